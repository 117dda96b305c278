"""An exported checkpoint loads in plain transformers and PEFT to the bit, and what is damaged is not exported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.export_cases import MERGES
from tests.distributed.harness import Outcome, run_cases

MODULE = "tests.distributed.export_cases"
NAMES = {
    1: [
        "merges",
        "renamed_families",
        "several_adapters",
        "refusals",
        "resized",
        "other_base",
        "damage",
        "killed",
        "foreign",
        "ties_of_users",
        "four_bit",
        "memory",
    ],
    2: ["masters", "sharded_adapter"],
}
_outcomes: dict[int, dict[str, Outcome]] = {}


def first(world_size: int, name: str) -> Any:
    """What rank 0 gave; the first call for a number of processes runs all of its cases."""
    if world_size not in _outcomes:
        _outcomes[world_size] = run_cases(MODULE, NAMES[world_size], world_size, seconds_per_case=240)
    return _outcomes[world_size][name].get()[0]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_masters_are_exported_as_save_pretrained_gathers_them(kind: str) -> None:
    found = first(2, "masters")[kind]
    assert found["sharded"] and found["share"] < 0.6
    assert found["stored"] == "torch.float32"
    assert found["report"][:2] == ["model", "bfloat16"]
    assert found["differing"] == []
    assert found["config_dtype"] == "bfloat16"
    assert found["fp32_is_more"] and found["fp32_rounds_to_it"] == []
    assert found["aliases"] == (["lm_head.weight"] if kind == "tied" else [])


def test_weights_are_split_and_run_files_stay_out() -> None:
    found = first(2, "masters")["untied"]
    weights = [name for name in found["files"] if name.endswith(".safetensors")]
    assert len(weights) == found["index"] > 1
    assert max(found["sizes"]) < 30_000 + 10_000
    assert sorted(set(found["files"]) - set(weights)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    ]


def test_a_sharded_adapter_loads_in_peft_and_merges_as_peft_does() -> None:
    found = first(2, "sharded_adapter")
    assert found["sharded"]
    assert found["report"][0] == "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found["report"][2])
    assert found["differing"] == []
    assert found["merged"][0] == "merged"
    assert not [line for line in found["merged"][1] if "not those" in line]
    assert found["merged_differing"] == []


@pytest.mark.parametrize("name", MERGES)
def test_lora_is_merged_as_peft_merges_it(name: str) -> None:
    for dtype in ("torch.float32", "torch.bfloat16"):
        found = first(1, "merges")[f"{name}, {dtype}"]
        assert found["changed"] > 0
        assert found["worst"] <= 1.0, f"{found['worst']} ulp"
        assert found["adapter"] == []
        assert f"torch.{found['dtype']}" == dtype


@pytest.mark.parametrize("trained", ["head", "embeddings"])
def test_a_head_that_came_apart_from_its_embeddings_is_said(trained: str) -> None:
    lines = first(1, "merges")[f"tied, {trained} trained, torch.float32"]["lines"]
    assert any("tie_word_embeddings: false" in line for line in lines)


@pytest.mark.parametrize(
    "name",
    ["MixtralForCausalLM", "LlavaForConditionalGeneration", "T5ForConditionalGeneration", "DeepseekV4ForCausalLM"],
)
def test_renamed_families_are_written_as_save_pretrained_writes_them(name: str) -> None:
    found = first(1, "renamed_families")[name]
    assert found["names"] == found["files"] == found["differing"] == []
    assert (found["renamed"] > 0) == (not name.startswith("T5"))
    assert found.get("merged", []) == []


def test_several_adapters_keep_their_folders() -> None:
    found = first(1, "several_adapters")
    assert "adapter_model.safetensors" in found["files"] and "other/adapter_model.safetensors" in found["files"]
    assert found["dtype"] == "bfloat16"
    assert found["differing"] == found["merged"] == []
    assert any("left out: the adapters other" in line for line in found["lines"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exists", "exists and is not overwritten"),
        ("no_export", "no exported model, so --force does not delete it"),
        ("the_run", "is the checkpoint or a folder above it"),
        ("inside", "lies in the checkpoint"),
        ("dtype", "--dtype int8 is not known"),
        ("size", "--max-shard-size many is no size"),
        ("no_adapter", "holds no adapter"),
        ("overflow", "model.norm.weight holds values that float16 cannot"),
        ("other_config", "in the model that config.json describes"),
    ],
)
def test_what_must_not_be_exported_is_refused(name: str, message: str) -> None:
    assert message in first(1, "refusals")[name]


def test_refusals_leave_nothing_and_force_replaces_an_export() -> None:
    found = first(1, "refusals")
    assert found["untouched"]
    assert found["forced"] == "torch.bfloat16"
    assert not [name for name in found["left"] if name == "x" or "export" in name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tied", "model.embed_tokens.weight is tied to lm_head.weight"),
        ("pissa", "changed the base weights before training"),
        ("parameters", "target_parameters of adapter_config.json is not merged"),
        ("no base", "nowhere is not there"),
        ("not on the hub", "the base model nobody/nothing is no folder, and not in the Hub's cache or within reach"),
        ("trained outside", "1 tensors were trained and belong to no adapter"),
        ("fixed", "True"),
    ],
)
def test_what_cannot_be_merged_exactly_is_refused_by_name(name: str, message: str) -> None:
    assert message in first(1, "refusals")["lora"][name]


@pytest.mark.parametrize("name", [f"tied {tied}, trained {count}" for tied in (False, True) for count in (0, 2)])
def test_added_tokens_are_exported_and_merged(name: str) -> None:
    found = first(1, "resized")[name]
    assert found["adapter"] == found["merged"] == []
    assert found["vocabulary"] == 72


def test_another_base_is_told_from_the_one_that_was_trained_on() -> None:
    found = first(1, "other_base")
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert found[f"base {dtype}"] == []
        assert len(found[f"other {dtype}"]) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flipped .json", "config.json was changed after it was written"),
        ("flipped .safetensors", "was changed after it was written"),
        ("cut off", "bytes, not"),
        ("uncommitted", "incomplete: it has no manifest.json"),
        ("no run", "is no folder"),
    ],
)
def test_a_damaged_checkpoint_is_not_exported(name: str, message: str) -> None:
    found = first(1, "damage")
    assert message in found[name]
    assert found["left"] == ["good", "run"]


def test_a_model_is_exported_whatever_happened_to_the_optimizer() -> None:
    assert first(1, "damage")["without optimizer"] == 30


def test_a_killed_export_leaves_no_output() -> None:
    found = first(1, "killed")
    assert not found["out_was_there"]
    assert len(found["staged"]) == 1
    assert found["after"] == ["out", "run"]
    assert found["differing"] == []


def test_checkpoints_of_other_programs_are_exported() -> None:
    found = first(1, "foreign")
    assert found["plain_differing"] == found["shards_differing"] == []
    assert "trainer_state.json" not in found["plain"]
    assert "--base NAME_OR_FOLDER" in found["no_config"]
    assert "holds a PEFT model without the config of its adapter" in found["peft_shards"]


def test_ties_are_written_so_that_from_pretrained_finds_every_tensor() -> None:
    found = first(1, "ties_of_users")
    assert found["by_hand"]
    assert found["apart"] == []
    assert any("tie_word_embeddings: false" in line for line in found["lines"])


def test_an_adapter_of_a_four_bit_base_is_merged_into_the_full_weights() -> None:
    found = first(1, "four_bit")
    assert any("trained on a 4-bit base" in line for line in found["lines"])
    assert found["differing"] == []
    assert not found["quantized"]


def test_exporting_needs_memory_for_a_tensor_and_not_for_the_model() -> None:
    found = first(1, "memory")
    assert found["model"] > 400e6
    assert found["grown"] < 0.4 * found["model"] + found["largest"]
    assert found["peak"] < 2**30 + found["largest"]
