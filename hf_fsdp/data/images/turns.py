"""Turns of a conversation with images, in every spelling, as typed parts: ``<image>`` marks, parts, or plain text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp.data.images.references import Reference, read_reference

MARK = "<image>"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
_IMAGE_KEYS = ("image", "path", "url", "bytes", "image_url")
# What a person does about each kind of problem; the kind is the rule, a detail says what was found.
FIXES = {
    "no turns": 'fill them: [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": '
    '"A cat."}]',
    "a turn without role and content": 'write each turn as {"role": "user", "content": "..."}',
    "a role that is not system, user, assistant or tool": "rename the roles, e.g. human -> user, gpt -> assistant",
    "a part of a turn that is neither text nor image": 'leave out videos and sounds; write {"type": "image"} or '
    '{"type": "text", "text": "..."}',
    "other numbers of image marks and images": "give every <image> mark (or image part) one entry of images, in order; "
    "write no mark at all to have the images put first",
    "images both in the turns and in a column": "keep one of them: remove the images of the column, or the path, url "
    "or image inside the parts",
    "no answer": "remove these rows, or end them with an assistant turn that has text",
    "an answer before any question": "begin the conversation with a user turn",
    "an image that cannot be read": "give a path, bytes, or data:image/png;base64,...",
    "a video or a sound": "leave these rows out, or give frames of the video as images: only pictures are trained on",
    "no question": "fill the question, or remove these rows",
}


@dataclass
class Conversation:
    """A conversation that is being read: typed parts, the images in order, and the first problem found."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Reference] = field(default_factory=list)
    problem: str = ""
    detail: str = ""

    def fail(self, problem: str, detail: str = "") -> Conversation:
        """Note a problem of `FIXES`; the first one counts, those after it would only follow from it."""
        if not self.problem:
            self.problem, self.detail = problem, detail
        return self


def read_turns(
    turns: Any, images: list[Any], folder: Path, *, num_images: int | None = None, with_answers: bool = True
) -> Conversation:
    """Return a conversation as typed parts with one image for each image part.

    Args:
        turns: ``{"role", "content"}`` or ``{"from", "value"}`` mappings. A content is text, in which ``<image>`` marks
            an image, or a list of parts, in which an image part may hold its image itself.
        images: the images of the row's own column, in order of the marks. Without any mark they are put first, into
            the first user turn.
        folder: what relative paths are relative to.
        num_images: how many images the row's column has, where they are kept elsewhere; `images` is empty then.
        with_answers: whether a conversation without an answer is a problem.
    """
    conversation = Conversation()
    if not isinstance(turns, list) or not turns:
        return conversation.fail("no turns")
    inline: list[Any] = []
    for turn in turns:
        role, content = _role_and_content(turn)
        if role is None:
            return conversation.fail("a turn without role and content")
        if role not in _KNOWN_ROLES:
            return conversation.fail("a role that is not system, user, assistant or tool", repr(role))
        parts = _split_marks(content) if isinstance(content, str) else _read_parts(content, conversation, inline)
        conversation.messages.append({"role": role, "content": _join_texts(parts)})
    if conversation.problem:
        return conversation
    _place_images(conversation, inline, images, folder, num_images)
    _check_roles(conversation, with_answers)
    return conversation


def _role_and_content(turn: Any) -> tuple[str | None, Any]:
    if not isinstance(turn, dict):
        return None, None
    role = turn.get("role") or turn.get("from")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if not isinstance(role, str) or not isinstance(content, str | list):
        return None, None
    return _ROLES.get(role.lower(), role.lower()), content


def _split_marks(text: str) -> list[dict[str, Any]]:
    """A line break beside a mark belongs to the mark: the template writes its own around the image."""
    parts: list[dict[str, Any]] = []
    pieces = text.split(MARK)
    for index, piece in enumerate(pieces):
        if index > 0:
            parts.append({"type": "image", "text": None})
            piece = piece.removeprefix("\n")
        if index < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        parts.append({"type": "text", "text": piece})
    return parts


def _read_parts(content: list[Any], conversation: Conversation, inline: list[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts += _split_marks(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in (None, "text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif isinstance(part, dict) and (kind in ("image", "image_url") or (kind is None and _inline_image(part))):
            parts.append({"type": "image", "text": None})
            inline.append(_inline_image(part))
        else:
            conversation.fail("a part of a turn that is neither text nor image", repr(kind or type(part).__name__))
    return parts


def _inline_image(part: dict[str, Any]) -> Any:
    return next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)


def _join_texts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adjacent texts become one: some templates read only the first text of a turn."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        elif part["type"] == "image" or part["text"]:
            joined.append(part)
    return joined


def _place_images(
    conversation: Conversation, inline: list[Any], images: list[Any], folder: Path, num_images: int | None
) -> None:
    given = [image for image in inline if image is not None]
    count = len(images) if num_images is None else num_images
    marks = sum(part["type"] == "image" for turn in conversation.messages for part in turn["content"])
    if marks == 0 and count:
        first = next((turn for turn in conversation.messages if turn["role"] == "user"), None)
        if first is not None:
            first["content"][:0] = [{"type": "image", "text": None} for _ in range(count)]
            marks = count
    if given and count:
        conversation.fail("images both in the turns and in a column", f"{len(given)} and {count}")
    elif marks != count + len(given):
        conversation.fail(
            "other numbers of image marks and images", f"{_num(marks, 'mark')}, {_num(count + len(given), 'image')}"
        )
    for value in given or images:
        reference, problem = read_reference(value, folder)
        if reference is None:
            conversation.fail("an image that cannot be read", problem)
        else:
            conversation.images.append(reference)


def _check_roles(conversation: Conversation, with_answers: bool) -> None:
    roles = [turn["role"] for turn in conversation.messages if turn["role"] != "system"]
    if roles and roles[0] == "assistant":
        conversation.fail("an answer before any question")
    answers = [turn for turn in conversation.messages if turn["role"] == "assistant"]
    said = (part["text"] for turn in answers for part in turn["content"] if part["type"] == "text")
    if with_answers and not any(text.strip() for text in said):
        conversation.fail("no answer")


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
