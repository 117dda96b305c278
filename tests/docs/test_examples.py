"""Every example in a docstring runs, and the README's script diff is a script that trains sharded."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_digits import write_digits, write_model

REPOSITORY = Path(__file__).resolve().parents[2]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in (REPOSITORY / "hf_fsdp").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
# What a person has before the diff starts: a model and a dataset of their own.
PRELUDE = """
from transformers import Trainer, TrainingArguments
from tests.distributed.tiny_models import build_model
from tests.distributed.training import build_dataset
model, dataset = build_model("llama", tied=False), build_dataset(8)
"""


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_docstring_examples_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0 and results.failed == 0


def readme_blocks(language: str) -> list[str]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readmes_script_diff_trains_sharded(tmp_path: Path) -> None:
    (diff,) = readme_blocks("diff")
    after = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("+", " "))
    before = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("-", " "))
    assert "FSDP" in after and "FSDP" not in before
    printed = run_on_two_processes(
        PRELUDE + after.replace('"out"', f"{str(tmp_path / 'out')!r}, report_to=[]"), tmp_path
    )
    assert "FSDP audit: LlamaForCausalLM on 2 processes (dp_shard 2), bf16-mixed" in printed
    assert "sharded      100.0%" in printed


def run_on_two_processes(code: str, folder: Path) -> str:
    """Run a script as a person would, and return what it printed."""
    script = folder / "train.py"
    script.write_text(code)
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_the_vision_language_script_trains_sharded(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "vlm.md").read_text(encoding="utf-8").partition("## A script of your own")[2]
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    train_file, _ = write_digits(tmp_path / "data")
    train_file.write_text(json.dumps(json.loads(train_file.read_text())[:40]))
    write_model(tmp_path / "model")
    given = {"MODEL": tmp_path / "model", "DATA": train_file, "PICTURES": tmp_path / "data"}
    names = "".join(f"{name} = {str(path)!r}\n" for name, path in given.items())
    script = script.replace('"out', f'"{tmp_path}/out').replace(
        "max_steps=20", "max_steps=2, use_cpu=True, report_to=[]"
    )
    printed = run_on_two_processes(names + script.replace("eval_steps=10", "eval_steps=2"), tmp_path)
    assert "FSDP audit: LlavaForConditionalGeneration on 2 processes (dp_shard 2), bf16-mixed" in printed
    assert printed.count("in 40 samples") == 1 and "eval_exact_match" in printed
    assert "39 of 39 frozen tensors are bit for bit what they were" in printed
    assert (tmp_path / "out" / "final" / "processor_config.json").exists()


def test_the_readmes_plain_loop_shards_and_prints_the_audit(tmp_path: Path) -> None:
    (block,) = (block for block in readme_blocks("python") if "apply_fsdp" in block)
    printed = run_on_two_processes("import torch\n" + PRELUDE + block, tmp_path)
    assert printed.count("FSDP audit: LlamaForCausalLM on 2 processes (dp_shard 2), bf16-mixed") == 2


def test_every_file_and_command_the_readme_names_exists() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:configs|docs|recipes|scripts|benchmarks|tests)/[\w./-]*\w", text))
    missing = sorted(name for name in named if not (REPOSITORY / name).exists())
    assert named and not missing
