"""`push_to_hub` on 2 processes against a stand-in of the Hub: what goes there, what loads from it, what fails how."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.hub_cases import BASE, PUSHING, READING
from tests.distributed.hub_stand_in import TOKEN, Repository, StandIn
from tests.distributed.tiny_models import build_model

MODULE = "tests.distributed.hub_cases"
NEVER_UPLOADED = ("*shard*", "*optimizer*", "*manifest*", "*.pt", "*.pth", "*.bin", "*.pkl", "*state*", "audit.json")
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
BESIDE = {".gitattributes", "README.md", "tokenizer.json", "tokenizer_config.json"}


@dataclass(frozen=True)
class Seen:
    """What the ranks returned, what was read back in another process, and the stand-in itself."""

    pushed: dict[str, Outcome]
    read: dict[str, Outcome]
    hub: StandIn

    def weights(self, repository: str) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.read["read_back"].get()[0][repository]
        return weights


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("hub")
    with StandIn() as hub:
        build_model("llama", tied=False).save_pretrained(folder / "base")
        files = {path.name: path.read_bytes() for path in Path(folder, "base").iterdir()}
        hub.repositories[BASE] = Repository()
        hub.repositories[BASE].add("base", files)
        # The ranks may ask this hub and no other; xet is a service of its own that the stand-in does not have.
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(folder / "home"),
            "NO_PROXY": "127.0.0.1",
        }
        pushed = run_cases(MODULE, list(PUSHING), world_size=2, environment=environment)
        read = run_cases(MODULE, list(READING), world_size=1, environment=environment)
    yield Seen(pushed, read, hub)


def assert_equal(loaded: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    assert loaded.keys() == live.keys()
    for name, tensor in live.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize(
    ("case", "repository", "expected"),
    [
        ("end_full", "end-full", MODEL_FILES | BESIDE),
        ("end_lora", "end-lora", ADAPTER_FILES | BESIDE),
        ("every_save", "every-save", MODEL_FILES | BESIDE),
        ("busy", "busy", MODEL_FILES | BESIDE),
    ],
)
def test_the_exported_model_is_what_is_pushed(case: str, repository: str, expected: set[str], seen: Seen) -> None:
    for rank in seen.pushed[case].get():
        assert rank["sharded"] and rank["halved"]
        assert rank["repo"] == f"someone/{repository}"
        assert_equal(seen.weights(repository), rank["weights"])
    assert set(seen.hub.files(f"someone/{repository}")) == expected


def test_no_shard_no_optimizer_state_and_no_pickle_ever_reaches_the_hub(seen: Seen) -> None:
    for outcome in [*seen.pushed.values(), *seen.read.values()]:
        outcome.get()
    names = [
        name for repository in seen.hub.repositories.values() for commit in repository.commits for name in commit.files
    ]
    assert len(names) > 50
    assert [n for n in names if any(fnmatch.fnmatch(os.path.basename(n), p) for p in NEVER_UPLOADED)] == []
    assert {name.partition("/")[0] for name in names if "/" in name} == {"checkpoint-1", "checkpoint-2"}


def test_each_push_is_one_commit(seen: Seen) -> None:
    assert seen.hub.messages("someone/end-full") == ["End of training"]
    assert seen.hub.messages("someone/every-save") == [f"Training in progress, step {step}" for step in (2, 4)]
    assert seen.hub.messages("someone/sft")[-1] == "Model save"


def test_after_the_push_the_folder_of_the_run_holds_the_model_and_nothing_of_the_push(seen: Seen) -> None:
    for rank in seen.pushed["end_full"].get():
        assert set(rank["files"]) == MODEL_FILES | BESIDE - {".gitattributes"} | {"audit.json"}
    for rank in seen.pushed["every_save"].get():
        assert [name for name in rank["files"] if name != "audit.json"] == ["checkpoint-4"]
    commits = [rank["commit"] for rank in seen.pushed["end_full"].get()]
    assert commits[0].startswith(f"{seen.hub.url}/someone/end-full/commit/") and commits[1] == "None"


def test_a_checkpoint_that_came_during_an_upload_is_pushed_at_the_end(seen: Seen) -> None:
    for rank in seen.pushed["busy"].get():
        assert {f"checkpoint-{step}" for step in (1, 2, 3, 4)} <= set(rank["files"])
    assert seen.hub.messages("someone/busy") == [f"Training in progress, step {step}" for step in (1, 4)]
    assert b"| steps | 4 |" in seen.hub.files("someone/busy")["README.md"]


def test_an_adapter_names_its_base_by_repository_and_its_card_says_what_it_was_made_from(seen: Seen) -> None:
    files = seen.hub.files("someone/end-lora")
    assert b'"base_model_name_or_path": "someone/base"' in files["adapter_config.json"]
    card = ModelCard(files["README.md"].decode())
    data = card.data.to_dict()
    assert data["base_model"] == BASE and data["datasets"] == ["someone/data"] and data["license"] == "apache-2.0"
    assert data["library_name"] == "peft" and {"hf-fsdp", "lora"} <= set(data["tags"])
    assert "| learning_rate | 0.05 |" in card.text and "| global batch | 12 |" in card.text
    assert "| lora_r | 4 |" in card.text and "(96 training rows)" in card.text
    assert "  precision: {preset: fp32," in card.text
    loss = [line for line in card.text.splitlines() if line.startswith("| training loss, last logged |")]
    assert len(loss) == 1 and 3 < float(loss[0].split("|")[2]) < 6


def test_how_to_load_and_serve_is_printed_once_by_rank_0(seen: Seen) -> None:
    first, second = (rank["printed"] for rank in seen.pushed["end_lora"].get())
    command = "vLLM: vllm serve someone/base --enable-lora --lora-modules end-lora=someone/end-lora"
    assert first.count(command) == 1 and command not in second
    assert first.count("step 4 is on the Hub: http://127.0.0.1") == 1
    assert seen.pushed["every_save"].get()[0]["printed"].count("vllm serve someone/every-save") == 1


def test_trls_tags_and_citation_are_in_our_card(seen: Seen) -> None:
    for rank in seen.pushed["sft_checkpoint"].get():
        assert_equal(seen.weights("sft"), rank["weights"])
    card = ModelCard(seen.hub.files("someone/sft")["README.md"].decode())
    assert {"trl", "sft", "hf-fsdp"} <= set(card.data.to_dict()["tags"])
    assert card.text.count("## Citations") == 1 and "@software{vonwerra2020trl" in card.text
    assert "sharded by hf-fsdp" in card.text and "--max-lora-rank 32" in card.text


def test_all_checkpoints_are_kept_as_exports_of_their_step(seen: Seen) -> None:
    seen.pushed["sft_checkpoint"].get()
    files = seen.hub.files("someone/sft")
    for name in ("checkpoint-1", "checkpoint-2"):
        assert {f"{name}/{file}" for file in ADAPTER_FILES} <= set(files)
    last, first = seen.weights("sft"), seen.weights("sft/checkpoint-1")
    assert first.keys() == last.keys() and any(not torch.equal(first[name], last[name]) for name in last)


def test_a_hub_that_refuses_the_commit_ends_no_training_and_hurts_no_checkpoint(seen: Seen) -> None:
    for rank in seen.pushed["refused_in_the_background"].get():
        assert rank["steps"] == 4 and rank["again"]
        assert {"checkpoint-2", "checkpoint-4"} <= set(rank["files"])
    printed = seen.pushed["refused_in_the_background"].get()[0]["printed"]
    failed = [line for line in printed.splitlines() if "could not push to someone/fails-500: step" in line]
    assert [line.split("step ")[1][0] for line in failed] == ["2", "4"]
    assert all("500 Internal Server Error" in line for line in failed)
    assert printed.count("fix   hf upload someone/fails-500 ") == 1  # of the last; the one before is superseded


def test_a_push_that_was_asked_for_fails_on_every_rank_and_its_fix_works(seen: Seen) -> None:
    first, second = seen.pushed["refused_in_the_background"].get()
    assert first["error"] == second["error"]
    assert "could not push to someone/fails-500 on rank 0: step 4: " in first["error"]
    assert "500 Internal Server Error" in first["error"] and "hf upload someone/fails-500 " in first["error"]
    assert set(first["left"]) == MODEL_FILES | BESIDE - {".gitattributes"}
    assert set(seen.hub.files("someone/by-hand")) == MODEL_FILES | BESIDE
    assert_equal(seen.weights("by-hand"), first["weights"])


def test_a_token_that_is_refused_ends_every_rank_with_the_same_words(seen: Seen) -> None:
    errors = [rank["error"] for rank in seen.pushed["wrong_token"].get()]
    assert errors[0] == errors[1]
    assert "could not open the repository someone/refused" in errors[0] and "401 Unauthorized" in errors[0]
    assert "hf auth login" in errors[0] and "push_to_hub=False" in errors[0]


def test_no_token_is_printed_or_uploaded(seen: Seen) -> None:
    for outcome in seen.pushed.values():
        for rank in outcome.get():
            for text in (rank["printed"], rank.get("error", "")):
                assert TOKEN not in text and "hf_wrongToken" not in text
    for repository in seen.hub.repositories.values():
        for commit in repository.commits:
            assert not any(TOKEN.encode() in data for data in commit.files.values())


def test_a_single_process_pushes_the_same_kind_of_folder(seen: Seen) -> None:
    rank = seen.read["single"].get()[0]
    assert not rank["sharded"]
    assert set(seen.hub.files("someone/single")) == MODEL_FILES | BESIDE
    assert_equal(seen.weights("single"), rank["weights"])
