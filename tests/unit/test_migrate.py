"""Old configs become ours: every kind of file, with the meaning kept, and what cannot be kept said aloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp import FSDPConfig
from hf_fsdp.config.migrate import migrate
from hf_fsdp.errors import ConfigError
from tests.golden.migrate.make import HERE, REPLICAS, old_files

# Written by hand from what each program documents, so that the golden files cannot only agree with themselves.
MEANINGS: dict[str, dict[str, Any]] = {
    "accelerate_fsdp1_hybrid.yaml": {
        "wrap.policy": "transformer_layers",
        "wrap.layer_classes": ("LlamaDecoderLayer", "MistralDecoderLayer"),
        "precision.preset": "bf16-mixed",
        "offload.parameters": False,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
        "sharding.dp_replicate_size": 2,
        "sharding.forward_prefetch": 1,
        "sharding.backward_prefetch": 1,
        "checkpoint.format": "sharded",
    },
    "accelerate_fsdp2.yaml": {
        "wrap.policy": "transformer_layers",
        "precision.preset": "fp32",
        "offload.parameters": True,
        "offload.optimizer": True,
        "offload.activations": "block_inputs",
        "activation_checkpointing.mode": "full",
        "compile.blocks": True,
        "compile.backend": "inductor",
        "compile.mode": "max-autotune",
        "sharding.reshard_after_forward": False,
        "sharding.dp_shard_size": 4,
        "sharding.dp_replicate_size": 2,
        "checkpoint.format": "full",
    },
    "accelerate_deepspeed.yaml": {"precision.preset": "bf16-mixed", "sharding.reshard_after_forward": False},
    "trainer_string.yaml": {
        "wrap.layer_classes": ("LlamaDecoderLayer",),
        "precision.preset": "bf16-mixed",
        "offload.parameters": True,
        "offload.optimizer": True,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
        "sharding.forward_prefetch": 0,
        "sharding.backward_prefetch": 0,
    },
    "trainer_tabs.json": {
        "wrap.policy": "size",
        "wrap.min_num_params": 20_000_000,
        "precision.preset": "fp16-mixed",
        "sharding.reshard_after_forward": False,
        "sharding.backward_prefetch": 1,
        "checkpoint.format": "sharded",
    },
    "fsdp_config.json": {
        "wrap.layer_classes": ("GPT2Block",),
        "activation_checkpointing.mode": "full",
        "sharding.forward_prefetch": 1,
        "sharding.backward_prefetch": 0,
    },
    "axolotl_fsdp1.yaml": {
        "wrap.policy": "transformer_layers",
        "wrap.layer_classes": ("LlamaDecoderLayer",),
        "precision.preset": "auto",
        "offload.parameters": True,
        "offload.optimizer": True,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
        "sharding.backward_prefetch": 1,
        "checkpoint.format": "full",
    },
    "axolotl_fsdp2.yaml": {
        "wrap.policy": "transformer_layers",
        "wrap.layer_classes": ("Qwen3DecoderLayer",),
        "precision.preset": "bf16-true",
        "offload.parameters": True,
        "offload.optimizer": True,
        "offload.activations": "block_inputs",
        "offload.pin_memory": False,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
        "sharding.dp_shard_size": 4,
        "sharding.dp_replicate_size": 2,
        "checkpoint.format": "sharded",
    },
    "llama_factory_full.yaml": {
        "precision.preset": "bf16-true",
        "precision.keep_norms_fp32": True,
        "offload.parameters": True,
        "offload.optimizer": True,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
    },
    "llama_factory_fsdp.yaml": {
        "precision.preset": "fp16-mixed",
        "activation_checkpointing.mode": "none",
        "sharding.reshard_after_forward": True,
        "sharding.dp_replicate_size": 2,
    },
    "llama_factory_v1.yaml": {
        "precision.preset": "bf16-mixed",
        "offload.parameters": True,
        "offload.optimizer": True,
        "offload.pin_memory": False,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": False,
    },
    "fsdp1_script.py": {
        "wrap.layer_classes": ("LlamaDecoderLayer",),
        "precision.preset": "bf16-mixed",
        "precision.reduce_dtype": "float32",
        "offload.parameters": False,
        "activation_checkpointing.mode": "full",
        "sharding.reshard_after_forward": True,
        "sharding.dp_shard_size": 4,
        "sharding.dp_replicate_size": 2,
        "sharding.forward_prefetch": 1,
        "sharding.backward_prefetch": 1,
        "sharding.sync_each_batch": False,
        "checkpoint.format": "full",
    },
    "fsdp2_script.py": {
        "precision.preset": "bf16-mixed",
        "precision.reduce_dtype": "bfloat16",
        "offload.parameters": True,
        "offload.optimizer": True,
        "offload.pin_memory": False,
        "compile.blocks": True,
        "compile.mode": "reduce-overhead",
        "sharding.reshard_after_forward": True,
        "checkpoint.format": "sharded",
    },
    "size_based_script.py": {
        "wrap.policy": "size",
        "wrap.min_num_params": 20_000_000,
        "precision.preset": "fp32",
        "offload.parameters": True,
        "offload.optimizer": True,
    },
}


def stated(config: FSDPConfig) -> dict[str, Any]:
    return {key: config.get(key) for key in config.said}


def run(folder: Path, text: str, name: str = "old.yaml", replicas: int | None = None) -> Any:
    (folder / name).write_text(text, encoding="utf-8")
    return migrate(folder / name, replicas)


def refusal(folder: Path, text: str, name: str = "old.yaml", replicas: int | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run(folder, text, name, replicas)
    return caught.value


def python(*lines: str) -> str:
    return "\n".join(lines)


def test_every_old_config_here_has_its_meaning_written_down() -> None:
    assert set(MEANINGS) == set(old_files())


@pytest.mark.parametrize("name", MEANINGS)
def test_an_old_config_keeps_its_meaning(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    migration = migrate(name, REPLICAS.get(name))
    assert stated(migration.config) == MEANINGS[name]
    new = tmp_path / "new.yaml"
    new.write_text(migration.text, encoding="utf-8")
    read = FSDPConfig.from_yaml(new)
    assert read == migration.config
    assert stated(read) == MEANINGS[name]


@pytest.mark.parametrize("name", MEANINGS)
def test_the_new_file_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    text = migrate(name, REPLICAS.get(name)).text
    assert text == (HERE / "expected" / f"{name}.yaml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) < 180


@pytest.mark.parametrize("name", MEANINGS)
def test_each_line_names_the_old_setting_it_came_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    values = [line for line in migrate(name, REPLICAS.get(name)).text.splitlines() if line.startswith("    ")]
    assert len(values) == len(MEANINGS[name])
    assert all(line.partition("  # ")[2] for line in values)


# ---- strategies, replicas ---------------------------------------------------------------------------------------

LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
{machines}fsdp_config:
  fsdp_sharding_strategy: {strategy}
"""


