"""Training templates mark the answers and render, token for token, what the published template renders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig
from trl import SFTConfig, SFTTrainer
from trl import chat_template_utils as trl_templates

from hf_fsdp.data import (
    find_stop_token_id,
    find_training_template,
    measure_lengths,
    prepare_chat,
    prepare_generation_config,
    prepare_pad_token,
    read_chat_template,
    read_examples,
    resolve_chat_template,
)
from hf_fsdp.data.chat_template import has_generation_marks, list_templates
from hf_fsdp.data.preview import _smallest_model
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
_MISTRAL_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
)
_MISTRAL_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)


def _mistral(system: bool, user: str, answer: str, place: str = "first") -> str:
    """Mistral's published templates: where the system message goes and which spaces there are is all they differ in."""
    opening = "[INST] "
    with_system = f"{{{{ {user.replace('@', 'system + nl + nl + message.content')} }}}}"
    plain = f"{{{{ {user.replace('@', 'message.content')} }}}}"
    if system:
        plain = f"{{% if loop.{place} and system is defined %}}{with_system}{{% else %}}{plain}{{% endif %}}"
    rows = "rest" if system else "messages"
    assert opening in user
    return (
        "{% set nl = '\n' %}" + (_MISTRAL_SYSTEM if system else "") + "{{ bos_token }}{% for message in " + rows + " %}"
        + _MISTRAL_ALTERNATE + "{% if message['role'] == 'user' %}" + plain
        + "{% elif message['role'] == 'assistant' %}{{ " + answer + " }}{% else %}{{ raise_exception('no such role') }}"
        "{% endif %}{% endfor %}"
    )  # fmt: skip


MISTRAL = {
    "mistral": _mistral(True, "' [INST] ' + @ + ' [/INST]'", "' ' + message['content'] + eos_token"),
    "mistral_v0_1_2023": _mistral(False, "'[INST] ' + @ + ' [/INST]'", "message['content'] + eos_token + ' '"),
    "mistral_v0_2_2023": _mistral(False, "'[INST] ' + @ + ' [/INST]'", "message['content'] + eos_token"),
    "mistral_v0_3": _mistral(True, "'[INST] ' + @ + '[/INST]'", "' ' + message['content'] + eos_token", "last"),
    "mistral_v0_3_trimmed": _mistral(
        True, "'[INST] ' + @ + '[/INST]'", "' ' + message['content']|trim + eos_token", "last"
    ),
}
WITHOUT_SYSTEM = ("mistral_v0_1_2023", "mistral_v0_2_2023")
FAMILIES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "smollm2": (tiny.smollm2_tokenizer, tiny.SMOLLM2_TEMPLATE, "<|im_end|>"),
    "llama2": (tiny.llama2_tokenizer, LLAMA2_TEMPLATE, "</s>"),
    "llama3": (tiny.llama3_tokenizer, trl_templates.llama3_chat_template, "<|eot_id|>"),
    "llama3_1": (tiny.llama3_tokenizer, trl_templates.llama3_1_chat_template, "<|eot_id|>"),
    "llama3_2": (tiny.llama3_tokenizer, trl_templates.llama3_2_chat_template, "<|eot_id|>"),
    **{
        name: (tiny.mistral_v3_tokenizer if "v0_3" in name else tiny.llama2_tokenizer, template, "</s>")
        for name, template in MISTRAL.items()
    },
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[Any, str, str]:
    make, template, stop = FAMILIES[request.param]
    return make(template), template, stop


def _opening(published: str) -> list[dict[str, str]]:
    """A system message, for the templates that have one."""
    return [] if published in [MISTRAL[name] for name in WITHOUT_SYSTEM] else [SYSTEM]


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_training_template_gives_the_published_tokens(
    family: tuple[Any, str, str], with_system: bool, prompt: bool
) -> None:
    tokenizer, published, _ = family
    training = find_training_template(tokenizer)
    assert training != published and has_generation_marks(training)
    turns = (_opening(published) if with_system else []) + (CONVERSATION[:3] if prompt else CONVERSATION)
    options: dict[str, Any] = {"add_generation_prompt": prompt, "return_dict": True}
    expected = tokenizer.apply_chat_template(turns, chat_template=published, **options)["input_ids"]
    assert tokenizer.apply_chat_template(turns, chat_template=training, **options)["input_ids"] == expected


