"""What `accelerate launch` exported: read when it is meant, named for removal when it is not.

Accelerate's launcher talks to its plugin through ``FSDP_*`` variables. The plugin also reads them when no
launcher set them, so a variable left in a shell or a container image changes the training silently.
Everything here is a pure function of a mapping; nothing touches ``os.environ``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_fsdp.config.precedence import RAM_EFFICIENT_LOADING, Stated
from hf_fsdp.config.values import FALSE_WORDS, TRUE_WORDS, Rejected, parse_field
from hf_fsdp.errors import ConfigError, Problem

# Every variable that FullyShardedDataParallelPlugin falls back to. FSDP_CPU_RAM_EFFICIENT_LOADING is not
# among the strays: TrainingArguments writes it itself, and nothing reads it while FSDP is off.
PLUGIN_VARIABLES = (
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_FORWARD_PREFETCH",
    "FSDP_IGNORED_MODULES",
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "FSDP_SYNC_MODULE_STATES",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_USE_ORIG_PARAMS",
    "FSDP_VERSION",
)
SWITCH = "ACCELERATE_USE_FSDP"


@dataclass(frozen=True)
class Scrub:
    """Variables to remove before Accelerate looks at them, and the line that says so (empty when none)."""

    names: tuple[str, ...]
    line: str


def is_fsdp_launch(environ: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` set up FSDP, by the same comparison that Accelerate makes."""
    return environ.get(SWITCH, "false").lower() == "true"


def stray_fsdp_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables that would leak into Accelerate's plugin although no launcher set FSDP up."""
    if is_fsdp_launch(environ):
        return ()
    strays = [name for name in PLUGIN_VARIABLES if name in environ]
    switch = environ.get(SWITCH, "false").strip().lower()
    if switch not in FALSE_WORDS | {""}:  # "1" or "yes": on for one part of Accelerate, off for the other
        strays.insert(0, SWITCH)
    return tuple(strays)


def scrubbed_fsdp_environment(environ: Mapping[str, str]) -> Scrub:
    """Return which variables to remove so that nothing stray reaches Accelerate, and the line to print."""
    names = stray_fsdp_variables(environ)
    if not names:
        return Scrub((), "")
    shown = ", ".join(f"{name}={environ[name]}" for name in names)
    return Scrub(
        names,
        f"hf-fsdp: ignored {shown}: no `accelerate launch` set FSDP up (to be rid of it: unset {' '.join(names)})",
    )


