"""What goes to the Hub, what is said of it, and what upstream has to keep for the seams of `push_to_hub`."""

from __future__ import annotations

import inspect
import json
import shlex
import time
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_fsdp.checkpoint.model_card import ModelCardFacts, build_model_card, citations_of
from hf_fsdp.checkpoint.serving import serving_lines
from hf_fsdp.checkpoint.upload import (
    HubTarget,
    describe_failure,
    export_files,
    name_hub_base,
    not_uploaded,
    replaced_files,
    repository_of_snapshot,
    upload_command,
)
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations import hub_push
from hf_fsdp.integrations.hub_card import CardDraft, draft_card
from hf_fsdp.integrations.hub_push import Push, Pushes, move_into, push_folder, remove_push_folders

SNAPSHOT = "/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/0123abcd"


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# -- how it is served -------------------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"]}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "base_model_name_or_path": "a/base"}


@pytest.mark.parametrize(
    ("config", "adapter", "python", "vllm"),
    [
        (LLAMA, None, "AutoModelForCausalLM.from_pretrained('me/it')", "vllm serve me/it"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
            None,
            "AutoModelForImageTextToText.from_pretrained('me/it')",
            "vllm serve me/it",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            None,
            "AutoModelForSeq2SeqLM.from_pretrained('me/it')",
            None,
        ),
        (
            {"architectures": ["BertForSequenceClassification"]},
            None,
            "AutoModelForSequenceClassification.from_pretrained('me/it')",
            None,
        ),
        (
            None,
            LORA,
            "AutoPeftModelForCausalLM.from_pretrained('me/it')",
            "vllm serve a/base --enable-lora --lora-modules it=me/it",
        ),
        (
            LLAMA,
            {**LORA, "r": 16, "rank_pattern": {"q_proj": 48}},
            "AutoPeftModelForCausalLM.from_pretrained('me/it')",
            "vllm serve a/base --enable-lora --max-lora-rank 64 --lora-modules it=me/it",
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
            LORA,
            "PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained('a/base'), 'me/it')",
            "vllm serve a/base --enable-lora --lora-modules it=me/it",
        ),
        (None, {**LORA, "use_dora": True}, "AutoPeftModelForCausalLM", "serves no adapter with use_dora: merge it"),
        (None, {**LORA, "modules_to_save": ["lm_head"]}, "AutoPeftModelForCausalLM", "with modules_to_save: merge"),
        (None, {**LORA, "r": 1024}, "AutoPeftModelForCausalLM", "serves no adapter with rank 1024: merge"),
        (None, {**LORA, "task_type": "SEQ_CLS"}, "AutoPeftModelForSequenceClassification", None),
    ],
)
def test_how_a_model_is_loaded_and_served(
    tmp_path: Path, config: Any, adapter: Any, python: str, vllm: str | None
) -> None:
    write(tmp_path, {name: c for name, c in (("config.json", config), ("adapter_config.json", adapter)) if c})
    lines = serving_lines("me/it", tmp_path)
    assert python in lines[0].text.replace('"', "'")
    compile(lines[0].text, "line", "exec")
    assert (vllm in lines[1].text) if vllm else len(lines) == 1


def test_a_folder_with_a_space_is_one_word_of_the_command(tmp_path: Path) -> None:
    folder = write(tmp_path / "my model", {"config.json": LLAMA})
    assert shlex.split(serving_lines(folder)[1].text) == ["vllm", "serve", str(folder)]


# -- what is uploaded -------------------------------------------------------------------------------------------------


def test_pickles_and_hidden_files_stay_and_code_and_tokenizers_go(tmp_path: Path) -> None:
    keep = ["config.json", "model.safetensors", "modeling_mine.py", "spiece.model", "chat_template.jinja"]
    stay = ["training_args.bin", "optimizer.pt", ".hf-fsdp-saving-3/x.json", "__pycache__/a.pyc", "rng_state.pth"]
    write(tmp_path, dict.fromkeys([*keep, *stay], ""))
    (tmp_path / "link.json").symlink_to("/etc/hostname")
    assert sorted(export_files(tmp_path)) == sorted(keep)
    assert not_uploaded(tmp_path) == ["optimizer.pt", "rng_state.pth", "training_args.bin"]


def test_further_adapters_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, {"german/adapter_model.safetensors": "", "german/adapter_config.json": LORA})
    assert export_files(tmp_path) == ["german/adapter_config.json", "german/adapter_model.safetensors"]


@pytest.mark.parametrize("file", ["manifest.json", "model/shard-00001-x.safetensors", "state/a.json"])
def test_a_checkpoint_is_refused_with_the_command_that_exports_it(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path / "checkpoint-3", {"config.json": LLAMA, "model.safetensors": "", file: ""})
    with pytest.raises(CheckpointError, match="checkpoint-3 is a checkpoint") as caught:
        export_files(folder)
    assert f"hf-fsdp checkpoint export {folder} -o EXPORTED" in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no exported model"):
        export_files(write(tmp_path, {"config.json": LLAMA, "README.md": ""}))


