"""What the old config says about memory and speed: offload, checkpointing, state dicts, compilation."""

from __future__ import annotations

from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.migrate.setting import OldSetting
from hf_fsdp.config.values import FALSE_WORDS, TRUE_WORDS, word_of


def read_offload(draft: Draft) -> None:
    """Read what lives in host memory."""
    on, setting = draft.take_bool("offload_params")
    if setting is not None and on is not None:
        draft.put("offload.parameters", on, setting)
        if on:
            draft.put("offload.optimizer", True, setting, "the optimizer's state is where its shard is")
    pinned, pin = draft.take_bool("pin_memory")
    if pin is not None and pinned is not None:
        if on:
            draft.put("offload.pin_memory", pinned, pin)
        else:
            draft.leave(pin, "not needed", "nothing is offloaded")


def read_checkpointing(draft: Draft) -> None:
    """Read activation checkpointing; one switch that is on is enough, as in the old programs."""
    switches = [*draft.take("activation_checkpointing"), *draft.take("gradient_checkpointing")]
    off: list[OldSetting] = []
    for setting in switches:
        word = word_of(setting.value)
        if word in ("offload", "offload_disk"):  # Axolotl's
            draft.put("activation_checkpointing.mode", "full", setting)
            draft.put("offload.activations", "block_inputs", setting)
            if word == "offload_disk":
                draft.leave(setting, "changed", "inputs of blocks are kept in host memory, never on disk")
        elif word in TRUE_WORDS | {"full"}:
            draft.put("activation_checkpointing.mode", "full", setting)
        elif word in FALSE_WORDS | {"none"}:
            off.append(setting)
        else:
            draft.refuse(setting, "is neither true nor false", fix=f"{setting.name}: true   # or false")
    for setting in off:
        if "activation_checkpointing.mode" not in draft.lines:
            draft.put("activation_checkpointing.mode", "none", setting)
    _read_activation_offload(draft)


def _read_activation_offload(draft: Draft) -> None:
    for setting in draft.take("activation_checkpointing_offload"):
        if word_of(setting.value) in FALSE_WORDS:
            continue
        draft.put("offload.activations", "block_inputs", setting)
        if word_of(setting.value) == "disk":
            draft.leave(setting, "changed", "activations are kept in host memory, never on disk")
    for setting in draft.take("activation_offloading"):
        if word_of(setting.value) in FALSE_WORDS:
            continue
        draft.put("offload.activations", "auto", setting)
        if word_of(setting.value) == "disk":
            draft.leave(setting, "changed", "activations are kept in host memory, never on disk")


def read_state_dicts(draft: Draft) -> None:
    """Read how checkpoints are written."""
    kinds = draft.take("state_dict_type")
    if len({word_of(setting.value) for setting in kinds}) > 1:
        for setting in kinds:
            draft.leave(
                setting,
                "changed",
                "the script writes more than one kind; checkpoint.format is one for the whole run, `full` here; "
                "`final/` and save_model are always whole",
            )
        draft.put("checkpoint.format", "full", None, "more than one kind in the old script")
        kinds = []
    for setting in kinds:
        if word_of(setting.value) == "local_state_dict":
            draft.put("checkpoint.format", "sharded", setting, "FSDP2 has no flat local state")
            draft.leave(
                setting,
                "changed",
                "each process still writes its own part, but of each parameter: old local checkpoints do not load",
            )
        else:
            draft.put("checkpoint.format", setting.value, setting)
    for setting in draft.take("final_state_dict_type"):
        whole = word_of(setting.value) == "full_state_dict"
        draft.leave(
            setting,
            "not needed" if whole else "changed",
            "save_model always writes a folder that from_pretrained loads",
        )


def read_compilation(draft: Draft) -> None:
    """Read ``torch.compile``: hf-fsdp compiles each block for itself."""
    on, switch = draft.take_bool("compile")
    backend, mode = draft.take_one("compile_backend"), draft.take_one("compile_mode")
    options = [*draft.take("compile_fullgraph"), *draft.take("compile_dynamic")]
    regional, by_block = draft.take_bool("compile_regional")
    if switch is None and backend is not None:  # Accelerate: a backend is the switch, and NO is off
        on, switch = word_of(backend.value) not in ("no", "false", "none"), backend
    if not on or switch is None:
        return
    draft.put("compile.blocks", True, switch)
    if not regional:
        why = "each block is compiled for itself, not the whole model: one graph serves all blocks"
        draft.leave(switch, "changed", why)
    elif by_block is not None:
        draft.put("compile.blocks", True, by_block)
    if backend is not None:
        draft.put("compile.backend", backend.value, backend)
    if mode is not None:
        draft.put("compile.mode", mode.value, mode)
    for setting in options:
        if word_of(setting.value) not in FALSE_WORDS:
            draft.leave(setting, "no equivalent", "torch.compile's default is used for each block")
