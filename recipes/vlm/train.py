"""Fine-tune a vision-language model on pictures and text with TRL's `SFTTrainer`, fully sharded by `FSDPCallback`.

    accelerate launch --config_file configs/fsdp_llava7b.yaml recipes/vlm/train.py configs/train/llava1_5_7b_lora.yaml
    torchrun --nproc_per_node 8 recipes/vlm/train.py configs/train/qwen2_5_vl_7b_lora.yaml --max_pixels 501760
    python recipes/vlm/train.py my_run.yaml --fsdp.precision fp32 --max_steps 10        # one process, not sharded

A run config is one YAML mapping: TRL's and transformers' own keys (`SFTConfig`, `ModelConfig`, `ScriptArguments`), the
keys of `RecipeArguments` below, and an `fsdp:` section. Each can be overridden on the command line, `_` and `-` alike.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

from hf_fsdp import (
    AnswersCallback,
    FSDPCallback,
    MemoryPlanCallback,
    MetricsCallback,
    check_part_rates,
    data,
    four_bit_skips,
    load_sharded,
    plan_lora,
    prepare_wandb,
    set_part_rates,
    set_trainable,
    wandb_sync_line,
)
from hf_fsdp.data import HfFsdpError

RANK = int(os.environ.get("RANK") or 0)


def option(default: Any, text: str) -> Any:
    """Return an argument with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class RecipeArguments:
    """What this recipe adds to TRL's and transformers' arguments."""

    trainable: list[str] | None = option(
        None, "Parts trained in full: language, projector, vision, or all; language and projector without LoRA."
    )
    lora_parts: list[str] | None = option(None, "Parts that get LoRA adapters under use_peft; language by default.")
    part_learning_rate: dict[str, float] | str | None = option(None, "Rates of parts: {projector: 2.0e-5}.")
    part_weight_decay: dict[str, float] | str | None = option(None, "Weight decay of parts: {vision: 0.0}.")
    min_pixels: int | None = option(None, "Enlarge pictures with fewer pixels, where the family has such a limit.")
    max_pixels: int | None = option(None, "Shrink pictures with more pixels, where the family has such a limit.")
    image_folder: str | None = option(None, "Where relative paths of pictures begin; else at the data file.")
    allow_image_urls: bool = option(False, "Fetch pictures that the data names by URL, while training.")
    question: str | None = option(None, "Asked about each picture of a dataset that has pictures and answers only.")
    on_too_long: str = option("refuse", "What max_length does to a longer sample: refuse or drop; never cut.")
    check_data: str = option("100", "Read so many samples before any weights are loaded: a number, all, or 0.")
    chat_template: str | None = option(None, "A Jinja file in place of the processor's own template.")
    rename_columns: list[str] | None = option(None, "OLD=NEW for each: image_file=image.")
    global_batch_size: int | None = option(None, "Samples a step over all processes; accumulation follows from it.")
    eval_file: str | None = option(None, "A file with held-out examples.")
    eval_fraction: float | None = option(None, "Share of the training examples to hold out, e.g. 0.05.")
    answers: int = option(0, "Answer so many held-out examples at each evaluation, score and show them.")
    answer_metrics: list[str] | None = option(None, "exact_match (default), vqa_accuracy, anls, token_f1, ...")
    answer_tokens: int = option(32, "The longest answer, in tokens.")
    preview: int = option(0, "Print so many training examples as trained, and leave before any weights are loaded.")
    require_sharding: bool = option(False, "Refuse to train in one process, where nothing is sharded.")
    plan_memory: bool = option(False, "Predict the memory of this run beside its first steps, measure it, compare.")


ARGUMENT_CLASSES = (RecipeArguments, ScriptArguments, SFTConfig, ModelConfig)
REFUSED = {  # an ignored setting would be worse than none
    "load_in_8bit": ("has no shards that train", "load_in_4bit: true, or leave both out: LoRA on 16-bit weights"),
    "use_liger_kernel": ("is not proven on sharded weights", "remove it"),
    "activation_offloading": ("is not proven on sharded weights", "fsdp: {offload: activations}"),
    "dataset_streaming": ("cannot be checked before training", "remove dataset_streaming"),
    "packing": ("would mix the pictures of samples", "train_sampling_strategy: group_by_length, for little padding"),
    "chat_template_path": ("has another name here", "chat_template: JINJA_FILE"),
}


def say(text: str) -> None:
    """Print on the first process only."""
    if RANK == 0:
        print(text, flush=True)


def load_examples(
    recipe: RecipeArguments, script: ScriptArguments, training: SFTConfig
) -> tuple[data.ImageExamples, data.ImageExamples | None]:
    """Return the training examples and the held-out ones (or None), as conversations with pictures."""
    is_held_out = recipe.eval_file or recipe.eval_fraction or training.eval_strategy != "no" or training.eval_on_start
    examples, held_out = data.read_image_splits(
        data.load_splits(script.dataset_name, config=script.dataset_config),
        script.dataset_train_split,
        script.dataset_test_split if is_held_out or recipe.answers else None,
        source=script.dataset_name,
        eval_file=recipe.eval_file,
        eval_fraction=recipe.eval_fraction,
        seed=training.seed,
        image_folder=recipe.image_folder,
        renames=recipe.rename_columns or [],
        allow_urls=recipe.allow_image_urls,
        question=recipe.question,
    )
    count = len(held_out.dataset) if held_out else "none"
    say(f"data: {len(examples.dataset)} training examples, {count} held out; {examples.line}")
    return examples, held_out


