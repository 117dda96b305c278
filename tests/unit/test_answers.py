"""Metrics of answers against values worked out by hand, which rank answers what, files and pictures of answers."""

from __future__ import annotations

import inspect
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.errors import DataError, IntegrationError
from hf_fsdp.integrations.answers import AnswersCallback
from hf_fsdp.monitor.answer_file import AnswersFile, ImageStore, answer_record
from hf_fsdp.monitor.answer_grid import choose_rows, draw_answer_grid
from hf_fsdp.monitor.answer_rounds import generate_answers, plan_rounds
from hf_fsdp.monitor.answer_rows import check_references, prompt_text, references_of
from hf_fsdp.monitor.answers import (
    anls,
    exact_match,
    mean_scores,
    normalize_vqa,
    relaxed_accuracy,
    resolve_metrics,
    score_answer,
    token_f1,
    vqa_accuracy,
)
from hf_fsdp.monitor.predict import predict_answers
from tests.distributed.answer_rows import TinyCollator, build_answering_model, build_row, build_rows

# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("Seven", ["seven"], 1),
        ("  seven\n", ["Seven."], 1),
        ("the seven", ["seven"], 0),
        ("seven!", ["seven"], 0),
        ("b", ["a", "b"], 1),
        ("", [""], 1),
        ("", ["x"], 0),
        (".", [""], 1),
        ("cafe\u0301", ["café"], 1),
        ("STRASSE", ["straße"], 1),
        ("１２", ["12"], 1),
        ("猫", ["犬"], 0),
    ],
)
def test_exact_match_compares_without_case_blanks_and_a_last_full_stop(
    answer: str, references: list[str], expected: int
) -> None:
    assert exact_match(answer, references) == expected


@pytest.mark.parametrize(("num_equal", "expected"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_vqa_accuracy_of_ten_annotators(num_equal: int, expected: float) -> None:
    assert vqa_accuracy("red", ["red"] * num_equal + ["blue"] * (10 - num_equal)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("references", "expected"),
    [
        (["red"], 1),
        (["blue"], 0),
        (["red", "blue"], 0.5),  # leaving red out 0 of 1, leaving blue out 1 of 1
        (["red", "red"], 1),
        (["red", "blue", "green"], 1 / 3),  # 0, 1/2, 1/2
        (["red"] * 4, 1),
        (["red", "blue", "blue", "blue"], 0.25),  # 0, 1/3, 1/3, 1/3
    ],
)
def test_vqa_accuracy_of_fewer_annotators(references: list[str], expected: float) -> None:
    assert vqa_accuracy("red", references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),
        ("two dogs", "2 dogs"),
        ("None", "0"),
        ("ten", "10"),
        ("eleven", "eleven"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("wont!", "won't"),
        ("its", "its"),
        ("red, white", "red white"),  # beside a blank: dropped
        ("left/right", "left right"),  # between letters: a blank
        ("t-shirt", "t shirt"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("u.s.", "us"),
        ("10:30", "10:30"),
        ("dog’s", "dog's"),
        ("yes.\n", "yes"),
        ("a an the", ""),
        ("", ""),
    ],
)
def test_vqa_normalisation(text: str, expected: str) -> None:
    assert normalize_vqa(text) == expected


def test_vqa_accuracy_compares_normalised_answers() -> None:
    assert vqa_accuracy("The two.", ["2"] * 10) == 1
    assert vqa_accuracy("", ["2"] * 10) == 0


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("coca cola", ["coca-cola"], 8 / 9),
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("ab", ["cd"], 0),
        ("abcd", ["abxy"], 0),  # distance 0.5 is the threshold: nothing
        ("abcde", ["abcxy"], 0.6),
        ("Hello  World", ["hello world"], 1),
        ("x", ["y", "x"], 1),
        ("", [""], 1),
        ("", ["word"], 0),
        ("naïve", ["nai\u0308ve"], 1),
        ("北京市", ["北京"], 2 / 3),
    ],
)
def test_anls(answer: str, references: list[str], expected: float) -> None:
    assert anls(answer, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("a red car", ["the red bus"], 0.5),
        ("red red", ["red"], 2 / 3),
        ("car red", ["red car"], 1),
        ("It's, red!", ["its red"], 1),
        ("", [""], 1),
        ("the", ["a"], 1),
        ("", ["red"], 0),
        ("blue", ["red", "dark blue"], 2 / 3),
        ("Ärger Öl", ["ärger"], 2 / 3),
    ],
)
def test_token_f1(answer: str, references: list[str], expected: float) -> None:
    assert token_f1(answer, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("105", "100", 1),
        ("95", "100", 1),
        ("105.1", "100", 0),
        ("-95", "-100", 1),
        ("95", "-100", 0),
        ("12%", "0.12", 1),
        ("12%", "12", 0),
        ("0", "0", 1),
        ("0.0", "0", 1),
        ("0.01", "0", 0),
        ("1e2", "100", 1),
        ("1,000", "1000", 0),
        ("Yes ", "yes", 1),
        ("nan", "nan", 1),
        ("inf", "100", 0),
        ("", "100", 0),
        ("100 dollars", "100", 0),
    ],
)
def test_relaxed_accuracy_of_charts(answer: str, reference: str, expected: int) -> None:
    assert relaxed_accuracy(answer, [reference]) == expected
    assert relaxed_accuracy(answer, ["another", reference]) == expected


