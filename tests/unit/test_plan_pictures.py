"""Plans with pictures: the simulated step is the real one, family by family, and nothing is left out silently."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.models.resolve import resolve_model
from hf_fsdp.plan.service import simulate
from hf_fsdp.plan.simulation import Simulation
from hf_fsdp.plan.simulator.depth import Tower
from hf_fsdp.plan.simulator.picture_values import Bounds
from hf_fsdp.plan.simulator.pictures import measure_picture, picture_inputs, picture_notes
from tests.unit.real_picture_step import picture_job, real_peaks

CHECKPOINTED = FSDPConfig.from_mapping({"activation_checkpointing": "full"}, source="a test")
FAMILIES = (
    "llava",
    "llava-next",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "idefics3",
    "smolvlm",
    "gemma3",
    "paligemma",
    "internvl",
)
CASES: Mapping[str, tuple[str, FSDPConfig, dict[str, Any]]] = {
    **{family: (family, FSDPConfig(), {}) for family in FAMILIES},
    "checkpointed": ("qwen2.5-vl", CHECKPOINTED, {}),
    "frozen tower": ("gemma3", FSDPConfig(), {"trainable": ("language", "projector")}),
    "two pictures": ("qwen3-vl", FSDPConfig(), {"num_images": 2}),
}


@pytest.fixture(scope="module")
def simulations() -> dict[str, Simulation]:
    jobs = [picture_job(family, fsdp, **options) for family, fsdp, options in CASES.values()]
    return dict(zip(CASES, simulate(jobs), strict=True))


# Whole models return views of their logits; nobody writes to them here.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_every_phase_holds_what_the_real_step_holds(case: str, simulations: dict[str, Simulation]) -> None:
    family, fsdp, options = CASES[case]
    real = real_peaks(family, fsdp, **options)
    found = {phase.name: phase.num_bytes for phase in simulations[case].phases}
    assert set(found) == {phase.name for phase in real}
    for phase in real:
        assert found[phase.name] == pytest.approx(phase.num_bytes, rel=0.03), phase.name
    assert simulations[case].peak.num_bytes == pytest.approx(max(phase.num_bytes for phase in real), rel=0.001)


# -- depth ------------------------------------------------------------------------------------------------------------


def of_fewer_layers(name: str, vision: dict[str, Any], num_layers: int) -> ModelSpec:
    """A model of the catalog with its widths and fewer layers, so that all of them can be simulated."""
    spec = resolve_model(name)
    config: dict[str, Any] = copy.deepcopy(dict(spec.config))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = num_layers
    text.pop("layer_types", None)
    config["vision_config"] |= vision
    return ModelSpec(name=name, config=config)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (of_fewer_layers("llava-1.5-7b", {"num_hidden_layers": 10}, 10), None),
        (of_fewer_layers("qwen2.5-vl-7b", {"depth": 14, "fullatt_block_indexes": [6, 13]}, 10), (448, 336)),
    ],
    ids=["llava", "qwen2.5-vl"],
)
def test_shallow_towers_give_what_whole_ones_give(spec: ModelSpec, size: tuple[int, int] | None) -> None:
    batch = Batch(num_tokens=1024, num_images=1, image_size=size)
    job = Job(model=spec, batch=batch, fsdp=CHECKPOINTED)
    short, whole = simulate([job, replace(job, exact=True)])
    assert all(few < many for few, many in short.simulated_layers.values()) and len(short.simulated_layers) == 2
    exact = {phase.name: phase.num_bytes for phase in whole.phases}
    assert {phase.name: phase.num_bytes for phase in short.phases} == pytest.approx(exact, rel=1e-4)
    for name in ("forward_flops", "backward_flops", "recompute_flops", "all_gather_bytes", "num_reduce_scatters"):
        assert getattr(short.work, name) == pytest.approx(getattr(whole.work, name), rel=1e-6), name
    assert short.state_bytes == whole.state_bytes


def test_layers_that_do_more_are_never_left_out() -> None:
    tower = Tower("vision", "visual.blocks", 32, 0, 1, 4).keeping([7, 15, 23, 31])
    assert tower.kept(tower.min_layers) == [0, 1, 7, 15, 23, 29, 30, 31]
    assert tower.kept(tower.min_layers + 1) == [0, 1, 7, 15, 23, 28, 29, 30, 31]
    assert Tower("vision", "visual.blocks", 3, 0, 1, 3).keeping([7]).kept(3) == [0, 1, 2]


# -- methods ----------------------------------------------------------------------------------------------------------


def test_adapters_and_packed_weights_run_with_pictures() -> None:
    spec = of_fewer_layers("qwen2.5-vl-7b", {"depth": 4, "fullatt_block_indexes": [3]}, 2)
    batch = Batch(num_tokens=1024, num_images=1, image_size=(448, 448))
    full = Job(model=spec, batch=batch)
    parts = ("language",)
    methods = [Method(), *(Method(name=name, lora_parts=parts) for name in ("lora", "qlora"))]
    methods.append(Method(trainable=("language", "projector")))
    whole, lora, qlora, frozen = simulate([replace(full, method=method) for method in methods])
    assert qlora.state_bytes["parameters"] < lora.state_bytes["parameters"] < whole.state_bytes["parameters"]
    assert frozen.peak.num_bytes < whole.peak.num_bytes and frozen.work.flops < whole.work.flops
    # Nothing behind a frozen tower is backed through: no phase of it in the backward.
    assert not any(phase.name.startswith("backward: vision") for phase in frozen.phases)
    assert any(phase.name.startswith("backward: vision") for phase in whole.phases)
    assert all(phase.name.startswith(("forward", "backward", "clip", "optimizer")) for phase in lora.phases)


def test_pictures_cost_what_text_does_not() -> None:
    spec = of_fewer_layers("llava-1.5-7b", {"num_hidden_layers": 4}, 2)
    text = Job(model=spec, batch=Batch(num_tokens=2048))
    none, one, two = simulate([replace(text, batch=Batch(num_tokens=2048, num_images=count)) for count in range(3)])
    assert none.work.forward_flops < one.work.forward_flops < two.work.forward_flops
    assert not none.notes and "576 tokens" in one.notes[0]
    # The tower and its projector are run once more a picture, and the language model is not.
    more = two.work.forward_flops - one.work.forward_flops
    assert more == pytest.approx(one.work.forward_flops - none.work.forward_flops, rel=1e-6)
    # The weights behind the layer that is read have no gradient, so no optimizer state.
    assert one.state_bytes["parameters"] == none.state_bytes["parameters"]
    assert one.state_bytes["optimizer"] > none.state_bytes["optimizer"]  # a tower without gradients has none


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "shapes"),
    [
        ("llava-1.5-7b", None, {"pixel_values": (4, 3, 336, 336)}),
        ("qwen2.5-vl-7b", (560, 280), {"pixel_values": (4 * 800, 1176), "image_grid_thw": (4, 3)}),
        ("gemma-3-4b", None, {"pixel_values": (4, 3, 896, 896), "token_type_ids": (2, 4096)}),
        ("smolvlm-256m", (512, 512), {"pixel_values": (2, 34, 3, 512, 512), "pixel_attention_mask": (2, 34, 512, 512)}),
        ("internvl3-8b", (448, 896), {"pixel_values": (12, 3, 448, 448)}),
        ("paligemma-3b", None, {"pixel_values": (4, 3, 224, 224)}),
    ],
)
def test_inputs_have_the_shapes_of_the_processor(name: str, size: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    batch = Batch(micro_batch_size=2, num_tokens=4096, num_images=2, image_size=size)
    inputs = picture_inputs(Job(model=resolve_model(name), batch=batch), "meta")
    assert {key: tuple(inputs[key].shape) for key in shapes} == shapes
    assert inputs["pixel_values"].dtype is torch.float32


def test_tiles_have_the_shape_that_is_closest_to_the_pictures() -> None:
    spec = resolve_model("internvl3-8b")
    sizes = [(448, 448), (448, 900), (900, 448), (900, 1340), (100, 1200), (3000, 3000)]
    jobs = [Job(model=spec, batch=Batch(num_tokens=8192, num_images=1, image_size=size)) for size in sizes]
    # As its processor cuts them, and the whole once more where there are several.
    assert [picture.num_tiles for job in jobs if (picture := measure_picture(job))] == [1, 3, 3, 7, 13, 10]


def test_stretches_are_told_apart_by_their_bounds() -> None:
    bounds = Bounds([0, 64, 128, 144])
    assert (bounds[1:] - bounds[:-1]).tolist() == [64, 64, 16]


@pytest.mark.parametrize(
    ("name", "batch", "message", "fix"),
    [
        ("qwen2.5-vl-7b", Batch(num_images=1), "needs a size of its pictures", "--image-size 448x448"),
        ("llava-1.5-7b", Batch(num_images=4), "4 x 576 tokens of pictures exceed the 2048", "--num-images 3"),
        ("llama-2-7b", Batch(num_images=1), "takes no pictures", "--num-images 0"),
    ],
)
def test_pictures_that_cannot_be_are_an_error(name: str, batch: Batch, message: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        measure_picture(Job(model=resolve_model(name), batch=batch))
    (problem,) = caught.value.problems
    assert message in problem.message and fix in (problem.fix or "")


def test_a_family_without_rules_is_planned_for_its_text_and_says_so() -> None:
    job = Job(model=resolve_model("llama-3.2-11b-vision"), batch=Batch(num_images=1))
    assert measure_picture(job) is None and picture_inputs(job, "meta") == {}
    assert "were not simulated" in picture_notes(job)[0]