def load_model(recipe: RecipeArguments, args: ModelConfig, name: str, config: Any, **source: Any) -> Any:
    """Return the model, each process reading only what it keeps, with the parts frozen that are not trained."""
    quantization = get_quantization_config(args)  # None without load_in_4bit
    if quantization is not None:
        quantization.llm_int8_skip_modules = four_bit_skips(config, recipe.lora_parts or [])
    model = load_sharded(
        AutoModelForImageTextToText,
        name,
        dtype=args.dtype,
        quantization_config=quantization,
        **source,
    )
    if not args.use_peft:
        set_trainable(model, recipe.trainable or [])
    return model


def choose_adapters(recipe: RecipeArguments, args: ModelConfig, outline: Any, rates: Any) -> Any:
    """Return PEFT's config for the layers of the chosen parts, None without `use_peft`; `outline` has no weights."""
    config = get_peft_config(args)
    if config is not None:
        kinds = args.lora_target_modules or "all-linear"
        plan = plan_lora(outline, recipe.lora_parts or [], kinds, train_in_full=recipe.trainable or [])
        config.target_modules, config.modules_to_save = plan.target_modules, plan.modules_to_save
        for line in plan.lines():
            say(line)
    set_trainable(outline, [*(recipe.trainable or []), *(recipe.lora_parts or [])])
    if problems := check_part_rates(outline, *rates):
        raise data.ConfigError(problems)
    return config


def main(argv: list[str]) -> None:
    """Config, checks, data, model, Trainer, save."""
    fsdp, recipe, script, training, model_args = data.read_recipe_arguments(
        argv, TrlParser(ARGUMENT_CLASSES), script="recipes/vlm/train.py", output_dir="runs/vlm", refused=REFUSED
    )
    name, output = model_args.model_name_or_path, Path(training.output_dir)
    source = {"revision": model_args.model_revision, "trust_remote_code": training.trust_remote_code}

    parts = data.choose_parts(recipe.trainable, recipe.lora_parts, use_peft=model_args.use_peft)
    recipe.trainable, recipe.lora_parts = parts
    rates = (
        data.read_mapping(recipe.part_learning_rate, "part_learning_rate"),
        data.read_mapping(recipe.part_weight_decay, "part_weight_decay"),
    )

    # What costs seconds comes before what costs minutes.
    resume = data.find_resume_checkpoint(training.resume_from_checkpoint, output)
    data.check_output_dir(output)
    data.check_model_access(name, revision=model_args.model_revision)
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # an adapter names its base by it, and is loaded from other folders
    processor = data.load_processor(name, min_pixels=recipe.min_pixels, max_pixels=recipe.max_pixels, **source)
    config = data.read_vision_config(name, **source)
    adapters = choose_adapters(
        recipe, model_args, data.build_outline(config, trust_remote_code=training.trust_remote_code), rates
    )
    examples, held_out = load_examples(recipe, script, training)
    collator = data.ImageTextCollator(
        processor,
        max_length=training.max_length,
        assistant_only=training.assistant_only_loss is not False,
        on_too_long=recipe.on_too_long,
        chat_template=recipe.chat_template,
        limits=data.ImageLimits(allow_urls=recipe.allow_image_urls),
    )
    data.check_image_settings(training, processor.tokenizer)
    training.assistant_only_loss = False  # the collator masks; TRL would ask for a column of its own
    if recipe.preview:
        return say(data.format_collated_examples(examples.dataset, collator, processor.tokenizer, recipe.preview))
    rows = data.check_images(examples.dataset, collator, recipe.check_data, what="training")
    held_out_rows = held_out and data.check_images(held_out.dataset, collator, recipe.check_data, what="held-out")
    if training.train_sampling_strategy == "group_by_length":
        rows = data.add_lengths(rows, collator, show_progress=RANK == 0)
    callbacks = [FSDPCallback(fsdp), MetricsCallback(), *([MemoryPlanCallback()] if recipe.plan_memory else [])]
    if recipe.answers and held_out_rows:
        metrics = recipe.answer_metrics or ["exact_match"]
        limits = {"num_rows": recipe.answers, "max_new_tokens": recipe.answer_tokens}
        callbacks.append(AnswersCallback(held_out_rows, collator, metrics, **limits))
    attention = data.choose_attention(
        model_args.attn_implementation,
        config,
        compute=data.compute_dtype(fsdp.precision.preset, bf16=training.bf16, fp16=training.fp16),
        packed=False,
    )
    say(str(attention))
    if RANK == 0:
        data.write_run_config(output / "resolved_config.yaml", fsdp, (recipe, script, training, model_args))
    if "wandb" in training.report_to and (line := prepare_wandb(output)):
        say(line)

    model = load_model(recipe, model_args, name, config, attn_implementation=attention.implementation, **source)
    training.remove_unused_columns = False  # the collator reads the rows whole
    trainer = SFTTrainer(
        model=model,
        args=training,
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=held_out_rows,
        processing_class=processor,
        peft_config=adapters,
        callbacks=callbacks,
    )
    set_part_rates(trainer, *rates)

    trainer.train(resume_from_checkpoint=resume)
    step = trainer.state.global_step
    if held_out_rows and not any("eval_loss" in log and log["step"] == step for log in trainer.state.log_history):
        trainer.evaluate()

    trainer.save_model(str(output / "final"))
    if RANK == 0:
        processor.save_pretrained(output / "final")
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
