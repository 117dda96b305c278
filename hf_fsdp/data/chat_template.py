"""Chat templates with generation marks, which say which tokens the model is to learn.

An assistant-only loss needs `{% generation %}` marks around each answer; most published templates have none. The
folder `templates/` has marked twins of common ones. A twin is used only for a tokenizer whose own template renders
every probe conversation to the same text, so that training sees exactly what the model will see later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import DataError, nearest_names

if TYPE_CHECKING:
    from hf_fsdp.data.examples import Examples

Conversation = list[dict[str, Any]]

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Tokens that models reserve for padding: Llama 3.1's, and the common names.
_PAD_TOKENS = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]")
_PADDED_USER = {"role": "user", "content": ' 2 < 3 & "why"?\n\n'}
_PADDED_ANSWER = {"role": "assistant", "content": "\n  It's so.\n\n\tYes "}
_USER, _ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
_SYSTEM = {"role": "system", "content": " Be brief.\n"}
_PROBES: tuple[Conversation, ...] = (
    [_USER, _ANSWER],
    [_PADDED_USER, _PADDED_ANSWER],
    [_SYSTEM, _USER, _ANSWER],
    [_SYSTEM, _PADDED_USER, _PADDED_ANSWER, _USER, _ANSWER],
    [_USER, _ANSWER, _SYSTEM, _USER, _ANSWER],
    [_USER, _USER, _ANSWER],
    [_SYSTEM, _USER],
    [_USER],
)


def has_generation_marks(template: str) -> bool:
    """Return whether a Jinja chat template marks what the assistant says."""
    return _MARK.search(template) is not None


def list_templates() -> dict[str, str]:
    """Return our marked templates: name -> Jinja text."""
    folder = resources.files("hf_fsdp.data") / "templates"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".jinja")), key=lambda e: e.name)
    return {entry.name.removesuffix(".jinja"): entry.read_text(encoding="utf-8") for entry in files}


def resolve_chat_template(name: str) -> str:
    """Return the text of a chat template given as one of our names (``llama2``) or as a Jinja file.

    Raises:
        DataError: neither a known name nor a file.
    """
    templates = list_templates()
    if name in templates:
        return templates[name]
    path = Path(name).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise DataError(
        f"chat_template={name!r} is neither a file nor one of: {', '.join(templates)}",
        near=", ".join(nearest_names(name, templates)) or None,
        fix=f"chat_template: {(nearest_names(name, templates) or ['llama2'])[0]}",
    )


def find_training_template(tokenizer: Any, fallback: Callable[[Any], str | None] | None = None) -> str:
    """Return a template for `tokenizer` that marks the answers and renders what its own template renders.

    Tried in this order: the tokenizer's own template, if it has marks; one of ours that renders every probe the
    same; `fallback`.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        fallback: called with the tokenizer; a template, or ValueError. TRL's `get_training_chat_template` fits.

    Raises:
        DataError: no chat template at all, or none with marks, with what to do.
    """
    own = read_chat_template(tokenizer)
    if has_generation_marks(own):
        return own
    wanted = render_probes(tokenizer, own)
    for template in list_templates().values():
        if render_probes(tokenizer, template) == wanted:
            return template
    if fallback is not None:
        try:
            offered = fallback(tokenizer)
        except ValueError:
            offered = None
        if offered:
            return offered
    raise DataError(
        "assistant_only_loss=True needs {% generation %} marks around the answers in the chat template, and the "
        f"template of {_name(tokenizer)} has none",
        fix="assistant_only_loss: false   (the loss then counts every token)   or   save a copy of the template with "
        "{% generation %}...{% endgeneration %} around the answer and its end token, and give its path as "
        "chat_template",
    )


def read_chat_template(tokenizer: Any) -> str:
    """Return the tokenizer's default chat template.

    Raises:
        DataError: it has none (a base model), naming the templates of ours that its vocabulary can carry.
    """
    if tokenizer.chat_template:
        return str(tokenizer.get_chat_template())
    fitting = [name for name, template in list_templates().items() if _fits_vocabulary(tokenizer, name, template)]
    raise DataError(
        f"{_name(tokenizer)} has no chat template (a base model), so conversations cannot be rendered",
        near=", ".join(fitting) or None,
        fix=f"chat_template: {_suggest(fitting)}   or   give a Jinja file, or the instruct variant of the model",
    )


def _suggest(fitting: list[str]) -> str:
    # Special tokens are the stronger sign: llama2 and mistral need none of their own, so they fit every vocabulary.
    for name in ("llama3_1", "chatml", "mistral_v0_3"):
        if name in fitting:
            return name
    return fitting[0] if fitting else "path/to/template.jinja"


def _fits_vocabulary(tokenizer: Any, name: str, template: str) -> bool:
    vocabulary = tokenizer.get_vocab()
    if name.startswith("mistral_v0_3") and "[INST]" not in vocabulary:
        return False  # from v0.3 on it is one token
    tokens = set(re.findall(r"<\|\w+\|>", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)))
    needs_ends = not tokens and (tokenizer.bos_token is None or tokenizer.eos_token is None)
    return tokens <= set(vocabulary) and not needs_ends


def render_probes(tokenizer: Any, template: str) -> list[str | None]:
    """Render every probe conversation, with and without a generation prompt; None where the template refuses."""
    return [_render(tokenizer, template, probe, prompt) for probe in _PROBES for prompt in (False, True)]


def _render(tokenizer: Any, template: str, conversation: Conversation, add_generation_prompt: bool) -> str | None:
    from jinja2.exceptions import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except (TemplateError, TypeError):  # TypeError: a template that adds None, as with a missing bos token
        return None


def find_stop_token_id(tokenizer: Any, template: str) -> int | None:
    """Return the id of the special token that ends an answer under a marked `template`; None when there is none.

    A model trained with this template stops by this token, so its generation config has to know it: a base Llama 3
    has only `<|end_of_text|>` there and would go on for ever.
    """
    encoded = tokenizer.apply_chat_template(
        [_USER, _ANSWER, _USER],
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    while marked and marked[-1] not in special and not tokenizer.decode([marked[-1]]).strip():
        marked.pop()
    return marked[-1] if marked and marked[-1] in special else None


def prepare_chat(
    tokenizer: Any,
    examples: Examples,
    *,
    assistant_only: bool | None,
    chat_template: str | None = None,
    fallback: Callable[[Any], str | None] | None = None,
) -> tuple[bool, str | None, int | None]:
    """Give `tokenizer` the template, and where it lacks one the pad token, that `examples` are trained with.

    Args:
        tokenizer: changed in place.
        examples: the training examples.
        assistant_only: whether only answers count in the loss; None is yes for conversations.
        chat_template: one of our templates by name, or a Jinja file, in place of the tokenizer's own.
        fallback: as for `find_training_template`.

    Returns:
        Whether only answers count, the template to publish with the model, and the token that ends an answer.

    Raises:
        DataError: no fitting template, or only answers asked for where there are none.
    """
    prepare_pad_token(tokenizer)
    if chat_template:
        tokenizer.chat_template = resolve_chat_template(chat_template)
    published = tokenizer.chat_template
    if assistant_only is None:
        assistant_only = examples.kind == "messages"
    if not examples.is_conversational:
        if assistant_only:
            raise DataError(
                f"assistant_only_loss=True needs conversations, and the examples are {examples.format} columns",
                fix="remove assistant_only_loss: for completions the loss counts the completion, for text every token",
            )
        return False, published, None
    if not assistant_only:
        read_chat_template(tokenizer)
        return False, published, None
    tokenizer.chat_template = find_training_template(tokenizer, fallback=fallback)
    return True, published, find_stop_token_id(tokenizer, tokenizer.chat_template)


def prepare_pad_token(tokenizer: Any) -> None:
    """Give a tokenizer without a pad token one of its own vocabulary that ends nothing, where there is one.

    TRL would take the end token. Its collator keeps the two apart by length, but other programs mask the loss by the
    pad id, and a model reloaded with that pad id gets no gradient for the end token's embedding.
    """
    if tokenizer.pad_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    for token in (*_PAD_TOKENS, tokenizer.unk_token):
        if token is not None and token in vocabulary and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return


def _name(tokenizer: Any) -> str:
    return str(tokenizer.name_or_path) or type(tokenizer).__name__
