"""What the old config says about units: wrapped by class, by size, by a function, or not at all."""

from __future__ import annotations

from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.migrate.setting import OldSetting
from hf_fsdp.config.values import SIZE_POLICY_WORDS, word_of


def read_units(draft: Draft) -> None:
    """Read the wrap policy, its classes and its size."""
    policy = draft.take_one("auto_wrap_policy")
    classes = draft.take_one("transformer_layer_cls_to_wrap")
    size = draft.take_one("min_num_params")
    if size is not None and word_of(size.value) in ("0", "none", ""):
        size = None  # the default of the old programs: no size
    word = word_of(policy.value) if policy is not None else None
    by_size = word in SIZE_POLICY_WORDS or (word is None and size is not None and classes is None)
    if policy is not None:
        _read_policy(draft, policy)
    if by_size:
        if size is not None:
            draft.put("wrap.min_num_params", size.value, size)
        if classes is not None:
            draft.leave(classes, "not needed", "class names are not read when units are made by size")
            classes = None
    elif size is not None:
        draft.leave(size, "not needed", "a size is not read when units are made by class")
    if by_size and policy is None:
        draft.put("wrap.policy", "size", size)
    if classes is not None:
        _read_classes(draft, classes)


def _read_policy(draft: Draft, policy: OldSetting) -> None:
    if word_of(policy.value) in ("no_wrap", "none"):
        draft.leave(
            policy,
            "changed",
            "the whole model was one unit, gathered at once on every GPU; hf-fsdp always makes a unit of each block",
        )
    else:
        draft.put("wrap.policy", policy.value, policy)


def _read_classes(draft: Draft, classes: OldSetting) -> None:
    names = classes.value
    if not isinstance(names, str) or names.strip():
        draft.put("wrap.layer_classes", names, classes)
