"""Fine-tune a causal language model on text with TRL's `SFTTrainer`, fully sharded by `FSDPCallback`.

    accelerate launch --config_file configs/fsdp_llama7b.yaml recipes/text/train.py configs/train/llama2_7b_full.yaml
    torchrun --nproc_per_node 8 recipes/text/train.py configs/train/llama2_7b_lora.yaml --learning_rate 1e-4
    python recipes/text/train.py my_run.yaml --fsdp.precision fp32 --max_steps 10       # one process, not sharded

A run config is one YAML mapping: TRL's and transformers' own keys (`SFTConfig`, `ModelConfig`, `ScriptArguments`), the
keys of `RecipeArguments` below, and an `fsdp:` section. Each can be overridden on the command line, `_` and `-` alike.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config
from trl.chat_template_utils import get_training_chat_template

from hf_fsdp import (
    FSDPCallback,
    MemoryPlanCallback,
    MetricsCallback,
    SamplesCallback,
    data,
    load_sharded,
    prepare_wandb,
    wandb_sync_line,
)
from hf_fsdp.data import ConfigError, HfFsdpError

RANK = int(os.environ.get("RANK") or 0)


def option(default: Any, text: str) -> Any:
    """Return an argument with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class RecipeArguments:
    """What this recipe adds to TRL's and transformers' arguments."""

    global_batch_size: int | None = option(None, "Samples a step over all processes; accumulation follows from it.")
    chat_template: str | None = option(None, "One of hf_fsdp/data/templates by name, e.g. llama2, or a Jinja file.")
    rename_columns: list[str] | None = option(None, "OLD=NEW for each: question=prompt answer=completion.")
    dataset_format: str = option("auto", f"auto, or where the columns fit several: {', '.join(data.FORMATS)}.")
    eval_file: str | None = option(None, "A file with held-out examples.")
    eval_fraction: float | None = option(None, "Share of the training examples to hold out, e.g. 0.05.")
    eval_samples: int = option(0, "Show so many greedy answers to held-out examples at each evaluation.")
    print_examples: int = option(0, "Print so many training examples with the tokens that count in the loss.")
    preview: int = option(0, "Print so many training examples as trained, and leave before any weights are loaded.")
    require_sharding: bool = option(False, "Refuse to train in one process, where nothing is sharded.")
    plan_memory: bool = option(False, "Predict the memory of this run beside its first steps, measure it, compare.")


ARGUMENT_CLASSES = (RecipeArguments, ScriptArguments, SFTConfig, ModelConfig)
REFUSED = {  # an ignored setting would be worse than none
    "load_in_8bit": ("has no shards that train", "load_in_4bit: true, or leave both out: LoRA on 16-bit weights"),
    "use_liger_kernel": ("is not proven on sharded weights", "remove it: TRL computes the loss in chunks already"),
    "activation_offloading": ("is not proven on sharded weights", "fsdp: {offload: activations}"),
    "dataset_streaming": ("cannot be checked before training", "remove dataset_streaming"),
    "chat_template_path": ("has another name here", "chat_template: NAME_OR_JINJA_FILE"),
}


def say(text: str) -> None:
    """Print on the first process only."""
    if RANK == 0:
        print(text, flush=True)


def read_arguments(argv: list[str]) -> data.RecipeRun:
    """Return the `fsdp` section and the four groups of training arguments: file first, command line over it."""
    run = data.read_recipe_arguments(
        argv, TrlParser(ARGUMENT_CLASSES), script="recipes/text/train.py", output_dir="runs/text", refused=REFUSED
    )
    if problems := data.check_packing(run.training):
        raise ConfigError(problems)
    return run


