"""Make the golden data of the processors in an environment with torchvision; or check what ours saved there.

    python -m venv ../golden-venv
    ../golden-venv/bin/pip install torch==2.14.1 torchvision==0.29.1 transformers==5.24.0 pillow num2words scikit-learn
    ../golden-venv/bin/python tests/golden/processors/make.py
    ../golden-venv/bin/python tests/golden/processors/make.py --check FOLDER   # see README.md

Needs no network once the packages are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import cases
import numpy as np
import PIL
import torch
import torchvision
import transformers
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedTokenizerFast

SENTENCES = [
    "Which digit is written here? A seven. Compare the first and the second.",
    "No picture here, only text. And one that is a little longer. How many are not alike?",
    "user assistant What is it? Sure? Yes. The second is wider. A short one. A line.",
]
# One turn after the other; what the assistant says is marked, so that a loss can be taken on it alone.
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' -%}
{% generation %}{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>{% endgeneration %}
{% else -%}
{% for part in message.content -%}
{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def build_tokenizer(special: list[str], named: dict[str, str]) -> Any:
    """A byte-level tokenizer of a few hundred tokens with the family's special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ["<|im_start|>", *special]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=named,
        model_max_length=4096,
    )


def build(family: str) -> Any:
    """The official processor of a family, small: patches of 4 pixels or tiles of 16."""
    template = TEMPLATE.replace("PICTURE", cases.PLACEHOLDERS[family].replace("\n", "{{ '\\n' }}"))
    if family.startswith("qwen"):
        return build_qwen(family, template)
    tiles = {"size": {"height": 16, "width": 16}}
    if family == "internvl":
        named = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
        return transformers.InternVLProcessor(
            image_processor=transformers.GotOcr2ImageProcessor(**tiles, crop_to_patches=True, max_patches=4),
            tokenizer=build_tokenizer(list(named.values()), named),
            video_processor=transformers.InternVLVideoProcessor(**tiles),
            image_seq_length=4,
            chat_template=template,
        )
    if family == "smolvlm":
        rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        special = ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows]
        sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        return transformers.SmolVLMProcessor(
            image_processor=transformers.SmolVLMImageProcessor(**sizes),
            tokenizer=build_tokenizer(special, {}),
            video_processor=transformers.SmolVLMVideoProcessor(**sizes, num_frames=7, fps=3),
            image_seq_len=4,
            chat_template=template,
        )
    pinpoints = [[16, 16], [16, 32], [32, 16], [32, 32], [16, 48]]
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(**tiles, image_grid_pinpoints=pinpoints),
        tokenizer=build_tokenizer(["<image>", "<video>"], {}),
        video_processor=transformers.LlavaOnevisionVideoProcessor(**tiles),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template,
    )


def build_qwen(family: str, template: str) -> Any:
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    patches = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 60}}
    if family == "qwen3_vl":
        patches["image_mean"] = patches["image_std"] = [0.5, 0.5, 0.5]
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    videos = transformers.Qwen3VLVideoProcessor if family == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    return getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**patches),
        tokenizer=build_tokenizer(special, {}),
        video_processor=videos(**patches, fps=3),
        chat_template=template,
    )


def load(folder: Path, backend: str, **limits: int) -> Any:
    """Load as anyone does on a machine with torchvision, with one of the two forms of the image processor."""
    processor = AutoProcessor.from_pretrained(folder, **limits)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend=backend, **limits)
    return processor


def run_cases(family: str, folder: Path, backend: str) -> dict[str, dict[str, torch.Tensor]]:
    """Run every case; an official error is part of the truth, and kept as its class's name."""
    plain = load(folder, backend)
    results = {name: cases.as_tensors(case(family, plain)) for name, case in cases.CASES.items()}
    if family in cases.LIMITS:
        least, most = cases.LIMITS[family]
        limited = load(folder, backend, min_pixels=least, max_pixels=most)
        results["limits"] = cases.as_tensors(cases.mixed(family, limited))
    return results


