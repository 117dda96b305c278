"""A model that is only run gets the trained model's config without what only a backward needs."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp import FSDPConfig
from hf_fsdp.sharding.frozen import frozen_config
from tests.unit.small_models import tiny_llama


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": {"activations": "block_inputs"}, "activation_checkpointing": "full"},
        {"offload": ["parameters", "activations"], "activation_checkpointing": {"selective": ["attention"]}},
        {"offload": {"activations": "saved_tensors"}, "activation_checkpointing": {"every": 2}, "compile": "blocks"},
        {"activation_checkpointing": {"towers": ["language"], "fraction": 0.5}},
    ],
    ids=str,
)
def test_nothing_of_the_backward_is_left_and_the_rest_is_kept(settings: dict[str, Any]) -> None:
    trained = FSDPConfig(precision="fp16", wrap={"granularity": "attention_and_mlp"}, **settings)
    own = frozen_config(tiny_llama(), trained)
    assert own.activation_checkpointing.mode == "none"
    assert own.offload.activations == "none" and not own.compile.blocks
    assert own.offload.parameters == trained.offload.parameters == own.offload.optimizer
    assert (own.precision, own.wrap, own.sharding) == (trained.precision, trained.wrap, trained.sharding)


def test_layer_classes_of_another_architecture_are_left_out() -> None:
    trained = FSDPConfig(wrap=["GPT2Block"])
    assert frozen_config(tiny_llama(), trained).wrap.layer_classes == ()
    trained = FSDPConfig(wrap=["LlamaDecoderLayer"])
    assert frozen_config(tiny_llama(), trained).wrap.layer_classes == ("LlamaDecoderLayer",)
