"""What a notebook does: a function that trains, given to `notebook_launcher`. Started by test_trainer_launch.py.

Nothing but the launcher is imported before it: it refuses to fork a process that has imported what may touch a GPU.
"""

from __future__ import annotations

import sys

from accelerate import notebook_launcher


def train(output_dir: str) -> None:
    """The training cells of the notebook."""
    import json

    from torch.distributed.tensor import DTensor
    from transformers import Trainer, TrainingArguments

    from hf_fsdp import FSDPCallback, FSDPConfig
    from tests.distributed.tiny_models import build_model
    from tests.distributed.training import QUIET_ARGUMENTS, build_dataset

    config = FSDPConfig(precision="fp32")
    trainer = Trainer(
        model=build_model("llama", tied=True),
        args=TrainingArguments(
            output_dir, max_steps=2, per_device_train_batch_size=2, **QUIET_ARGUMENTS, **config.trainer_kwargs()
        ),
        train_dataset=build_dataset(8),
        callbacks=[FSDPCallback()],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        parameters = list(trainer.model.parameters())
        result = {
            "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
            "steps": trainer.state.global_step,
            "processes": trainer.args.world_size,
        }
        with open(f"{output_dir}/result.json", "w", encoding="utf-8") as file:
            json.dump(result, file)


if __name__ == "__main__":
    notebook_launcher(train, args=(sys.argv[1],), num_processes=2, use_port=sys.argv[2])
    print("the notebook goes on")