def launch(strategy: str, machines: int | None = 1, extra: str = "") -> str:
    line = f"num_machines: {machines}\n" if machines is not None else ""
    return LAUNCH.format(strategy=strategy, machines=line) + extra


@pytest.mark.parametrize(
    ("strategy", "reshard", "replicas"),
    [
        ("FULL_SHARD", True, 1),
        ("1", True, 1),
        ("SHARD_GRAD_OP", False, 1),
        ("2", False, 1),
        ("HYBRID_SHARD", True, 2),
        ("4", True, 2),
        ("HYBRID_SHARD_ZERO2", False, 2),
        ("5", False, 2),
        ("_HYBRID_SHARD_ZERO2", False, 2),
    ],
)
def test_strategies_keep_resharding_and_replicas(strategy: str, reshard: bool, replicas: int, tmp_path: Path) -> None:
    config = run(tmp_path, launch(strategy, machines=2)).config
    assert (config.sharding.reshard_after_forward, config.sharding.dp_replicate_size) == (reshard, replicas)


def test_a_strategy_under_its_newer_key_is_the_same(tmp_path: Path) -> None:
    text = launch("HYBRID_SHARD", machines=2).replace("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    assert run(tmp_path, text).config.sharding.dp_replicate_size == 2


def test_hybrid_sharding_on_one_machine_is_one_copy(tmp_path: Path) -> None:
    migration = run(tmp_path, launch("HYBRID_SHARD", machines=1))
    assert migration.config.sharding.dp_replicate_size == 1
    assert "one machine: one copy over its GPUs" in migration.text


def test_no_shard_is_refused_and_its_fix_is_accepted(tmp_path: Path) -> None:
    error = refusal(tmp_path, launch("NO_SHARD"))
    assert "nothing is sharded, which is DDP" in str(error)
    assert "sharding_strategy: FULL_SHARD" in error.problems[0].fix
    assert run(tmp_path, launch("FULL_SHARD")).config.sharding.reshard_after_forward


def test_hybrid_without_a_number_of_replicas_is_refused_and_the_option_helps(tmp_path: Path) -> None:
    text = launch("HYBRID_SHARD", machines=None)
    error = refusal(tmp_path, text)
    assert "does not say how many replicas" in str(error)
    assert error.problems[0].fix.startswith("--replicas 2")
    assert error.problems[0].source == f"{tmp_path / 'old.yaml'}:7"
    assert run(tmp_path, text, replicas=2).config.sharding.dp_replicate_size == 2


def test_replicas_without_hybrid_sharding_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, launch("FULL_SHARD"), replicas=2)
    assert "--replicas 2, but" in str(error) and "does not ask for hybrid sharding" in str(error)