def make(family: str) -> dict[str, float]:
    """Write one family's folder; return how far the two forms of its image processor are apart in each case."""
    target = cases.HERE / family
    shutil.rmtree(target, ignore_errors=True)
    source = target / "source"
    processor = build(family)
    assert len(processor.tokenizer(processor.image_token)["input_ids"]) == 1, "the image token must be one token"
    processor.save_pretrained(source)
    pil, fast = (run_cases(family, source, backend) for backend in ("pil", "torchvision"))
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for name in pil:
        kept, facts[name] = cases.summarise(pil[name])
        fast_kept, fast_facts = cases.summarise(fast[name])
        for key, value in kept.items():
            tensors[f"{name}.{key}"] = value
            if key in cases.PIXELS:
                tensors[f"{name}.{key}.torchvision"] = fast_kept[key][::4].contiguous()
                gap = float((fast[name][key].float() - pil[name][key].float()).abs().max())
                mean_gap = float((fast[name][key].float() - pil[name][key].float()).abs().mean())
                facts[name][key] |= {"max_gap_to_torchvision": gap, "mean_gap_to_torchvision": mean_gap}
                assert fast_facts[key]["shape"] == facts[name][key]["shape"]
            else:
                assert torch.equal(fast_kept[key], value), f"{family} {name} {key}: the two forms differ"
    save_file(tensors, target / "expected.safetensors")
    text = json.dumps(facts, indent=1, sort_keys=True)
    (target / "expected.json").write_text(text + "\n", encoding="utf-8")
    gaps = {name: fact["pixel_values"]["max_gap_to_torchvision"] for name, fact in facts.items() if fact}
    return {name: round(gap, 6) for name, gap in gaps.items()}


def make_pictures() -> None:
    """Write the pictures: two handwritten digits, four times as large, and drawn ones."""
    from sklearn.datasets import load_digits

    digits = load_digits().images.astype(np.uint8) * 15
    pictures = cases.draw()
    pictures["digit"] = np.repeat(np.repeat(np.stack([digits[7]] * 3, axis=-1), 4, axis=0), 4, axis=1)
    save_arrays(
        {name: np.ascontiguousarray(array) for name, array in pictures.items()}, cases.HERE / "pictures.safetensors"
    )


def check(folder: Path) -> None:
    """Load what ours saved, as anyone does here, and compare with the official processor and with ours, in full.

    `folder` is what `save_ours.py` wrote.
    """
    for family in cases.FAMILIES:
        source, target = cases.HERE / family / "source", folder / family
        official = run_cases(family, source, "pil")
        ours = load_file(target / "outputs.safetensors")
        num_equal = compare(
            f"{family}, ours",
            official,
            {name: {key: ours[f"{name}.{key}"] for key in batch} for name, batch in official.items()},
        )
        num_equal += compare(f"{family}, saved by ours", official, run_cases(family, target / "saved", "pil"))
        num_equal += compare_folders(family, source, target / "saved")
        num_equal += compare_folders(f"{family}, old layout", target / "old", target / "saved_old")
        if family in cases.LIMITS:
            limited = {"limits": cases.as_tensors(cases.mixed(family, load(target / "saved_limits", "pil")))}
            num_equal += compare(f"{family}, saved limits", {"limits": official["limits"]}, limited)
        print(f"{family}: {num_equal} tensors equal")


def compare(what: str, expected: dict[str, Any], actual: dict[str, Any]) -> int:
    """Demand equal tensors; return how many."""
    for name, batch in expected.items():
        assert sorted(batch) == sorted(actual[name]), f"{what} {name}: {sorted(actual[name])}"
        for key, value in batch.items():
            assert torch.equal(value, actual[name][key]), f"{what} {name} {key} differ"
    return sum(len(batch) for batch in expected.values())


def compare_folders(what: str, source: Path, saved: Path) -> int:
    """Load a source and what ours saved of it as anyone does here, and demand the same processor."""
    before, after = AutoProcessor.from_pretrained(source), AutoProcessor.from_pretrained(saved)
    assert type(after) is type(before) and type(after.image_processor) is type(before.image_processor), what
    assert after.chat_template == before.chat_template, what
    for part in ("image_processor", "video_processor"):
        old, new = getattr(before, part).to_dict(), getattr(after, part).to_dict()
        assert old == new, f"{what}: {part} {new} was {old}"
    family = what.split(",")[0]
    return compare(
        what,
        *(
            {name: cases.as_tensors(case(family, processor)) for name, case in cases.CASES.items()}
            for processor in (before, after)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, help="folder with what ours saved and computed")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
        return
    make_pictures()
    gaps = {family: make(family) for family in cases.FAMILIES}
    versions = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "pillow": PIL.__version__,
    }
    report = {"versions": versions, "largest_gap_pil_to_torchvision": gaps}
    (cases.HERE / "versions.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
