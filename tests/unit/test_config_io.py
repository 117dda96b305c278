"""YAML in and out: line numbers, every problem at once, files that are no config at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hf_fsdp import FSDPConfig
from hf_fsdp.config.io import load_yaml
from hf_fsdp.errors import ConfigError

GOOD = """\
model_name_or_path: org/model
fsdp:
  wrap: {layer_classes: [LlamaDecoderLayer]}
  precision: bf16-mixed   # as typed
  activation_checkpointing:
    every: 2
  sharding: {reshard_after_forward: "false"}
learning_rate: 1e-5
"""


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_only_the_fsdp_section_is_read_and_every_source_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = FSDPConfig.from_yaml(path)
    assert config.wrap.layer_classes == ("LlamaDecoderLayer",)
    assert config.activation_checkpointing.every == 2
    assert config.sharding.reshard_after_forward is False
    assert config.sources["precision.preset"] == f"{path}:4"
    assert config.sources["activation_checkpointing.every"] == f"{path}:6"
    assert config.sources["sharding.reshard_after_forward"] == f"{path}:7"


def test_a_config_written_to_a_file_is_read_back(tmp_path: Path) -> None:
    config = FSDPConfig(wrap=["A"], precision="fp32", sharding={"dp_replicate_size": 2}, checkpoint="sharded")
    path = tmp_path / "out.yaml"
    assert config.to_yaml(path) == path.read_text(encoding="utf-8")
    assert FSDPConfig.from_yaml(path) == config


def test_every_problem_of_a_file_is_reported_with_its_line_and_the_fixes_make_it_right(tmp_path: Path) -> None:
    text = """\
fsdp:
  warp: transformer_layers
  precision: bf61
  offload: parameter_s
  sharding:
    reshard: true
    dp_replicate_size: none
  checkpoint: {grace_seconds: soon}
"""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="^6 problems") as caught:
        FSDPConfig.from_yaml(path)
    lines = [int(str(problem.source).rpartition(":")[2]) for problem in caught.value.problems]
    assert lines == [2, 3, 4, 6, 7, 8]
    # Follow the advice: put each fix in the place of its line.
    fixed = text.splitlines()
    for line, problem in zip(lines, caught.value.problems, strict=True):
        fixed[line - 1] = f"  {problem.fix}"
    fixed.remove("  sharding:")  # its two keys were given back in full
    config = FSDPConfig.from_yaml(write(tmp_path, "\n".join(fixed), "fixed.yaml"))
    assert config.sharding.reshard_after_forward is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("just words\n", r"holds one value \('just words'\)"),
        ("fsdp:\n\twrap: A\n", "is not valid YAML"),
        ("fsdp: {wrap: [A\n", "is not valid YAML"),
        ("fsdp: {a: 1}\n---\nfsdp: {}\n", "is not valid YAML"),
        ("fsdp: !!python/object:os.system {}\n", "is not valid YAML"),
        ("fsdp: {since: 2024-99-99}\n", "is not valid YAML"),
        ("fsdp: " + "[" * 3000, "is not valid YAML"),
        ("fsdp: {? [a, b] : 1}\n", "is not valid YAML|is not a key of the fsdp config"),
        ("fsdp: {wrap: A}\nb: \0\n", "is not valid YAML: line 2 holds the character U.0000"),
        ("fsdp: true\n", "fsdp=True is not a mapping of sections"),
        ("fsdp:\n", "fsdp=None is not a mapping of sections"),
        ("fsdp: full_shard auto_wrap\n", "fsdp='full_shard auto_wrap' is not a mapping"),
        ("fspd:\n  wrap: A\n", "has no `fsdp:` section"),
        ("learning_rate: 1\n", "has no `fsdp:` section"),
        ("wrap: A\nprecision: fp32\n", "has wrap, precision at the top level, outside"),
        ("fsdp: {wrap: A}\nfsdp: {wrap: B}\n", "fsdp is given twice, on lines 1 and 2"),
        ("fsdp: {wrap: A, wrap: B}\n", "wrap is given twice"),
        ("a: [{b: 1, c: 2, b: 3}]\nfsdp: {}\n", "b is given twice"),
        ("fsdp:\n  on: 1\n", "True=1 is not a key of the fsdp config"),
    ],
)
def test_a_file_that_is_no_config_gives_one_error_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        FSDPConfig.from_yaml(path)
    assert len(caught.value.problems) == 1
    assert str(caught.value.problems[0].source).startswith(str(path))
    assert caught.value.problems[0].fix


def test_the_example_in_the_advice_is_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no `fsdp:` section") as caught:
        FSDPConfig.from_yaml(write(tmp_path, "learning_rate: 1\n"))
    advice = caught.value.problems[0].fix.removeprefix("add\n")
    assert (
        FSDPConfig.from_yaml(write(tmp_path, f"learning_rate: 1\n{advice}\n", "b.yaml")).precision.preset
        == "bf16-mixed"
    )


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "llama_full.yaml")
    with pytest.raises(ConfigError, match=r"llama_ful.yaml does not exist") as caught:
        FSDPConfig.from_yaml(tmp_path / "llama_ful.yaml")
    assert caught.value.problems[0].fix == f"use {tmp_path / 'llama_full.yaml'}"
    assert FSDPConfig.from_yaml(caught.value.problems[0].fix.removeprefix("use ")) is not None
    with pytest.raises(ConfigError, match="does not exist"):
        FSDPConfig.from_yaml(tmp_path / "no" / "such" / "folder.yaml")


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="is a folder, not a YAML file") as caught:
        FSDPConfig.from_yaml(tmp_path)
    assert str(tmp_path / "run.yaml") in str(caught.value)
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        FSDPConfig.from_yaml(tmp_path / "model.bin")


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GOOD)

    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))  # file modes do not stop root

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        FSDPConfig.from_yaml(path)


def test_a_byte_order_mark_anchors_and_merge_keys_are_read_as_yaml_does(tmp_path: Path) -> None:
    text = "base: &base {precision: fp32, checkpoint: sharded}\nfsdp:\n  <<: *base\n  precision: bf16-true\n"
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    config = FSDPConfig.from_yaml(path)
    assert (config.precision.preset, config.checkpoint.format) == ("bf16-true", "sharded")
    assert load_yaml(path)[0] == yaml.safe_load(text)


def test_an_alias_to_its_own_parent_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a key of the fsdp config"):
        FSDPConfig.from_yaml(write(tmp_path, "fsdp: &a\n  self: *a\n"))


def test_accelerates_launch_file_is_recognised_and_the_right_command_printed(tmp_path: Path) -> None:
    path = write(tmp_path, FSDPConfig().to_accelerate(num_processes=2), "launch.yaml")
    with pytest.raises(ConfigError, match="is a launch file of Accelerate") as caught:
        FSDPConfig.from_yaml(path)
    fix = caught.value.problems[0].fix
    assert re.match(rf"accelerate launch --config_file {re.escape(str(path))} train.py", fix)


def test_an_empty_path_is_called_empty() -> None:
    with pytest.raises(ConfigError, match="the path of the config file is empty"):
        FSDPConfig.from_yaml("")


@pytest.mark.parametrize("key", ["version", "fsdp_version"])
def test_accelerates_version_is_to_be_left_out(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=2 is a key of Accelerate and Trainer, not of the fsdp") as caught:
        FSDPConfig.from_yaml(write(tmp_path, f"fsdp:\n  {key}: 2\n  precision: fp32\n"))
    (problem,) = caught.value.problems
    assert problem.fix.startswith(f"remove {key}; hf-fsdp always runs FSDP2") and problem.near is None
