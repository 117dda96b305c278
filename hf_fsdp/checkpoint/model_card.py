"""The model card of an export: what it was made from, with which settings, and the numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from huggingface_hub import ModelCard, ModelCardData

from hf_fsdp.checkpoint.serving import ServingLine

TAGS = ("generated_from_trainer", "hf-fsdp")
_CITATIONS_HEADING = "## Citations"

_TEMPLATE = """---
{{ card_data }}
---

# {{ facts.name }}

{{ what }}

## Use
{% for line in facts.serving %}
{{ line.tool }}:

```{{ "python" if line.tool in ("transformers", "peft") else "bash" }}
{{ line.text | replace("; ", "\n") if line.tool in ("transformers", "peft") else line.text }}
```
{% endfor %}
## Data

{{ data }}

## Training
{{ table("setting", facts.settings) }}
{% if facts.sharding %}
```yaml
{{ facts.sharding }}
```
{% endif %}
## Numbers
{{ table("measure", facts.numbers) if facts.numbers else "\nNone were logged." }}

## Versions
{{ table("package", facts.versions) }}
{%- if facts.citations %}

{{ facts.citations }}
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class ModelCardFacts:
    """What a card says.

    Args:
        name: the repository, or the name of the folder.
        serving: the lines of `serving_lines`.
        base_model: the repository that training started from; None for a local or a new model.
        method: ``full fine-tuning``, ``LoRA``, …
        is_adapter: the export is an adapter, which PEFT loads.
        datasets: repositories of the Hub that the data came from.
        data: other names of it, such as the kind of files.
        num_rows: training rows, None where nobody can count them.
        settings: the run's settings, in the order they are shown.
        sharding: the sharding config as YAML.
        numbers: losses and metrics, in the order they are shown.
        versions: package to version.
        tags, language, license, pipeline_tag: for the Hub's filters.
        citations: Markdown from `## Citations` on, as TRL writes it.
    """

    name: str
    serving: Sequence[ServingLine]
    base_model: str | None = None
    method: str = "full fine-tuning"
    is_adapter: bool = False
    datasets: Sequence[str] = ()
    data: str = ""
    num_rows: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    sharding: str = ""
    numbers: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[str] = ()
    language: str | Sequence[str] | None = None
    license: str | None = None
    pipeline_tag: str | None = None
    citations: str = ""


def build_model_card(facts: ModelCardFacts) -> ModelCard:
    """Return the card: YAML that the Hub reads, and text for people."""
    tags = list(dict.fromkeys([*TAGS, *(("lora",) if facts.method.startswith("LoRA") else ()), *facts.tags]))
    card_data = ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        language=facts.language if facts.language is None or isinstance(facts.language, str) else list(facts.language),
        library_name="peft" if facts.is_adapter else "transformers",
        license=facts.license,
        pipeline_tag=facts.pipeline_tag,
        tags=tags,
    )
    card: ModelCard = ModelCard.from_template(
        card_data, template_str=_TEMPLATE, facts=facts, what=_what(facts), data=_data(facts), table=_table
    )
    return card


def citations_of(card_text: str) -> str:
    """Return a card's citations with their heading, which TRL puts last; empty without any."""
    _, heading, rest = card_text.partition(_CITATIONS_HEADING)
    return heading + rest.rstrip() if heading else ""


def _what(facts: ModelCardFacts) -> str:
    base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else None
    if facts.is_adapter:
        kind = f"This is a {facts.method} adapter" + (f" of {base}" if base else " of a model that is not on the Hub")
    elif base:
        kind = f"This is {base}, trained further ({facts.method})"
    else:
        kind = f"This model was trained from a local or a new one ({facts.method})"
    return f"{kind}. It was trained with transformers' Trainer, sharded by hf-fsdp."


def _data(facts: ModelCardFacts) -> str:
    named = [f"[{name}](https://huggingface.co/datasets/{name})" for name in facts.datasets]
    text = ", ".join(named) or facts.data or "Not stated."
    return f"{text} ({facts.num_rows:,} training rows)" if facts.num_rows is not None else text


def _table(heading: str, rows: Mapping[str, str]) -> str:
    lines = [f"\n| {heading} | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows.items())])
