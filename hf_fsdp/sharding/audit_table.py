"""The audit as a table a person reads in a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from hf_fsdp.sharding.audit import Audit, UnitRow
from hf_fsdp.units import format_count

# A number that is a whole part of a module path: `model.layers.12 LlamaDecoderLayer`, `0 Block`.
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=[. ])")
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


# A longer name has its class in a second line.
MAX_NAME_WIDTH = 45
COLUMNS_WIDTH = 82


def render_audit(audit: Audit, width: int = 118) -> str:
    """Return the audit as plain text: a line of totals, the units (equal ones folded), then notes and warnings."""
    buffer = io.StringIO()
    # No markup: `[LlamaDecoderLayer]` in a note is text and not a style.
    console = Console(file=buffer, width=width, no_color=True, highlight=False, markup=False)
    mesh = " x ".join(f"{name} {size}" for name, size in audit.mesh.items())
    console.print(f"FSDP audit: {audit.model_class} on {audit.world_size} processes ({mesh}), {audit.precision}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    # Folded inside a number, `layers.0-29` would read as `layers.0-2`: rather a table that is too wide.
    lines = fold_rows(audit.units)
    console.width = max(
        width, COLUMNS_WIDTH + max((len(part) for name, _, _ in lines for part in name.split(" ")), default=0)
    )
    table.add_column("unit", overflow="fold")
    for heading in ("count", "params", "this rank", "trained"):
        table.add_column(heading, justify="right", no_wrap=True)
    dtypes = {"stored": "storage", "compute": "compute", "reduce": "reduce", "output": "output"}
    if audit.first_step is not None:  # before it, the optimizer has no state to show
        dtypes["optimizer"] = "optimizer_state"
    for heading in dtypes:
        table.add_column(heading, no_wrap=True)
    for name, count, row in lines:
        table.add_row(
            name.replace(" ", "\n", 1) if len(name) > MAX_NAME_WIDTH else name,
            str(count),
            format_count(row.num_parameters),
            format_count(row.num_local),
            format_count(row.num_trained),
            *(_short(getattr(row, dtype)) for dtype in dtypes.values()),
        )
    console.print(table)
    for line in summary_lines(audit):
        console.print(line, soft_wrap=True)
    return buffer.getvalue().rstrip() + "\n"


def summary_lines(audit: Audit) -> list[str]:
    """The totals under the table, one fact a line."""
    lines = [
        f"sharded      {audit.sharded_share:.1%} of {format_count(audit.num_parameters)} parameters; "
        f"this rank holds {format_count(audit.num_local)}",
        f"trained      {format_count(audit.num_trained)}, frozen {format_count(audit.num_frozen)}",
        *_part_lines(audit),
        f"checkpointed {audit.num_checkpointed_blocks} of {audit.num_blocks} blocks",
        f"agreed       {audit.num_tensors_agreed} tensors equal on all ranks (checksum {audit.weights_checksum})"
        + (f", {len(audit.tensors_taken_from_rank_0)} taken from rank 0" if audit.tensors_taken_from_rank_0 else ""),
    ]
    if audit.activations:
        lines.append(f"activations  {audit.activations}")
    if audit.host_memory:
        lines.append(f"host memory  {audit.host_memory}")
    lines += [f"tied         {' = '.join(names)}" for names in audit.ties.values()]
    if audit.replicas_equal is not None:
        lines.append("replicas     equal" if audit.replicas_equal else "replicas     DIFFER")
    lines += [f"note         {note}" for note in audit.notes]
    lines += [f"warning      {warning}" for warning in audit.warnings]
    return lines


def _part_lines(audit: Audit) -> list[str]:
    """Return a line for each part of a model that has several: its size, what is trained, how it is stored."""
    if len(audit.parts) < 2:
        return []
    width = max(len(row.name) for row in audit.parts)
    lines = []
    for row in audit.parts:
        trained = "frozen" if row.num_trained == 0 else f"{format_count(row.num_trained)} trained"
        if row.learning_rates:
            trained += f" at {' and '.join(f'{rate:g}' for rate in row.learning_rates)}"
        stored = "/".join(_short(dtype) for dtype in row.storage.split("/"))
        name = f"{row.name:<{width}}"
        lines.append(f"part         {name}  {format_count(row.num_parameters)}, {trained}, stored {stored}")
    return lines


def fold_rows(rows: list[UnitRow]) -> list[tuple[str, int, UnitRow]]:
    """Fold units that differ only in their index: (name or range of names, count, one of the rows)."""
    folded: dict[tuple[object, ...], list[UnitRow]] = {}
    for row in rows:
        key = {**asdict(row), "names": len(row.names), "name": _INDEX.sub("*", row.name)}
        folded.setdefault(tuple(key.values()), []).append(row)
    return [(_fold_names([row.name for row in group]), len(group), group[0]) for group in folded.values()]


def _fold_names(names: list[str]) -> str:
    """`layers.0 Layer`, …, `layers.3 Layer` -> `layers.0-3 Layer`; every index that varies becomes its range."""
    indexes = zip(*([int(index) for index in _INDEX.findall(name)] for name in names), strict=True)
    ranges = iter(f"{min(values)}-{max(values)}" if len(set(values)) > 1 else str(values[0]) for values in indexes)
    return _INDEX.sub(lambda _: next(ranges), names[0])


def _short(dtype: str) -> str:
    return "+".join(_SHORT.get(part, part) for part in dtype.split("+"))
