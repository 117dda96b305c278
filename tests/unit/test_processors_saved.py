"""Every checkpoint, saved model and export of a vision-language run carries its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback
from hf_fsdp.checkpoint.export import ExportOptions, export_checkpoint
from hf_fsdp.data.processors import load_processor
from tests.golden.processors import cases

FAMILY = "qwen2_5_vl"
LEAST, MOST = cases.LIMITS[FAMILY]


def build_processor() -> Any:
    """A processor with pixel limits of its own, so that a default one in its place would show."""
    return load_processor(str(cases.HERE / FAMILY / "source"), min_pixels=LEAST, max_pixels=MOST)


def build_model(processor: Any) -> Any:
    ids = {
        f"{name}_token_id": processor.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")
    }
    ids |= {
        f"{name}_token_id": processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
    }
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": len(processor.tokenizer),
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [0],
            },
            **ids,
        )
    )


class Collator:
    """Pictures by name and a text become a batch; it has the processor, as collators of pictures do."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.tokenizer = processor.tokenizer

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pictures = cases.read_pictures()
        text = [f"{cases.PLACEHOLDERS[FAMILY]}{row['text']}" for row in rows]
        images = [[pictures[row["picture"]]] for row in rows]
        batch = dict(self.processor(images=images, text=text, padding=True, return_tensors="pt"))
        labels = batch["input_ids"].clone()
        labels[(batch["attention_mask"] == 0) | (labels == self.processor.image_token_id)] = -100
        return {**batch, "labels": labels}


def train(folder: Path, *, processing_class: Any, with_lora: bool = False) -> Trainer:
    processor = build_processor()
    model = build_model(processor)
    if with_lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=1,
            save_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Dataset.from_dict({"picture": ["digit", "odd"], "text": ["Which digit?", "What is it?"]}),
        data_collator=Collator(processor),
        processing_class=processing_class(processor),
        callbacks=[FSDPCallback()],
    )
    trainer.train()
    return trainer


def assert_has_processor(folder: Path) -> None:
    """Compare what the folder's processor makes of pictures with what the run's does."""
    expected, loaded = build_processor(), load_processor(str(folder))
    for made, wanted in ((cases.mixed(FAMILY, loaded), cases.mixed(FAMILY, expected)),):
        assert sorted(made) == sorted(wanted)
        assert all(torch.equal(made[key], wanted[key]) for key in wanted)
    assert loaded.chat_template == expected.chat_template
    assert loaded.video_processor.to_dict() == expected.video_processor.to_dict()


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
def test_checkpoint_saved_model_and_export_carry_the_processor(tmp_path: Path, with_lora: bool) -> None:
    trainer = train(tmp_path / "run", processing_class=lambda processor: processor, with_lora=with_lora)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / "processor_config.json").is_file()
    assert_has_processor(checkpoint)
    trainer.save_model(str(tmp_path / "final"))
    assert_has_processor(tmp_path / "final")
    export_checkpoint(checkpoint, tmp_path / "exported")
    assert_has_processor(tmp_path / "exported")
    if with_lora:
        base = tmp_path / "base"
        build_model(build_processor()).save_pretrained(base)
        export_checkpoint(checkpoint, tmp_path / "merged", ExportOptions(merge_lora=True, base=str(base)))
        assert_has_processor(tmp_path / "merged")


@pytest.mark.parametrize("given", ["tokenizer", "nothing"])
def test_a_trainer_that_was_given_less_saves_the_processor_of_its_collator(tmp_path: Path, given: str) -> None:
    def choose(processor: Any) -> Any:
        return processor.tokenizer if given == "tokenizer" else None

    trainer = train(tmp_path / "run", processing_class=choose)
    assert_has_processor(tmp_path / "run" / "checkpoint-1")
    trainer.save_model(str(tmp_path / "final"))
    assert_has_processor(tmp_path / "final")
