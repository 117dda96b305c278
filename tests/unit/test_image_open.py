"""Pictures of every mode, format and kind of damage become upright RGB, or an error that names them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="needs pillow (the extra 'vision')")

from hf_fsdp.data.images import ImageLimits, open_image, read_image_size  # noqa: E402
from hf_fsdp.errors import DataError  # noqa: E402
from tests.unit.image_processors import picture, stored  # noqa: E402


def pixel(image: Any, x: int = 0, y: int = 0) -> tuple[int, ...]:
    assert image.mode == "RGB"
    return image.getpixel((x, y))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_modes_without_transparency_keep_their_colours(mode: str) -> None:
    image = picture(12, 9, mode=mode)
    opened = open_image(stored(image))
    assert np.array_equal(np.asarray(opened), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_become_white_and_not_the_black_beneath(mode: str) -> None:
    image = Image.new(mode, (8, 8), (0, 0, 0, 0) if mode == "RGBA" else (0, 0))
    image.putpixel((3, 3), (0, 0, 0, 255) if mode == "RGBA" else (0, 255))
    opened = open_image(stored(image))
    assert pixel(opened) == (255, 255, 255)
    assert pixel(opened, 3, 3) == (0, 0, 0)


def test_a_palette_with_a_transparent_colour_is_laid_on_white() -> None:
    image = Image.new("P", (6, 6), 1)
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((2, 2), 0)
    opened = open_image(stored(image, transparency=0))
    assert pixel(opened, 2, 2) == (255, 255, 255)
    assert pixel(opened) == (200, 0, 0)


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 32768, 65535, 257]] * 4, dtype=np.uint16)
    opened = open_image(stored(Image.fromarray(values)))
    assert [pixel(opened, x)[0] for x in range(4)] == [0, 128, 255, 1]


def test_float_and_32_bit_grey_are_scaled() -> None:
    floats = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    assert pixel(open_image(stored(Image.fromarray(floats), "TIFF")), 3, 3) == (255, 255, 255)
    integers = (np.arange(16, dtype=np.int32) * 100_000).reshape(4, 4)
    opened = open_image(stored(Image.fromarray(integers), "TIFF"))
    assert (pixel(opened), pixel(opened, 3, 3)) == ((0, 0, 0), (255, 255, 255))


def test_cmyk_jpegs_keep_their_colours() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 30))
    opened = open_image(stored(red.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(np.array(pixel(opened)) - [200, 30, 30]).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_rotated_picture_stands_upright_whatever_the_format(orientation: int, format: str) -> None:
    upright = Image.new("RGB", (48, 32), (255, 255, 255))
    upright.paste((250, 0, 0), (0, 0, 24, 16))  # red at the top left, and nowhere else
    turns = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
             5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
             8: Image.Transpose.ROTATE_270}  # fmt: skip
    lying = upright.transpose(turns[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    reference = stored(lying, format, exif=exif)
    opened = open_image(reference)
    assert opened.size == (48, 32) == read_image_size(reference)
    corners = [pixel(opened, x, y)[1] for x, y in ((6, 4), (42, 4), (6, 28), (42, 28))]
    assert corners[0] < 60 and min(corners[1:]) > 190


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (10, 10), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    for format in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if format == "WEBP" else {}
        opened = open_image(stored(frames[0], format, save_all=True, append_images=frames[1:], **options))
        assert pixel(opened) == (255, 0, 0)


def test_a_large_picture_is_scaled_down_in_its_proportions() -> None:
    for format in ("JPEG", "PNG"):
        reference = stored(picture(400, 200), format)
        opened = open_image(reference, ImageLimits(max_pixels=5000))
        assert opened.size == (100, 50) == read_image_size(reference, ImageLimits(max_pixels=5000))


def test_a_scaled_down_jpeg_is_like_the_whole_one_scaled() -> None:
    smooth = Image.linear_gradient("L").resize((512, 512)).convert("RGB")
    reference = stored(smooth, "JPEG", quality=95)
    small = open_image(reference, ImageLimits(max_pixels=64 * 64))  # decoded at an eighth of its size
    whole = open_image(reference).resize((64, 64), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(small).astype(int) - np.asarray(whole)).max() <= 3


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_huge_picture_is_refused_before_it_is_decoded() -> None:
    header = stored(Image.new("1", (20_000, 5_000)))
    with pytest.raises(DataError, match=r"20000 x 5000 = 100 megapixels; more than 89 are not decoded"):
        open_image(header)


def test_a_picture_that_pil_calls_a_bomb_is_refused() -> None:
    reference = stored(Image.new("1", (20_000, 10_000)))
    with pytest.raises(DataError, match="too large to be decoded"):
        open_image(reference)


def test_a_huge_jpeg_passes_where_a_fraction_of_it_is_decoded() -> None:
    reference = stored(picture(800, 600), "JPEG")
    limits = ImageLimits(max_pixels=100 * 75, max_decoded_pixels=200 * 150)
    assert open_image(reference, limits).size == (100, 75)
    with pytest.raises(DataError, match="megapixels"):
        open_image(reference, ImageLimits(max_decoded_pixels=200 * 150))


@pytest.mark.parametrize("size", [(1, 1), (3, 100), (100, 1), (2, 3)])
def test_a_tiny_picture_is_enlarged_so_that_no_processor_takes_a_side_for_channels(size: tuple[int, int]) -> None:
    image = picture(*size)
    opened = open_image(stored(image))
    factor = opened.width // size[0]
    assert opened.size == (size[0] * factor, size[1] * factor) and min(opened.size) >= 4
    assert pixel(opened) == image.getpixel((0, 0))


def test_a_strip_that_processors_refuse_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"1000 x 4 pixels: one side is 250 times the other"):
        open_image(stored(picture(1000, 4)))
    assert open_image(stored(picture(1000, 4)), ImageLimits(max_aspect_ratio=300)).size == (1000, 4)


def damage(kind: str) -> bytes:
    png, jpeg = stored(picture(64, 64))["bytes"], stored(picture(64, 64), "JPEG")["bytes"]
    return {
        "cut png": png[: len(png) // 2],
        "cut jpeg": jpeg[: len(jpeg) // 2],
        "cut header": png[:20],
        "empty": b"",
        "web page": b"<!DOCTYPE html><html>404</html>",
        "pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
        "npy": b"\x93NUMPY\x01\x00v\x00",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cut png", "is broken"),
        ("cut jpeg", "is broken: image file is truncated"),
        ("cut header", "is"),
        ("empty", "is empty"),
        ("web page", "a web page that was saved in its place"),
        ("pickle", "no picture of a known kind"),
        ("npy", "no picture of a known kind"),
        ("eps", "no picture of a known kind"),
    ],
)
@pytest.mark.parametrize("as_file", [True, False])
def test_damage_is_named(kind: str, words: str, as_file: bool, tmp_path: Path) -> None:
    content = damage(kind)
    path = tmp_path / "cat.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        open_image(str(path) if as_file else content)
    if as_file:
        assert str(path) in str(caught.value)
    assert caught.value.problems[0].fix


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cat.png does not exist"):
        open_image(str(tmp_path / "cat.png"))
    with pytest.raises(DataError, match="cannot be opened"):
        open_image(str(tmp_path))
    with pytest.raises(DataError, match="without path and bytes"):
        open_image({"path": None, "bytes": None})


def test_urls_are_refused_unless_allowed() -> None:
    with pytest.raises(DataError, match="is not opened unless you say so") as caught:
        open_image("https://example.org/cat.png")
    assert caught.value.problems[0].fix.startswith("allow_image_urls: true")


def test_an_allowed_url_is_downloaded_within_its_limits(http_server: str) -> None:
    limits = ImageLimits(allow_urls=True)
    assert open_image(f"{http_server}/cat.png", limits).size == (20, 10)
    with pytest.raises(DataError, match="could not be downloaded: HTTP Error 404"):
        open_image(f"{http_server}/dog.png", limits)
    with pytest.raises(DataError, match="is larger than 10 bytes"):
        open_image(f"{http_server}/cat.png", ImageLimits(allow_urls=True, max_url_bytes=10))
    with pytest.raises(DataError, match="is not an http or https address"):
        open_image("ftp://example.org/cat.png", limits)


@pytest.fixture
def http_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import http.server
    import threading

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "cat.png").write_bytes(stored(picture(20, 10))["bytes"])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_data_does_not_spoil_a_good_picture() -> None:
    reference = stored(picture(16, 16), "JPEG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x05garbage")
    assert open_image(reference).size == (16, 16)


def test_a_limit_below_the_smallest_picture_is_refused() -> None:
    with pytest.raises(DataError, match="max_pixels=3 is less than 4 x 4 pixels"):
        ImageLimits(max_pixels=3)


def test_real_digits_come_through_unchanged() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    for index in (0, 700, 1796):
        grey = (digits.images[index] * 255 / 16).astype("uint8")
        buffer = io.BytesIO()
        Image.fromarray(grey).save(buffer, "PNG")
        assert np.array_equal(np.asarray(open_image(buffer.getvalue()))[..., 0], grey)