def test_replicas_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    mesh = "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n"
    error = refusal(tmp_path, launch("HYBRID_SHARD", machines=2, extra=mesh), replicas=2)
    assert "--replicas 2 contradicts parallelism_config.parallelism_config_dp_replicate_size: 4" in str(error)


def test_replicas_that_do_not_fit_the_processes_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, launch("HYBRID_SHARD", machines=3))
    assert "sharding.dp_replicate_size=3 does not divide 8 processes" in str(error)
    assert f"{tmp_path / 'old.yaml'}:8" in str(error)


@pytest.mark.parametrize(
    ("machines", "processes", "mesh"),
    [
        (2, 2, ""),
        (3, 8, ""),
        (3, 3, ""),
        (1, 8, "replicate_size: 3"),
        (1, 8, "shard_size: 6"),
        (1, 4, "replicate_size: 4"),
    ],
)
def test_a_mesh_that_does_not_fit_has_fixes_that_can_be_followed(
    machines: int, processes: int, mesh: str, tmp_path: Path
) -> None:
    extra = f"parallelism_config:\n  parallelism_config_dp_{mesh}\n" if mesh else ""
    text = launch("HYBRID_SHARD" if not mesh else "FULL_SHARD", machines, extra)
    text = text.replace("num_processes: 8", f"num_processes: {processes}")
    (problem,) = refusal(tmp_path, text).problems
    first, _, second = problem.fix.partition("#")
    key, _, value = first.strip().rpartition(": ")
    if first.startswith("--replicas"):
        assert run(tmp_path, text, replicas=int(first.split()[1])).config
    elif key == "num_processes":
        assert run(tmp_path, text.replace(f"num_processes: {processes}", first.strip())).config
    else:
        assert run(tmp_path, text.replace(extra, f"parallelism_config:\n  {key.rpartition('.')[2]}: {value}\n")).config
    if "num_processes: " in second:
        assert run(
            tmp_path, text.replace(f"num_processes: {processes}", second[second.index("num_processes") :])
        ).config


@pytest.mark.parametrize("axis", ["tp", "cp", "sp"])
def test_other_kinds_of_parallelism_are_refused_by_name(axis: str, tmp_path: Path) -> None:
    extra = "parallelism_config:\n  parallelism_config_{}_size: {}\n"
    error = refusal(tmp_path, launch("FULL_SHARD", extra=extra.format(axis, 2)))
    assert f"parallelism_config.parallelism_config_{axis}_size: 2" in str(error)
    assert error.problems[0].fix == f"parallelism_config.parallelism_config_{axis}_size: 1"
    run(tmp_path, launch("FULL_SHARD", extra=extra.format(axis, 1)))


# ---- what is left behind ----------------------------------------------------------------------------------------


def left(migration: Any, part: str) -> tuple[str, str]:
    (found,) = [item for item in migration.left if part in item.text]
    return found.kind, found.why


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        ("fsdp_use_orig_params: true", "not needed", "FSDP2 keeps each parameter"),
        ("fsdp_use_orig_params: false", "changed", "old optimizer states do not load"),
        ("fsdp_sync_module_states: true", "not needed", "compared and made equal"),
        ("fsdp_sync_module_states: false", "changed", "compared and made equal"),
        ("fsdp_limit_all_gathers: false", "no equivalent", "always bounds the gathers"),
        ("fsdp_cpu_ram_efficient_loading: true", "no equivalent", "a key of the launch file only"),
        ("fsdp_ignored_modules: lm_head", "no equivalent", "every parameter is sharded"),
        ("fsdp_backward_prefetch: BACKWARD_POST", "changed", "FSDP2 gathers ahead of a block's backward or not at all"),
        ("fsdp_state_dict_type: LOCAL_STATE_DICT", "changed", "old local checkpoints do not load"),
        ("fsdp_auto_wrap_policy: NO_WRAP", "changed", "the whole model was one unit"),
        ("fsdp_version: 1", "changed", "hf-fsdp runs FSDP2"),
    ],
)
def test_what_is_not_carried_over_is_listed_with_its_reason(line: str, kind: str, why: str, tmp_path: Path) -> None:
    migration = run(tmp_path, launch("FULL_SHARD", extra=f"  {line}\n"))
    found = left(migration, line)
    assert found[0] == kind and why in found[1]
    assert line in migration.text


