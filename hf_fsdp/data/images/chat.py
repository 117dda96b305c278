"""A conversation as the model's text, and which of its characters are answers."""

from __future__ import annotations

from typing import Any

from hf_fsdp.data.chat_template import has_generation_marks, resolve_chat_template
from hf_fsdp.errors import DataError

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_IMAGE = {"type": "image"}
_PROBE: Messages = [
    {"role": "user", "content": [_IMAGE, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
]
_SECOND: Messages = [
    {"role": "user", "content": [{"type": "text", "text": "And that?"}, _IMAGE]},
    {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
]


class Chat:
    """Renders conversations by a processor's chat template and finds the answers in the text.

    Where the template has ``{% generation %}`` marks, they say what is learned. Where it has none, each answer is what
    a conversation has more than the prompt for it; that is checked to be so for every conversation. The end token after
    an answer is always learned with it: without it a model never stops.

    Args:
        processor: with a tokenizer and an image token.
        chat_template: a Jinja text or file, or one of our names, in place of the processor's own.

    Raises:
        DataError: no template, or one that shows no images.
    """

    def __init__(self, processor: Any, chat_template: str | None = None):
        self.template = _read_template(processor, chat_template)
        self.has_marks = has_generation_marks(self.template)
        self.image_token: str = processor.image_token
        self._processor_name = type(processor).__name__
        tokenizer = processor.tokenizer
        self._special_tokens = dict(tokenizer.special_tokens_map)
        known = {*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)}
        self._ends = tuple(sorted(known - {self.image_token}, key=len, reverse=True))
        self.appended_end = ""
        self._check_images()
        self.appended_end = self._missing_end(tokenizer.eos_token)

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, with one image token for each image.

        Raises:
            DataError: the template refuses it, or leaves a turn's text or an image out.
        """
        text = self._render(messages, add_generation_prompt)
        if self.appended_end and not add_generation_prompt and messages[-1]["role"] == "assistant":
            text = text.rstrip() + self.appended_end
        self._check_whole(messages, text)
        return text

    def answer_spans(self, messages: Messages, text: str) -> list[Span]:
        """Return (start, end) of each answer, with its end token, in what `render` returned for `messages`.

        Raises:
            DataError: the template renders a conversation otherwise than its beginning, so answers cannot be found.
        """
        spans = self._marked_spans(messages) if self.has_marks else self._prefix_spans(messages, text)
        return [self._with_end(start, min(end, len(text)), text) for start, end in spans if end > start]

    def stop_token(self) -> str | None:
        """Return the token that ends an answer, None where there is none."""
        text = self.render(_PROBE)
        spans = self.answer_spans(_PROBE, text)
        answer = text[spans[-1][0] : spans[-1][1]].rstrip() if spans else ""
        return next((token for token in self._ends if answer.endswith(token)), None)

    # -- rendering ----------------------------------------------------------------------------------------------------

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        return self._jinja(messages, add_generation_prompt)[0]

    def _jinja(self, messages: Messages, add_generation_prompt: bool, marks: bool = False) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[for_template(messages)],
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marks,
                **self._special_tokens,
            )
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template of {self._processor_name} is not valid Jinja: line {error.lineno}: {error.message}",
                fix="repair it, or give another file: chat_template: path/to/template.jinja",
            ) from error
        except (TemplateError, TypeError, IndexError) as error:
            raise DataError(
                f"the chat template of {self._processor_name} cannot render it: {error}",
                fix="repair or remove such samples, or set chat_template to one that accepts them",
            ) from error
        return texts[0], [(start, end) for start, end in spans[0]] if marks else []

    def _check_images(self) -> None:
        for probe in (_PROBE, [*_PROBE, *_SECOND]):
            text = self._render(probe)
            wanted = sum(part["type"] == "image" for turn in probe for part in turn["content"])
            if text.count(self.image_token) != wanted:
                raise DataError(
                    f"the chat template of {self._processor_name} renders {text.count(self.image_token)} times "
                    f"{self.image_token} for a conversation with {wanted} images, so the model would not see them",
                    fix="set chat_template to one that writes the image token for parts of type 'image', such as the "
                    "one of the model's instruct variant",
                )

    def _check_whole(self, messages: Messages, text: str) -> None:
        num_images = sum(part["type"] == "image" for turn in messages for part in turn["content"])
        num_marks = text.count(self.image_token)
        if num_marks < num_images:
            roles = sorted({turn["role"] for turn in messages for part in turn["content"] if part["type"] == "image"})
            raise DataError(
                f"the chat template of {self._processor_name} shows {num_marks} of its {num_images} images, which are "
                f"in turns of {' and '.join(roles)}",
                fix="move the images to user turns: templates leave out those of other roles",
            )
        if num_marks > num_images:
            raise DataError(
                f"it has {num_images} images, and its text {num_marks} times {self.image_token}",
                fix=f"write {self.image_token} nowhere in the text yourself: the template writes it",
            )
        for turn in messages:
            for part in turn["content"]:
                said = part["text"].strip() if part["type"] == "text" else ""
                if said and said not in text and "</think>" not in said:  # thoughts are left out on purpose
                    raise DataError(
                        f"the chat template of {self._processor_name} leaves out what the {turn['role']} says: "
                        f"{said[:60]!r}",
                        fix="put a system message in front of the first user message, or set chat_template to one "
                        "that renders it",
                    )

    # -- answers ------------------------------------------------------------------------------------------------------

    def _marked_spans(self, messages: Messages) -> list[Span]:
        text, spans = self._jinja(messages, False, marks=True)
        answers = sum(turn["role"] == "assistant" and bool(turn["content"]) for turn in messages)
        if len(spans) < answers:
            raise DataError(
                f"the chat template of {self._processor_name} marks {len(spans)} of {answers} answers",
                fix="remove the generation marks from the template: answers are found without them too",
            )
        if self.appended_end and messages[-1]["role"] == "assistant" and spans:
            spans[-1] = (spans[-1][0], len(text.rstrip()) + len(self.appended_end))
        return self._from_prompt(messages, text, spans)

    def _from_prompt(self, messages: Messages, text: str, spans: list[Span]) -> list[Span]:
        """Let an answer begin where the prompt for it ends, if only blanks lie between.

        LLaVA 1.5's template asks with ``ASSISTANT:`` and trains on ``ASSISTANT: `` with the mark behind the blank:
        where the blank is a token of its own, the model would have to begin with one that it never learned.
        """
        begun = []
        turns = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        for index, (start, end) in zip(turns, spans, strict=False):
            head = self._render(messages[:index], add_generation_prompt=True)
            follows = text.startswith(head) and len(head) <= start and not text[len(head) : start].strip()
            begun.append((len(head) if follows else start, end))
        return begun + spans[len(turns) :]

    def _prefix_spans(self, messages: Messages, text: str) -> list[Span]:
        spans = []
        for index, turn in enumerate(messages):
            if turn["role"] != "assistant":
                continue
            head = self._render(messages[:index], add_generation_prompt=True)
            until = text if index == len(messages) - 1 else self._render(messages[: index + 1])
            if not text.startswith(head) or not text.startswith(until):
                raise DataError(
                    f"the chat template of {self._processor_name} renders the conversation up to turn {index + 1} "
                    "otherwise than the same turns within the whole, so which tokens are the answer cannot be told",
                    fix="assistant_only_loss: false   or   put {% generation %}...{% endgeneration %} around the "
                    "answer in a copy of the template, and give its path as chat_template",
                )
            spans.append((len(head), len(until)))
        return spans

    def _with_end(self, start: int, end: int, text: str) -> Span:
        """Let the answer end with its end token: reach out for one that follows, leave the blanks after it.

        A blank at the end of an answer is often one token with the first word of the next turn, which would be
        learned with it.
        """
        trimmed = start + len(text[start:end].rstrip())
        if not self._ends_with_token(text[start:trimmed]):
            for place in (trimmed, end):
                following = next((token for token in self._ends if text.startswith(token, place)), None)
                if following is not None:
                    return start, place + len(following)
        return start, trimmed

    def _ends_with_token(self, text: str) -> bool:
        return any(text.endswith(token) for token in self._ends)

    def _missing_end(self, eos_token: str | None) -> str:
        """Return the end token, where the template ends an answer without any, as LLaVA 1.5's does."""
        text = self._render(_PROBE)
        end = text.rstrip()
        return "" if eos_token is None or self._ends_with_token(end) else eos_token


def for_template(messages: Messages) -> Messages:
    """Return messages without the empty fields that Arrow adds: templates ask whether a part has 'text'."""
    return [
        {
            "role": turn["role"],
            "content": [
                {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}
                for part in turn["content"]
            ],
        }
        for turn in messages
    ]


def _read_template(processor: Any, chat_template: str | None) -> str:
    if chat_template is not None:
        if "{%" in chat_template or "{{" in chat_template:
            return chat_template
        try:
            return resolve_chat_template(chat_template)
        except DataError as error:
            raise DataError(
                f"chat_template={chat_template!r}: there is no such file",
                fix="give a Jinja file that writes the image token for parts of type 'image', or remove chat_template",
            ) from error
    own = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise DataError(
            f"{type(processor).__name__} has no chat template (a base model), so conversations cannot be rendered",
            fix="chat_template: path/to/template.jinja   or   the instruct variant of the model",
        )
    return str(own)
