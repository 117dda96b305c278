"""All samples are looked at before training, problems named by row; lengths from headers make ranks' batches alike."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL.Image", reason="needs pillow (the extra 'vision')")

from datasets import Dataset  # noqa: E402

from hf_fsdp.data.images import (  # noqa: E402
    ImageTextCollator,
    add_lengths,
    check_image_data,
    lengths_for_grouping,
    read_image_examples,
)
from hf_fsdp.data.processors import load_processor  # noqa: E402
from hf_fsdp.errors import DataError  # noqa: E402
from tests.unit import image_processors as tiny  # noqa: E402
from tests.unit.image_processors import picture  # noqa: E402


def write(folder: Path, count: int, *, side: int = 40) -> Dataset:
    """Return rows with 0, 1, 2, 0, 1, 2 ... pictures in files, each answer longer than the one before."""
    rows = []
    for index in range(count):
        names = [f"{index}_{number}.png" for number in range(index % 3)]
        for number, name in enumerate(names):
            picture(side + index, side, number).save(folder / name)
        answer = "word " * (index + 1)
        rows.append({"id": f"s{index}", "images": names, "question": "What is it?", "answer": answer.strip()})
    return read_image_examples(Dataset.from_list(rows), source="rows", image_folder=folder).dataset


SOURCES = Path(__file__).parents[1] / "golden" / "processors"
PUBLISHED = ("qwen2_5_vl", "smolvlm", "internvl", "llava_onevision")
FAMILIES = (*tiny.FAMILIES, *PUBLISHED)


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    loaded = {name: load_processor(str(SOURCES / name / "source")) for name in PUBLISHED}
    return {name: build() for name, build in tiny.FAMILIES.items()} | loaded


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_is_counted_as_it_will_be_trained(
    num_workers: int, processors: dict[str, Any], tmp_path: Path
) -> None:
    dataset = write(tmp_path, 20)
    collator = ImageTextCollator(processors["idefics3"], num_threads=1)
    report = check_image_data(dataset, collator, num_workers=num_workers, show_progress=False)
    trained = [int(collator([row])["attention_mask"].sum()) for row in dataset]
    assert [sample.num_tokens for sample in report.samples] == trained
    assert [sample.num_images for sample in report.samples] == [index % 3 for index in range(20)]
    assert all((sample.num_image_tokens > 0) == (sample.num_images > 0) for sample in report.samples)
    assert report.longest[0].num_tokens == max(trained) and report.kept == list(range(20))
    assert report.samples[4].name == "row 5 (id s4)" and report.samples[4].num_pixels == 44 * 40
    report.check()
    assert str(report).startswith("images: 19 in 20 samples (at most 2 a sample, 7 samples without), ")
    assert str(report).endswith("tokens, no limit")


def test_all_broken_samples_are_found_and_five_are_shown(processors: dict[str, Any], tmp_path: Path) -> None:
    dataset = write(tmp_path, 24)
    for index in range(1, 24, 3):
        (tmp_path / f"{index}_0.png").write_bytes(b"<html>")
    report = check_image_data(dataset, processors["llava"], num_workers=0, show_progress=False)
    assert [sample.position for sample in report.broken] == list(range(1, 24, 3))
    assert set(report.kept) == set(range(24)) - set(range(1, 24, 3))
    with pytest.raises(DataError) as caught:
        report.check()
    problems = caught.value.problems
    assert len(problems) == 6
    assert problems[0].message.startswith(f"row 2 (id s1): {tmp_path}/1_0.png is a web page that was saved")
    assert problems[5].message.startswith("8 of 24 samples cannot be used: row 2 (id s1), row 5 (id s4)")
    # The advice, followed:
    again = check_image_data(dataset.select(report.kept), processors["llava"], num_workers=0, show_progress=False)
    again.check()
    assert len(again.usable) == 16


def test_samples_that_do_not_fit_are_told_with_a_limit_that_holds_them(
    processors: dict[str, Any], tmp_path: Path
) -> None:
    dataset = write(tmp_path, 21)
    collator = ImageTextCollator(processors["gemma3"], max_length=90, num_threads=1)
    report = check_image_data(dataset, collator, num_workers=0, show_progress=False)
    long = [sample.position for sample in report.too_long]
    assert 0 < len(long) < 21 and set(report.kept) == set(range(21)) - set(long)
    with pytest.raises(DataError, match=rf"max_length=90 does not hold {len(long)} of 21 samples") as caught:
        report.check()
    first = report.longest[0]
    text = first.num_tokens - first.num_image_tokens
    assert f"{first.name}: {first.num_image_tokens} image + {text} text = {first.num_tokens}" in str(caught.value)
    report.check(on_too_long="drop")
    fixed = caught.value.problems[0].fix.split("max_length: ")[1].split(" ")[0]
    check_image_data(dataset, collator, max_length=int(fixed), num_workers=0, show_progress=False).check()
    with pytest.raises(DataError, match="does not hold 21 of 21 samples"):
        check_image_data(dataset, collator, max_length=5, num_workers=0, show_progress=False).check(on_too_long="drop")
    for row in dataset.select(report.kept):
        collator([row])  # and none of those kept is refused


def test_a_part_of_the_samples_is_evenly_spread(processors: dict[str, Any], tmp_path: Path) -> None:
    dataset = write(tmp_path, 20)
    report = check_image_data(dataset, processors["llava"], num_samples=5, num_workers=0, show_progress=False)
    assert [sample.position for sample in report.samples] == [0, 4, 8, 12, 16]
    assert "(5 of 20 checked)" in str(report)
    with pytest.raises(DataError, match="num_samples='some' is neither 'all' nor a positive number"):
        check_image_data(dataset, processors["llava"], num_samples="some")


def test_a_report_can_be_told_to_other_processes(processors: dict[str, Any], tmp_path: Path) -> None:
    dataset = write(tmp_path, 4)
    (tmp_path / "1_0.png").write_bytes(b"")
    report = check_image_data(dataset, processors["llava"], num_workers=0, show_progress=False)
    told = pickle.loads(pickle.dumps(report))
    assert told == report
    with pytest.raises(DataError, match="row 2 .*1_0.png is empty"):
        told.check()


def test_a_template_that_marks_nothing_is_found(tmp_path: Path) -> None:
    marked = tiny.CHATML.replace("IMAGE", "<image>")
    marked += "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    report = check_image_data(write(tmp_path, 3), tiny.llava(marked), num_workers=0, show_progress=False)
    with pytest.raises(DataError, match="row 1 .*: the chat template of LlavaProcessor marks 0 of 1 answers"):
        report.check()


# -- lengths for grouping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_from_headers_are_near_those_that_are_trained(
    family: str, processors: dict[str, Any], tmp_path: Path
) -> None:
    dataset = write(tmp_path, 12, side=50)
    processor = processors[family]
    estimated = lengths_for_grouping(dataset, processor, num_workers=0, show_progress=False)
    report = check_image_data(dataset, processor, num_workers=0, show_progress=False)
    real = [sample.num_tokens for sample in report.samples]
    assert max(abs(guess - length) for guess, length in zip(estimated, real, strict=True)) <= 4


def test_grouped_batches_give_the_ranks_alike_loads(processors: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    dataset = add_lengths(write(tmp_path, 60), processors["llava"], num_workers=2, show_progress=False)
    assert dataset.column_names[-1] == "length" and min(dataset["length"]) > 0
    lengths = list(dataset["length"]) * 20  # the sampler groups well from some hundred batches on

    def spread(order: list[int]) -> float:
        """Mean difference between what two ranks have in a step, of batches of 2, as Accelerate deals them."""
        loads = [max(lengths[i] for i in order[start : start + 2]) for start in range(0, len(order), 2)]
        return sum(abs(a - b) for a, b in zip(loads[::2], loads[1::2], strict=True)) / len(loads)

    generator = torch.Generator().manual_seed(0)
    grouped = list(LengthGroupedSampler(2, lengths=lengths, generator=generator))
    random = torch.randperm(len(lengths), generator=generator).tolist()
    assert spread(grouped) < spread(random) / 3


def test_a_header_that_cannot_be_read_counts_nothing(processors: dict[str, Any], tmp_path: Path) -> None:
    dataset = write(tmp_path, 3)
    whole = lengths_for_grouping(dataset, processors["llava"], num_workers=0, show_progress=False)
    (tmp_path / "1_0.png").write_bytes(b"")
    broken = lengths_for_grouping(dataset, processors["llava"], num_workers=0, show_progress=False)
    assert broken[::2] == whole[::2] and broken[1] == whole[1] - 16