AXOLOTL = "base_model: x\nfsdp: [full_shard, auto_wrap]\nlearning_rate: 1e-4\n"
LLAMA_FACTORY = "stage: sft\nfsdp: full_shard\n"


@pytest.mark.parametrize(
    ("text", "line", "kind", "why"),
    [
        (AXOLOTL, "optimizer: paged_adamw_8bit", "no equivalent", "write optim: adamw_torch_fused"),
        (AXOLOTL, "optimizer: adamw_bnb_8bit", "no equivalent", "write optim: adamw_torch_fused"),
        (AXOLOTL, "load_in_8bit: true", "no equivalent", "write load_in_4bit: true"),
        (AXOLOTL, "load_in_4bit: true", "changed", "see QLoRA in docs/guide.md"),
        (LLAMA_FACTORY, "optim: adafactor", "no equivalent", "works on whole matrices"),
        (LLAMA_FACTORY, "quantization_bit: 8", "no equivalent", "write load_in_4bit: true"),
        (LLAMA_FACTORY, "quantization_bit: 4", "changed", "bnb_4bit_quant_storage"),
        ("fsdp: full_shard\n", "optim: paged_adamw_8bit", "no equivalent", "write optim: adamw_torch_fused"),
    ],
)
def test_training_keys_that_shards_refuse_are_listed_with_what_to_write(
    text: str, line: str, kind: str, why: str, tmp_path: Path
) -> None:
    migration = run(tmp_path, f"{text}{line}\n")
    found = left(migration, line)
    assert found[0] == kind and why in found[1]
    assert line.partition(":")[0] not in migration.other_keys


def test_what_shards_take_is_only_named(tmp_path: Path) -> None:
    migration = run(tmp_path, f"{AXOLOTL}optimizer: adamw_torch_fused\nload_in_8bit: false\n")
    assert not migration.left
    assert {"optimizer", "load_in_8bit", "learning_rate"} <= set(migration.other_keys)


def test_python_that_asks_for_what_shards_refuse_is_told(tmp_path: Path) -> None:
    code = python(
        "quantization = BitsAndBytesConfig(load_in_8bit=True)",
        "other = BitsAndBytesConfig(load_in_4bit=True, load_in_8bit=False)",
        'args = TrainingArguments("out", fsdp="full_shard", optim=OptimizerNames.ADAMW_BNB)',
        'others = SFTConfig("out", fsdp="full_shard", optim="paged_adamw_8bit")',
    )
    migration = run(tmp_path, code, "script.py")
    assert left(migration, "optim=OptimizerNames.ADAMW_BNB")[0] == "no equivalent"
    assert "optim: adamw_torch_fused" in left(migration, "optim='paged_adamw_8bit'")[1]
    assert left(migration, "load_in_8bit=True")[0] == "no equivalent"
    assert left(migration, "load_in_4bit=True")[0] == "changed"


def test_the_optimizers_refused_here_are_those_that_training_refuses() -> None:
    from transformers.training_args import OptimizerNames

    from hf_fsdp.config.migrate.refused import explain
    from hf_fsdp.integrations.optimizers import why_refused

    for optimizer in OptimizerNames:
        refused = why_refused(optimizer.value) is not None
        assert (explain("optim", optimizer.value, "") is not None) == refused, optimizer
        assert (explain("optim", optimizer.name, "") is not None) == refused, optimizer


def test_what_had_no_effect_under_fsdp2_is_not_taken_for_a_wish(tmp_path: Path) -> None:
    extra = "  fsdp_version: 2\n  fsdp_backward_prefetch: NO_PREFETCH\n  fsdp_forward_prefetch: true\n"
    migration = run(tmp_path, launch("FULL_SHARD", extra=extra))
    assert not {"sharding.backward_prefetch", "sharding.forward_prefetch"} & migration.config.said
    assert left(migration, "NO_PREFETCH")[0] == "not needed"


def test_settings_of_the_launcher_are_listed_and_defaults_are_not(tmp_path: Path) -> None:
    extra = "gpu_ids: 0,1\nenable_cpu_affinity: false\ntpu_env: []\nrdzv_backend: static\n"
    migration = run(tmp_path, launch("FULL_SHARD", extra=extra))
    assert "CUDA_VISIBLE_DEVICES" in left(migration, "gpu_ids")[1]
    assert not any(word in migration.text for word in ("affinity", "tpu_env", "rdzv"))


