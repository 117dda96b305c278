"""Known GPUs and the words of --gpus and --gpu-memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp.cli import app
from hf_fsdp.config.hardware import GPUS, Gpu, parse_gpu_memory, parse_gpus, unknown_gpu
from hf_fsdp.errors import ConfigError
from hf_fsdp.units import GIB

BY_NAME = {gpu.name: gpu for gpu in GPUS}


def first_fix(error: ConfigError, flag: str) -> str:
    """The first thing that an error advises to type after `flag`."""
    return error.problems[0].fix.partition("   #")[0].removeprefix(f"{flag} ").partition(" or ")[0].partition(",")[0]


@pytest.mark.parametrize(
    ("text", "num_nodes", "count", "name"),
    [
        ("8", 1, 8, None),
        (" 8 ", 1, 8, None),
        ("8xA100-80G", 1, 8, "A100-80G"),
        ("8 x a100-80gb", 1, 8, "A100-80G"),
        ("4xH100", 1, 4, "H100-80G"),
        ("A10G", 1, 1, "A10G-24G"),
        ("2xRTX 4090", 1, 2, "RTX4090-24G"),
        ("8x4090", 1, 8, "RTX4090-24G"),
        ("4090", 1, 1, "RTX4090-24G"),
        ("2x4x3090", 2, 4, "RTX3090-24G"),
        ("T4-16G", 1, 1, "T4-16G"),
        ("8xB200-192G", 1, 8, "B200-180G"),
        ("8xB200", 1, 8, "B200-180G"),
        ("2x8", 2, 8, None),
        ("2x8xA100-80G", 2, 8, "A100-80G"),
        ("16 x 8 x h200", 16, 8, "H200-141G"),
        ("NVIDIA H100 80GB HBM3", 1, 1, "H100-80G"),
        ("8xNVIDIA A100-SXM4-40GB", 1, 8, "A100-40G"),
    ],
)
def test_gpus_are_read_as_people_write_them(text: str, num_nodes: int, count: int, name: str | None) -> None:
    request = parse_gpus(text)
    assert (request.num_nodes, request.count, request.num_gpus) == (num_nodes, count, num_nodes * count)
    assert (request.gpu.name if request.gpu else None) == name


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_found_by_its_names_and_its_name_states_its_memory(gpu: Any) -> None:
    for name in (gpu.name, *gpu.aliases):
        assert parse_gpus(f"2x{name}").gpu is gpu
    assert gpu.name.endswith(f"-{gpu.memory_gib}G")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_figures_of_every_gpu_are_whole_and_hang_together(gpu: Gpu) -> None:
    assert gpu.half_tflops and gpu.fp32_tflops and gpu.memory_gb_per_s and gpu.link_gb_per_s and gpu.host_gb_per_s
    assert gpu.node_size and gpu.network_gb_per_s and gpu.compute_capability and gpu.source and gpu.memory_source
    assert gpu.link in ("nvlink", "pcie", "host")
    assert 0.9 * gpu.memory_gib < gpu.usable_gib < gpu.memory_gib
    assert gpu.has_bf16 == (gpu.compute_capability >= (8, 0)) == (gpu.tf32_tflops is not None)
    assert gpu.fp32_tflops <= (gpu.tf32_tflops or gpu.half_tflops) <= gpu.half_tflops
    # Cards without NVLink speak over the same lanes as with the host.
    assert gpu.link_gb_per_s > gpu.host_gb_per_s if gpu.link == "nvlink" else gpu.link_gb_per_s == gpu.host_gb_per_s


def test_the_gpus_that_people_rent_are_there() -> None:
    names = "A100-40G A100-80G H100-80G H200-141G B200-180G L40S-48G L4-24G A10G-24G RTX4090-24G RTX3090-24G"
    assert set(names.split()) | {"V100-16G", "V100-32G", "T4-16G"} == set(BY_NAME)


def test_peaks_are_dense_not_sparse() -> None:
    """Data sheets print the doubled figure first: 624, 1979, 733, 242."""
    assert [BY_NAME[name].half_tflops for name in ("A100-80G", "H100-80G", "L40S-48G", "L4-24G")] == [
        312,
        989,
        362,
        121,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "not a positive number"),
        ("-2", "not a positive number"),
        ("0xA100-80G", "not a positive number"),
        ("0x8", "not a positive number"),
        ("2x0xH100", "not a positive number"),
        ("8xA100", "could be either of several GPUs"),
        ("2x8xV100", "could be either of several GPUs"),
        ("8xH1000", "is not a GPU that hf-fsdp knows"),
        ("eight", "is not a GPU that hf-fsdp knows"),
        ("8x", "is not a GPU that hf-fsdp knows"),
        ("2x2x2x2", "is not a GPU that hf-fsdp knows"),
        ("2.5", "is not a GPU that hf-fsdp knows"),
        ("", "is empty"),
    ],
)
def test_gpus_that_cannot_be_are_refused_and_the_fix_works(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_gpus(text)
    assert parse_gpus(first_fix(caught.value, "--gpus")).count >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p4d.24xlarge", "--gpus 8 --gpu-memory 40GiB"),
        ("8x40GiB", "--gpus 8 --gpu-memory 40GiB"),
        ("4xRTX5090", "--gpus 4 --gpu-memory 32GiB"),
        ("A6000", "--gpus 1 --gpu-memory 32GiB"),
        ("2x8xA100-80G-PCIe", "--gpus 2x8 --gpu-memory 80GiB"),
        ("0x40GiB", "--gpus 8 --gpu-memory 40GiB"),
    ],
)
def test_a_gpu_that_is_not_known_can_be_said_by_its_memory(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpus(text, takes_memory=True)
    assert caught.value.problems[0].fix.endswith(f"{words}   # memory only, no speed")
    _, gpus, _, memory = words.split()
    assert parse_gpus(gpus).gpu is None and parse_gpu_memory(memory) > 0
    with pytest.raises(ConfigError) as caught:  # a command without --gpu-memory does not advise it
        parse_gpus(text)
    assert "--gpu-memory" not in caught.value.problems[0].fix


def test_an_ambiguous_name_names_both_and_keeps_the_machines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpus("2x8xA100")
    assert caught.value.problems[0].near == "A100-40G, A100-80G"
    assert caught.value.problems[0].fix == "--gpus 2x8xA100-40G or --gpus 2x8xA100-80G"


def test_a_typo_finds_the_nearest_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpus("8xL40-48G")
    assert caught.value.problems[0].fix.startswith("--gpus 8xL40S-48G")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * GIB),
        ("40 gib", 40 * GIB),
        ("79.15GiB", int(79.15 * GIB)),
        ("40960MiB", 40 * GIB),
        ("40GB", 40 * 10**9),
        ("40G", 40 * 10**9),
        ("24000MB", 24 * 10**9),
    ],
)
def test_gpu_memory_is_read_with_its_unit(text: str, size: int) -> None:
    assert abs(parse_gpu_memory(text) - size) <= 1


def test_a_size_from_a_shop_is_close_to_what_the_card_leaves() -> None:
    """What the docstring claims of GB, held against every card whose memory is known."""
    ratios = {gpu.name: gpu.usable_bytes / parse_gpu_memory(f"{gpu.memory_gib}GB") for gpu in GPUS}
    assert 0.98 < min(ratios.values()) < max(ratios.values()) < 1.07, ratios


@pytest.mark.parametrize(
    "text", ["", "40", "0", "GiB", "-40GiB", "0GiB", "40TiB", "40GiBs", "1e3GiB", "4000GiB", "1MiB"]
)
def test_sizes_that_cannot_be_are_refused_and_the_fix_works(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory") as caught:
        parse_gpu_memory(text)
    assert parse_gpu_memory(first_fix(caught.value, "--gpu-memory")) >= 10**9


def test_of_an_unknown_gpu_only_the_memory_is_known() -> None:
    gpu = unknown_gpu(parse_gpu_memory("40GiB"))
    assert gpu.usable_bytes == 40 * GIB
    assert gpu.name == "a GPU of 40.0 GiB"
    speeds = ("half", "fp32", "tf32", "memory", "link", "host", "network", "node")
    assert all(
        value is None
        for key, value in vars(gpu).items()
        if key.startswith(speeds) and key != "memory_gib" and key != "memory_source"
    )


def test_two_machines_reach_the_launch_file(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    result = CliRunner().invoke(app, ["config", "llama-2-7b", "--gpus", "2x8xA100-80G", "-o", str(path)])
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(path.read_text())
    assert (written["num_machines"], written["num_processes"]) == (2, 16)
    assert "--gpus 2x8xA100-80G" in path.read_text()


def test_machines_said_twice_must_agree() -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["config", "llama-2-7b", "--gpus", "2x8", *words])

    assert run("--machines", "2").exit_code == 0
    result = run("--machines", "4")
    assert result.exit_code == 2
    assert "--gpus 2x8 says 2 machines, --machines says 4" in result.output
    fix = re.search(r"fix   (--machines \d)", result.output)
    assert fix and run(*fix[1].split()).exit_code == 0