# variable -> (dotted key, key in the launch file)
_READ_AS = {
    "FSDP_RESHARD_AFTER_FORWARD": ("sharding.reshard_after_forward", "fsdp_reshard_after_forward"),
    "FSDP_STATE_DICT_TYPE": ("checkpoint.format", "fsdp_state_dict_type"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("wrap.layer_classes", "fsdp_transformer_layer_cls_to_wrap"),
    "FSDP_AUTO_WRAP_POLICY": ("wrap.policy", "fsdp_auto_wrap_policy"),
    "FSDP_OFFLOAD_PARAMS": ("offload.parameters", "fsdp_offload_params"),
    "FSDP_FORWARD_PREFETCH": ("sharding.forward_prefetch", "fsdp_forward_prefetch"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing.mode", "fsdp_activation_checkpointing"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("offload.activations", "fsdp_activation_checkpointing_offload"),
    "FSDP_MIN_NUM_PARAMS": ("wrap.min_num_params", "fsdp_min_num_params"),
}
# The launcher exports these whether or not the file has them, so "false" says nothing about a person's wish.
_MEANS_NOTHING_WHEN_FALSE = frozenset(
    {
        "FSDP_OFFLOAD_PARAMS",
        "FSDP_FORWARD_PREFETCH",
        "FSDP_ACTIVATION_CHECKPOINTING",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    }
)
_REPAIRS = {
    "FSDP_STATE_DICT_TYPE": "fsdp_state_dict_type: SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params: false",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp_reshard_after_forward: true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "remove fsdp_transformer_layer_cls_to_wrap; the blocks are found from the model",
}
_STRATEGY_REPAIRS = {
    "SHARD_GRAD_OP": "remove fsdp_sharding_strategy and write fsdp_reshard_after_forward: false",
    "NO_SHARD": "distributed_type: MULTI_GPU (nothing would be sharded), or remove fsdp_sharding_strategy",
    "HYBRID_SHARD": "remove fsdp_sharding_strategy and say FSDPConfig(sharding={'dp_replicate_size': 2})",
    "HYBRID_SHARD_ZERO2": "remove fsdp_sharding_strategy and say FSDPConfig(sharding={'dp_replicate_size': 2})",
}
STRATEGY_NUMBERS = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
_LATER_PARALLELISM = ("TP", "CP", "SP")


def from_accelerate_environment(environ: Mapping[str, str]) -> dict[str, Stated]:
    """Return what Accelerate's launch file states, as dotted keys for `precedence.merge`.

    Args:
        environ: the environment of a process that `accelerate launch` started; any other gives at most the
            mixed precision.

    Raises:
        ConfigError: the file asks for FSDP1 or for something a later release builds; all problems at once.
    """
    stated: dict[str, Stated] = {}
    problems: list[Problem] = []
    _read_mixed_precision(environ, stated, problems)
    if is_fsdp_launch(environ):
        problems += _check_version(environ)
        for name, (dotted, key) in _READ_AS.items():
            _read_variable(environ, name, dotted, key, stated, problems)
        _read_parallelism(environ, stated, problems)
        problems += _check_unsupported(environ)
        if "FSDP_CPU_RAM_EFFICIENT_LOADING" in environ:
            on = environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].strip().lower() in TRUE_WORDS
            stated[RAM_EFFICIENT_LOADING] = Stated(on, _source(environ, "FSDP_CPU_RAM_EFFICIENT_LOADING"))
    if problems:
        raise ConfigError(problems)
    return stated


def _source(environ: Mapping[str, str], name: str) -> str:
    return f"Accelerate's launch file ({name}={environ[name]})"


def _read_mixed_precision(environ: Mapping[str, str], stated: dict[str, Stated], problems: list[Problem]) -> None:
    name = "ACCELERATE_MIXED_PRECISION"
    if not environ.get(name):
        return
    try:
        value = parse_field("precision.preset", environ[name])
    except Rejected as rejected:
        problems.append(
            Problem(
                message=rejected.message,
                fix="mixed_precision: bf16   # or 'no' for fp32",
                source=_source(environ, name),
            )
        )
        return
    stated["precision.preset"] = Stated(value, _source(environ, name))


def _read_variable(
    environ: Mapping[str, str], name: str, dotted: str, key: str, stated: dict[str, Stated], problems: list[Problem]
) -> None:
    raw = environ.get(name, "").strip()
    if not raw or (name in _MEANS_NOTHING_WHEN_FALSE and raw.lower() in FALSE_WORDS):
        return
    if name == "FSDP_AUTO_WRAP_POLICY" and raw.upper() == "NO_WRAP":
        return  # only says that Accelerate must not wrap; the callback always wraps
    if name == "FSDP_MIN_NUM_PARAMS" and "SIZE" not in environ.get("FSDP_AUTO_WRAP_POLICY", "").upper():
        return  # the launcher exports a default beside every policy
    if name == "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD" and raw.lower() in TRUE_WORDS:
        raw = "block_inputs"  # what Accelerate moves
    try:
        value = parse_field(dotted, raw)
    except Rejected as rejected:
        fix = _REPAIRS.get(name, f"{key}: false")
        problems.append(
            Problem(message=f"{key}: {rejected.message}", fix=fix, near=rejected.near, source=_source(environ, name))
        )
        return
    stated[dotted] = Stated(value, _source(environ, name))


def _check_version(environ: Mapping[str, str]) -> list[Problem]:
    version = environ.get("FSDP_VERSION", "1").strip()
    if version == "2":
        return []
    source = "FSDP_VERSION" if "FSDP_VERSION" in environ else SWITCH
    return [
        Problem(
            message=f"the launch file asks for FSDP version {version}; this release runs FSDP2",
            fix="fsdp_version: 2   # in fsdp_config; or: hf-fsdp migrate FILE -o fsdp.yaml --launch launch.yaml",
            source=_source(environ, source),
        )
    ]


def _check_unsupported(environ: Mapping[str, str]) -> list[Problem]:
    problems = []
    strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").strip().upper()
    strategy = STRATEGY_NUMBERS.get(strategy, strategy)
    if strategy in _STRATEGY_REPAIRS and environ.get("FSDP_VERSION") == "2":
        problems.append(
            Problem(
                message=f"fsdp_sharding_strategy: {strategy} is FSDP1's and has no effect under FSDP2",
                fix=_STRATEGY_REPAIRS[strategy],
                source=_source(environ, "FSDP_SHARDING_STRATEGY"),
            )
        )
    if environ.get("FSDP_IGNORED_MODULES", "None").strip() not in ("", "None"):
        problems.append(
            Problem(
                message="fsdp_ignored_modules arrives in a later release and is refused rather than ignored",
                fix="remove fsdp_ignored_modules",
                source=_source(environ, "FSDP_IGNORED_MODULES"),
            )
        )
    return problems


def _read_parallelism(environ: Mapping[str, str], stated: dict[str, Stated], problems: list[Problem]) -> None:
    """Read ``parallelism_config``: hybrid sharding is ours, the other axes come in a later release."""
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return
    for axis in ("dp_replicate_size", "dp_shard_size"):
        name = f"PARALLELISM_CONFIG_{axis.upper()}"
        value = environ.get(name, "1").strip()
        if value.isdigit() and int(value) > 1:
            stated[f"sharding.{axis}"] = Stated(int(value), _source(environ, name))
    for axis in _LATER_PARALLELISM:
        name = f"PARALLELISM_CONFIG_{axis}_SIZE"
        if environ.get(name, "1").strip() not in ("", "1"):
            key = name.lower()
            problems.append(
                Problem(
                    message=f"{key}: {environ[name]} arrives in a later release and is refused rather than ignored",
                    fix=f"{key}: 1",
                    source=_source(environ, name),
                )
            )
