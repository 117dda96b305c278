"""Training templates mark the answers and render, token for token, what the published template renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GenerationConfig
from trl import chat_template_utils as trl_templates

from hf_fsdp.data import (
    find_stop_token_id,
    find_training_template,
    prepare_generation_config,
    read_chat_template,
    resolve_chat_template,
)
from hf_fsdp.data.chat_template import has_generation_marks, list_templates
from hf_fsdp.errors import DataError
from tests.recipes import tiny

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
CONVERSATION = [
    {"role": "user", "content": "\n What is 2 < 3 &  'this'? "},
    {"role": "assistant", "content": "  It is blue,\n\n as a rule. "},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi"},
]
# Written from the published format; see SMOLLM2_TEMPLATE for why.
LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
FAMILIES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "smollm2": (tiny.smollm2_tokenizer, tiny.SMOLLM2_TEMPLATE, "<|im_end|>"),
    "llama2": (tiny.llama2_tokenizer, LLAMA2_TEMPLATE, "</s>"),
    "llama3": (tiny.llama3_tokenizer, trl_templates.llama3_chat_template, "<|eot_id|>"),
    "llama3_1": (tiny.llama3_tokenizer, trl_templates.llama3_1_chat_template, "<|eot_id|>"),
    "llama3_2": (tiny.llama3_tokenizer, trl_templates.llama3_2_chat_template, "<|eot_id|>"),
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[Any, str, str]:
    make, template, stop = FAMILIES[request.param]
    return make(template), template, stop


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_training_template_gives_the_published_tokens(
    family: tuple[Any, str, str], with_system: bool, prompt: bool
) -> None:
    tokenizer, published, _ = family
    training = find_training_template(tokenizer)
    assert training != published and has_generation_marks(training)
    turns = ([SYSTEM] if with_system else []) + (CONVERSATION[:3] if prompt else CONVERSATION)
    options: dict[str, Any] = {"add_generation_prompt": prompt, "return_dict": True}
    expected = tokenizer.apply_chat_template(turns, chat_template=published, **options)["input_ids"]
    assert tokenizer.apply_chat_template(turns, chat_template=training, **options)["input_ids"] == expected


def test_exactly_the_answers_and_their_end_tokens_are_marked(family: tuple[Any, str, str]) -> None:
    tokenizer, _, stop = family
    encoded = tokenizer.apply_chat_template(
        [SYSTEM, *CONVERSATION],
        chat_template=find_training_template(tokenizer),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    runs: list[list[int]] = [[]]
    for token, marked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        if marked:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    texts = [tokenizer.decode(run, skip_special_tokens=False).strip() for run in runs if run]
    assert len(texts) == 2
    assert all(text.endswith(stop) for text in texts)
    answers = [text.removesuffix(stop).strip() for text in texts]
    assert answers == ["It is blue,\n\n as a rule.", "Hi"]


def test_the_stop_token_is_found(family: tuple[Any, str, str]) -> None:
    tokenizer, _, stop = family
    found = find_stop_token_id(tokenizer, find_training_template(tokenizer))
    assert found == tokenizer.convert_tokens_to_ids(stop)


def test_a_template_with_marks_is_kept_as_it_is() -> None:
    marked = "{% for m in messages %}{%- generation %}{{ m['content'] }}{% endgeneration -%}{% endfor %}"
    assert find_training_template(tiny.smollm2_tokenizer(marked)) == marked


def test_a_template_that_differs_in_one_character_is_not_replaced() -> None:
    other = tiny.SMOLLM2_TEMPLATE.replace("named SmolLM", "named Other")
    with pytest.raises(DataError, match="needs {% generation %} marks"):
        find_training_template(tiny.smollm2_tokenizer(other))


def test_the_fallback_serves_families_that_trl_knows() -> None:
    tokenizer = tiny.smollm2_tokenizer(trl_templates.qwen2_5_chat_template)
    with pytest.raises(DataError, match="needs {% generation %} marks"):
        find_training_template(tokenizer)
    found = find_training_template(tokenizer, fallback=trl_templates.get_training_chat_template)
    assert found == trl_templates.qwen2_5_training_chat_template


def test_a_template_without_marks_is_repaired_by_the_advice(tmp_path: Any) -> None:
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    tokenizer = tiny.smollm2_tokenizer(plain)
    with pytest.raises(DataError, match="needs {% generation %} marks") as caught:
        find_training_template(tokenizer, fallback=trl_templates.get_training_chat_template)
    assert "assistant_only_loss: false" in caught.value.problems[0].fix
    assert "chat_template" in caught.value.problems[0].fix
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    tokenizer.chat_template = resolve_chat_template(str(path))
    assert find_training_template(tokenizer) == path.read_text()


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (tiny.llama2_tokenizer, "llama2"),
        (tiny.llama3_tokenizer, "llama3_1"),
        (tiny.smollm2_tokenizer, "chatml"),
    ],
)
def test_a_base_model_without_template_is_given_one_that_fits(tokenizer: Any, expected: str) -> None:
    base = tokenizer(None)
    with pytest.raises(DataError, match="has no chat template") as caught:
        read_chat_template(base)
    name = caught.value.problems[0].fix.removeprefix("chat_template: ").split()[0]
    assert name == expected
    base.chat_template = resolve_chat_template(name)
    assert find_stop_token_id(base, find_training_template(base)) is not None


def test_an_unknown_template_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="is neither a file nor one of: chatml") as caught:
        resolve_chat_template("llama31")
    assert resolve_chat_template(caught.value.problems[0].fix.removeprefix("chat_template: "))


@pytest.mark.parametrize("name", list(list_templates()))
def test_every_template_of_ours_has_marks(name: str) -> None:
    assert has_generation_marks(list_templates()[name])


def test_tool_calls_are_refused_rather_than_dropped() -> None:
    tokenizer = tiny.llama3_tokenizer(resolve_chat_template("llama3_1"))
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(Exception, match="renders no tool calls"):
        tokenizer.apply_chat_template([CONVERSATION[0], call], tokenize=False)


def test_the_stop_token_joins_those_of_the_generation_config() -> None:
    config = GenerationConfig(eos_token_id=7)
    prepare_generation_config(config, 9)
    assert config.eos_token_id == [9, 7]
    prepare_generation_config(config, 9)
    assert config.eos_token_id == [9, 7]
    bare = GenerationConfig()
    prepare_generation_config(bare, None)
    assert bare.eos_token_id is None


def test_a_generation_config_that_could_not_be_saved_is_repaired(tmp_path: Any) -> None:
    config = GenerationConfig(temperature=0.6, top_p=0.9)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        config.save_pretrained(tmp_path)
    prepare_generation_config(config, None)
    config.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.6
