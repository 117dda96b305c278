"""What a Trainer can say for the model card of its export.

TRL writes a card of its own into `output_dir`, at every checkpoint. It stays there as it is; what is pushed is ours,
with TRL's tags and citations. A Trainer with a `create_model_card` of somebody else's is asked for its card instead.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import Trainer

from hf_fsdp.checkpoint.model_card import ModelCardFacts, build_model_card, citations_of
from hf_fsdp.checkpoint.serving import ADAPTER_CONFIG, read_config, serving_lines
from hf_fsdp.checkpoint.upload import is_local, repository_of_snapshot
from hf_fsdp.integrations.trl import is_trl
from hf_fsdp.policies.blocks import base_model
from hf_fsdp.sharding.apply import get_applied_sharding

CARD_FILE = "README.md"
_OWN_BASE = "PATH_OF_THE_BASE_MODEL"
# What `push_to_hub` hands on to `create_model_card`, Trainer's and TRL's.
CARD_ARGUMENTS = frozenset(
    "language license tags model_name finetuned_from tasks dataset_tags dataset dataset_args dataset_name".split()
)
_SETTINGS = (
    "learning_rate lr_scheduler_type warmup_steps optim weight_decay max_grad_norm per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs max_steps seed max_length packing"
).split()
_PACKAGES = ("hf-fsdp", "torch", "transformers", "accelerate", "peft", "trl", "datasets")
_NOT_RESULTS = ("runtime", "_per_second", "_time", "total_flos")
_HUB_DATASET = re.compile(r"hf://datasets/([\w.\-]+(?:/[\w.\-]+)?)@")


def _card_of_others(trainer: Trainer, asked: Mapping[str, Any]) -> str | None:
    """Let TRL, or the Trainer's own class, write its card into `output_dir`, and return its text.

    Returns:
        None where the card would be plain Trainer's, which says less than ours.
    """
    writer = trainer.create_model_card
    if getattr(writer, "__func__", None) is Trainer.create_model_card:
        return None
    allowed = CARD_ARGUMENTS if not _writer_is_trl(trainer) else {"model_name", "dataset_name", "tags"}
    writer(**{name: value for name, value in asked.items() if name in allowed})
    path = Path(str(trainer.args.output_dir), CARD_FILE)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _writer_is_trl(trainer: Trainer) -> bool:
    """Return whether `create_model_card` is TRL's own."""
    owner = next(cls for cls in type(trainer).__mro__ if "create_model_card" in vars(cls))
    return is_trl(owner)


@dataclass(frozen=True)
class CardDraft:
    """A card but for the lines on its use, which are known when the export is there; or somebody else's text."""

    facts: ModelCardFacts | None = None
    text: str = ""

    def write(self, folder: Path) -> None:
        """Write the card of the exported model in `folder` into it."""
        text = self.text
        if self.facts is not None:
            config = read_config(folder / ADAPTER_CONFIG)
            base = config.get("base_model_name_or_path")
            hidden = _OWN_BASE if base and is_local(base) else None  # a path of this machine is nobody's business
            text = str(build_model_card(replace(self.facts, serving=serving_lines(self.facts.name, folder, hidden))))
        (folder / CARD_FILE).write_text(text, encoding="utf-8")


