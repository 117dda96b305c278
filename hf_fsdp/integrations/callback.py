"""`FSDPCallback`: the one line that gives a plain Trainer, Seq2SeqTrainer or SFTTrainer this backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.config.environment import from_accelerate_environment, is_fsdp_launch, scrubbed_fsdp_environment
from hf_fsdp.config.precedence import merge, stated_by
from hf_fsdp.config.schema import FSDPConfig, single_process_refused
from hf_fsdp.config.validate import note_config
from hf_fsdp.errors import IntegrationError, ShardingError
from hf_fsdp.integrations import accelerate as seams
from hf_fsdp.integrations import trainer as trainer_seam
from hf_fsdp.integrations.wandb import log_audit, log_first_step
from hf_fsdp.monitor.first_step import StepMonitor
from hf_fsdp.sharding.apply import AppliedSharding, apply_fsdp, get_applied_sharding
from hf_fsdp.sharding.audit import Audit, audit_sharding
from hf_fsdp.sharding.audit_table import render_audit
from hf_fsdp.units import format_bytes

AUDIT_FILE = "audit.json"


class FSDPCallback(TrainerCallback):
    """Trains a Trainer's model under real FSDP2, on GPUs and on CPUs, and proves it by an audit.

    Give it to the constructor: ``Trainer(..., callbacks=[FSDPCallback()])``; it has to be there before the model is
    prepared. Everything else stays Trainer's.

    Args:
        config: the sharding config. Without one it is read from ``TrainingArguments.fsdp_config`` (where
            ``**config.trainer_kwargs()`` puts it), else from what the script's own arguments and Accelerate's
            launch file say.

    In a single process the model is trained unsharded, with one line that says so, or refused under
    ``sharding.require_sharding``.

    Raises:
        HfFsdpError: from Trainer's constructor, for settings that cannot work; from ``train()``, ``evaluate()`` and
            ``predict()``, when the model is not sharded as asked.

    Example:
        >>> from hf_fsdp import FSDPCallback, FSDPConfig
        >>> callback = FSDPCallback(FSDPConfig(precision="fp32"))
    """

    def __init__(self, config: FSDPConfig | None = None):
        if config is not None and not isinstance(config, FSDPConfig):
            raise IntegrationError(
                f"FSDPCallback was given a {type(config).__name__}, not an FSDPConfig",
                fix='FSDPCallback(FSDPConfig(precision="bf16-mixed")), or FSDPCallback(FSDPConfig.from_yaml(PATH))',
            )
        self._config = config
        self._launch_environment = _launch_environment()
        self._attached: _TrainerBackend | None = None
        self._single_process = False
        # Before Trainer builds its Accelerator: on CPU, Accelerate would drop the FSDP plugin.
        seams.install_seams()
        trainer_seam.install_trainer_seam()

    @property
    def audit(self) -> Audit | None:
        """The latest audit, or None before the model was prepared and in a single process."""
        return self._attached.audit if self._attached else None

    # -- Trainer's events ---------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the settings, decide the config in force, and attach the backend."""
        if args.world_size <= 1:
            self._refuse_or_announce_single_process(args)
            return
        plugin = seams.current_plugin()
        problems = trainer_seam.check_training_arguments(args)
        if not problems:  # a plugin that is missing for a reason named above needs no second message
            problems += trainer_seam.check_plugin(plugin, args.world_size)
        if problems:
            raise IntegrationError(problems)
        if parallel := seams.check_parallelism():
            raise IntegrationError(
                f"Accelerate's parallelism_config says {parallel}; this release shards data-parallel axes only",
                fix="leave tensor, context and sequence parallelism off, "
                "and hybrid sharding to sharding.dp_replicate_size",
            )
        config, lines = self._config_in_force(args)
        trainer_seam.turn_checkpointing_off(args)
        args.bf16 = config.precision.preset.startswith("bf16") or config.precision.preset == "auto"
        seams.set_sync_each_batch(config.sharding.sync_each_batch)
        seams.set_checkpoint_format(config.checkpoint.format)
        if not is_fsdp_launch(self._launch_environment):
            # Building the plugin has set it; left there, a later Trainer without FSDP would get one.
            os.environ.pop("ACCELERATE_USE_FSDP", None)
        self._attached = _TrainerBackend(
            config,
            Path(args.output_dir),
            is_printer=args.process_index == 0,
            accumulates=args.gradient_accumulation_steps > 1,
        )
        seams.attach_backend(self._attached)
        self._attached.say(*lines)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Audit the model that is about to be trained, with its optimizer."""
        backend = self._backend_in_force(args, model)
        if backend is None:
            return
        assert model is not None
        backend.begin_training(model, _inner_optimizer(optimizer))

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse an evaluation on a model that is not sharded."""
        self._backend_in_force(args, model)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at loss and gradients before the step: always at the first, then whenever the step is logged."""
        if self._attached is None or model is None:
            return
        step = state.global_step + 1
        is_logged = state.logging_steps and step % max(1, int(state.logging_steps)) == 0
        self._attached.before_step(model, step, check=bool(is_logged))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse to save weights that a step on a loss that is not finite has spoiled."""
        if self._attached is not None and model is not None and control.should_save:
            self._attached.before_save(model, state.global_step)

    on_epoch_end = on_step_end  # `save_strategy="epoch"` decides only there

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at what the first step did."""
        if self._attached is not None and model is not None:
            self._attached.after_step(model, _inner_optimizer(optimizer))

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _config_in_force(self, args: TrainingArguments) -> tuple[FSDPConfig, list[str]]:
        carried = FSDPConfig.from_trainer(args.fsdp_config or {})
        given = self._config or carried or FSDPConfig()
        stated = trainer_seam.read_training_arguments(args)
        if carried is not None and self._config is not None:
            merge(carried, stated, {})  # raises where the arguments contradict themselves
            stated = {**stated, **stated_by(carried, "TrainingArguments.fsdp_config")}
        merged = merge(
            given,
            stated,
            from_accelerate_environment(self._launch_environment),
        )
        lines = list(merged.overrides)
        lines += note_config(merged.config)
        if trainer_seam.checkpointing_is_on(args) and merged.config.activation_checkpointing.mode == "full":
            lines.append("gradient checkpointing: done by hf-fsdp (same blocks, random state kept), not by Trainer")
        return merged.config, lines

    def _refuse_or_announce_single_process(self, args: TrainingArguments) -> None:
        num_started = int(os.environ.get("WORLD_SIZE") or 1)
        if num_started > 1:
            raise IntegrationError(
                f"the launcher started {num_started} processes, but TrainingArguments sees one device and no group, "
                "so each process would train the whole model for itself",
                fix="TrainingArguments(..., use_cpu=True) on a machine without GPUs; "
                "with GPUs, one for each process (--nproc_per_node, --num_processes)",
                source=f"{type(args).__name__}(...)",
            )
        config = self._config or FSDPConfig.from_trainer(args.fsdp_config or {}) or FSDPConfig()
        if config.sharding.require_sharding:
            raise ShardingError(single_process_refused(config.sources.get("sharding.require_sharding")))
        if not self._single_process:
            print("hf-fsdp: one process, so the model is trained unsharded and fsdp settings do not apply")
        self._single_process = True

    def _backend_in_force(self, args: TrainingArguments, model: nn.Module | None) -> _TrainerBackend | None:
        if args.world_size <= 1:
            return None
        if self._attached is None:
            raise IntegrationError(
                "FSDPCallback was added after Trainer was built, so its model was prepared without it",
                fix="give it to the constructor: Trainer(..., callbacks=[FSDPCallback()])",
            )
        if model is not None and get_applied_sharding(model) is None:
            raise ShardingError(
                f"{type(model).__name__} was prepared without hf-fsdp and is not sharded by it",
                fix="do not call accelerator.prepare or replace trainer.model by hand after Trainer was built; "
                "use one Trainer at a time",
            )
        return self._attached


class _TrainerBackend:
    """What the seams call for one Trainer."""

    def __init__(self, config: FSDPConfig, output_dir: Path, is_printer: bool, accumulates: bool):
        self._config = config
        self._output_dir = output_dir
        self._is_printer = is_printer
        self._accumulates = accumulates
        self._monitor = StepMonitor()
        self._said: set[str] = set()
        self._printed_audit_of: int | None = None
        self._waits_for_first_step = False
        self.audit: Audit | None = None

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
        self._waits_for_first_step = True
        self.audit = audit_sharding(model, optimizer)
        if self._is_printer:
            self.audit.write(self._output_dir / AUDIT_FILE)
            log_audit(self.audit)

    def before_step(self, model: nn.Module, step: int, check: bool) -> None:
        self._monitor.close_step(step)
        if check or self._waits_for_first_step:
            self._monitor.check_finite(model, step)
        if self._waits_for_first_step:
            self._monitor.before_step(model)

    def before_save(self, model: nn.Module, step: int) -> None:
        self._monitor.check_finite(model, step, is_taken=True)

    def after_step(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        # A warm-up starts at learning rate 0, where nothing moves and nothing can be learned about who should have.
        if not self._waits_for_first_step or optimizer is None or not _has_learning_rate(optimizer):
            return
        self._waits_for_first_step = False
        report = self._monitor.after_step(model, optimizer)
        self.say(*(f"warning: {line}" for line in report.lines()))
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


_environment_at_start: dict[str, str] = {}


def _launch_environment() -> dict[str, str]:
    """Return the environment as the launcher left it, rid of stray `FSDP_*` variables.

    Taken once: building an FSDP plugin sets ``ACCELERATE_USE_FSDP`` itself, so later it says nothing about the launch.
    """
    if not _environment_at_start:
        scrub = scrubbed_fsdp_environment(os.environ)
        for name in scrub.names:
            del os.environ[name]
        if scrub.line and int(os.environ.get("RANK", 0)) == 0:
            print(scrub.line)
        _environment_at_start.update(os.environ)
    return dict(_environment_at_start)


def _inner_optimizer(optimizer: Any) -> Optimizer | None:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _has_learning_rate(optimizer: Optimizer) -> bool:
    return any(float(group["lr"]) > 0 for group in optimizer.param_groups)
