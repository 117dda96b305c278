"""Old configs of FSDP1 and FSDP2, from five kinds of files, as a config of ours; nothing of them is executed."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass

from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.migrate.leftovers import read_leftovers
from hf_fsdp.config.migrate.memory import read_checkpointing, read_compilation, read_offload, read_state_dicts
from hf_fsdp.config.migrate.precision import read_precision
from hf_fsdp.config.migrate.recognise import read_old_config
from hf_fsdp.config.migrate.setting import Left, Machines
from hf_fsdp.config.migrate.sharding import read_prefetch, read_sharding
from hf_fsdp.config.migrate.units import read_units
from hf_fsdp.config.migrate.world_size import fixes_for_the_old_file
from hf_fsdp.config.migrate.write import COMMENT_WIDTH, write_left, write_section
from hf_fsdp.config.parse import SECTION_FIELDS
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.config.validate import check_config
from hf_fsdp.config.values import TRUE_WORDS, word_of
from hf_fsdp.errors import ConfigError

# Order matters: resharding needs the version, what is left over comes last.
READERS = (
    read_sharding,
    read_prefetch,
    read_units,
    read_precision,
    read_offload,
    read_checkpointing,
    read_compilation,
    read_state_dicts,
    read_leftovers,
)
SHOWN_OTHER_KEYS = 12


@dataclass(frozen=True)
class Migration:
    """An old config in our words.

    Args:
        kind: what the old file is, in words.
        config: the new config.
        text: the new YAML file.
        left: what was not carried over, and why.
        machines: of an Accelerate launch file, for `FSDPConfig.to_accelerate`.
        other_keys: keys about data and training, which stay with the training script.
        cpu_ram_efficient_loading: the old run let process 0 alone read the weights; a key of the launch file only.
    """

    kind: str
    config: FSDPConfig
    text: str
    left: tuple[Left, ...]
    machines: Machines | None
    other_keys: tuple[str, ...]
    cpu_ram_efficient_loading: bool = False


def migrate(path: str | os.PathLike[str], replicas: int | None = None, command: str | None = None) -> Migration:
    """Read an old config and return it as ours.

    Args:
        path: Accelerate's launch file, TrainingArguments as YAML or JSON, Axolotl's or LLaMA-Factory's YAML, or a
            Python file with the calls in it; which of them is found from its content.
        replicas: copies under hybrid sharding, where the file does not say how many.
        command: the command that was typed, for the title of the new file.

    Raises:
        ConfigError: the file cannot be read, contradicts itself, or asks for what FSDP2 cannot mean; all at once.
    """
    old = read_old_config(path)
    draft = Draft(old, replicas, left=list(old.left), problems=list(old.problems))
    for read in READERS:
        read(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    config = _build(draft)
    return Migration(
        kind=old.kind,
        config=config,
        text=_write(draft, command),
        left=tuple(draft.left),
        machines=old.machines,
        other_keys=tuple(old.other_keys),
        cpu_ram_efficient_loading=any(
            word_of(setting.value) in TRUE_WORDS
            for setting in old.settings
            if setting.name == "cpu_ram_efficient_loading"
        ),
    )


def _build(draft: Draft) -> FSDPConfig:
    """Return the config, checked as a whole and against the number of processes where it is known."""
    raw: dict[str, dict[str, object]] = {}
    for section, names in SECTION_FIELDS.items():
        for name in names:
            if f"{section}.{name}" in draft.lines:
                raw.setdefault(section, {})[name] = draft.lines[f"{section}.{name}"].value
    sources = {dotted: "; ".join(dict.fromkeys(line.sources)) for dotted, line in draft.lines.items()}
    config = FSDPConfig(**raw, sources=sources)
    machines = draft.old.machines
    if machines is not None and machines.num_processes is not None:
        problems = check_config(config, machines.num_processes)
        if problems:
            raise ConfigError(fixes_for_the_old_file(draft, problems))
    return config


def _write(draft: Draft, command: str | None) -> str:
    title = ["# hf-fsdp: read with FSDPConfig.from_yaml(...)"]
    if command:
        title.append(f"# Written by: {' '.join(command.split())}")
    path = " ".join(draft.old.path.split())
    title.append(f"# From {path}, {draft.old.kind}; after # on each line: what it says there.")
    text = "\n".join(title) + "\n" + write_section(draft)
    lines = write_left(draft.left, "# ")
    other = draft.old.other_keys
    if other:
        more = f", and {len(other) - SHOWN_OTHER_KEYS} more" if len(other) > SHOWN_OTHER_KEYS else ""
        lines.append("# About data and training, for your script:")
        keys = ", ".join(other[:SHOWN_OTHER_KEYS]) + more
        lines += [f"#   {line}" for line in textwrap.wrap(keys, COMMENT_WIDTH)]
    return text + "".join(f"{line}\n" for line in lines)