def load_examples(
    recipe: RecipeArguments, script: ScriptArguments, training: SFTConfig
) -> tuple[data.Examples, data.Examples | None]:
    """Return the training examples and the held-out ones (or None), in the columns TRL trains on, all checked."""
    is_held_out = recipe.eval_file or recipe.eval_fraction or training.eval_strategy != "no" or training.eval_on_start
    is_held_out = is_held_out or recipe.eval_samples
    rows, held_out_rows = data.select_eval_examples(
        data.load_splits(script.dataset_name, config=script.dataset_config),
        script.dataset_train_split,
        script.dataset_test_split if is_held_out else None,
        eval_file=recipe.eval_file,
        eval_fraction=recipe.eval_fraction,
        seed=training.seed,
    )
    examples, held_out = data.read_train_and_held_out(
        rows,
        held_out_rows,
        source=script.dataset_name,
        held_out_source=recipe.eval_file,
        renames=recipe.rename_columns or [],
        format=recipe.dataset_format,
        text_field=training.dataset_text_field,
    )
    count = len(held_out.dataset) if held_out else "none"
    say(f"data: {len(rows)} training examples, {count} held out ({examples.kind}); {examples.line}")
    return examples, held_out


def main(argv: list[str]) -> None:
    """Config, checks, data, model, Trainer, save."""
    fsdp, recipe, script, training, model_args = read_arguments(argv)
    name, output = model_args.model_name_or_path, Path(training.output_dir)
    source = {"revision": model_args.model_revision, "trust_remote_code": training.trust_remote_code}

    # What costs seconds comes before what costs minutes.
    resume = data.find_resume_checkpoint(training.resume_from_checkpoint, output)
    data.check_output_dir(output)
    data.check_model_access(name, revision=model_args.model_revision)
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # an adapter names its base by it, and is loaded from other folders
    examples, held_out = load_examples(recipe, script, training)
    tokenizer = AutoTokenizer.from_pretrained(name, **source)
    training.assistant_only_loss, published_template, stop_token_id = data.prepare_chat(
        tokenizer,
        examples,
        assistant_only=training.assistant_only_loss,
        chat_template=recipe.chat_template,
        fallback=get_training_chat_template,
    )
    lengths = data.measure_lengths(
        examples.dataset, tokenizer, max_length=training.max_length, text_field=training.dataset_text_field
    )
    say(str(lengths))
    data.check_lengths(lengths)
    if recipe.preview:
        return say(data.preview_training(SFTTrainer, training, examples, tokenizer, recipe.preview))
    attention = data.choose_attention(
        model_args.attn_implementation,
        AutoConfig.from_pretrained(name, **source),
        compute=data.compute_dtype(fsdp.precision.preset, bf16=training.bf16, fp16=training.fp16),
        packed=data.packs_samples(training),
    )
    say(str(attention))
    if RANK == 0:
        data.write_run_config(output / "resolved_config.yaml", fsdp, (recipe, script, training, model_args))
    if "wandb" in training.report_to and (line := prepare_wandb(output)):
        say(line)

    model = load_sharded(  # from_pretrained, but each process reads only what it keeps
        AutoModelForCausalLM,
        name,
        dtype=model_args.dtype,
        attn_implementation=attention.implementation,
        quantization_config=get_quantization_config(model_args),  # None without load_in_4bit
        **source,
    )
    data.prepare_generation_config(model.generation_config, stop_token_id)
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=examples.dataset,
        eval_dataset=held_out.dataset if held_out else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        callbacks=[
            FSDPCallback(fsdp),
            MetricsCallback(),
            *([MemoryPlanCallback()] if recipe.plan_memory else []),
            *([SamplesCallback(num_samples=recipe.eval_samples)] if recipe.eval_samples else []),
        ],
    )
    # Everything is tokenized now: checkpoints and the final folder get the template that other programs know.
    tokenizer.chat_template = published_template
    if recipe.print_examples:
        say(data.format_training_examples(trainer, recipe.print_examples))

    trainer.train(resume_from_checkpoint=resume)
    step = trainer.state.global_step
    if held_out and not any("eval_loss" in log and log["step"] == step for log in trainer.state.log_history):
        trainer.evaluate()

    trainer.save_model(str(output / "final"))
    if RANK == 0:
        tokenizer.save_pretrained(output / "final")
        model.generation_config.save_pretrained(output / "final")
    say(f"saved {output / 'final'}")
    if line := wandb_sync_line():
        say(line)
    trainer.accelerator.end_training()  # closes the trackers and the process group


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HfFsdpError as error:
        text = f"{type(error).__name__}: {error}"
        # Every rank finds the same mistake: one tells it in full, the others in a line.
        sys.exit(text if RANK == 0 else f"[rank {RANK}] {text.splitlines()[0]}")
