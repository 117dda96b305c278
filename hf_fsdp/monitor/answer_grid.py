"""A picture of pictures: what was shown, what the model answered under it, and whether that is right."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import DataError
from hf_fsdp.monitor.answer_rows import Row, prompt_text, references_of
from hf_fsdp.monitor.answers import exact_match

if TYPE_CHECKING:
    from PIL import Image as PILImage
    from PIL import ImageDraw, ImageFont

_TILE, _GAP, _MARGIN, _LINE = 160, 16, 20, 18  # pixels
_TITLE_HEIGHT = 34
_MAX_ANSWER_LINES = 3
_FONT_SIZE, _TITLE_SIZE = 14, 18
_INK, _FAINT, _PAPER, _EMPTY = (25, 25, 30), (100, 100, 110), (255, 255, 255), (236, 236, 240)
# Blue and orange stay apart for every kind of colour vision, and each goes with a sign of its own.
_RIGHT, _WRONG = (0, 98, 178), (204, 85, 0)
_ENOUGH = 0.5  # a score from here on is drawn as right


@dataclass(frozen=True)
class _Tile:
    picture: PILImage.Image | None
    num_more: int
    answer: str
    wanted: str
    score: float | None
    prompt: str


def choose_rows(scores: Sequence[float], num: int) -> list[int]:
    """Return which rows a grid shows: wrong ones as far as half of it, then right ones, each in the order of rows.

    Where there are fewer wrong ones than that, right ones fill up, and the other way round.

    Example:
        >>> choose_rows([1.0, 1.0, 0.0, 1.0, 1.0], num=4)
        [0, 1, 2, 3]
    """
    wrong = [index for index, score in enumerate(scores) if score < _ENOUGH]
    right = [index for index, score in enumerate(scores) if score >= _ENOUGH]
    num_wrong = min(len(wrong), max(num // 2, num - len(right)))
    return sorted(wrong[:num_wrong] + right[: num - num_wrong])


def draw_answer_grid(
    rows: Sequence[Row],
    answers: Sequence[str],
    path: str | Path,
    *,
    columns: int = 6,
    scores: Sequence[float] | None = None,
    title: str = "",
) -> Path:
    """Draw the first picture of every row with the answer under it, and write a PNG.

    A right answer has a blue frame and a tick, a wrong one a thick orange frame, a cross and the reference. A row
    without pictures shows its question.

    Args:
        rows: as many as answers.
        answers: what the model said.
        path: the file; its folder is made.
        columns: pictures side by side.
        scores: from 0 to 1, half is right; exact match with the references when None. Rows without references are
            neither right nor wrong.
        title: a line above.

    Returns:
        The path of the file.

    Raises:
        DataError: rows and answers differ in number, there are none, or Pillow is missing.

    Example:
        >>> draw_answer_grid(rows, answers, "grid.png", columns=8)  # doctest: +SKIP
    """
    if len(rows) != len(answers) or (scores is not None and len(scores) != len(rows)) or not rows:
        raise DataError(
            f"draw_answer_grid was given {len(rows)} rows, {len(answers)} answers"
            + ("" if scores is None else f" and {len(scores)} scores"),
            fix="give one answer (and score) for every row, and at least one row",
        )
    check_pillow()
    from PIL import Image, ImageDraw

    given = list(scores) if scores is not None else [None] * len(rows)
    tiles = [_tile(row, answer, score) for row, answer, score in zip(rows, answers, given, strict=True)]
    font, title_font = _font(_FONT_SIZE), _font(_TITLE_SIZE)
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    captions = [_caption(pen, font, tile) for tile in tiles]
    columns = max(1, min(columns, len(tiles)))
    heights = [
        _TILE + 10 + _LINE * max(len(lines) for lines in captions[start : start + columns])
        for start in range(0, len(tiles), columns)
    ]
    width = 2 * _MARGIN + columns * _TILE + (columns - 1) * _GAP
    if title:
        width = max(width, 2 * _MARGIN + int(pen.textlength(title, font=title_font)))
    top = _MARGIN + (_TITLE_HEIGHT if title else 0)
    sheet = Image.new("RGB", (width, top + sum(heights) + _GAP * (len(heights) - 1) + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(sheet)
    if title:
        pen.text((_MARGIN, _MARGIN - 4), title, font=title_font, fill=_INK)
    for index, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        line, column = divmod(index, columns)
        corner = (_MARGIN + column * (_TILE + _GAP), top + sum(heights[:line]) + _GAP * line)
        _draw_tile(sheet, pen, font, tile, lines, corner)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    sheet.save(draft, format="PNG", optimize=True)
    draft.replace(path)
    return path


def check_pillow() -> None:
    """Raise DataError when pictures cannot be drawn."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DataError(
            "a grid of pictures needs Pillow, which is not installed", fix='pip install "hf-fsdp[vision]"'
        ) from error


