"""What the seams call while a model is trained by this package: shard it, audit it, look at its first steps."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.data.packing import prove_packing
from hf_fsdp.errors import IntegrationError
from hf_fsdp.integrations.loss_scaling import FP16_PRESET, LossScale, set_scaler
from hf_fsdp.integrations.wandb import log_audit, log_first_step, log_loss_scale
from hf_fsdp.monitor.first_step import StepMonitor
from hf_fsdp.sharding.apply import AppliedSharding, apply_fsdp, get_applied_sharding
from hf_fsdp.sharding.audit import Audit, audit_sharding
from hf_fsdp.sharding.audit_table import render_audit
from hf_fsdp.sharding.frozen import shard_frozen_model
from hf_fsdp.sharding.training_proof import TrainingReport
from hf_fsdp.units import format_bytes

AUDIT_FILE = "audit.json"


class TrainingBackend:
    """Shards, audits and looks at the steps of one training, Trainer's or a loop of one's own."""

    def __init__(self, config: FSDPConfig, output_dir: Path, is_printer: bool, accumulates: bool):
        self._config = config
        self._output_dir = output_dir
        self._is_printer = is_printer
        self._accumulates = accumulates
        self._monitor = StepMonitor()
        self._scales: dict[int, LossScale] = {}
        self._was_skipped = False
        self._said: set[str] = set()
        self._step = 0
        self._printed_audit_of: int | None = None
        self.packs = False
        self._waits_for_first_step = False
        self.audit: Audit | None = None
        self.frozen_audits: tuple[Audit, ...] = ()
        self.trained: weakref.ref[nn.Module] | None = None

    def say(self, *lines: str) -> None:
        """Print each line once, on one rank."""
        for line in lines:
            if self._is_printer and line not in self._said:
                print(f"hf-fsdp: {line}", flush=True)
            self._said.add(line)

    def shard(self, model: nn.Module, optimizers: list[Optimizer], device_type: str) -> None:
        applied = apply_fsdp(model, self._config, optimizers=optimizers, device_type=device_type)
        self.audit = audit_sharding(model, optimizers[0] if optimizers else None)
        self._announce(model, applied)
        if self.packs:
            share = prove_packing(model)
            self.say(f"packing: a packed sample gets the logits it gets alone (off by {share:.1g} of a leak)")

    def shard_frozen(self, model: nn.Module, device_type: str) -> None:
        """Shard a model that is only run, and print its audit; `audit` stays the trained model's."""
        if self.trained is not None and self.trained() is model:
            return self.shard(model, [], device_type)  # evaluated before it is trained
        is_new = get_applied_sharding(model) is None
        shard_frozen_model(model, self._config, device_type)
        audit = audit_sharding(model)
        self.frozen_audits = (*self.frozen_audits, audit) if is_new else self.frozen_audits
        if is_new and self._is_printer:
            print(f"hf-fsdp: {audit.model_class} is only run (reference, teacher or reward): frozen", flush=True)
            print(render_audit(audit), flush=True)

    def set_scaler(self, accelerator: Accelerator, optimizers: list[Optimizer]) -> None:
        set_scaler(accelerator, self._config, optimizers)

    def after_scaled_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Follow the loss scale of a step that was just tried, and say that it was skipped.

        Raises:
            NumericsError: on every rank, when no scale can help.
        """
        scale = self._scales.setdefault(id(optimizer), LossScale())
        self._was_skipped = optimizer.step_was_skipped
        line = scale.after_step(optimizer.scaler, self._step_of(optimizer), was_skipped=self._was_skipped)
        if self._is_printer:
            log_loss_scale(scale.scale, scale.num_skipped)
        if line is not None:
            self.say(line)

    def _step_of(self, optimizer: AcceleratedOptimizer) -> int:
        """The number of the step that is being tried, counted from 1."""
        return self._step

    def observe_loss(self, loss: torch.Tensor) -> None:
        self._monitor.observe_loss(loss)

    def begin_training(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        applied = get_applied_sharding(model)
        if applied is not None and applied.config != self._config:
            raise IntegrationError(
                "the model was prepared under the FSDPConfig of another Trainer, which was built later",
                fix="finish with one Trainer before the next is built, or give both the same FSDPConfig",
            )
        self._monitor = StepMonitor()
        self._scales.clear()
        self._waits_for_first_step = True
        self.audit = audit_sharding(model, optimizer)
        if self._is_printer:
            self.audit.write(self._output_dir / AUDIT_FILE)
            log_audit(self.audit)

    def before_step(self, model: nn.Module, step: int, check: bool) -> None:
        self._step = step
        self._monitor.close_step(step)
        # With a scaler, values that are not finite are expected: the step is skipped, and that is checked after it.
        if (check or self._waits_for_first_step) and not self._scales_loss:
            self._monitor.check_finite(model, step)
        if self._waits_for_first_step:
            self._monitor.before_step(model)

    def before_save(self, model: nn.Module, step: int) -> None:
        if not self._scales_loss:
            self._monitor.check_finite(model, step, is_taken=True)

    def after_step(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if self._was_skipped:
            return
        # A warm-up starts at learning rate 0, where nothing moves and nothing can be learned about who should have.
        if not self._waits_for_first_step or optimizer is None or not has_learning_rate(optimizer):
            return
        self._waits_for_first_step = False
        report = self._monitor.after_step(model, optimizer)
        self.say(*(f"warning: {line}" for line in report.lines()))
        if (applied := get_applied_sharding(model)) is not None and applied.activations is not None:
            self.say(*(f"warning: {line}" for line in applied.activations.findings()))
        if not report.lines():
            dtypes = "+".join(sorted(set(report.optimizer_state_dtypes.values()))) or "none"
            self.say(
                f"first step: every trained parameter got a gradient, those with one that is not zero moved; "
                f"optimizer state: {dtypes}"
            )
        if self._is_printer and self.audit is not None:
            self.audit.add_first_step(report.without_gradient, report.not_moved, report.optimizer_state_dtypes)
            self.audit.write(self._output_dir / AUDIT_FILE)
            log_first_step(report)

    def end_training(self, report: TrainingReport) -> None:
        """Keep what the training has changed with the audit."""
        if self._is_printer and self.audit is not None:
            self.audit.add_training(report)
            self.audit.write(self._output_dir / AUDIT_FILE)

    @property
    def _scales_loss(self) -> bool:
        return self._config.precision.preset == FP16_PRESET

    def _announce(self, model: nn.Module, applied: AppliedSharding) -> None:
        if self._printed_audit_of == id(applied) or self.audit is None:
            return
        self._printed_audit_of = id(applied)
        if applied.replaced_model_checkpointing:
            self.say("the model's own gradient checkpointing was on and is replaced by hf-fsdp's setting")
        if not self._config.sharding.sync_each_batch and self._accumulates:
            held = 4 * self.audit.num_trained
            self.say(
                f"sharding.sync_each_batch: false keeps whole fp32 gradients between micro-batches: "
                f"{format_bytes(held)} on every process (estimated, 4 bytes a trained parameter)"
            )
        if self._is_printer:
            print(render_audit(self.audit), flush=True)


def has_learning_rate(optimizer: Optimizer) -> bool:
    """Return whether a step would move anything: a warm-up starts at zero."""
    return any(float(group["lr"]) > 0 for group in optimizer.param_groups)
