"""The demo's measured results as tables for a terminal, as samples.md, and the claims they have to bear out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from killed_save import Resume
from rich.console import Console
from rich.table import Table

# Both runs add the same fp32 numbers in another order; over a few AdamW steps that is what may remain of it.
MAX_LOSS_DIFFERENCE = 1e-5

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the demo measured.

    Args:
        single, sharded: metrics.jsonl of the run in one process and of the sharded run.
        resume: what the sharded run computed before it was killed in a save, and after it went on.
        audit: audit.json of the sharded run.
        stock: what compare_stock.py wrote.
        samples: what generate_samples.py wrote.
    """

    single: Sequence[Record]
    sharded: Sequence[Record]
    resume: Resume
    audit: Record
    stock: Record
    samples: Sequence[Record]

    def losses(self) -> list[tuple[int, float, float]]:
        """Return (step, loss in one process, loss sharded) for the steps that both runs took."""
        single = {record["step"]: record["loss"] for record in self.single if "loss" in record}
        sharded = {record["step"]: record["loss"] for record in self.sharded if "loss" in record}
        return [(step, single[step], sharded[step]) for step in sorted(single.keys() & sharded.keys())]

    def largest_loss_difference(self) -> float:
        """Return the largest absolute difference of the two losses at one step."""
        return max(abs(one - two) for _, one, two in self.losses())

    def held_out(self) -> tuple[float, float]:
        """Return the held-out loss before and after training."""
        losses = [record["eval_loss"] for record in self.sharded if "eval_loss" in record]
        return losses[0], losses[-1]

    def sharded_shares(self) -> tuple[float, float]:
        """Return the share of parameter elements that are sharded: stock, ours."""
        stock = self.stock["stock_sharding"]
        ours = self.audit["num_sharded"] / self.audit["num_parameters"]
        return stock["num_sharded"] / stock["num_parameters"], ours

    def to_mapping(self) -> dict[str, Any]:
        """Return the figures of the tables, for results.json."""
        stock_share, our_share = self.sharded_shares()
        before, after = self.held_out()
        return {
            "losses": [{"step": step, "one_process": one, "two_sharded": two} for step, one, two in self.losses()],
            "largest_loss_difference": self.largest_loss_difference(),
            "sharded_share": {"stock": stock_share, "ours": our_share},
            "gradient_error": dict(self.stock["gradient_error"]),
            "held_out_loss": {"before": before, "after": after},
            "killed_save": self.resume.to_mapping(),
        }

    def unmet_claims(self) -> list[str]:
        """Return what was promised and not measured; empty when the demo shows what it says."""
        before, after = self.held_out()
        claims = {
            f"the losses of one and of two processes differ by {self.largest_loss_difference():.1e}, more than "
            f"{MAX_LOSS_DIFFERENCE:.0e}": self.largest_loss_difference() <= MAX_LOSS_DIFFERENCE,
            "not every parameter is sharded": self.sharded_shares()[1] == 1.0,
            "our checkpointing changes gradients": self.stock["gradient_error"]["ours"] <= 1e-6,
            "the held-out loss did not fall": after < before,
        }
        return [claim for claim, holds in claims.items() if not holds] + self.resume.unmet_claims()


def show_results(results: Results, console: Console) -> None:
    """Print the tables: losses side by side, killed against resumed, stock against ours, held-out loss, samples."""
    console.print("training loss, measured: same rows, same order, fp32, no dropout", style="italic", soft_wrap=True)
    console.print(
        f"two sharded processes: steps 1 to {results.resume.resumed_from} were computed before the kill, later ones "
        "after the resume",
        style="italic",
        soft_wrap=True,
    )
    console.print(_loss_table(results))
    console.print(f"largest difference: {results.largest_loss_difference():.2e}\n")
    console.print(_resume_table(results.resume))
    is_equal = not results.resume.unmet_claims()
    same = "equal to the bit" if is_equal else "NOT EQUAL"
    console.print(f"losses, gradient norms and learning rates computed twice: {same}", soft_wrap=True)
    if is_equal:
        console.print(
            "The killed launch computed these steps from what it had in memory and the resumed one from "
            f"checkpoint-{results.resume.resumed_from} on the disk; the numbers are the same in all their bits, also "
            "in those that the table rounds off.",
            soft_wrap=True,
        )
    console.print()
    console.print(_stock_table(results))
    before, after = results.held_out()
    console.print(f"\nheld-out loss (modules of which training saw nothing): before {before:.3f}, after {after:.3f}\n")
    for number, sample in enumerate(results.samples, start=1):
        console.print(_sample_table(number, sample))


def _loss_table(results: Results) -> Table:
    table = Table()
    for heading in ("step", "one process", "two sharded processes", "difference"):
        table.add_column(heading, justify="right")
    for step, one, two in results.losses():
        table.add_row(str(step), f"{one:.6f}", f"{two:.6f}", f"{abs(one - two):.1e}")
    return table


def _resume_table(resume: Resume) -> Table:
    title = f"killed in the save of step {resume.killed_at}, resumed from checkpoint-{resume.resumed_from}"
    table = Table(title=title, title_justify="left")
    for heading in ("step", "loss", "computed again", "gradient norm", "computed again"):
        table.add_column(heading, justify="right")
    for one, two in resume.pairs():
        numbers = [f"{record[name]:.8f}" for name in ("loss", "grad_norm") for record in (one, two)]
        table.add_row(str(one["step"]), *numbers)
    return table


def _stock_table(results: Results) -> Table:
    stock_share, our_share = results.sharded_shares()
    wrapped_as = results.stock["stock_sharding"]["wrapped_as"]
    errors = results.stock["gradient_error"]
    table = Table(title="Accelerate alone against hf-fsdp, measured on this CPU", title_justify="left")
    table.add_column("")
    table.add_column("stock", justify="right")
    table.add_column("hf-fsdp", justify="right")
    table.add_row(
        f"parameters sharded (stock: fsdp=True, became {wrapped_as})", f"{stock_share:.1%}", f"{our_share:.1%}"
    )
    dropout = results.stock["lora_dropout"]
    table.add_row(
        f"gradient error of checkpointing under LoRA dropout {dropout}",
        f"{errors['stock']:.2%}",
        f"{errors['ours']:.2%}",
    )
    return table


def _sample_table(number: int, sample: Record) -> Table:
    table = Table(title=f"sample {number} (greedy)", title_justify="left", show_header=False, show_lines=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for label, text in (
        ("question", sample["question"]),
        ("before", sample["before"]),
        ("after", sample["after"]),
        ("the library's own", sample["true"]),
    ):
        table.add_row(label, _plain(text))
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # code has brackets, which rich would take for its markup


def samples_markdown(results: Results) -> str:
    """Return samples.md."""
    before, after = results.held_out()
    lines = ["# Samples before and after training", "", f"Held-out loss {before:.3f} before, {after:.3f} after.", ""]
    for number, sample in enumerate(results.samples, start=1):
        lines += [f"## {number}", "", sample["question"], ""]
        for label in ("before", "after"):
            lines += [f"**{label}**", "", "````text", sample[label], "````", ""]
        lines += [f"**the library's own**: {sample['true']}", ""]
    return "\n".join(lines)