def test_a_size_beside_class_names_is_not_read_as_the_old_programs_did(tmp_path: Path) -> None:
    extra = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_min_num_params: 1000\n"
    migration = run(tmp_path, launch("FULL_SHARD", extra=extra))
    assert migration.config.wrap.policy == "transformer_layers"
    assert left(migration, "fsdp_min_num_params")[0] == "not needed"


@pytest.mark.parametrize(
    ("word", "preset"), [("bf16", "bf16-mixed"), ("fp16", "fp16-mixed"), ("'no'", "fp32"), ("no", "fp32")]
)
def test_accelerates_precision_words(word: str, preset: str, tmp_path: Path) -> None:
    config = run(tmp_path, launch("FULL_SHARD").replace("mixed_precision: bf16", f"mixed_precision: {word}")).config
    assert config.precision.preset == preset


def test_a_launch_file_without_precision_is_fp32_and_says_so(tmp_path: Path) -> None:
    migration = run(tmp_path, launch("FULL_SHARD").replace("mixed_precision: bf16\n", ""))
    assert migration.config.precision.preset == "fp32"
    assert "# the launch file has no mixed_precision, which is fp32" in migration.text


def test_axolotls_fsdp_config_is_enough(tmp_path: Path) -> None:
    text = "base_model: x\nfsdp: []\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: false\n"
    assert not run(tmp_path, text).config.sharding.reshard_after_forward


def test_axolotls_activation_offloading_and_checkpointing_go_together(tmp_path: Path) -> None:
    text = "base_model: x\nfsdp: full_shard\ngradient_checkpointing: true\nactivation_offloading: true\n"
    config = run(tmp_path, text).config
    assert (config.activation_checkpointing.mode, config.offload.activations) == ("full", "auto")


# ---- contradictions, what cannot be read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (launch("FULL_SHARD", extra="  fsdp_reshard_after_forward: false\n"), "contradicts"),
        (launch("FULL_SHARD", extra="  fsdp_ofload_params: true\n"), "fsdp_ofload_params=True is not a key of FSDP"),
        (launch("FULL_SHARD", extra="  fsdp_offload_params: perhaps\n"), "is neither true nor false"),
        (launch("HALF_SHARD"), "fsdp_sharding_strategy: HALF_SHARD is not a sharding strategy"),
        (launch("FULL_SHARD", extra="  fsdp_version: 3\n"), "FSDP has the versions 1 and 2"),
        (launch("FULL_SHARD", extra="  fsdp_state_dict_type: HALF\n"), "HALF"),
        (launch("FULL_SHARD", extra="  fsdp_backward_prefetch: MAYBE\n"), "is not a backward prefetch"),
        (launch("FULL_SHARD", extra="num_procesess: 8\n"), "num_procesess=8 is not a key of Accelerate's launch file"),
        (launch("FULL_SHARD").replace("num_processes: 8", "num_processes: many"), "is not a whole number"),
        (launch("FULL_SHARD").replace("mixed_precision: bf16", "mixed_precision: fp8"), "fp8 is not built"),
        (launch("FULL_SHARD").replace("type: FSDP", "type: MULTI_GPU"), "MULTI_GPU shards nothing"),
        ("distributed_type: FSDP\nnum_processes: 2\n", "asks for FSDP and has no fsdp_config"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n", "ZeRO stage 1 keeps whole weights"),
        ("fsdp: full_shard auto_warp\n", "holds 'auto_warp', which is not an option of fsdp"),
        ("fsdp: full_shard no_shard\n", "nothing is sharded"),
        ("fsdp: full_shard shard_grad_op\n", "contradicts"),
        ("fsdp: ''\nfsdp_config: {}\n", "switches FSDP off"),
        ("fsdp: true\nfsdp_config: other.json\n", "names another file"),
        ("fsdp: true\nfsdp_config: [1]\n", "is not a mapping"),
        ("fsdp: true\nbf16: true\nfp16: true\n", "fp16: true contradicts bf16: true"),
        ("fsdp: true\ndeepspeed: ds.json\n", "deepspeed and fsdp are both set"),
        ("fsdp: true\nfsdp_config: {xla: true}\n", "trains on TPUs"),
        ("base_model: x\nfsdp:\nfsdp_config:\n", "shards nothing"),
        ("stage: sft\nfinetuning_type: full\ndeepspeed: nowhere.json\n", "names a DeepSpeed config that is not there"),
        ("dist_config: {name: deepspeed}\n", "dist_config: 'deepspeed' is not FSDP2"),
        ("fsdp:\n  precision: bf16-mixed\n", "is already a config of hf-fsdp"),
        ("learning_rate: 1e-4\n", "has no settings of FSDP that hf-fsdp recognises"),
        ("- full_shard\n", "holds no mapping of settings"),
        ("fsdp: {a: [\n", "is not valid YAML"),
        ("fsdp: true\nfsdp: false\n", "given twice"),
    ],
)
def test_what_contradicts_itself_or_cannot_be_read_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, text)
    assert message in str(error)
    assert all(problem.fix for problem in error.problems)
    assert str(tmp_path / "old.yaml") in str(error)


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    error = refusal(tmp_path, launch("NO_SHARD", extra="  fsdp_ofload_params: true\n  fsdp_version: 3\n"))
    assert len(error.problems) == 3
    assert {problem.source.rpartition(":")[2] for problem in error.problems if problem.source} == {"8", "9", "10"}


