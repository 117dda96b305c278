"""What a training changed, tensor by tensor: frozen parts to the last bit as they were, trained ones all moved.

Every rank hashes its own shards before the first step and after the last one; names are compared, no values sent.
That costs one reading of this rank's weights at each end (7 to 9 GB a second measured on one CPU core; shards on a
device are copied to the host, a tensor at a time) and a few bytes a tensor in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_fsdp.errors import Problem, ShardingError
from hf_fsdp.policies.model_parts import find_parts
from hf_fsdp.policies.packed_weights import quantization_tensors
from hf_fsdp.sharding.agree import checksum
from hf_fsdp.sharding.buffers import persistent_buffers
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.sharding.shards import local_tensor, reshard_all


@dataclass(frozen=True)
class PartProof:
    """One part after training. Counts are of tensors.

    Args:
        num_frozen: frozen parameters, and the saved buffers of a part of which nothing is trained.
        num_frozen_changed: of those, how many differ in any bit.
        num_trained: trained parameters.
        num_moved: of those, how many differ from what they were.
        never_got_a_gradient: trained, and never reached by backward: LLaVA's last tower layers, whose output nobody
            reads because features are taken from an earlier one.
        did_not_move: got gradients, and is bit for bit what it was.
    """

    part: str
    num_frozen: int = 0
    num_frozen_changed: int = 0
    num_trained: int = 0
    num_moved: int = 0
    never_got_a_gradient: tuple[str, ...] = ()
    did_not_move: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingReport:
    """What a training changed, by part; the same on every rank.

    Args:
        parts: one row each.
        num_steps: steps of this training.
        changed_frozen: names of frozen tensors that differ.
        earlier_step: the step whose weights the model has now, where those are from before this training's first step:
            a resumed run that did not get better loads its best ones. What moved is then not to be seen.
    """

    parts: tuple[PartProof, ...]
    num_steps: int
    changed_frozen: tuple[str, ...] = ()
    earlier_step: int | None = None

    def lines(self) -> list[str]:
        """Return a line for each part, and one for each kind of tensor that was to be trained and was not.

        None where no step was taken: a run that is resumed from its last step.
        """
        lines: list[str] = []
        if self.num_steps == 0:
            return lines
        if self.earlier_step is not None:
            lines.append(
                f"the best weights are those of step {self.earlier_step}, from before this training's {self.num_steps} "
                "steps; what these moved is not in them"
            )
        for row in self.parts:
            said = []
            if row.num_trained and self.earlier_step is None:
                said.append(f"{row.num_moved} of {row.num_trained} trained tensors moved")
            if row.num_frozen:
                kept = row.num_frozen - row.num_frozen_changed
                said.append(f"{kept} of {row.num_frozen} frozen tensors are bit for bit what they were")
            lines += [f"{row.part}: {', '.join(said)}"] if said else []
            if self.earlier_step is not None:
                continue
            if row.never_got_a_gradient:
                lines.append(
                    f"{row.part}: {_some(row.never_got_a_gradient)} never got a gradient, which is normal where the "
                    "model does not use its output (features from an inner layer); freezing it saves its optimizer "
                    "state"
                )
            if row.did_not_move and self.num_steps > 1:  # at the first step of LoRA half of its gradients are zero
                lines.append(
                    f"warning: {row.part}: {_some(row.did_not_move)} got gradients and did not move: is the learning "
                    "rate larger than the rounding of what is stored (bf16-true)?"
                )
        return lines

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, as `audit.json` holds them under ``after_training``."""
        return asdict(self)


