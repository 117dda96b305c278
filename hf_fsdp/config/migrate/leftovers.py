"""Old settings that decide nothing any more, or that nothing here can do, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdp.config.io import TRAINER_KEYS_REFUSED_WHEN_ON
from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.values import FALSE_WORDS, word_of

ALWAYS = "not needed"
CHANGED = "changed"
NONE = "no equivalent"
OFF_WORDS = FALSE_WORDS | {"none", "[]", "{}", ""}


@dataclass(frozen=True)
class Reason:
    """Why a setting is not carried over, when it is on and when it is off; `off` None: off says nothing."""

    on: tuple[str, str]
    off: tuple[str, str] | None = None


REASONS: dict[str, Reason] = {
    "use_orig_params": Reason(
        on=(ALWAYS, "FSDP2 keeps each parameter: its name, its requires_grad and its place in the optimizer"),
        off=(
            CHANGED,
            "FSDP2 has no flat parameters: frozen and trained ones can share a unit, optimizer groups work; old "
            "optimizer states do not load",
        ),
    ),
    "sync_module_states": Reason(
        on=(ALWAYS, "weights and buffers of all processes are compared and made equal before they are cut"),
        off=(CHANGED, "weights and buffers of all processes are compared and made equal, always"),
    ),
    "limit_all_gathers": Reason(
        on=(ALWAYS, "FSDP2 bounds the gathers in flight itself"),
        off=(NONE, "FSDP2 always bounds the gathers in flight, which costs no time and less memory"),
    ),
    "cpu_ram_efficient_loading": Reason(
        on=(
            NONE,
            "a key of the launch file only: fsdp_cpu_ram_efficient_loading: true there lets process 0 alone read the "
            "weights, and the others get its values; --launch carries it over from Accelerate's file",
        ),
        off=(ALWAYS, "each process reads the weights"),
    ),
    "ignored_modules": Reason(on=(NONE, "every parameter is sharded, which the audit checks"), off=None),
    "param_init_fn": Reason(on=(ALWAYS, "parameters on meta get the values of process 0"), off=None),
    "device_id": Reason(on=(ALWAYS, "each process uses its own device"), off=None),
    "process_group": Reason(
        on=(ALWAYS, "the groups follow from sharding.dp_shard_size and dp_replicate_size"), off=None
    ),
    "mesh_axes": Reason(on=(ALWAYS, "the mesh follows from sharding.dp_shard_size and dp_replicate_size"), off=None),
    "shard_placement_fn": Reason(on=(NONE, "parameters are cut along their first dimension"), off=None),
    "offload_to_cpu": Reason(
        on=(ALWAYS, "whole weights are gathered a tensor at a time, into host memory"),
        off=(CHANGED, "whole weights are gathered a tensor at a time, into host memory"),
    ),
    "rank0_only": Reason(
        on=(ALWAYS, "only process 0 holds and writes whole weights"),
        off=(CHANGED, "only process 0 holds and writes whole weights"),
    ),
    "xla_fsdp_settings": Reason(on=(ALWAYS, "only read on TPUs"), off=None),
}


def read_leftovers(draft: Draft) -> None:
    """Explain every setting that no other part has read, and refuse those that nothing here knows."""
    for setting in draft.untaken():
        off = word_of(setting.value) in OFF_WORDS
        if setting.name in REASONS:
            said = REASONS[setting.name].off if off else REASONS[setting.name].on
            if said is not None:
                draft.leave(setting, *said)
        elif setting.name in TRAINER_KEYS_REFUSED_WHEN_ON:
            if not off:
                why, fix = TRAINER_KEYS_REFUSED_WHEN_ON[setting.name]
                draft.refuse(setting, why, fix)
        else:
            draft.refuse(setting, "is not understood", fix="remove it from a copy of the file")
