"""A picture of any kind as plain RGB: upright, opaque, not too large and not too small; or an error that names it."""

from __future__ import annotations

import functools
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.colours import to_rgb
from hf_fsdp.data.images.references import Reference, is_url, name_of
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that PIL decodes by itself. Left out on purpose: EPS and PDF start other programs, the rest are rare.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")
# PIL's own mark for a picture that may be an attack: 0.25 GiB as RGB.
MAX_DECODED_PIXELS = 89_478_485
_JPEG = ("JPEG", "MPO")  # a phone's JPEG with a second picture in it is opened as MPO
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # EXIF orientations in which width and height are exchanged


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What a picture may be, and what is made of it.

    Args:
        max_pixels: pixels (width x height) above which a picture is scaled down, in its own proportions; None keeps
            its size, which the processor then brings to what the model takes.
        max_decoded_pixels: pixels above which a file is refused before it is decoded; a JPEG may be larger where it
            can be decoded at a fraction of its size. The default is PIL's own mark.
        max_aspect_ratio: longer over shorter side above which a picture is refused: Qwen-VL's processors raise there.
        min_side: pixels of the shorter side below which a picture is enlarged by a whole factor. Arrays of 1 or 3
            rows are taken by processors for pictures whose channels come first, and the colours are then mixed up.
        allow_urls: whether a path may be a URL.
        url_timeout_seconds: how long a server may take.
        max_url_bytes: bytes above which a download is given up.
    """

    max_pixels: int | None = None
    max_decoded_pixels: int = MAX_DECODED_PIXELS
    max_aspect_ratio: float = 200.0
    min_side: int = 4
    allow_urls: bool = False
    url_timeout_seconds: float = 20.0
    max_url_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.max_pixels is not None and self.max_pixels < self.min_side**2:
            raise DataError(
                f"max_pixels={self.max_pixels} is less than {self.min_side} x {self.min_side} pixels",
                fix="max_pixels: 1003520   (1280 patches of 28 x 28, as Qwen2.5-VL counts)",
            )


def open_image(reference: Reference | str | bytes, limits: ImageLimits | None = None) -> Image:
    """Return a picture as upright RGB within `limits`.

    Rotated as its EXIF data says; transparent pictures are laid on white, because under a transparent pixel a file may
    hold any colour, often black, and black text would vanish; 16-bit grey is scaled, where PIL would clip it to white;
    of an animation the first frame is taken.

    Args:
        reference: a path, bytes, or ``{"path": ..., "bytes": ...}``.
        limits: defaults to `ImageLimits()`.

    Raises:
        DataError: missing, empty, broken, cut off, too large, too narrow, no picture, or a URL that is not allowed.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> buffer = io.BytesIO()
        >>> Image.new("L", (640, 480)).save(buffer, "PNG")
        >>> open_image(buffer.getvalue(), ImageLimits(max_pixels=100_000)).size
        (365, 273)
    """
    limits = limits or ImageLimits()
    image, name = _open(reference, limits)
    try:
        with image:
            size = _target_size(image, limits, name)
            if image.format in _JPEG and size != _upright_size(image):
                wanted = size if _orientation(image) not in _TURNED else (size[1], size[0])
                image.draft(None, wanted)  # decodes at 1/2, 1/4 or 1/8, never below what is wanted
            _refuse_huge(image.size, limits, name)
            image.load()
            upright = to_rgb(_turn(image))
    except DataError:
        raise
    except Exception as error:  # decoders raise what they like: OSError, SyntaxError, EOFError, struct.error ...
        raise _broken(name, error) from error
    return upright if upright.size == size else _resize(upright, size)


def read_image_size(reference: Reference | str | bytes, limits: ImageLimits | None = None) -> tuple[int, int]:
    """Return (width, height) that `open_image` gives a picture, reading only its header.

    Raises:
        DataError: as `open_image`, for what a header shows.
    """
    limits = limits or ImageLimits()
    image, name = _open(reference, limits)
    with image:
        try:
            return _target_size(image, limits, name)
        except DataError:
            raise
        except Exception as error:
            raise _broken(name, error) from error


# -- opening ----------------------------------------------------------------------------------------------------------


def _open(reference: Reference | str | bytes, limits: ImageLimits) -> tuple[Any, str]:
    from PIL import Image, UnidentifiedImageError

    if isinstance(reference, bytes):
        reference = {"path": None, "bytes": reference}
    elif isinstance(reference, str):
        reference = {"path": reference, "bytes": None}
    name, content, path = name_of(reference), reference.get("bytes"), reference.get("path")
    if content is None and path is None:
        raise DataError("an image without path and bytes", fix="give one of them, or leave the image out")
    if content is None and is_url(path):
        content = _download(str(path), limits)
    if content is not None and not content:
        raise DataError(f"{name} is empty (0 bytes)", fix="write it again, or leave the sample out")
    try:
        return Image.open(io.BytesIO(content) if content is not None else str(path), formats=_formats()), name
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist", fix="put it there, or set image_folder") from error
    except (IsADirectoryError, PermissionError) as error:
        raise DataError(f"{name} cannot be opened: {error.strerror}", fix="give a readable file") from error
    except UnidentifiedImageError as error:
        raise _no_image(name, content if content is not None else _head(str(path))) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name} is too large to be decoded: {error}", fix="scale it down beforehand") from error
    except Exception as error:
        raise _broken(name, error) from error


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this PIL was built with."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _head(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(64)


def _no_image(name: str, content: bytes) -> DataError:
    if not content:
        return DataError(f"{name} is empty (0 bytes)", fix="write it again, or leave the sample out")
    start = content[:16]
    hint = "a web page that was saved in its place" if start.lstrip()[:1] == b"<" else "no picture of a known kind"
    return DataError(
        f"{name} is {hint} (it begins with {start!r})",
        fix=f"give one of: {', '.join(FORMATS)}; or leave the sample out",
    )


def _broken(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name} is broken: {str(error) or type(error).__name__}", fix="write it again, or leave the sample out"
    )


def _download(url: str, limits: ImageLimits) -> bytes:
    if not limits.allow_urls:
        raise DataError(
            f"{url} is a URL, which is not opened unless you say so",
            fix="allow_image_urls: true   (in a script: ImageLimits(allow_urls=True))",
        )
    if not url.lower().startswith(("http://", "https://")):
        raise DataError(f"{url} is not an http or https address", fix="download it, and give its path")
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, headers={"User-Agent": "hf-fsdp"}), timeout=limits.url_timeout_seconds) as answer:
            content: bytes = answer.read(limits.max_url_bytes + 1)
    except OSError as error:  # URLError and timeouts too
        raise DataError(f"{url} could not be downloaded: {error}", fix="download it, and give its path") from error
    if len(content) > limits.max_url_bytes:
        raise DataError(f"{url} is larger than {limits.max_url_bytes} bytes", fix="download it, and give its path")
    return content


# -- size -------------------------------------------------------------------------------------------------------------


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF data is often broken while the picture is fine; then it is taken as it lies
        return 1


def _upright_size(image: Any) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) in _TURNED else (width, height)


def _target_size(image: Any, limits: ImageLimits, name: str) -> tuple[int, int]:
    width, height = _upright_size(image)
    if min(width, height) < 1:
        raise DataError(f"{name} has no pixels ({width} x {height})", fix="leave the sample out")
    if image.format not in _JPEG:
        _refuse_huge((width, height), limits, name)
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_aspect_ratio:
        raise DataError(
            f"{name} is {width} x {height} pixels: one side is {ratio:.0f} times the other, and processors refuse more "
            f"than {limits.max_aspect_ratio:g}",
            fix="crop it or pad it, or leave the sample out",
        )
    if min(width, height) < limits.min_side:
        factor = math.ceil(limits.min_side / min(width, height))
        width, height = width * factor, height * factor
    if limits.max_pixels is not None and width * height > limits.max_pixels:
        scale = math.sqrt(limits.max_pixels / (width * height))
        width, height = (max(limits.min_side, math.floor(side * scale)) for side in (width, height))
    return width, height


def _refuse_huge(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    if size[0] * size[1] > limits.max_decoded_pixels:
        raise DataError(
            f"{name} is {size[0]} x {size[1]} = {size[0] * size[1] / 1e6:.0f} megapixels; more than "
            f"{limits.max_decoded_pixels / 1e6:.0f} are not decoded",
            fix="scale it down beforehand, or leave the sample out",
        )


def _resize(image: Image, size: tuple[int, int]) -> Image:
    from PIL.Image import Resampling

    if size[0] > image.size[0]:  # a tiny picture: its pixels become squares, nothing is made up between them
        return image.resize(size, Resampling.NEAREST)
    return image.resize(size, Resampling.BICUBIC, reducing_gap=3.0)


def _turn(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