def test_metrics_by_name_or_function_scored_row_by_row() -> None:
    def length(answer: str, references: Any) -> float:
        return len(answer) / 10

    metrics = resolve_metrics(("exact_match", length), source="here")
    scores = [score_answer(metrics, answer, ["one"]) for answer in ("one", "three")]
    assert scores == [{"exact_match": 1.0, "length": 0.3}, {"exact_match": 0.0, "length": 0.5}]
    assert mean_scores(scores) == {"exact_match": 0.5, "length": 0.4}
    assert mean_scores([]) == {} and resolve_metrics((), source="here") == {}
    assert list(resolve_metrics("anls", source="here")) == ["anls"]


def test_unknown_metrics_are_all_named_with_what_is_near_and_the_fix_works() -> None:
    with pytest.raises(DataError, match="2 problems") as error:
        resolve_metrics(("exact_mach", "bleu", "anls"), source="AnswersCallback(metrics=...)")
    first, second = error.value.problems
    assert "'exact_mach' is no metric" in first.message and first.near == "exact_match"
    assert 'metrics=("exact_match",)' in first.fix and "'bleu'" in second.message
    assert resolve_metrics(("exact_match",), source="")


# -- rows and rounds --------------------------------------------------------------------------------------------------


def test_what_counts_as_right_are_the_answers_else_the_last_assistant_turn() -> None:
    row = build_row(1, 1)
    assert references_of(row) == ["w23 w24"]
    assert references_of({**row, "answers": ["a", "b"]}) == ["a", "b"]
    assert references_of({**row, "answers": "a"}) == ["a"]
    assert references_of({**row, "answers": []}) == ["w23 w24"]
    assert references_of({"messages": row["messages"][:1]}) == []


def test_prompts_are_shown_without_the_answer_and_with_roles_where_there_are_turns() -> None:
    row = build_row(1, 2)
    assert prompt_text(row) == "<image> <image> is here how"
    first, second = row["messages"]
    turns = [first, second, {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "x"}]
    assert prompt_text({"messages": turns}).splitlines() == [
        "user: <image> <image> is here how",
        "assistant: w23 w24",
        "user: and now?",
    ]


def test_rows_without_reference_are_counted_and_named_and_the_fixes_work() -> None:
    rows = build_rows(20)
    for index in range(3, 11):
        rows[index]["messages"] = rows[index]["messages"][:1]
    (problem,) = check_references(rows, ["anls"], first_index=100)
    assert "8 of 20 rows have none: row 103, 104, 105, 106, 107, ..." in problem.message
    assert not check_references(rows, [])
    assert not check_references([{**row, "answers": ["x"]} for row in rows], ["anls"])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 7, 23])
