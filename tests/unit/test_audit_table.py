"""The audit as a person sees it: equal units folded, totals and findings below, text left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_fsdp.sharding.audit import Audit, UnitRow
from hf_fsdp.sharding.audit_table import fold_rows, render_audit, summary_lines

ROW = UnitRow(
    name="model.layers.0 LlamaDecoderLayer",
    kind="block",
    num_parameters=202_400_000,
    num_local=101_200_000,
    num_trained=202_400_000,
    storage="float32",
    compute="bfloat16",
    reduce="float32",
    output="bfloat16",
    reshard_after_forward=True,
    names=("model.layers.0.mlp.up_proj.weight",),
)


def rows(*names: str, **changes: Any) -> list[UnitRow]:
    return [replace(ROW, name=name, names=(f"{name}.weight",), **changes) for name in names]


def audit(units: list[UnitRow], **changes: Any) -> Audit:
    values: dict[str, Any] = {
        "model_class": "LlamaForCausalLM",
        "world_size": 2,
        "mesh": {"dp_shard": 2},
        "precision": "bf16-mixed",
        "units": units,
        "num_parameters": 1000,
        "num_sharded": 1000,
        "num_local": 500,
        "num_trained": 900,
        "num_frozen": 100,
        "ties": {},
        "num_checkpointed_blocks": 4,
        "num_blocks": 4,
        "num_tensors_agreed": 12,
        "tensors_taken_from_rank_0": [],
        "weights_checksum": "00ff",
        "replicas_equal": None,
    }
    return Audit(**{**values, **changes})


def folded_names(units: list[UnitRow]) -> list[tuple[str, int]]:
    return [(name, count) for name, count, _ in fold_rows(units)]


def test_layers_that_differ_only_in_their_index_are_one_line() -> None:
    units = [*rows(*(f"model.layers.{i} LlamaDecoderLayer" for i in range(12))), *rows("(root) LlamaForCausalLM")]
    assert folded_names(units) == [("model.layers.0-11 LlamaDecoderLayer", 12), ("(root) LlamaForCausalLM", 1)]


def test_layers_that_differ_in_anything_else_are_lines_of_their_own() -> None:
    units = rows("h.0 Block", "h.1 Block") + rows("h.2 Block", num_parameters=7) + rows("h.3 Mamba")
    assert folded_names(units) == [("h.0-1 Block", 2), ("h.2 Block", 1), ("h.3 Mamba", 1)]


def test_units_of_several_modules_are_not_folded_with_single_ones() -> None:
    units = rows("h.0 Block", "h.1 Block") + [replace(ROW, name="h.2 +1 Block", names=("a", "b"))]
    assert folded_names(units) == [("h.0-1 Block", 2), ("h.2 +1 Block", 1)]


def test_a_class_name_with_a_number_is_no_index() -> None:
    assert folded_names(rows("h.0 GPT2Block", "h.1 GPT2Block")) == [("h.0-1 GPT2Block", 2)]
    assert folded_names(rows("tower2.h.0 Block", "tower3.h.0 Block")) == [
        ("tower2.h.0 Block", 1),
        ("tower3.h.0 Block", 1),
    ]


def test_modules_of_a_plain_sequential_are_folded() -> None:
    assert folded_names(rows("0 Block", "1 Block", "2 Block")) == [("0-2 Block", 3)]


def test_every_index_that_varies_is_shown_as_a_range() -> None:
    units = rows(*(f"stages.{i}.blocks.{j} Block" for i in range(2) for j in range(3)))
    assert folded_names(units) == [("stages.0-1.blocks.0-2 Block", 6)]
    assert folded_names(rows("stages.1.blocks.0 Block", "stages.1.blocks.1 Block")) == [
        ("stages.1.blocks.0-1 Block", 2)
    ]


def test_a_long_name_has_its_class_in_a_second_line_and_is_never_cut_inside_a_number() -> None:
    text = render_audit(audit(rows(*(f"base_model.model.model.language_model.layers.{i} Layer" for i in range(30)))))
    assert "base_model.model.model.language_model.layers.0-29 " in text


def test_the_optimizer_has_a_column_once_it_has_state() -> None:
    record = audit(rows("model.layers.0 Layer"))
    assert "optimizer" not in render_audit(record)
    record.add_first_step([], [], {})
    assert "optimizer" in render_audit(record)


def test_the_table_shows_sizes_and_dtypes_of_each_line() -> None:
    text = render_audit(audit(rows(*(f"model.layers.{i} LlamaDecoderLayer" for i in range(32)))))
    assert text.startswith("FSDP audit: LlamaForCausalLM on 2 processes (dp_shard 2), bf16-mixed\n")
    line = next(line for line in text.splitlines() if "model.layers" in line)
    assert line.split() == ("model.layers.0-31 LlamaDecoderLayer 32 202.4M 101.2M 202.4M fp32 bf16 fp32 bf16".split())


def test_a_long_name_is_continued_and_not_cut() -> None:
    name = "base_model.model.model.language_model.layers.0"
    text = render_audit(audit(rows(f"{name} Qwen2_5_VLDecoderLayer", storage="bfloat16+float32")))
    assert "…" not in text
    lines = text.splitlines()
    heading = next(line for line in lines if line.startswith(" unit"))
    column = [line[: heading.index("count")].strip() for line in lines[lines.index(heading) + 2 :]]
    assert "".join(column).startswith(f"{name}Qwen2_5_VLDecoderLayer")


def test_mixed_storage_is_shown_part_by_part() -> None:
    text = render_audit(audit(rows("h.0 Block", storage="bfloat16+float32")))
    assert "bf16+fp32" in text


def test_the_totals_say_what_is_sharded_and_trained() -> None:
    lines = summary_lines(audit([], num_sharded=750, tensors_taken_from_rank_0=["lm_head.weight"]))
    assert lines == [
        "sharded      75.0% of 1000 parameters; this rank holds 500",
        "trained      900, frozen 100",
        "checkpointed 4 of 4 blocks",
        "agreed       12 tensors equal on all ranks (checksum 00ff), 1 taken from rank 0",
    ]


def test_ties_replicas_notes_and_warnings_follow_the_totals() -> None:
    ties = {"model.embed_tokens.weight": ["model.embed_tokens.weight", "lm_head.weight"]}
    lines = summary_lines(audit([], ties=ties, replicas_equal=False, notes=["a"], warnings=["b"]))
    assert lines[4:] == [
        "tied         model.embed_tokens.weight = lm_head.weight",
        "replicas     DIFFER",
        "note         a",
        "warning      b",
    ]
    assert "replicas     equal" in summary_lines(audit([], replicas_equal=True))


def test_square_brackets_and_long_lines_come_out_as_they_went_in() -> None:
    note = "wrap: {layer_classes: [LlamaDecoderLayer]} " + "x" * 150
    assert f"note         {note}\n" in render_audit(audit(rows("h.0 Block"), notes=[note]))
    assert "[red]layer Block" in render_audit(audit(rows("[red]layer Block")))


def test_an_audit_of_nothing_is_no_division_by_zero() -> None:
    empty = audit([], num_parameters=0, num_sharded=0)
    assert empty.sharded_share == 0.0
    assert "sharded      0.0%" in render_audit(empty)


def test_what_the_first_step_showed_is_added_by_unit() -> None:
    trained, frozen = rows("a Block", "b Block")
    record = audit([trained, replace(frozen, num_trained=0), *rows("c Block")])
    record.add_first_step(["c Block.weight"], [], {"a Block.weight": "float32"})
    assert [row.optimizer_state for row in record.units] == ["float32", "-", "none"]
    assert record.to_mapping()["first_step"] == {"without_gradient": ["c Block.weight"], "not_moved": []}
