"""`FSDPCallback`: the one line that gives a plain Trainer, Seq2SeqTrainer or SFTTrainer this backend."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_fsdp.config.environment import from_accelerate_environment, is_fsdp_launch
from hf_fsdp.config.precedence import merge, stated_by
from hf_fsdp.config.schema import FSDPConfig, single_process_refused
from hf_fsdp.config.validate import note_config
from hf_fsdp.data.attention import compute_dtype
from hf_fsdp.data.packing import check_packing, packs_samples, prove_packing
from hf_fsdp.errors import IntegrationError, ShardingError
from hf_fsdp.integrations import accelerate as seams
from hf_fsdp.integrations import trainer as trainer_seam
from hf_fsdp.integrations import trl as trl_seam
from hf_fsdp.integrations.backend import TrainingBackend
from hf_fsdp.integrations.checkpoint_seams import install_checkpoint_seams
from hf_fsdp.integrations.checkpoints import Checkpoints
from hf_fsdp.integrations.data_draws import watch_training_data
from hf_fsdp.integrations.dynamo import read_dynamo_plugin, take_over_compilation
from hf_fsdp.integrations.evaluation import install_evaluation_seams
from hf_fsdp.integrations.fork import check_fork
from hf_fsdp.integrations.hub import install_hub_seams
from hf_fsdp.integrations.launch import launch_environment
from hf_fsdp.integrations.loss_scaling import FP16_PRESET
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.integrations.preemption import Preemption
from hf_fsdp.integrations.preemption_seams import install_preemption_seam
from hf_fsdp.integrations.train import install_train_seam
from hf_fsdp.policies.frozen_statistics import hold_frozen_statistics
from hf_fsdp.policies.packed_weights import ready_for_training
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.audit import Audit
from hf_fsdp.sharding.mesh import rank
from hf_fsdp.sharding.training_proof import TrainingProof


class FSDPCallback(TrainerCallback):
    """Trains a Trainer's model under real FSDP2, on GPUs and on CPUs, and proves it by an audit.

    Give it to the constructor: ``Trainer(..., callbacks=[FSDPCallback()])``; it has to be there before the model is
    prepared. Everything else stays Trainer's.

    Args:
        config: the sharding config. Without one it is read from ``TrainingArguments.fsdp_config`` (where
            ``**config.trainer_kwargs()`` puts it), else from what the script's own arguments and Accelerate's
            launch file say.
        prove_training: hash every frozen tensor before the first step and at the end of training, and refuse an end
            where one of them changed (on all ranks, by a `ShardingError`); say which trained ones never moved. A
            second for 7 to 9 GB, measured on one CPU core.

    In a single process the model is trained unsharded, with one line that says so, or refused under
    ``sharding.require_sharding``.

    Raises:
        HfFsdpError: from Trainer's constructor, for settings that cannot work; from ``train()``, ``evaluate()`` and
            ``predict()``, when the model is not sharded as asked.

    Example:
        >>> from hf_fsdp import FSDPCallback, FSDPConfig
        >>> callback = FSDPCallback(FSDPConfig(precision="fp32"))
    """

    hf_fsdp_evaluates = True  # evaluation.MARK: its seams act on Trainers that have this callback

    def __init__(self, config: FSDPConfig | None = None, *, prove_training: bool = True):
        if config is not None and not isinstance(config, FSDPConfig):
            raise IntegrationError(
                f"FSDPCallback was given a {type(config).__name__}, not an FSDPConfig",
                fix='FSDPCallback(FSDPConfig(precision="bf16-mixed")), or FSDPCallback(FSDPConfig.from_yaml(PATH))',
            )
        check_fork()
        self._config = config
        self._launch_environment = launch_environment()
        self._attached: TrainingBackend | None = None
        self._single_process = False
        self._prove_training = prove_training
        self._proof: TrainingProof | None = None
        self._first_step = 0
        self.preemption = Preemption()
        self.checkpoints = Checkpoints(self._say, self.preemption)
        # Before Trainer builds its Accelerator: on CPU, Accelerate would drop the FSDP plugin.
        seams.install_seams()
        trainer_seam.install_trainer_seam()
        install_evaluation_seams()
        install_hub_seams()
        install_preemption_seam()
        install_checkpoint_seams()
        install_train_seam()

    @property
    def audit(self) -> Audit | None:
        """The latest audit, or None before the model was prepared and in a single process."""
        return self._attached.audit if self._attached else None

    @property
    def frozen_audits(self) -> tuple[Audit, ...]:
        """The audits of models that are only run: a DPO reference, a teacher, a reward model."""
        return self._attached.frozen_audits if self._attached else ()

    # -- Trainer's events ---------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the settings, decide the config in force, and attach the backend."""
        if args.world_size <= 1:
            self._refuse_or_announce_single_process(args, kwargs.get("model"))
            return
        plugin = seams.current_plugin()
        trl_seam.install_trl_seams()
        problems = trainer_seam.check_training_arguments(args) + trl_seam.check_trl_arguments(args)
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
        lines += take_over_compilation(args, config)
        args.bf16 = config.precision.preset.startswith("bf16") or config.precision.preset == "auto"
        args.fp16 = config.precision.preset == FP16_PRESET
        seams.set_sync_each_batch(config.sharding.sync_each_batch)
        seams.set_checkpoint_format(config.checkpoint.format)
        if not is_fsdp_launch(self._launch_environment):
            # Building the plugin has set it; left there, a later Trainer without FSDP would get one.
            os.environ.pop("ACCELERATE_USE_FSDP", None)
        self._attached = TrainingBackend(
            config,
            Path(args.output_dir),
            is_printer=args.process_index == 0,
            accumulates=args.gradient_accumulation_steps > 1,
        )
        self.preemption.configured_grace = config.checkpoint.grace_seconds
        self.checkpoints.use(config.checkpoint)
        self._attached.packs = packs_samples(args)
        seams.attach_backend(self._attached)
        self._attached.say(*lines)
        if (model := kwargs.get("model")) is not None:
            self._attached.trained = weakref.ref(model)
            self._attached.say(*ready_for_training(model, config.precision.preset))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Audit the model that is about to be trained, with its optimizer."""
        backend = self._backend_in_force(args, model)
        assert model is not None
        if backend is None:
            self._prove_unsharded_packing(args, model)
        else:
            backend.begin_training(model, raw_optimizer(optimizer))
        hold_frozen_statistics(model)
        self._proof = TrainingProof(model) if self._prove_training else None
        self._first_step = state.global_step
        watch_training_data(train_dataloader, args)
        self.checkpoints.resume.restore_running_loss()
        self.checkpoints.test(model, None if args.save_strategy == SaveStrategy.NO else Path(args.output_dir))

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse an evaluation on a model that is not sharded."""
        if self._backend_in_force(args, model) is None:
            self._prove_unsharded_packing(args, model)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at loss and gradients before the step: always at the first, then whenever the step is logged."""
        if self._proof is not None and model is not None:
            self._proof.observe_gradients(model)
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
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse to save weights that a step on a loss that is not finite has spoiled; look at a save in flight."""
        self.checkpoints.poll()
        if model is not None and args.save_strategy != SaveStrategy.NO and not args.save_only_model:
            self.checkpoints.test_optimizer(model, raw_optimizer(optimizer))
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
            self._attached.after_step(model, raw_optimizer(optimizer))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Prove that frozen parts are what they were, and say what moved."""
        proof, self._proof = self._proof, None
        if proof is None or model is None:
            return
        best = state.best_global_step if args.load_best_model_at_end and state.best_model_checkpoint else None
        is_earlier = best is not None and best <= self._first_step < state.global_step
        report = proof.compare(model, earlier_step=best if is_earlier else None)
        self._say(*report.lines())
        if self._attached is not None:
            self._attached.end_training(report)

    def _say(self, *lines: str) -> None:
        if self._attached is not None:
            self._attached.say(*lines)
        elif rank() == 0:
            for line in lines:
                print(f"hf-fsdp: {line}", flush=True)

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
            {**from_accelerate_environment(self._launch_environment), **read_dynamo_plugin(args)},
        )
        lines = list(merged.overrides)
        lines += note_config(merged.config)
        if trainer_seam.checkpointing_is_on(args) and merged.config.activation_checkpointing.mode == "full":
            lines.append("gradient checkpointing: done by hf-fsdp (same blocks, random state kept), not by Trainer")
        return merged.config, lines

    def _refuse_or_announce_single_process(self, args: TrainingArguments, model: nn.Module | None) -> None:
        num_started = int(os.environ.get("WORLD_SIZE") or 1)
        if num_started > 1:
            raise IntegrationError(
                f"the launcher started {num_started} processes, but TrainingArguments sees one device and no group, "
                "so each process would train the whole model for itself",
                fix="TrainingArguments(..., use_cpu=True) on a machine without GPUs; "
                "with GPUs, one for each process (--nproc_per_node, --num_processes)",
                source=f"{type(args).__name__}(...)",
            )
        if seams.current_plugin() is not None:
            # Told FSDP, `accelerate launch` starts one process under torchrun, and Accelerate shards it over itself.
            raise IntegrationError(
                "one process was launched with FSDP: Accelerate would shard the model over that process by itself, "
                "with its own precision, and nothing of hf-fsdp would apply",
                fix="python SCRIPT, or distributed_type: 'NO' in the launch file, trains one process unsharded; "
                "--num_processes 2 shards",
                source="the launch file of Accelerate, or TrainingArguments(fsdp=...)",
            )
        config = self._config or FSDPConfig.from_trainer(args.fsdp_config or {}) or FSDPConfig()
        if config.sharding.require_sharding:
            raise ShardingError(single_process_refused(config.sources.get("sharding.require_sharding")))
        self.preemption.configured_grace = config.checkpoint.grace_seconds
        self.checkpoints.use(config.checkpoint)
        if not self._single_process:
            print(
                "hf-fsdp: one process, so the model is trained unsharded; of the fsdp settings only checkpoint: counts "
                "(recipes hand precision and activation checkpointing to Trainer)"
            )
            if config.precision.preset == FP16_PRESET and args.device.type == "cpu":
                print("hf-fsdp: without sharding, Trainer computes fp16 on a CPU in fp32")
        self._single_process = True
        if problems := check_packing(args):
            raise IntegrationError(problems)
        for line in ready_for_training(model, config.precision.preset) if model is not None else ():
            print(f"hf-fsdp: {line}")

    def _prove_unsharded_packing(self, args: TrainingArguments, model: nn.Module | None) -> None:
        if model is not None and packs_samples(args):
            prove_packing(model, compute_dtype("auto", bf16=args.bf16, fp16=args.fp16), autocast=True)

    def _backend_in_force(self, args: TrainingArguments, model: nn.Module | None) -> TrainingBackend | None:
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
