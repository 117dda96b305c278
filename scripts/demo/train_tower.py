"""Train the vision demo's tower alone, as a classifier of digits, sharded; write its weights for a LLaVA.

torchrun --nproc_per_node 2 train_tower.py --data FOLDER --output FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from make_digits import WORDS, build_processor, tower_config
from PIL import Image
from transformers import CLIPConfig, CLIPForImageClassification, CLIPVisionModel, Trainer, TrainingArguments
from transformers.utils import logging

from hf_fsdp import FSDPCallback, FSDPConfig

NUM_EPOCHS = 20
MOST_SHIFTED = 3


def read_pictures(file: Path) -> Dataset:
    """Return the rows of a data file that have a picture, as pixels and the digit."""
    pixels, labels = [], []
    images = build_processor().image_processor
    for row in json.loads(file.read_text(encoding="utf-8")):
        if "image" in row:
            picture = Image.open(file.parent / row["image"]).convert("RGB")
            pixels.append(images(picture, return_tensors="pt")["pixel_values"][0])
            labels.append(WORDS.index(row["conversations"][1]["value"]))
    return Dataset.from_dict({"pixel_values": pixels, "labels": labels}).with_format("torch")


def shifted(rows: dict[str, Any]) -> dict[str, Any]:
    """Return rows with each picture moved by up to 3 of 32 pixels: 1,500 of them would be learned by heart."""
    pixels = []
    for picture in torch.as_tensor(rows["pixel_values"]):
        down, right = torch.randint(-MOST_SHIFTED, MOST_SHIFTED + 1, (2,)).tolist()
        pixels.append(picture.roll((down, right), dims=(1, 2)))
    return {"pixel_values": pixels, "labels": torch.as_tensor(rows["labels"])}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of digits that are right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Train, measure, write the tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    asked = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    vision = tower_config()
    config = CLIPConfig(vision_config=vision.to_dict(), projection_dim=vision.projection_dim, num_labels=len(WORDS))
    fsdp = FSDPConfig(precision="fp32", sharding={"require_sharding": True})
    trainer = Trainer(
        model=CLIPForImageClassification(config),
        args=TrainingArguments(
            output_dir=str(asked.output),
            use_cpu=True,
            dataloader_pin_memory=False,
            per_device_train_batch_size=32,
            num_train_epochs=NUM_EPOCHS,
            learning_rate=2e-3,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **fsdp.trainer_kwargs(),
        ),
        train_dataset=read_pictures(asked.data / "train.json").with_transform(shifted),
        eval_dataset=read_pictures(asked.data / "test.json"),
        compute_metrics=accuracy,
        callbacks=[FSDPCallback(fsdp)],
    )
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(str(asked.output / "classifier"))  # all ranks gather, rank 0 writes
    if trainer.is_world_process_zero():
        classifier = CLIPForImageClassification.from_pretrained(asked.output / "classifier")
        tower = CLIPVisionModel(vision)
        own = tower.state_dict()
        weights = {name: value for name, value in classifier.state_dict().items() if "vision_model" in name}
        tower.load_state_dict({name: _of(name, weights) for name in own})
        tower.save_pretrained(asked.output / "tower")
        (asked.output / "accuracy.json").write_text(json.dumps(found["eval_accuracy"]), encoding="utf-8")
    trainer.accelerator.end_training()


def _of(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the classifier's tensor of the tower's `name`, which may lie a level deeper there."""
    (found,) = [
        key for key in weights if key.removeprefix("vision_model.").endswith(name.removeprefix("vision_model."))
    ]
    return weights[found]


if __name__ == "__main__":
    main()