def draft_card(trainer: Trainer, repo_id: str, asked: Mapping[str, Any], step: int) -> CardDraft:
    """Return the card of what `trainer` pushes to `repo_id`, as far as the trainer knows it.

    Args:
        trainer: the one that trains; TRL's card is written into its `output_dir`.
        repo_id: the repository.
        asked: what the caller of `push_to_hub` said about the card.
        step: of the model that is pushed; training may have gone on since.
    """
    others = _card_of_others(trainer, asked)
    if others is not None and not _writer_is_trl(trainer):
        return CardDraft(text=others)
    tags = [*_listed(asked.get("tags")), *_listed(getattr(trainer.model, "model_tags", None))]
    if others is not None:
        data = ModelCard(others, ignore_metadata_errors=True).data
        tags += _listed(data.tags if isinstance(data, ModelCardData) else None)
    base, method = _base_of(trainer), _method_of(trainer)
    datasets, data_text = _data_of(trainer, asked)
    facts = ModelCardFacts(
        name=repo_id,
        serving=(),
        base_model=asked.get("finetuned_from") or base,
        method=method,
        is_adapter=_peft_config(trainer) is not None,
        datasets=datasets,
        data=data_text,
        num_rows=_num_rows(trainer.train_dataset),
        settings=_settings_of(trainer),
        sharding=_sharding_of(trainer),
        numbers=_numbers_of(trainer, step),
        versions=_versions(),
        tags=tags,
        language=asked.get("language"),
        license=asked.get("license"),
        pipeline_tag=next(iter(_listed(asked.get("tasks"))), None),
        citations=citations_of(others) if others is not None else "",
    )
    return CardDraft(facts)


def _peft_config(trainer: Trainer) -> Any | None:
    return getattr(trainer.model, "active_peft_config", None)


def _base_of(trainer: Trainer) -> str | None:
    name = getattr(getattr(base_model(trainer.model), "config", None), "_name_or_path", None) or ""
    if not name:
        return None
    if is_local(name):
        found = repository_of_snapshot(name)
        return found[0] if found else None
    return str(name)


def _method_of(trainer: Trainer) -> str:
    if (peft := _peft_config(trainer)) is None:
        return "full fine-tuning"
    kind = peft.peft_type
    name = str(getattr(kind, "value", kind))
    name = "LoRA" if name == "LORA" else name
    quantized = getattr(base_model(trainer.model), "is_loaded_in_4bit", False)
    return f"{name} on a base in 4 bits" if quantized else name


def _data_of(trainer: Trainer, asked: Mapping[str, Any]) -> tuple[list[str], str]:
    named = [*_listed(asked.get("dataset_name")), *_listed(asked.get("dataset_tags"))]
    said = ", ".join(_listed(asked.get("dataset")))
    dataset = trainer.train_dataset
    if not named:
        sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
        named = sorted({match[1] for source in sources if (match := _HUB_DATASET.search(str(source)))})
    kind = getattr(dataset, "builder_name", None)
    return named, said or (f"{kind} files" if kind else "")


def _num_rows(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # none, or a stream
        return None


def _settings_of(trainer: Trainer) -> dict[str, str]:
    args = trainer.args
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name, None) is not None}
    if args.max_steps > 0:
        settings.pop("num_train_epochs", None)
    else:
        settings.pop("max_steps", None)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings |= {"processes": args.world_size, "global batch": batch}
    if (peft := _peft_config(trainer)) is not None:
        for name in ("r", "lora_alpha", "lora_dropout"):
            if hasattr(peft, name):
                settings[f"lora_{name}" if name == "r" else name] = getattr(peft, name)
    return {name: str(getattr(value, "value", value)) for name, value in settings.items()}


def _sharding_of(trainer: Trainer) -> str:
    applied = get_applied_sharding(trainer.model)
    if applied is None:
        return ""
    lines = applied.config.to_yaml().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def _numbers_of(trainer: Trainer, step: int) -> dict[str, str]:
    state = trainer.state
    numbers: dict[str, Any] = {"steps": step}
    for entry in state.log_history:  # later entries replace earlier ones: the last of each kind is shown
        if entry.get("step", 0) > step:
            continue
        if "epoch" in entry:
            numbers["epochs"] = round(entry["epoch"], 3)
        for name, value in entry.items():
            is_result = name in ("loss", "train_loss", "num_input_tokens_seen") or name.startswith("eval_")
            if is_result and not any(part in name for part in _NOT_RESULTS) and isinstance(value, (int, float)):
                numbers["training loss, last logged" if name == "loss" else name] = value
    if state.best_metric is not None and (state.best_global_step or 0) <= step:
        numbers[f"best {trainer.args.metric_for_best_model}"] = state.best_metric
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in numbers.items()}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(item) for item in value]