def test_weights_of_an_earlier_push_that_would_be_loaded_instead_are_replaced() -> None:
    sharded = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    there = [
        "model.safetensors",
        "config.json",
        "adapter_config.json",
        "notes.txt",
        "other.safetensors",
        "a/model.safetensors",
    ]
    assert replaced_files(there, sharded) == ["adapter_config.json", "model.safetensors"]
    assert replaced_files(sharded, ["config.json", "model.safetensors"]) == sharded[1:]
    # An adapter beside a whole model may be meant.
    assert replaced_files(["model.safetensors", "adapter_model.bin"], ["adapter_model.safetensors"]) == [
        "adapter_model.bin"
    ]


def test_the_export_moves_into_the_folder_of_the_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"model.safetensors": "old", "checkpoint-1/config.json": "", "german/old.json": ""})
    new = write(run / "new", {"model-00001-of-00001.safetensors": "new", "german/adapter_config.json": LORA})
    move_into(new, run)
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint-1",
        "german",
        "model-00001-of-00001.safetensors",
        "new",
    ]
    assert [path.name for path in (run / "german").iterdir()] == ["adapter_config.json"]


def test_a_base_in_the_cache_of_this_machine_is_named_by_repository(tmp_path: Path) -> None:
    assert repository_of_snapshot(SNAPSHOT) == ("meta-llama/Llama-3.2-1B", "0123abcd")
    assert repository_of_snapshot("/data/models/llama") is None
    write(tmp_path, {"adapter_config.json": {**LORA, "base_model_name_or_path": SNAPSHOT, "revision": None}})
    assert name_hub_base(tmp_path) is None
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {**LORA, "base_model_name_or_path": "meta-llama/Llama-3.2-1B", "revision": "0123abcd"}


def test_a_base_in_a_folder_of_ones_own_stays_and_is_told(tmp_path: Path) -> None:
    local = write(tmp_path / "base", {"config.json": LLAMA})
    adapter = {**LORA, "base_model_name_or_path": str(local)}
    write(tmp_path / "it", {"adapter_config.json": adapter})
    assert name_hub_base(tmp_path / "it") == str(local)
    assert json.loads((tmp_path / "it" / "adapter_config.json").read_text()) == adapter


def test_no_token_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_fromTheEnvironment")
    error = ValueError("refused\n  hf_given and hf_fromTheEnvironment. For more information check: https://x.y/z")
    assert describe_failure(error, "hf_given") == "ValueError: refused *** and ***."
    target = HubTarget(repo_id="me/it", token="hf_given", revision="dev")
    assert "hf_given" not in repr(target) + upload_command(Path("/a b"), target)
    assert shlex.split(upload_command(Path("/a b"), target)) == "hf upload me/it".split() + [
        "/a b",
        ".",
        "--revision",
        "dev",
    ]


# -- around a push ----------------------------------------------------------------------------------------------------


def test_the_files_of_a_checkpoint_outlive_its_rotation_where_links_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write(tmp_path / "checkpoint-2", {"config.json": LLAMA, "model/a.safetensors": "x"})
    source = hub_push._source_folder(push_folder(tmp_path, 2))
    hub_push._link_tree(checkpoint, source)
    (checkpoint / "model" / "a.safetensors").unlink()
    assert (source / "model" / "a.safetensors").read_text() == "x"
    remove_push_folders(tmp_path, keep=[push_folder(tmp_path, 2)])
    assert source.is_dir()
    remove_push_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr("os.link", refuse)
    hub_push._link_tree(checkpoint, source)
    assert not source.exists()  # the checkpoint itself is read then


