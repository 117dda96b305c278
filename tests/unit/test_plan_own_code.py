"""Code that comes with a model: run by a person's word alone, and from the spec alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.model_config import model_kind, read_config
from hf_fsdp.plan.models.resolve import resolve_model
from tests.unit.test_plan_models import problem_of, write_config


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    folder = write_config(tmp_path / "own", {"model_type": "own", "width": 8, "auto_map": auto_map})
    marker = tmp_path / "it_ran"
    (folder / "modeling_own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from torch import nn\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    width: int = 4\n"
        "class OwnForCausalLM(PreTrainedModel):\n    config_class = OwnConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.layer = nn.Linear(config.width, config.width)\n        self.post_init()\n"
    )
    return folder


def test_code_of_the_model_is_not_run_without_a_word(own_code: Path) -> None:
    said = problem_of(str(own_code))
    assert "code of its own (modeling_own.OwnConfig)" in said and "--trust-remote-code" in said
    with pytest.raises(ValueError, match="not one of transformers"):
        read_config(ModelSpec(name=str(own_code), config=json.loads((own_code / "config.json").read_text())))
    assert not (own_code.parent / "it_ran").exists()


@pytest.mark.parametrize("named", ["folder", "file"])
def test_trusted_code_builds_its_own_class_from_the_spec_alone(
    own_code: Path, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    spec = resolve_model(str(own_code if named == "folder" else own_code / "config.json"), trust_remote_code=True)
    assert not (tmp_path / "it_ran").exists()  # resolving reads; only building runs
    assert model_kind(spec) == "causal-lm"
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(spec), trust_remote_code=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8 * 8 + 8


def test_a_class_of_transformers_needs_no_trust(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", auto_map={"AutoConfig": "configuration_mine.MyConfig"})
    assert model_kind(resolve_model(str(folder))) == "causal-lm"


def test_a_class_list_that_is_none_is_left_alone(tmp_path: Path) -> None:
    for junk in (7, "LlamaForCausalLM", [1, None], {}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": junk}))
        spec = resolve_model(str(tmp_path))
        assert model_kind(spec) == "causal-lm"