def _tile(row: Row, answer: str, score: float | None) -> _Tile:
    references, images = references_of(row), list(row.get("images") or ())
    if score is None and references:
        score = exact_match(answer, references)
    picture = _open(images[0]) if images else None
    return _Tile(
        picture=picture,
        num_more=max(len(images) - 1, 0),
        answer=answer or "(nothing)",
        wanted=references[0] if references else "",
        score=score,
        prompt=prompt_text(row) if not images else "(this picture cannot be read)",
    )


def _open(image: Any) -> PILImage.Image | None:
    """The picture as it is meant to be seen; None when it cannot be read, which must not end a training."""
    from PIL import Image, ImageOps

    path, data = (image.get("path"), image.get("bytes")) if isinstance(image, Mapping) else (image, None)
    try:
        with Image.open(io.BytesIO(data) if data else path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGBA")
    except Exception:
        return None
    white = Image.new("RGBA", picture.size, (*_PAPER, 255))
    picture = Image.alpha_composite(white, picture).convert("RGB")
    scale = min(_TILE / picture.width, _TILE / picture.height)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    # Few large pixels (a digit of 8 x 8) stay sharp; photographs are made smaller without steps.
    return picture.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS)


def _caption(pen: ImageDraw.ImageDraw, font: Any, tile: _Tile) -> list[tuple[str, tuple[int, int, int]]]:
    """Lines under a picture with their colours; the first one leaves room for the sign."""
    room = _TILE - (0 if tile.score is None else 20)
    lines = [(text, _INK) for text in _wrap(pen, font, tile.answer, room)]
    if tile.score is not None and tile.score < _ENOUGH and tile.wanted:
        lines += [(text, _FAINT) for text in _wrap(pen, font, f"expected: {tile.wanted}", _TILE)[:2]]
    return lines


def _wrap(pen: ImageDraw.ImageDraw, font: Any, text: str, room: int) -> list[str]:
    """Cut text into lines of at most `room` pixels, between words where it can be; a long one ends in dots."""
    lines, line = [], ""
    for word in text.split() or [""]:
        joined = f"{line} {word}".strip()
        while pen.textlength(joined, font=font) > room:
            if line:
                lines.append(line)
                joined = word
                line = ""
            else:  # one word wider than the picture
                cut = next(end for end in range(len(joined), 0, -1) if pen.textlength(joined[:end], font=font) <= room)
                lines.append(joined[:cut])
                joined = joined[cut:]
        line = joined
    lines.append(line)
    if len(lines) > _MAX_ANSWER_LINES:
        lines = lines[:_MAX_ANSWER_LINES]
        while lines[-1] and pen.textlength(lines[-1] + "...", font=font) > room:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "..."
    return lines


def _draw_tile(
    sheet: PILImage.Image, pen: ImageDraw.ImageDraw, font: Any, tile: _Tile, lines: list[Any], corner: tuple[int, int]
) -> None:
    left, top = corner
    box = (left, top, left + _TILE, top + _TILE)
    pen.rectangle(box, fill=_EMPTY)
    if tile.picture is not None:
        place = (left + (_TILE - tile.picture.width) // 2, top + (_TILE - tile.picture.height) // 2)
        sheet.paste(tile.picture, place)
    else:
        for index, text in enumerate(_wrap(pen, font, tile.prompt, _TILE - 20)):
            pen.text((left + 10, top + 10 + index * _LINE), text, font=font, fill=_FAINT)
    if tile.num_more:
        label = f"+{tile.num_more}"
        size = pen.textlength(label, font=font) + 8
        pen.rectangle((box[2] - size, top, box[2], top + 20), fill=_PAPER)
        pen.text((box[2] - size + 4, top + 2), label, font=font, fill=_INK)
    is_right = tile.score is not None and tile.score >= _ENOUGH
    color = _FAINT if tile.score is None else _RIGHT if is_right else _WRONG
    pen.rectangle(box, outline=color, width=4 if tile.score is not None and not is_right else 2)
    baseline = top + _TILE + 8
    if tile.score is not None:
        _draw_sign(pen, (left + 2, baseline + 3), is_right, color)
    indent = 0 if tile.score is None else 20
    for index, (text, ink) in enumerate(lines):
        start = left + (indent if ink == _INK else 0)
        pen.text((start, baseline + index * _LINE), text, font=font, fill=ink)


def _draw_sign(pen: ImageDraw.ImageDraw, corner: tuple[int, int], is_right: bool, color: tuple[int, int, int]) -> None:
    """A tick or a cross, drawn: not every font has them."""
    x, y = corner
    if is_right:
        pen.line([(x, y + 6), (x + 4, y + 11), (x + 12, y)], fill=color, width=3, joint="curve")
    else:
        pen.line([(x, y), (x + 11, y + 11)], fill=color, width=3)
        pen.line([(x, y + 11), (x + 11, y)], fill=color, width=3)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """DejaVu where the machine has it (Greek, Cyrillic, arrows), else the one inside Pillow."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)