def test_rounds_hold_every_row_once_and_never_mix_rows_with_and_without_images(
    num_ranks: int, batch_size: int, num_rows: int
) -> None:
    flags = [index % 3 != 0 for index in range(num_rows)]
    rounds = plan_rounds(flags, num_ranks, batch_size)
    kept = [index for shares in rounds for share in shares if share.counts for index in share.rows]
    assert sorted(kept) == list(range(num_rows))
    for shares in rounds:
        assert len(shares) == num_ranks
        assert all(1 <= len(share.rows) <= batch_size for share in shares), "every rank has something to run"
        assert len({flags[index] for share in shares for index in share.rows}) == 1
    full = num_ranks * batch_size
    assert len(rounds) == -(-sum(flags) // full) + -(-(num_rows - sum(flags)) // full)


# -- files ------------------------------------------------------------------------------------------------------------


def test_lines_name_pictures_by_path_or_by_a_file_that_is_written_once(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n and more"
    row = build_row(0, 0) | {"images": [{"path": "/data/cat.jpg", "bytes": None}, {"path": None, "bytes": png}]}
    store = ImageStore(tmp_path / "answers_images")
    record = answer_record(row, 4, "ü\u2028x", {"anls": 0.5}, store)
    path, stored = record["images"]
    assert path == "/data/cat.jpg" and stored.endswith(".png")
    assert (tmp_path / stored).read_bytes() == png
    written = (tmp_path / stored).stat().st_mtime_ns
    assert answer_record(row, 5, "", {}, ImageStore(tmp_path / "answers_images"))["images"] == [path, stored]
    assert (tmp_path / stored).stat().st_mtime_ns == written
    assert [found.name for found in (tmp_path / "answers_images").iterdir()] == [Path(stored).name]

    file = AnswersFile(tmp_path / "answers.jsonl")
    file.append([{"step": 1, **record}])
    file.append([{"step": 2, **record, "answer": "é"}])
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 2 and "é" in text, "one line each, whatever is in the answer"
    assert json.loads(text.splitlines()[0])["answer"] == "ü\u2028x"
    AnswersFile(tmp_path / "answers.jsonl").start(resume_step=1)
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


# -- generating in one process ----------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_the_batch_and_follow_the_picture() -> None:
    model, collator, rows = build_answering_model("llava"), TinyCollator("llava"), build_rows(6)
    model.train()
    alone = [generate_answers(model, [row], collator, max_new_tokens=5)[0] for row in rows]
    assert generate_answers(model, rows, collator, max_new_tokens=5, batch_size=4) == alone
    assert all(module.training for module in model.modules())
    others = [{**row, "images": [{"bytes": b"another"} for _ in row["images"]]} for row in rows]
    changed = generate_answers(model, others, collator, max_new_tokens=5)
    same = [first == second for first, second in zip(alone, changed, strict=True)]
    assert same == [not row["images"] for row in rows]


def test_a_prompt_that_leaves_no_room_is_named_and_one_near_the_end_gets_a_shorter_answer() -> None:
    model, collator = build_answering_model("llava"), TinyCollator("llava")
    model.generation_config.eos_token_id = None
    collator.processor.tokenizer.eos_token = None
    row = build_row(0, 12)  # 1 + 12 * 5 + 2 tokens of 64
    (answer,) = generate_answers(model, [row], collator, max_new_tokens=9)
    assert len(answer.split()) == 1
    with pytest.raises(DataError, match="row q0: its prompt has 68 tokens .* the model has 64 positions"):
        generate_answers(model, [build_row(1, 1), build_row(0, 13)], collator)


def test_what_cannot_be_read_is_one_error_that_names_the_row() -> None:
    rows = build_rows(4)
    rows[3]["images"] = [{"path": None, "bytes": b"broken"}]
    with pytest.raises(DataError, match="row q3 cannot be made into a prompt: OSError: cannot identify image"):
        generate_answers(build_answering_model("llava"), rows, TinyCollator("llava"))


def test_predictions_keep_the_order_and_count_only_what_was_asked_for(tmp_path: Path) -> None:
    model, collator, rows = build_answering_model("llava"), TinyCollator("llava"), build_rows(5)
    path = tmp_path / "out" / "p.jsonl"
    assert predict_answers(model, rows, collator, path, max_new_tokens=3) == {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(5)) and all(line["scores"] == {} for line in lines)
    assert [line["answer"] for line in lines] == generate_answers(model, rows, collator, max_new_tokens=3)
    assert predict_answers(model, [], collator, tmp_path / "none.jsonl", metrics="anls") == {}
    assert (tmp_path / "none.jsonl").read_text() == ""
    rows[4]["messages"] = rows[4]["messages"][:1]
    with pytest.raises(DataError, match="1 of 5 rows have none: row 4"):
        predict_answers(model, rows, collator, tmp_path / "q.jsonl", metrics="anls")


# -- the callback -----------------------------------------------------------------------------------------------------


class Headless(torch.nn.Module):
    """No model of transformers, so nothing that generates."""


def test_the_callback_refuses_what_could_only_fail_later() -> None:
    rows, collator = build_rows(4), TinyCollator("llava")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("'exact' is no metric", {"metrics": ("exact",)}),
        ("num_rows=0: must be at least 1", {"num_rows": 0}),
        ("batch_size=0.*\n.*\n.*every=-1", {"batch_size": 0, "every": -1}),
        ("dataset is empty", {"dataset": []}),
        ("dataset is a generator without length", {"dataset": (row for row in rows)}),
        ("SimpleNamespace has no encode_prompts", {"collator": SimpleNamespace(processor=None)}),
        ("4 of 4 rows have none", {"dataset": [{**row, "messages": row["messages"][:1]} for row in rows]}),
    ]
    for message, changes in cases:
        with pytest.raises(DataError, match=message):
            AnswersCallback(**{"dataset": rows, "collator": collator, "grid": 0, **changes})  # type: ignore[arg-type]
    answerless = [{**row, "messages": row["messages"][:1]} for row in rows]
    AnswersCallback(answerless, collator, metrics=(), grid=0)


def test_the_callback_refuses_a_model_that_cannot_generate_and_a_best_model_it_would_come_too_late_for() -> None:
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, metric_for_best_model="exact_match")
    events: tuple[Any, ...] = (arguments, TrainerState(), TrainerControl())
    callback = AnswersCallback(build_rows(2), TinyCollator("llava"), grid=0)
    with pytest.raises(IntegrationError, match="Headless cannot generate text"):
        callback.on_init_end(*events, model=Headless())
    callback.on_init_end(*events, model=build_answering_model("llava"))
    late = AnswersCallback(build_rows(2), TinyCollator("llava"), every=5, grid=0)
    with pytest.raises(DataError, match="metric_for_best_model='exact_match' has to be known"):
        late.on_init_end(*events, model=build_answering_model("llava"))