def test_the_nearest_key_is_the_fix_of_an_unknown_one_and_works(tmp_path: Path) -> None:
    error = refusal(tmp_path, launch("FULL_SHARD", extra="  fsdp_ofload_params: true\n"))
    assert error.problems[0].fix == "fsdp_offload_params: true"
    assert run(tmp_path, launch("FULL_SHARD", extra=f"  {error.problems[0].fix}\n")).config.offload.parameters


@pytest.mark.parametrize("name", ["missing.yaml", "missing.py"])
def test_a_file_that_is_not_there_is_said_plainly(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not exist"):
        migrate(tmp_path / name)


def test_yaml_tags_build_no_objects(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    error = refusal(
        tmp_path, f"fsdp: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{marker}]]"
    )
    assert "is not valid YAML" in str(error)
    assert not marker.exists()


# ---- Python files -----------------------------------------------------------------------------------------------


def test_a_python_file_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = python(
        f"open({str(marker)!r}, 'w').close()",
        "raise SystemExit(1)",
        "model = FSDP(model, use_orig_params=True)",
    )
    migration = run(tmp_path, code, "script.py")
    assert not marker.exists()
    assert migration.kind == "a Python file with calls of FSDP"


def test_python_is_recognised_without_its_suffix(tmp_path: Path) -> None:
    code = python("from torch.distributed.fsdp import FullyShardedDataParallel as F", "m = F(m, forward_prefetch=True)")
    assert run(tmp_path, code, "snippet.txt").config.sharding.forward_prefetch == 1


def test_positional_arguments_are_read_in_torchs_order(tmp_path: Path) -> None:
    code = "m = FSDP(m, None, ShardingStrategy.SHARD_GRAD_OP, CPUOffload(True))"
    config = run(tmp_path, code, "script.py").config
    assert not config.sharding.reshard_after_forward and config.offload.parameters


def test_a_value_that_only_a_run_shows_is_an_error_with_its_line(tmp_path: Path) -> None:
    code = python(
        "def main(args):", "    strategy = args.strategy", "    return FSDP(model, sharding_strategy=strategy)"
    )
    error = refusal(tmp_path, code, "script.py")
    assert "sharding_strategy depends on `args.strategy`, which is only known when the script runs" in str(error)
    assert error.problems[0].source == f"{tmp_path / 'script.py'}:2"
    repaired = code.replace("args.strategy", "ShardingStrategy.FULL_SHARD")
    assert run(tmp_path, repaired, "script.py").config.sharding.reshard_after_forward


def test_a_variable_of_another_file_is_not_guessed(tmp_path: Path) -> None:
    code = python("from configs import fsdp_config", "m = FSDP(m, sharding_strategy=fsdp_config.sharding_strategy)")
    assert "depends on `configs.fsdp_config.sharding_strategy`" in str(refusal(tmp_path, code, "script.py"))


def test_what_stands_under_a_condition_is_read_and_said(tmp_path: Path) -> None:
    code = python(
        "kwargs = {}",
        "if args.mixed:",
        "    kwargs['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16)",
        "fully_shard(model, **kwargs)",
        "if args.recompute:",
        "    apply_activation_checkpointing(model)",
    )
    migration = run(tmp_path, code, "script.py")
    assert migration.config.precision.preset == "bf16-mixed"
    assert left(migration, "mp_policy") == ("assumed", "stands under `if args.mixed`")
    assert left(migration, "apply_activation_checkpointing") == ("assumed", "stands under `if args.recompute`")
    inside = python("kwargs = {}", "if a:", "    kwargs['mp_policy'] = None", "    fully_shard(model, **kwargs)")
    assert not [item for item in run(tmp_path, inside, "script.py").left if item.kind == "assumed"]


def test_a_name_with_two_values_is_not_guessed(tmp_path: Path) -> None:
    code = python(
        "if big:", "    offload = CPUOffload(True)", "else:", "    offload = None", "m = FSDP(m, cpu_offload=offload)"
    )
    assert "cpu_offload depends on `offload`" in str(refusal(tmp_path, code, "script.py"))


def test_a_switch_that_decides_nothing_may_depend_on_anything(tmp_path: Path) -> None:
    code = "m = FSDP(m, sync_module_states=rank == 0, device_id=rank, param_init_fn=f if rank else None)"
    migration = run(tmp_path, code, "script.py")
    assert left(migration, "sync_module_states")[0] == "not needed"


def test_calls_that_disagree_are_refused(tmp_path: Path) -> None:
    code = python("a = FSDP(a, forward_prefetch=True)", "b = FSDP(b, forward_prefetch=False)")
    assert "contradicts" in str(refusal(tmp_path, code, "script.py"))


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    assert "shard_evenly=True is not an argument of FSDP" in str(
        refusal(tmp_path, "m = FSDP(m, shard_evenly=True)", "script.py")
    )


def test_calling_the_wrapped_model_is_no_second_wrapping(tmp_path: Path) -> None:
    code = python("model = FSDP(model, forward_prefetch=True)", "loss = model(**batch).loss", "model.forward(batch)")
    assert run(tmp_path, code, "script.py").config.sharding.forward_prefetch == 1


def test_keywords_from_a_dict_are_followed_and_unreadable_ones_refused(tmp_path: Path) -> None:
    code = python("kwargs = dict(forward_prefetch=True)", "kwargs['use_orig_params'] = True", "m = FSDP(m, **kwargs)")
    assert run(tmp_path, code, "script.py").config.sharding.forward_prefetch == 1
    error = refusal(tmp_path, "m = FSDP(m, **load_kwargs())", "script.py")
    assert "load_kwargs()" in str(error)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("size_based_auto_wrap_policy", ("size", (), 100_000_000)),
        ("partial(size_based_auto_wrap_policy, min_num_params=2**20)", ("size", (), 1_048_576)),
        ("ModuleWrapPolicy({Block, Layer})", ("transformer_layers", ("Block", "Layer"), 10_000_000)),
        ("partial(transformer_auto_wrap_policy, transformer_layer_cls=set([nn.Block]))",
         ("transformer_layers", ("Block",), 10_000_000)),
    ],
)  # fmt: skip
def test_wrap_policies_of_torch(policy: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    wrap = run(tmp_path, f"m = FSDP(m, auto_wrap_policy={policy})", "script.py").config.wrap
    assert (wrap.policy, wrap.layer_classes, wrap.min_num_params) == expected


@pytest.mark.parametrize("policy", ["partial(lambda_auto_wrap_policy, lambda_fn=f)", "CustomPolicy(f)", "my_policy"])
def test_wrap_functions_have_no_equivalent_in_a_file(policy: str, tmp_path: Path) -> None:
    code = python("def my_policy(module, recurse, nonwrapped_numel): ...", f"m = FSDP(m, auto_wrap_policy={policy})")
    migration = run(tmp_path, code, "script.py")
    assert left(migration, "auto_wrap_policy")[0] == "no equivalent"
    assert "FSDPConfig(wrap=function)" in migration.text


def test_no_wrap_policy_at_all_is_said(tmp_path: Path) -> None:
    assert left(run(tmp_path, "m = FSDP(m)", "script.py"), "no auto_wrap_policy")[0] == "changed"


@pytest.mark.parametrize(
    ("policy", "preset", "reduce"),
    [
        ("MixedPrecision(param_dtype=torch.bfloat16)", "bf16-mixed", "float32"),
        ("MixedPrecision(torch.float16, reduce_dtype=torch.float16)", "fp16-mixed", "float32"),
        ("MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)", "bf16-mixed", "bfloat16"),
        ("MixedPrecision(param_dtype=torch.float32)", "fp32", "float32"),
        ("MixedPrecision(reduce_dtype=torch.bfloat16)", "fp32", "bfloat16"),
        ("None", "fp32", "float32"),
    ],
)
def test_mixed_precision_becomes_a_preset_and_a_reduce_dtype(
    policy: str, preset: str, reduce: str, tmp_path: Path
) -> None:
    precision = run(tmp_path, f"m = FSDP(m, mixed_precision={policy})", "script.py").config.precision
    assert (precision.preset, precision.reduce_dtype) == (preset, reduce)


def test_a_reduce_dtype_that_was_implied_is_said_to_change(tmp_path: Path) -> None:
    migration = run(tmp_path, "m = FSDP(m, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))", "script.py")
    assert "summed over the GPUs in bfloat16" in left(migration, "param_dtype")[1]


@pytest.mark.parametrize(
    ("mesh", "replicas", "size"),
    [('init_device_mesh("cuda", (2, 4))', 2, 4), ('init_device_mesh("cuda", (2, world))', 2, "auto"),
     ('init_device_mesh("cuda", (world,))', 1, "auto")],
)  # fmt: skip
def test_a_device_mesh_gives_the_replicas(mesh: str, replicas: int, size: Any, tmp_path: Path) -> None:
    code = python("def main(world):", f"    mesh = {mesh}", "    fully_shard(model, mesh=mesh)")
    sharding = run(tmp_path, code, "script.py").config.sharding
    assert (sharding.dp_replicate_size, sharding.dp_shard_size) == (replicas, size)


def test_a_mesh_that_cannot_be_read_asks_for_the_replicas(tmp_path: Path) -> None:
    code = python("def main(mesh):", "    fully_shard(model, mesh=mesh)")
    assert "--replicas 1   # one copy over all processes" in str(refusal(tmp_path, code, "script.py"))
    assert run(tmp_path, code, "script.py", replicas=1).config.sharding.dp_replicate_size == 1
    assert run(tmp_path, code, "script.py", replicas=4).config.sharding.dp_replicate_size == 4


def test_training_arguments_in_python_are_read(tmp_path: Path) -> None:
    code = python(
        'config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "backward_prefetch": "backward_pre"}',
        'args = SFTConfig("out", fsdp="full_shard auto_wrap offload", fsdp_config=config, bf16=True)',
    )
    config = run(tmp_path, code, "script.py").config
    assert config.wrap.layer_classes == ("LlamaDecoderLayer",)
    assert config.offload.parameters and config.precision.preset == "bf16-mixed"


def test_a_class_name_that_only_a_run_shows_is_an_error(tmp_path: Path) -> None:
    code = 'args = TrainingArguments("out", fsdp="full_shard", fsdp_config={"transformer_layer_cls_to_wrap": [name()]})'
    assert "depends on `name()`" in str(refusal(tmp_path, code, "script.py"))
    error = refusal(tmp_path, code.replace("name()", "layers[0].name"), "script.py")
    assert "transformer_layer_cls_to_wrap depends on `layers[0].name`" in str(error)


def test_more_than_one_kind_of_state_dict_is_said(tmp_path: Path) -> None:
    code = python(
        "m = FSDP(m)",
        "FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT)",
        "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT): pass",
    )
    migration = run(tmp_path, code, "script.py")
    assert migration.config.checkpoint.format == "full"
    assert "more than one kind" in migration.text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def broken(:\n", "is not valid Python"),
        ("m = FSDP(m)\nparallelize_module(m, mesh, plan)\n", "tensor parallelism is not built"),
        ("print('hello')\n", "has no call of FullyShardedDataParallel"),
        ("x = " + "(" * 300 + ")" * 300, "is not valid Python|nested too deeply"),
        ("x = " + "+".join(["1"] * 20_000), "nested too deeply|is not valid Python"),
    ],
)
def test_python_that_cannot_be_read_is_one_clear_error(code: str, message: str, tmp_path: Path) -> None:
    import re

    assert re.search(message, str(refusal(tmp_path, code, "script.py")))


def test_names_built_from_names_end_in_an_error_not_in_an_endless_search(tmp_path: Path) -> None:
    lines = ["x0 = CPUOffload(args.offload)", *(f"x{n + 1} = [x{n}, x{n}]" for n in range(24))]
    error = refusal(
        tmp_path, python("def f(args):", *(f"  {line}" for line in lines), "  FSDP(m, cpu_offload=x24)"), "s.py"
    )
    assert "cpu_offload" in str(error)


def test_the_title_is_valid_yaml_whatever_the_name_of_the_file(tmp_path: Path) -> None:
    for name in ("old: #1.yaml", "old\nfsdp: 1.yaml"):
        assert set(yaml.safe_load(run(tmp_path, launch("FULL_SHARD"), name).text)) == {"fsdp"}