def test_exactly_the_answers_and_their_end_tokens_are_marked(family: tuple[Any, str, str]) -> None:
    tokenizer, published, stop = family
    encoded = tokenizer.apply_chat_template(
        [*_opening(published), *CONVERSATION],
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


@pytest.mark.parametrize("name", list(MISTRAL))
def test_each_published_mistral_template_has_its_own_twin(name: str) -> None:
    make, template, _ = FAMILIES[name]
    assert find_training_template(make(template)) == list_templates()[name]


@pytest.mark.parametrize("name", WITHOUT_SYSTEM)
def test_a_mistral_template_without_system_message_refuses_one(name: str) -> None:
    tokenizer = tiny.llama2_tokenizer(list_templates()[name])
    with pytest.raises(Exception, match="this Mistral template has no system message"):
        tokenizer.apply_chat_template([SYSTEM, *CONVERSATION], tokenize=False)


def test_a_system_message_that_the_template_leaves_out_is_refused_and_the_advice_works() -> None:
    tokenizer = tiny.mistral_v3_tokenizer(list_templates()["mistral_v0_3"])
    rows = [{"messages": CONVERSATION}, {"messages": [SYSTEM, *CONVERSATION]}]
    with pytest.raises(DataError, match="the chat template leaves the system message of row 2 out") as caught:
        measure_lengths(Dataset.from_list(rows), tokenizer, max_length=None)
    assert "put its text in front of the first user message" in caught.value.problems[0].fix
    user = {"role": "user", "content": SYSTEM["content"] + CONVERSATION[0]["content"]}
    measure_lengths(Dataset.from_list([{"messages": [user, *CONVERSATION[1:]]}]), tokenizer, max_length=None)
    tokenizer.chat_template = list_templates()["mistral"]  # the other advice
    measure_lengths(Dataset.from_list(rows), tokenizer, max_length=None)


def _stop_ids(tokenizer: Any, stop: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(stop))


# TRL sets by its old name what transformers has renamed.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("pad_is_stop", [True, False])
def test_the_stop_token_counts_in_the_loss_and_padding_never_does(
    family: tuple[Any, str, str], pad_is_stop: bool
) -> None:
    """Whatever the pad id: also where it is the very token that ends an answer, as SmolLM2's is."""
    tokenizer, published, stop = family
    if pad_is_stop:
        tokenizer.pad_token = stop
    else:
        tokenizer.pad_token = None
        prepare_pad_token(tokenizer)
    rows = [{"messages": [*_opening(published), *CONVERSATION]}, {"messages": CONVERSATION[:2]}]
    batch = _collate(tokenizer, rows)
    ids, labels, kept = batch["input_ids"], batch["labels"], batch["attention_mask"].bool()
    assert not kept.all()  # the second row is padded
    assert (labels[~kept] == -100).all() and (ids[~kept] == tokenizer.pad_token_id).all()
    stop_id = _stop_ids(tokenizer, stop)
    for row, num_answers in ((0, 2), (1, 1)):
        learned = ids[row][labels[row] != -100]
        assert int((learned == stop_id).sum()) == num_answers
        assert int(learned[-1]) == stop_id
        assert torch.equal(labels[row][labels[row] != -100], learned)


def _collate(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prepare and batch rows by TRL itself, beside a model of no size."""
    examples = read_examples(Dataset.from_list(rows), source="rows")
    assistant_only, _, _ = prepare_chat(tokenizer, examples, assistant_only=None)
    assert assistant_only
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], assistant_only_loss=True, max_length=None
        )
        trainer = SFTTrainer(
            model=_smallest_model(tokenizer),
            args=arguments,
            train_dataset=examples.dataset,
            processing_class=tokenizer,
        )
    batch: dict[str, torch.Tensor] = trainer.data_collator(list(trainer.train_dataset))
    return batch


def test_a_tokenizer_without_pad_token_gets_one_that_ends_nothing() -> None:
    llama2 = tiny.llama2_tokenizer()
    llama2.pad_token = None
    prepare_pad_token(llama2)
    assert llama2.pad_token == "<unk>"
    llama3 = tiny.llama3_tokenizer()
    llama3.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    prepare_pad_token(llama3)
    assert llama3.pad_token == "<|finetune_right_pad_id|>"
    bare = tiny.llama3_tokenizer()
    prepare_pad_token(bare)
    assert bare.pad_token is None  # nothing but its end tokens: TRL's collator keeps them apart by length


def test_a_published_pad_token_is_kept() -> None:
    smollm2 = tiny.smollm2_tokenizer()
    prepare_pad_token(smollm2)
    assert smollm2.pad_token == smollm2.eos_token == "<|im_end|>"


def test_answers_only_are_refused_for_text_and_the_advice_works() -> None:
    text = read_examples(Dataset.from_list([{"text": "Once upon a time."}]), source="rows")
    with pytest.raises(DataError, match="assistant_only_loss=True needs conversations, and the examples are text"):
        prepare_chat(tiny.smollm2_tokenizer(), text, assistant_only=True)
    assert prepare_chat(tiny.smollm2_tokenizer(None), text, assistant_only=None) == (False, None, None)


def test_conversational_completions_on_a_base_model_need_a_named_template() -> None:
    turns = [{"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]}]
    examples = read_examples(Dataset.from_list(turns), source="rows")
    with pytest.raises(DataError, match="has no chat template") as caught:
        prepare_chat(tiny.smollm2_tokenizer(None), examples, assistant_only=None)
    name = caught.value.problems[0].fix.removeprefix("chat_template: ").split()[0]
    assert not prepare_chat(tiny.smollm2_tokenizer(None), examples, assistant_only=None, chat_template=name)[0]


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
        (tiny.mistral_v3_tokenizer, "mistral_v0_3"),
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