def test_trainer_logs_and_returns_the_mapping_that_the_scores_are_added_to() -> None:
    source = inspect.getsource(inspect.unwrap(Trainer.evaluate))
    assert "self.log(output.metrics)" in source and "return output.metrics" in source
    assert source.index("speed_metrics(") < source.index("self.log(output.metrics)"), (
        "integrations.answers_seam._evaluate"
    )
    assert "self._inner_training_loop" in inspect.getsource(inspect.unwrap(Trainer.train))


# -- the picture ------------------------------------------------------------------------------------------------------


def test_a_grid_shows_wrong_answers_as_far_as_half_of_it() -> None:
    assert choose_rows([1, 1, 0, 1, 0, 0], num=4) == [0, 1, 2, 4]
    assert choose_rows([1, 1, 1, 1, 0], num=4) == [0, 1, 2, 4]
    assert choose_rows([0, 0, 0, 0, 1], num=4) == [0, 1, 2, 4]
    assert choose_rows([1, 0], num=10) == [0, 1]


def _png(color: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_grid_marks_right_and_wrong_by_more_than_colour(tmp_path: Path) -> None:
    green = {"path": None, "bytes": _png((180, 255, 180))}
    row = build_row(0, 0) | {"answers": ["yes"], "images": [green]}
    from PIL import Image

    pictures = {}
    for name, answer in (("right", "yes"), ("wrong", "no")):
        path = draw_answer_grid([row], [answer], tmp_path / "new" / f"{name}.png")
        with Image.open(path) as image:
            pictures[name] = image.convert("L").copy()
            assert image.convert("RGB").getpixel((20 + 80, 20 + 80)) == (180, 255, 180)
    assert not list((tmp_path / "new").glob("*.partial"))
    right, wrong = pictures["right"], pictures["wrong"]
    assert wrong.height > right.height, "the reference stands under a wrong answer"
    frame = [sum(picture.getpixel((20 + x, 100)) < 140 for x in range(8)) for picture in (right, wrong)]
    assert frame == [2, 4], "a wrong answer has the thicker frame, without colour too"
    signs = [picture.crop((20, 186, 38, 206)).tobytes() for picture in (right, wrong)]
    assert signs[0] != signs[1]


def test_the_grid_draws_rows_without_pictures_unreadable_ones_long_answers_and_any_letters(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    rows = [build_row(index, 0) for index in range(5)]
    rows[1]["images"] = [{"path": str(tmp_path / "missing.png"), "bytes": None}]
    rows[2]["images"] = [{"path": None, "bytes": _png((9, 9, 9), (400, 3))}] * 3
    answers = ["x" * 500, "", "Ελλάδα Привет 猫", "word " * 100, "a"]
    path = draw_answer_grid(rows, answers, tmp_path / "grid.png", columns=2, title="a title " * 20)
    with Image.open(path) as image:
        assert image.format == "PNG" and image.height > 3 * 160 and image.width > 2 * 160
    with pytest.raises(DataError, match="given 5 rows, 1 answers"):
        draw_answer_grid(rows, ["x"], tmp_path / "grid.png")