class TrainingProof:
    """Watches one training from its first step to its end; make it right before the first step.

    Args:
        model: as it is trained: frozen, adapted, sharded and read back from a checkpoint already.
    """

    def __init__(self, model: nn.Module):
        self._parts = _parts_of_tensors(model)
        self._is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._without_gradient = {name for name, trained in self._is_trained.items() if trained}
        self._before = _hashes(model, self._parts)
        self._num_steps = 0

    def observe_gradients(self, model: nn.Module) -> None:
        """Note which parameters have a gradient; between backward and the step. Local, and free once all had one."""
        self._num_steps += 1
        if not self._without_gradient:
            return
        for name, parameter in model.named_parameters():
            if name in self._without_gradient and parameter.grad is not None:
                self._without_gradient.discard(name)

    def compare(self, model: nn.Module, *, earlier_step: int | None = None) -> TrainingReport:
        """Return what has changed since the beginning; collective.

        Args:
            model: at the end.
            earlier_step: see `TrainingReport`.

        Raises:
            ShardingError: on every rank, when a frozen tensor differs on any.
        """
        after = _hashes(model, self._parts)
        mine = {name for name, before in self._before.items() if after.get(name) != before}
        everyone: list[tuple[set[str], set[str]]] = agree_all((mine, self._without_gradient))
        changed = set().union(*(names for names, _ in everyone))
        # Of a tensor with fewer rows than ranks, some ranks hold nothing; it is the same gradient on all of them.
        never = set.intersection(*(names for _, names in everyone))
        # What was unfrozen in the course of the training is trained.
        is_trained = {
            name: self._is_trained.get(name, False) or now.requires_grad for name, now in model.named_parameters()
        }
        report = replace(
            _report(self._parts, is_trained, changed, never), num_steps=self._num_steps, earlier_step=earlier_step
        )
        if report.changed_frozen:
            ranks = [rank for rank, (names, _) in enumerate(everyone) if names & set(report.changed_frozen)]
            raise ShardingError(_problem(report, self._parts, ranks))
        return report


def _report(
    parts: Mapping[str, str], is_trained: Mapping[str, bool], changed: set[str], never: set[str]
) -> TrainingReport:
    rows = []
    for part in dict.fromkeys(parts.values()):
        names = [name for name, own in parts.items() if own == part]
        trained = [name for name in names if is_trained.get(name, False)]
        frozen = [name for name in names if name not in set(trained)]
        still = [name for name in trained if name not in changed]
        rows.append(
            PartProof(
                part=part,
                num_frozen=len(frozen),
                num_frozen_changed=sum(name in changed for name in frozen),
                num_trained=len(trained),
                num_moved=len(trained) - len(still),
                never_got_a_gradient=tuple(name for name in still if name in never),
                did_not_move=tuple(name for name in still if name not in never),
            )
        )
    return TrainingReport(
        parts=tuple(rows),
        num_steps=0,
        changed_frozen=tuple(name for name in parts if name in changed and not is_trained.get(name, False)),
    )


def _problem(report: TrainingReport, parts: Mapping[str, str], ranks: list[int]) -> Problem:
    names = report.changed_frozen
    where = sorted({parts[name] for name in names})
    return Problem(
        message=f"{len(names)} frozen tensors of the {', '.join(where)} are not what they were before training "
        f"({_some(names)}; on rank {', '.join(map(str, ranks))})",
        fix="find what writes to them: a callback, a weight average, requires_grad set during training, or statistics "
        "that a forward keeps; where it is meant, FSDPCallback(prove_training=False)",
    )


# -- tensors ----------------------------------------------------------------------------------------------------------


def _parts_of_tensors(model: nn.Module) -> dict[str, str]:
    """Return the part of every tensor that is looked at: parameters, and what else a wholly frozen part consists of."""
    found = find_parts(model)
    parts = found.by_parameter()
    named = dict(model.named_parameters())
    trained = {part for part, names in found.names.items() if any(named[name].requires_grad for name in names)}
    owners: dict[str, str] = {}
    for name, part in parts.items():
        for path in _prefixes(name):
            if owners.setdefault(path, part) != part:
                owners[path] = ""  # several parts lie there
    beside = {
        name: part
        for name in (*persistent_buffers(model), *dict(_quantization(model)))
        if (part := next((owners[path] for path in _prefixes(name) if owners.get(path)), ""))
    }
    # Scales of packed weights never train; running statistics belong to a part that does.
    scales = dict(_quantization(model))
    return parts | {name: part for name, part in beside.items() if part not in trained or name in scales}


def _prefixes(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a tensor, the innermost first."""
    path = name.rpartition(".")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _quantization(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, (holder, attribute) in quantization_tensors(path, module).items():
            yield name, getattr(holder, attribute)


def _hashes(model: nn.Module, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return a hash of this rank's part of every wanted tensor."""
    reshard_all(model)  # after an evaluation some units are still whole, and their parameters not the shards
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model), **dict(_quantization(model))}
    return {name: checksum(local_tensor(tensors[name])) for name in wanted if name in tensors}


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
