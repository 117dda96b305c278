"""The processor of a vision-language model, on machines with and without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_fsdp.data.processors.pixel_limits import set_pixel_limits
from hf_fsdp.errors import ModelAccessError


def load_processor(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Any:
    """Load the official processor of a model; for pictures it needs neither torchvision nor num2words.

    Without torchvision the classes of Qwen-VL, InternVL, SmolVLM, LLaVA-OneVision and all others whose only missing
    part is the one for videos are built all the same, with transformers' PIL form of the image processor: tokens,
    masks and grids are those of a machine with torchvision, pixels differ by rounding. A video is refused when it
    comes. `save_pretrained` writes everything, the video settings of the source unchanged.

    Args:
        name: a folder or a hub id.
        revision: branch, tag or commit on the hub; None is ``main``.
        trust_remote_code: run a processor class that comes with the model. Off, as everywhere.
        min_pixels: pixels (height times width) below which a picture is enlarged, where the family has such a limit
            (Qwen-VL and its kind); None keeps the model's own.
        max_pixels: pixels above which a picture is reduced; it bounds the tokens of a picture. Both are saved with
            the processor, so inference resizes as training did.

    Returns:
        A processor of transformers: callable with ``images`` and ``text``, with ``tokenizer``, ``image_processor``,
        ``apply_chat_template`` and ``save_pretrained``.

    Raises:
        ModelAccessError: there is no processor for pictures (a text model, a folder without processor files), it is
            incomplete, or a package that pictures do need is missing.
        ConfigError: `min_pixels` or `max_pixels` do not fit the family, or each other.

    Example::

        processor = load_processor("Qwen/Qwen2.5-VL-7B-Instruct", max_pixels=1003520)
        batch = processor(images=[[picture]], text=[prompt], return_tensors="pt")
    """
    processor = _load(name, revision, trust_remote_code)
    _check_parts(name, processor)
    set_pixel_limits(processor, min_pixels, max_pixels)
    return processor


def _load(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    from hf_fsdp.data.processors.stand_ins import stand_ins

    try:
        with stand_ins():
            return AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise _missing_package(name, error) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if "optional dependencies" in str(error):  # how transformers says it of image processors
            raise _missing_package(name, error) from error
        raise ModelAccessError(
            f"the processor of {name!r} cannot be loaded: {_first_line(error)}", fix=_repair(name)
        ) from error


def _missing_package(name: str, error: Exception) -> ModelAccessError:
    return ModelAccessError(
        f"the processor of {name!r} needs a package that is missing: {_first_line(error)}",
        fix='install it; for pictures in general: pip install "hf-fsdp[vision]"',
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _check_parts(name: str, processor: Any) -> None:
    if getattr(processor, "image_processor", None) is not None and getattr(processor, "tokenizer", None) is not None:
        return
    if hasattr(processor, "convert_tokens_to_ids"):
        raise ModelAccessError(
            f"{name!r} has a tokenizer and no image processor: a text model, or a folder whose processor was not saved",
            fix=f"for a text model use the text recipe (recipes/text/train.py); otherwise {_repair(name)}",
        )
    has = "no image processor" if getattr(processor, "image_processor", None) is None else "no tokenizer"
    raise ModelAccessError(
        f"{name!r} has a {type(processor).__name__} with {has}: it cannot read pictures and text together",
        fix="give a vision-language model, such as Qwen/Qwen2.5-VL-3B-Instruct or HuggingFaceTB/SmolVLM-256M-Instruct",
    )


def _repair(name: str) -> str:
    """Say how the processor files get to where they are missing."""
    if not Path(name).expanduser().is_dir():
        return (
            f"with a connection run: hf download {name}   or see at https://huggingface.co/{name}/tree/main whether it "
            "has a preprocessor_config.json or processor_config.json"
        )
    return (
        "save the processor of the model it was trained from into the folder:\n"
        f"load_processor(BASE_MODEL).save_pretrained({str(name)!r})"
    )
