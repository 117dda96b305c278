"""Nothing fits: what would. Every piece of advice was simulated before it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_fsdp.config.gpus import GPUS
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.affine import fit_affine
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.placement import place_gpus
from hf_fsdp.plan.search.structures import leanest_job, with_keys
from hf_fsdp.plan.simulation import Simulation
from hf_fsdp.units import format_bytes

if TYPE_CHECKING:
    from hf_fsdp.plan.search.search import Search

_MOST_GPUS = 1024
_SHORTER = (2, 4)
_SHORTEST = 64


def explain_nothing_fits(run: Search) -> PlanError:
    """Return the error of a search in which nothing fits: what the nearest candidate lacks, and what would do."""
    request = run.request
    misses = sorted(run.candidates(), key=lambda item: item.missing_bytes + item.missing_host_bytes)
    nearest = misses[0]
    options = _Options(run.evaluation)
    return PlanError(
        f"{request.model.name} with rows of {request.max_length} tokens ({request.method.name}) fits in no way on "
        f"{request.num_gpus} x {request.gpu_name}: the nearest lacks {_lacks(nearest)}",
        near=_describe(nearest),
        fix="; or ".join(options.found()) or "--min-gpus, which looks for hardware that does it",
        source=request.config.sources.get("offload.parameters"),
    )


def _lacks(candidate: Candidate) -> str:
    parts = []
    if candidate.missing_bytes:
        parts.append(f"{format_bytes(candidate.missing_bytes)} on each GPU")
    if candidate.missing_host_bytes:
        parts.append(f"{format_bytes(candidate.missing_host_bytes)} of host memory on each machine")
    return " and ".join(parts) or "nothing that is known"


def _describe(candidate: Candidate) -> str:
    from hf_fsdp.plan.report.settings import describe_job

    source = "simulated" if candidate.simulation is not None else "at least, by arithmetic"
    return f"{describe_job(candidate.job)}: {format_bytes(candidate.peak_bytes)} {source}"


@dataclass(frozen=True)
class _Option:
    """A change of the job, and how it is told when it does."""

    job: Job
    text: str


class _Options:
    """Changes of the leanest job without offload that may let it fit."""

    def __init__(self, evaluation: Evaluation):
        self._evaluation = evaluation
        self._request = evaluation.request
        self._job = leanest_job(self._request)

    def found(self) -> list[str]:
        """Return those that fit, as a person types them."""
        options = [*self._methods(), *self._shorter_rows(), *self._unsaid()]
        peaks = self._run([option.job for option in options])
        texts = [
            option.text
            for option, peak in zip(options, peaks, strict=True)
            if peak is not None and self._evaluation.has_room(option.job, peak.peak.num_bytes)
        ]
        shorter = [text for text in texts if text.startswith("--max-length")][1:]  # the longest is enough
        return [text for text in (self._more_gpus(), self._bigger_gpu()) if text] + [
            text for text in texts if text not in shorter
        ]

    def _run(self, jobs: list[Job]) -> list[Simulation | None]:
        """Simulate `jobs`; one that cannot be is no advice, and no second error."""
        try:
            return list(self._evaluation.run(jobs))
        except PlanError:
            return [self._one(job) for job in jobs]

    def _one(self, job: Job) -> Simulation | None:
        try:
            return self._evaluation.run([job])[0]
        except PlanError:
            return None

    # -- other trainings ----------------------------------------------------------------------------------------------

    def _methods(self) -> list[_Option]:
        method = self._request.method
        others = {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(method.name, ())
        options = []
        for name in others:
            other = dataclasses.replace(method, name=name, load_dtype="auto", trainable=())
            options.append(_Option(dataclasses.replace(self._job, method=other), f"--method {name}"))
        return options

    def _shorter_rows(self) -> list[_Option]:
        options = []
        for divisor in _SHORTER:
            length = self._request.max_length // divisor // _SHORTEST * _SHORTEST
            if length >= _SHORTEST:
                batch = dataclasses.replace(self._job.batch, num_tokens=length)
                options.append(_Option(dataclasses.replace(self._job, batch=batch), f"--max-length {length}"))
        return options

    def _unsaid(self) -> list[_Option]:
        """What the config forbids; what it leaves open the search has tried."""
        config, options = self._request.config, []

        def says(section: str) -> bool:
            return any(key.startswith(section) for key in config.said)

        if says("offload.") and not config.offload.parameters and self._request.num_gpus > 1:
            keys: dict[str, object] = {"offload.parameters": True, "offload.optimizer": True}
            job = dataclasses.replace(self._job, fsdp=with_keys(self._job.fsdp, keys))
            options.append(_Option(job, "offload: parameters"))
        if says("activation_checkpointing.") and config.activation_checkpointing.mode == "none":
            keys = {"activation_checkpointing.mode": "full"}
            job = dataclasses.replace(self._job, fsdp=with_keys(self._job.fsdp, keys))
            options.append(_Option(job, "activation_checkpointing: full"))
        return options

    # -- other hardware -----------------------------------------------------------------------------------------------

    def _more_gpus(self) -> str | None:
        """The fewest GPUs of this kind, by a line in 1/GPUs that ends at a simulation."""
        if self._request.config.said & {"sharding.dp_shard_size", "sharding.dp_replicate_size"}:
            return None
        near, far = self._request.num_gpus * 2, self._request.num_gpus * 16
        first, last = self._run([self._with_gpus(near), self._with_gpus(far)])
        if first is None or last is None:
            return None
        fit = fit_affine([(1 / near, first), (1 / far, last)])
        number = near
        while number <= _MOST_GPUS:
            if self._has_room(number, fit.peak_bytes_at(1 / number)):
                proof = self._one(self._with_gpus(number))
                if proof is not None and self._has_room(number, proof.peak.num_bytes):
                    return self._told_gpus(number)
            number *= 2
        return None

    def _with_gpus(self, number: int) -> Job:
        return dataclasses.replace(self._job, world_size=number, num_micro_batches=2)

    def _placed(self, number: int) -> PlanRequest:
        gpus = place_gpus(number, self._request.gpus.gpu, None)
        return dataclasses.replace(self._request, gpus=gpus)

    def _has_room(self, number: int, peak_bytes: int) -> bool:
        return Evaluation(self._placed(number), _never).has_room(self._with_gpus(number), peak_bytes)

    def _told_gpus(self, number: int) -> str:
        gpus = self._placed(number).gpus
        name = f"x{gpus.gpu.name}" if gpus.gpu is not None else ""
        text = f"--gpus {f'{gpus.num_nodes}x' if gpus.num_nodes > 1 else ''}{gpus.count}{name}"
        total = self._request.global_batch_size
        if total % number:
            text += f" --global-batch-size {(total // number + 1) * number}"
        return text

    def _bigger_gpu(self) -> str | None:
        """The smallest known GPU on which as many would do."""
        peak = self._one(self._job)
        if peak is None:
            return None
        now = self._request.gpu_memory_bytes
        for gpu in sorted(GPUS, key=lambda gpu: (gpu.usable_bytes, gpu.half_tflops or 0)):
            if gpu.usable_bytes <= now or (not gpu.has_bf16 and self._request.precision.startswith("bf16")):
                continue
            gpus = dataclasses.replace(self._request.gpus, gpu=gpu)
            request = dataclasses.replace(self._request, gpus=gpus, gpu_memory_bytes=gpu.usable_bytes)
            if Evaluation(request, _never).has_room(self._job, peak.peak.num_bytes):
                nodes = f"{gpus.num_nodes}x" if gpus.num_nodes > 1 else ""
                return f"--gpus {nodes}{gpus.count}x{gpu.name}"
        return None


def _never(jobs: Sequence[Job]) -> list[Simulation]:
    """The simulator of an evaluation that is asked for room only."""
    raise AssertionError(f"{len(jobs)} jobs to simulate, where none should be")
