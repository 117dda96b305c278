"""`FSDPConfig`: what a person decides about sharding, as frozen dataclasses with checked values."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hf_fsdp.config.parse import DEFAULT_MIN_NUM_PARAMS, SECTION_FIELDS, Parsed, parse_config
from hf_fsdp.config.validate import check_config
from hf_fsdp.config.values import TRUE_WORDS, shown
from hf_fsdp.errors import ConfigError, Problem

PYTHON_SOURCE = "FSDPConfig(...)"


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Which modules become one sharded unit each.

    Args:
        policy: ``transformer_layers``: the repeated blocks, found from the model itself; or ``size``, for models
            that are no transformers: modules of at least `min_num_params` parameters.
        layer_classes: class names that are units instead of what the policy finds.
        callable: Python only: receives the model and returns the list of modules that are units.
        granularity: ``layer``, or ``attention_and_mlp``: both halves of a block are units of their own, which
            halves the largest gather and doubles the number of gathers.
        min_num_params: parameters of a unit under ``policy: size``; ten million (20 MB in bf16) keep a gather
            above the size at which a network's latency decides.
    """

    policy: str = "transformer_layers"
    layer_classes: tuple[str, ...] = ()
    callable: Callable[..., Any] | None = None
    granularity: str = "layer"
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """In which dtypes weights are stored, computed with, reduced and saved.

    Args:
        preset: ``auto`` (what TrainingArguments or Accelerate's file say, else ``bf16-mixed``), ``fp32``,
            ``bf16-mixed`` (fp32 stored, bf16 compute), ``bf16-true`` (bf16 stored) or ``fp16-mixed`` (fp32 stored,
            fp16 compute, loss scaling).
        keep_norms_fp32: keep normalisation weights in fp32; without effect under ``fp32``. ``auto``: under
            ``fp16-mixed`` only, whose range norms leave first.
        reduce_dtype: dtype in which gradients are summed over the GPUs: ``float32`` or ``bfloat16``.
        save_dtype: ``auto`` (the dtype the weights were loaded in), ``float32`` or ``bfloat16``.
    """

    preset: str = "auto"
    keep_norms_fp32: bool | str = "auto"
    reduce_dtype: str = "float32"
    save_dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What lives in host memory between its uses.

    Args:
        parameters: shards of parameters and gradients; they come to the device for their unit's gather.
        optimizer: the optimizer's state and its step. FSDP2 keeps it with the parameters: both or none.
        activations: ``none``, ``block_inputs`` (of checkpointed blocks), ``saved_tensors`` (everything that the
            backward needs) or ``auto``: the first where blocks are checkpointed, else the second.
        pin_memory: page-locked host memory, which copies fast and cannot be swapped; ``auto``: where the device is
            not the CPU.
    """

    parameters: bool = False
    optimizer: bool = False
    activations: str = "none"
    pin_memory: bool | str = "auto"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Which blocks recompute their activations in the backward pass.

    Args:
        mode: ``auto`` (follow TrainingArguments or Accelerate's file, else none), ``none`` or ``full``.
        every: checkpoint every n-th block, counted from 1.
        fraction: checkpoint this share of the blocks, spread evenly; above 0 and at most 1.
        selective: operators whose outputs are kept instead of computed again: ``attention``, ``matmul``, or names
            such as ``aten.mm``.
        towers: only the blocks of these: ``language``, ``vision``, ``audio``; empty = all.
    """

    mode: str = "auto"
    every: int = 1
    fraction: float = 1.0
    selective: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Whether blocks are compiled, each for itself: one graph serves all blocks of a kind.

    Args:
        blocks: compile every block with ``torch.compile``.
        backend: ``inductor``, ``aot_eager``, … as in ``torch.compile``.
        mode: as in ``torch.compile``.
    """

    blocks: bool = False
    backend: str = "inductor"
    mode: str = "default"


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How parameters are spread over the processes.

    Args:
        reshard_after_forward: free a unit's gathered weights after its forward pass.
        dp_shard_size: processes that share one copy; ``auto`` = world size / `dp_replicate_size`.
        dp_replicate_size: number of copies (hybrid sharding); 1 = one copy over all processes.
        forward_prefetch: units gathered ahead in the forward pass.
        backward_prefetch: units gathered ahead in the backward pass.
        sync_each_batch: reduce gradients after each micro-batch; False keeps whole gradients until the
            accumulation ends, 4 bytes a parameter on every GPU.
        require_sharding: refuse to run when there is only one process.
    """

    reshard_after_forward: bool = True
    dp_shard_size: int | str = "auto"
    dp_replicate_size: int = 1
    forward_prefetch: int = 0
    backward_prefetch: int = 1
    sync_each_batch: bool = True
    require_sharding: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How training checkpoints are written, and what is expected of one that is resumed from.

    Args:
        format: ``sharded``: every process writes its own part, in parallel, so no process needs room for more.
            ``full``: rank 0 writes whole tensors, in files that ``from_pretrained`` reads as they are; it needs host
            memory for the model, and the others wait. Adapters are small and are always written whole.
        async_save: copy the shards to host memory beside the next forward and backward, and write them behind training;
            needs that memory once more.
        optimizer: ``saved``: resuming without the optimizer's state is an error; ``fresh``: it is not loaded.
        grace_seconds: how long a process may go on after a signal that ends it; ``auto``: as long as the launcher
            waits (torchrun kills after 30 s, unless told otherwise). A save that does not fit leaves the optimizer out.
        self_test: before the first step, plan the whole save and write and reread its smallest part for real.
    """

    format: str = "sharded"
    async_save: bool = False
    optimizer: str = "saved"
    grace_seconds: float | str = "auto"
    self_test: bool = True


SECTION_CLASSES: dict[str, type] = {
    "wrap": WrapConfig,
    "precision": PrecisionConfig,
    "offload": OffloadConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "compile": CompileConfig,
    "sharding": ShardingConfig,
    "checkpoint": CheckpointConfig,
}


@dataclass(frozen=True, kw_only=True, init=False)
class FSDPConfig:
    """Everything about sharding that a person decides; the same names in Python and in YAML.

    Each section takes its dataclass, a mapping, or a short form: ``wrap="transformer_layers"``,
    ``precision="bf16-mixed"``, ``offload="none"``, ``activation_checkpointing="full"``,
    ``compile="blocks"``, ``checkpoint="sharded"``. What is left out has the section's default.

    Args:
        wrap, precision, offload, activation_checkpointing, compile, sharding, checkpoint: the sections.
        said: dotted keys that a person stated, on top of those found in the sections. Only needed to carry
            the knowledge over a copy; it decides which layer wins (`precedence.merge`).
        sources: dotted key -> where it was stated, for error messages; goes before ``FSDPConfig(...)``.

    Raises:
        ConfigError: with every problem of the config at once.

    Example:
        >>> FSDPConfig(precision="bf16", activation_checkpointing={"every": 2}).precision.preset
        'bf16-mixed'
    """

    wrap: WrapConfig
    precision: PrecisionConfig
    offload: OffloadConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig
    sharding: ShardingConfig
    checkpoint: CheckpointConfig
    said: frozenset[str] = dataclasses.field(compare=False, repr=False)
    sources: Mapping[str, str] = dataclasses.field(compare=False, repr=False)

    def __init__(
        self,
        *,
        wrap: WrapConfig | Mapping[str, Any] | Sequence[str] | Callable[..., Any] | str | None = None,
        precision: PrecisionConfig | Mapping[str, Any] | str | None = None,
        offload: OffloadConfig | Mapping[str, Any] | Sequence[str] | str | bool | None = None,
        activation_checkpointing: ActivationCheckpointingConfig | Mapping[str, Any] | str | bool | None = None,
        compile: CompileConfig | Mapping[str, Any] | str | bool | None = None,
        sharding: ShardingConfig | Mapping[str, Any] | None = None,
        checkpoint: CheckpointConfig | Mapping[str, Any] | str | None = None,
        said: Iterable[str] = (),
        sources: Mapping[str, str] | None = None,
        **unknown: Any,
    ):
        given = {
            "wrap": wrap,
            "precision": precision,
            "offload": offload,
            "activation_checkpointing": activation_checkpointing,
            "compile": compile,
            "sharding": sharding,
            "checkpoint": checkpoint,
        }
        raw: dict[str, Any] = dict(unknown)  # refused with the nearest name, as in a file
        problems: list[Problem] = []
        for section, value in given.items():
            if value is None:
                continue
            try:
                raw[section] = _as_raw(section, value)
            except ConfigError as error:
                problems.extend(error.problems)
        parsed = parse_config(raw, lambda path: PYTHON_SOURCE)
        parsed.problems[:0] = problems
        _fill(self, parsed, frozenset(said), dict(sources or {}))

    # ---- in ---------------------------------------------------------------------------------------

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = PYTHON_SOURCE) -> FSDPConfig:
        """Return the config of a plain mapping: sections, known aliases, or dotted keys.

        Args:
            mapping: e.g. ``{"precision": "fp32", "sharding.dp_replicate_size": 2}``.
            source: where the mapping came from, for messages.

        Raises:
            ConfigError: with every problem at once.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"the fsdp config is {shown(mapping)}, not a mapping of sections",
                fix="{wrap: transformer_layers, precision: bf16-mixed}",
                source=source,
            )
        return _build(parse_config(mapping, lambda path: source))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> FSDPConfig:
        """Return the config in the ``fsdp:`` section of a YAML file; other sections are left to others.

        Raises:
            ConfigError: the file cannot be read or holds problems; all of them, each with file and line.
        """
        from hf_fsdp.config.io import read_fsdp_section

        section, locate = read_fsdp_section(path)
        return _build(parse_config(section, locate))

    @classmethod
    def from_trainer(cls, fsdp_config: Mapping[str, Any]) -> FSDPConfig | None:
        """Return the config carried by ``TrainingArguments.fsdp_config``, or None when it is empty.

        Reads back what `to_trainer` wrote; without it, converts Trainer's own keys (with or without the
        ``fsdp_`` prefix). A key added by hand to what `to_trainer` wrote counts as stated.

        Raises:
            ConfigError: unknown keys, features of a later release, or two stated values that contradict.
        """
        from hf_fsdp.config.io import parse_trainer_mapping

        if not fsdp_config:
            return None
        return _build(*parse_trainer_mapping(fsdp_config))

    # ---- out --------------------------------------------------------------------------------------

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Return the complete config as plain values that JSON and YAML can hold, sections in order.

        Raises:
            ConfigError: `wrap` is a Python function, which no file can hold.
        """
        if self.wrap.callable is not None:
            raise ConfigError(
                f"wrap.callable={shown(self.wrap.callable)} is a Python function and cannot be written down",
                fix="pass the config itself: callbacks=[FSDPCallback(config)]",
                source=self.sources.get("wrap.callable"),
            )
        mapping = {section: dataclasses.asdict(getattr(self, section)) for section in SECTION_FIELDS}
        del mapping["wrap"]["callable"]
        for section, name in (
            ("wrap", "layer_classes"),
            ("activation_checkpointing", "selective"),
            ("activation_checkpointing", "towers"),
        ):
            mapping[section][name] = list(mapping[section][name])
        return mapping

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the config as YAML under ``fsdp:``, and write it to `path` when one is given."""
        from hf_fsdp.config.io import write_fsdp_yaml

        text = write_fsdp_yaml(self.to_mapping())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_trainer(self) -> dict[str, Any]:
        """Return the dict for ``TrainingArguments(fsdp=True, fsdp_config=...)``, carrying the whole config.

        ``auto_wrap_policy`` is ``NO_WRAP`` because `FSDPCallback` does the wrapping; stock wrapping on top
        of it would look for class names that sharding has already changed.

        Raises:
            ConfigError: `wrap` is a Python function; pass ``FSDPCallback(config)`` then.
        """
        return {
            "version": 2,
            "reshard_after_forward": self.sharding.reshard_after_forward,
            "state_dict_type": "FULL_STATE_DICT" if self.checkpoint.format == "full" else "SHARDED_STATE_DICT",
            "auto_wrap_policy": "NO_WRAP",
            "cpu_ram_efficient_loading": False,
            "hf_fsdp": {**self.to_mapping(), "said": sorted(self.said), "sources": dict(self.sources)},
        }

    def trainer_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for TrainingArguments.

        In a single process FSDP stays off and they only carry this config to `FSDPCallback`, for its checkpoints.

        On a machine without an accelerator it also tells Accelerate to use the CPU (``ACCELERATE_USE_CPU``), as
        ``use_cpu=True`` would: else each of several processes would train for itself.

        Raises:
            ConfigError: `wrap` is a Python function (pass ``FSDPCallback(config)`` then), or there is one process
                and ``sharding.require_sharding`` is true.
        """
        if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
            if self.sharding.require_sharding:
                raise ConfigError(single_process_refused(self.sources.get("sharding.require_sharding")))
            return {} if self.wrap.callable is not None else {"fsdp_config": {"hf_fsdp": self.to_trainer()["hf_fsdp"]}}
        torch = sys.modules.get("torch")  # TrainingArguments has imported it; this module must not
        if torch is not None and not torch.accelerator.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        fsdp_config = self.to_trainer()
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            # TrainingArguments would overwrite what the launch file says about how weights are read.
            asked = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").strip().lower()
            fsdp_config["cpu_ram_efficient_loading"] = asked in TRUE_WORDS
        kwargs: dict[str, Any] = {"fsdp": True, "fsdp_config": fsdp_config}
        if self.offload.parameters and torch is not None and torch.cuda.is_available():
            # Gradients in host memory are reduced on the CPU, for which NCCL alone has no backend.
            kwargs["ddp_backend"] = "cpu:gloo,cuda:nccl"
        return kwargs

    def to_accelerate(
        self,
        num_processes: int = 8,
        num_machines: int = 1,
        machine_rank: int = 0,
        main_process_ip: str | None = None,
        main_process_port: int = 29500,
    ) -> str:
        """Return a launch file for ``accelerate launch --config_file``, as annotated YAML text.

        Args:
            num_processes: GPUs over all machines.
            num_machines: machines in the run.
            machine_rank: number of this machine, from 0.
            main_process_ip: address of machine 0; can also be given to ``accelerate launch``.
            main_process_port: port on machine 0.

        Raises:
            ConfigError: the numbers do not fit together or do not fit ``sharding``.
        """
        from hf_fsdp.config.generate import LaunchPlan, write_launch_file

        plan = LaunchPlan(
            num_processes=num_processes,
            num_machines=num_machines,
            machine_rank=machine_rank,
            main_process_ip=main_process_ip,
            main_process_port=main_process_port,
        )
        return write_launch_file(self, plan)

    def get(self, dotted: str) -> Any:
        """Return the value of a dotted key such as ``precision.preset``."""
        section, _, name = dotted.partition(".")
        return getattr(getattr(self, section), name)


def single_process_refused(source: str | None) -> Problem:
    """Return the problem of `sharding.require_sharding` in a single process."""
    return Problem(
        message="sharding.require_sharding is true and there is one process, so nothing could be sharded",
        fix="start it with: accelerate launch --num_processes 2 SCRIPT, or torchrun --nproc_per_node 2 SCRIPT",
        source=source,
    )


def _as_raw(section: str, value: Any) -> Any:
    """Return a section dataclass as the mapping of what differs from its defaults; anything else as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    expected = SECTION_CLASSES[section]
    if not isinstance(value, expected):
        raise ConfigError(
            f"{section}={shown(value)} is a {type(value).__name__}",
            fix=f"{section}={expected.__name__}(...)",
            source=PYTHON_SOURCE,
        )
    fields = ((item.name, item.default) for item in dataclasses.fields(expected))
    return {name: getattr(value, name) for name, default in fields if getattr(value, name) != default}


def _build(parsed: Parsed, said: frozenset[str] | None = None) -> FSDPConfig:
    """Return a config from parsed values; `said` limits which of them count as stated by a person."""
    config = FSDPConfig.__new__(FSDPConfig)
    _fill(config, parsed, frozenset(), {}, said)
    return config


def _fill(
    config: FSDPConfig,
    parsed: Parsed,
    also_said: frozenset[str],
    more_sources: dict[str, str],
    said: frozenset[str] | None = None,
) -> None:
    """Set the attributes of a frozen config once, then check the fields against each other."""
    values = parsed.values
    for section, section_class in SECTION_CLASSES.items():
        chosen = {
            name: values[f"{section}.{name}"] for name in SECTION_FIELDS[section] if f"{section}.{name}" in values
        }
        object.__setattr__(config, section, section_class(**chosen))
    stated = frozenset(values) if said is None else said
    sources = {key: parsed.sources[key] for key in stated if key in parsed.sources} | more_sources
    object.__setattr__(config, "said", stated | also_said)
    object.__setattr__(config, "sources", sources)
    problems = [*parsed.problems, *check_config(config)]
    if problems:
        _raise(problems)


def _raise(problems: Sequence[Problem]) -> NoReturn:
    raise ConfigError(tuple(problems))
