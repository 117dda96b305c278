"""What processors ask for and pictures do not need: a video processor, and a package that spells numbers.

A processor of transformers is built with all its parts or not at all, and every video processor needs torchvision.
So on a machine without it the official classes get a part that keeps the video settings for whoever saves them, and
says what is missing when a video comes.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, NoReturn

import transformers
from transformers.processing_utils import ProcessorMixin, VideosKwargs
from transformers.utils import PushToHubMixin, is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from hf_fsdp.errors import DataError

_LOCK = threading.RLock()
_AUTO = "transformers.models.auto"
# Modules of transformers that refuse to build a processor without num2words, which they call for videos only.
_NUMBERS_IN_WORDS = ("transformers.models.smolvlm.processing_smolvlm",)


class VideoSettings(PushToHubMixin):
    """The settings of a video processor that cannot be built here.

    Args:
        settings: as the source has them; they are saved unchanged, so a machine with torchvision loads them.
    """

    _auto_class = None
    valid_kwargs = VideosKwargs
    model_input_names = ["pixel_values_videos"]

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        """Answer as a video processor does when it is asked for a setting (the number of frames, say)."""
        settings = self.__dict__.get("settings", {})  # absent while it is unpickled
        if name in settings:
            return settings[name]
        if name in VideosKwargs.__annotations__:
            return None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __call__(self, videos: Any = None, **kwargs: Any) -> NoReturn:
        """Refuse a video."""
        raise DataError(
            "a video was given, and torchvision, which reads and resizes videos, is not installed",
            fix="pip install torchvision (the release that belongs to this torch), or train on pictures only",
        )

    fetch_videos = preprocess = __call__

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of the source, unchanged."""
        return deepcopy(self.settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings})"


class _SettingsLoader:
    """Stands in for `AutoVideoProcessor`: reads the settings from where they would be loaded."""

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> VideoSettings:
        kwargs.pop("trust_remote_code", None)
        try:
            settings, _ = BaseVideoProcessor.get_video_processor_dict(name, **kwargs)
        except OSError:  # the source has none, nor settings for pictures that older versions took for videos too
            settings = {}
        return VideoSettings(_as_video_settings(settings))


def _as_video_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Name the video processor in settings that are a picture's, as `AutoVideoProcessor` guesses it.

    Folders of older versions have one file for both, and a folder written now has a part for each.
    """
    settings = dict(settings)
    image_type = settings.pop("image_processor_type", None) or ""
    processor = settings.pop("processor_class", None) or ""
    if "video_processor_type" not in settings:
        base = image_type.removesuffix("Fast").removesuffix("Pil")
        # InternVL's pictures are read by another family's class, so the processor's own name comes second.
        for name in (
            base.replace("ImageProcessor", "VideoProcessor"),
            processor.replace("Processor", "VideoProcessor"),
        ):
            if name and hasattr(transformers, name):  # names are known without torchvision
                settings["video_processor_type"] = name
                break
    return settings


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let processors be built whose only missing parts are those for videos; nothing is left behind.

    Where torchvision or num2words is installed, the real one is used.
    """
    with _LOCK:
        undo: list[tuple[Any, str, Any]] = []

        def put(owner: Any, name: str, value: Any) -> None:
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        try:
            if not is_torchvision_available():
                # By full name: as attributes of their package these modules are placeholders until they are imported.
                put(importlib.import_module(f"{_AUTO}.video_processing_auto"), "AutoVideoProcessor", _SettingsLoader)
                images = importlib.import_module(f"{_AUTO}.image_processing_auto")
                find = images.get_image_processor_class_from_name
                put(images, "get_image_processor_class_from_name", _finding_all(find))
                put(ProcessorMixin, "check_argument_for_proper_class", _accepting(VideoSettings))
            for name in _NUMBERS_IN_WORDS:
                module = importlib.import_module(name)
                if getattr(module, "num2words", True) is None:
                    put(module, "num2words", _refuse_number)
            yield
        finally:
            for owner, name, value in reversed(undo):
                setattr(owner, name, value)


def _accepting(stand_in: type) -> Any:
    """Return the check of a processor's parts that also lets `stand_in` pass."""
    check = ProcessorMixin.check_argument_for_proper_class

    def check_argument_for_proper_class(self: Any, argument_name: str, argument: Any) -> Any:
        return stand_in if isinstance(argument, stand_in) else check(self, argument_name, argument)

    return check_argument_for_proper_class


def _finding_all(find: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a search for image processors by name that finds PIL forms too which their package hides.

    transformers 5.17 hides SmolVLM's as if it needed torchvision, which it does not.
    """

    def get_image_processor_class_from_name(name: str) -> Any:
        found = find(name)
        if name.endswith("Pil") and getattr(found, "is_dummy", False):
            module = found.__module__.rpartition(".")[2]
            family = module.removeprefix("image_processing_pil_")
            with suppress(ImportError):
                found = getattr(importlib.import_module(f"transformers.models.{family}.{module}"), name, found)
        return found

    return get_image_processor_class_from_name


def _refuse_number(number: Any) -> NoReturn:
    """What stays true of num2words while a processor is built; a processor is not used in that time."""
    raise DataError("videos need the package num2words, which is not installed", fix="pip install num2words")
