"""What the old config says about how parameters are spread: strategy, replicas, prefetch."""

from __future__ import annotations

from hf_fsdp.config.environment import STRATEGY_NUMBERS
from hf_fsdp.config.io import BACKWARD_PREFETCH_WORDS
from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.migrate.setting import OldSetting
from hf_fsdp.config.values import FALSE_WORDS, TRUE_WORDS, word_of
from hf_fsdp.errors import Problem, nearest_names

# Strategy of FSDP1 -> whether a unit is freed after its forward.
STRATEGIES = {
    "full_shard": True,
    "shard_grad_op": False,
    "hybrid_shard": True,
    "hybrid_shard_zero2": False,
}
NUMBERED = {number: name.lower() for number, name in STRATEGY_NUMBERS.items()}
PARALLEL_AXES = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence", "ep_size": "expert"}


def read_sharding(draft: Draft) -> None:
    """Read strategy, resharding and the mesh; hybrid sharding keeps its replicas."""
    version = _read_version(draft)
    hybrid: OldSetting | None = None
    for setting in [*draft.take("sharding_strategy"), *draft.take("reshard_after_forward")]:
        word = word_of(setting.value).removeprefix("_")
        if setting.name == "reshard_after_forward" and (word in ("true", "false") or version == 2):
            draft.put("sharding.reshard_after_forward", setting.value, setting)
            continue
        strategy = NUMBERED.get(word, word)
        if strategy == "no_shard":
            draft.refuse(
                setting,
                "nothing is sharded, which is DDP and not FSDP",
                fix="distributed_type: MULTI_GPU, with no fsdp keys; or sharding_strategy: FULL_SHARD",
            )
        elif strategy in STRATEGIES:
            note = "ZeRO-2: whole weights until the backward" if strategy.startswith("shard_grad") else ""
            draft.put("sharding.reshard_after_forward", STRATEGIES[strategy], setting, note)
            hybrid = hybrid or (setting if strategy.startswith("hybrid") else None)
        elif word in TRUE_WORDS | FALSE_WORDS:
            draft.put("sharding.reshard_after_forward", setting.value, setting)
        else:
            near = nearest_names(word, [*STRATEGIES, "no_shard"])
            draft.problems.append(
                Problem(
                    message=f"{setting.text} is not a sharding strategy",
                    fix=f"sharding_strategy: {(near or ['full_shard'])[0].upper()}",
                    near=", ".join(near).upper() or None,
                    source=setting.source,
                )
            )
    _read_mesh(draft, hybrid)


def _read_version(draft: Draft) -> int | None:
    setting = draft.take_one("version")
    if setting is None:
        return None
    word = word_of(setting.value)
    if word not in ("1", "2"):
        draft.refuse(setting, "FSDP has the versions 1 and 2", fix="fsdp_version: 1   # or 2")
        return None
    if word == "1":
        draft.leave(setting, "changed", "hf-fsdp runs FSDP2: one sharded tensor a parameter instead of flat ones")
    else:
        draft.leave(setting, "not needed", "hf-fsdp always runs FSDP2")
    return int(word)


def _read_mesh(draft: Draft, hybrid: OldSetting | None) -> None:
    """Read the number of replicas from the file, from the machines, or from ``--replicas``."""
    for setting in draft.take("dp_replicate_size"):
        draft.put("sharding.dp_replicate_size", setting.value, setting)
    for setting in draft.take("dp_shard_size"):
        draft.put("sharding.dp_shard_size", setting.value, setting)
    for setting in draft.take("unknown_mesh"):
        hybrid = hybrid or setting
    for name, kind in PARALLEL_AXES.items():
        for setting in draft.take(name):
            if word_of(setting.value) not in ("1", "", "none"):
                draft.refuse(setting, f"{kind} parallelism is not built", fix=f"{setting.text.partition(':')[0]}: 1")
    stated = draft.lines.get("sharding.dp_replicate_size")
    if draft.replicas is not None:
        if hybrid is None and stated is None:
            draft.problems.append(
                Problem(
                    message=f"--replicas {draft.replicas}, but {draft.old.path} does not ask for hybrid sharding",
                    fix="leave --replicas out; or write sharding: {dp_replicate_size: "
                    f"{draft.replicas}}} into the new file",
                )
            )
        draft.put("sharding.dp_replicate_size", draft.replicas, None, f"--replicas {draft.replicas}")
    elif hybrid is not None and stated is None:
        machines = draft.old.machines.num_machines if draft.old.machines else None
        if machines is None:
            what = "--replicas 2   # one copy for each machine: the number of machines"
            if hybrid.name == "unknown_mesh":
                what = "--replicas 1   # one copy over all processes; 2 or more: so many copies"
            draft.refuse(
                hybrid,
                "the file does not say how many replicas, and without them hybrid would become plain sharding",
                fix=what,
            )
        else:
            note = "a copy on each machine" if machines > 1 else "one machine: one copy over its GPUs"
            draft.put("sharding.dp_replicate_size", machines, hybrid, f"num_machines: {machines}, {note}")


def read_prefetch(draft: Draft) -> None:
    """Read how many units are gathered ahead (FSDP1 knows none or one), and whether each batch is reduced."""
    for setting in draft.take("no_sync"):
        draft.put("sharding.sync_each_batch", False, setting)
    version = next((word_of(setting.value) for setting in draft.take("version")), None)
    for name in ("backward_prefetch", "forward_prefetch"):
        for setting in draft.take(name):
            if version == "2":
                what = "gathers one unit ahead in backward and none in forward"
                draft.leave(setting, "not needed", f"it had no effect with version 2, which {what}; so does hf-fsdp")
            elif name == "forward_prefetch":
                draft.put("sharding.forward_prefetch", setting.value, setting)
            else:
                _read_backward_prefetch(draft, setting)


def _read_backward_prefetch(draft: Draft, setting: OldSetting) -> None:
    word = word_of(setting.value)
    word = {"1": "backward_pre", "2": "backward_post", "none": "no_prefetch", "0": "no_prefetch"}.get(word, word)
    if word in BACKWARD_PREFETCH_WORDS:
        draft.put("sharding.backward_prefetch", BACKWARD_PREFETCH_WORDS[word], setting)
    elif word == "backward_post":
        draft.put("sharding.backward_prefetch", 0, setting, "FSDP2 has no prefetch behind the reduction")
        draft.leave(
            setting,
            "changed",
            "FSDP2 gathers ahead of a block's backward or not at all; 0 has the memory of BACKWARD_POST or less",
        )
    else:
        draft.refuse(setting, "is not a backward prefetch", fix="BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")