def test_an_export_that_fails_is_repaired_by_two_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path / "run 1" / "checkpoint-2", {"config.json": LLAMA, "model/a.safetensors": "x"})

    def fail(source: Path, output: Path) -> None:
        raise CheckpointError("model/a.safetensors is damaged", fix="take another checkpoint")

    monkeypatch.setattr(hub_push, "export_checkpoint", fail)
    push = Push(
        api=HfApi(),
        target=HubTarget(repo_id="me/it"),
        folder=push_folder(checkpoint.parent, 2),
        card=CardDraft(text="# it"),
        message="step 2",
        step=2,
        checkpoint=checkpoint,
    )
    push.secure()
    with pytest.raises(CheckpointError, match="step 2: model/a.safetensors is damaged") as caught:
        push.run()
    folder = str(tmp_path / "run 1" / ".hf-fsdp-hub-2")
    words = shlex.split(caught.value.problems[0].fix)
    assert words[:6] == ["hf-fsdp", "checkpoint", "export", str(checkpoint), "-o", folder]
    assert words[6:] == ["&&", "hf", "upload", "me/it", folder, "."]
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("repository", ["me/queue", "me/both-at-once"])
def test_pushes_run_one_after_the_other_and_only_the_last_failure_says_its_repair(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[int] = []

    def run(self: Push) -> Any:
        time.sleep(0.05 if self.step == 1 else 0)
        order.append(self.step)
        raise CheckpointError(f"step {self.step}: no network", fix=f"command {self.step}")

    monkeypatch.setattr(Push, "run", run)
    pushes = Pushes()
    for step in (1, 2):
        push = Push(
            api=HfApi(),
            target=HubTarget(repo_id=repository),
            folder=push_folder(tmp_path, step),
            card=CardDraft(text=""),
            message="",
            step=step,
        )
        pushes.start(push, outlives_script=True)
    assert [push.step for push in pushes.in_flight()] == [1, 2]
    if repository == "me/queue":  # else the first push ends after somebody looked, and both are told at the end
        futures.wait(pushes.jobs[:1])
        pushes.report(is_last=False)
    futures.wait(pushes.jobs)
    pushes.report()
    assert order == [1, 2]
    printed = capsys.readouterr().out
    assert f"could not push to {repository}: step 1: no network" in printed and "command 1" not in printed
    assert f"could not push to {repository}: step 2: no network\n  fix   command 2" in printed


# -- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_says_what_is_known_and_no_more() -> None:
    card = build_model_card(ModelCardFacts(name="me/it", serving=serving_lines("me/it")))
    data = card.data.to_dict()
    assert "base_model" not in data and "datasets" not in data and "license" not in data
    assert "from a local or a new one" in card.text and "Not stated." in card.text and "None were logged." in card.text
    assert "## Citations" not in card.text


def test_the_card_survives_being_read_again() -> None:
    facts = ModelCardFacts(
        name="me/it",
        serving=serving_lines("me/it"),
        base_model="a/base",
        datasets=["a/data"],
        num_rows=1234,
        settings={"warmup|steps": "3"},
        numbers={"eval_loss": "1.5"},
        tags=["trl", "hf-fsdp"],
        language=["en", "de"],
        citations="## Citations\n\nText.",
    )
    card = ModelCard(str(build_model_card(facts)))
    assert card.data.to_dict()["tags"] == ["generated_from_trainer", "hf-fsdp", "trl"]
    assert card.data.to_dict()["language"] == ["en", "de"]
    assert "(1,234 training rows)" in card.text and "| eval_loss | 1.5 |" in card.text
    assert citations_of(card.text) == "## Citations\n\nText."


def test_a_card_of_the_trainers_own_class_is_pushed_as_it_is(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
            Path(str(self.args.output_dir), "README.md").write_text(f"# {model_name}, by hand\n")

    trainer = Mine.__new__(Mine)
    trainer.args = SimpleNamespace(output_dir=tmp_path / "run")
    (tmp_path / "run").mkdir()
    draft = draft_card(trainer, "me/it", {"model_name": "it", "dataset_name": "a/data"}, step=3)
    draft.write(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# it, by hand\n"


def test_a_path_of_this_machine_is_not_in_the_card(tmp_path: Path) -> None:
    local = write(tmp_path / "private" / "base", {"config.json": LLAMA})
    write(tmp_path / "it", {"adapter_config.json": {**LORA, "base_model_name_or_path": str(local)}})
    CardDraft(ModelCardFacts(name="me/it", serving=(), is_adapter=True)).write(tmp_path / "it")
    text = (tmp_path / "it" / "README.md").read_text()
    assert "private" not in text and "vllm serve PATH_OF_THE_BASE_MODEL" in text
    assert "of a model that is not on the Hub" in text


# -- upstream ---------------------------------------------------------------------------------------------------------


def test_trainers_hub_methods_are_called_as_the_seams_expect() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(Trainer.init_hf_repo) == ["self", "token", "private"]
    assert names(Trainer.push_to_hub)[:6] == ["self", "commit_message", "blocking", "token", "revision", "private"]
    assert names(Trainer._push_from_checkpoint) == ["self", "checkpoint_folder"]
    assert names(Trainer._finish_current_push) == ["self"]
    assert {strategy.value for strategy in HubStrategy} == {"end", "every_save", "checkpoint", "all_checkpoints"}
    assert PushInProgress([]).is_done()
    assert hasattr(HfApi, "run_as_future")


def test_trainer_asks_for_the_repository_after_it_has_its_callbacks() -> None:
    source = inspect.getsource(Trainer.__init__)
    assert source.index("self.callback_handler = ") < source.index("self.init_hf_repo()"), "hub._init_hf_repo: is_ours"
