"""Which parts of a model with pictures are trained where nobody says it: what our recipe for pictures trains."""

from __future__ import annotations

import dataclasses

from hf_fsdp.plan.job import Method

_ALL = "all"


def with_usual_parts(method: Method, *, has_pictures: bool) -> Method:
    """Return `method` with the parts that are meant by none: the vision tower stays frozen, and without adapters.

    Args:
        method: as typed; ``("all",)`` stands for every part.
        has_pictures: rows have pictures, so the recipe for pictures trains it. Text alone has one part.

    Example:
        >>> with_usual_parts(Method(), has_pictures=True).trainable
        ('language', 'projector')
    """
    if method.name == "full":
        usual = ("language", "projector") if has_pictures else ()
        trainable = method.trainable or usual
        return dataclasses.replace(method, trainable=() if trainable == (_ALL,) else trainable)
    if has_pictures and not method.lora_parts:
        return dataclasses.replace(method, lora_parts=("language",))
    return method
