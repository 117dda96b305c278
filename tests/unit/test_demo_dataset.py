"""The demo's dataset: the answer is not in the question, and nothing held out was seen in training."""

from __future__ import annotations

import json
from pathlib import Path

import make_dataset


def write_library(root: Path, num_modules: int = 30) -> None:
    for number in range(num_modules):
        source = f'def double_{number}(x):\n    """Return twice the value, variant {number}."""\n    return 2 * x\n'
        (root / f"module_{number}.py").write_text(source, encoding="utf-8")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_question_holds_the_code_and_not_its_docstring():
    source = 'def area(r):\n    """Return the area of a\n    circle.\n\n    More.\n    """\n    return 3.14 * r * r\n'
    [(code, line)] = make_dataset.function_pairs(source)
    assert line == "Return the area of a circle."
    assert code == "def area(r):\n    return 3.14 * r * r"


def test_functions_without_a_body_or_a_telling_docstring_give_no_pair():
    only_docstring = 'def area(r):\n    """Return the area of a circle."""\n'
    too_short = 'def area(r):\n    """Area."""\n    return r\n'
    too_long = f'def area(r):\n    """Return the area of a circle."""\n    return [{"1, " * 200}]\n'
    assert [list(make_dataset.function_pairs(text)) for text in (only_docstring, too_short, too_long)] == [[], [], []]


def test_no_module_is_on_both_sides_of_the_split(tmp_path):
    write_library(tmp_path)
    train, held_out = make_dataset.collect_rows(tmp_path)
    assert len(train) + len(held_out) == 30
    assert train and held_out
    assert not {row["module"] for row in train} & {row["module"] for row in held_out}


def test_a_function_copied_to_another_module_is_taken_once(tmp_path):
    source = 'def double(x):\n    """Return twice the value."""\n    return 2 * x\n'
    for number in range(20):
        (tmp_path / f"copy_{number}.py").write_text(source, encoding="utf-8")
    train, held_out = make_dataset.collect_rows(tmp_path)
    assert len(train) + len(held_out) == 1


def test_a_large_module_does_not_fill_its_side(tmp_path):
    functions = [
        f'def f_{n}(x):\n    """Return the value plus {n} and nothing else."""\n    return x + {n}\n'
        for n in range(200)
    ]
    (tmp_path / "large.py").write_text("\n".join(functions), encoding="utf-8")
    train, held_out = make_dataset.collect_rows(tmp_path)
    assert len(train) + len(held_out) == make_dataset.MAX_ROWS_A_MODULE


def test_a_file_that_does_not_parse_and_a_folder_of_installed_packages_are_skipped(tmp_path):
    write_library(tmp_path, num_modules=1)
    (tmp_path / "broken.py").write_text("def (", encoding="utf-8")
    (tmp_path / "site-packages").mkdir()
    write_library(tmp_path / "site-packages", num_modules=5)
    train, held_out = make_dataset.collect_rows(tmp_path)
    assert len(train) + len(held_out) == 1


def test_the_same_library_gives_the_same_files(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    write_library(library)
    first = make_dataset.make_dataset(tmp_path / "one", 10, 3, root=library)
    second = make_dataset.make_dataset(tmp_path / "two", 10, 3, root=library)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len(read_rows(first[0])) == 10
    assert [message["role"] for message in read_rows(first[0])[0]["messages"]] == ["user", "assistant"]
