"""Blocks are compiled in place: one graph for all of a kind, the same numbers and names, never silently uncompiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from hf_fsdp import FSDPConfig
from hf_fsdp.errors import ConfigError, ShardingError
from hf_fsdp.policies import compilation
from hf_fsdp.policies.activation import apply_activations, plan_activations
from hf_fsdp.policies.blocks import find_blocks
from tests.unit.small_models import text_models, tiny_llama
from tests.unit.test_activation import IDS, gradients
from tests.unit.test_selective import apply

# What torch's own compiler does to itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

GRAPHS: list[tuple[str, torch.fx.GraphModule]] = []


def _keep(kind: str) -> Any:
    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        GRAPHS.append((kind, graph))
        return make_boxed_func(graph.forward)

    return compiler


@register_backend(name="counted_aot_eager")  # type: ignore[untyped-decorator]
def counted_aot_eager(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """As `aot_eager` with the partitioner that inductor uses; keeps the graphs of forward and backward."""
    run = aot_autograd(
        fw_compiler=_keep("forward"), bw_compiler=_keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    return run(graph, inputs)


COMPILE = {"blocks": True, "backend": "counted_aot_eager"}


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()
    GRAPHS.clear()


def kinds() -> list[str]:
    return [kind for kind, _ in GRAPHS]


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    norm = torch.stack([gradient.norm() for gradient in one.values()]).norm()
    return max(((other[name] - one[name]).norm() / norm).item() for name in one)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": {"fraction": 0.5}},
        {"activation_checkpointing": {"selective": ["matmul"]}},
        {"activation_checkpointing": {"selective": ["attention"], "every": 2}},
        {"activation_checkpointing": "full", "offload": {"activations": "block_inputs"}},
        {"offload": {"activations": "saved_tensors"}},
        {"activation_checkpointing": {"selective": ["matmul"]}, "offload": {"activations": "block_inputs"}},
        {"activation_checkpointing": {"every": 2}, "offload": "activations"},
    ],
    ids=str,
)
def test_gradients_under_dropout_equal_the_uncompiled(sections: dict[str, Any]) -> None:
    plain, compiled = tiny_llama(4, attention_dropout=0.3), tiny_llama(4, attention_dropout=0.3)
    plan = apply(compiled, compile={"blocks": True, "backend": "aot_eager"}, **sections)
    expected = gradients(plain)
    for _ in range(2):
        assert relative_error(expected, gradients(compiled)) <= 1e-6
    assert "4 blocks compiled (aot_eager)" in plan.describe()
    if plan.store is not None:
        assert plan.store.bytes_moved > 0 and plan.store.bytes_held == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("selective", [[], ["matmul"]])
def test_lora_gradients_under_dropout_equal_the_uncompiled(selective: list[str]) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(3), config)
    plain = gradients(model)
    apply(model, compile=COMPILE, activation_checkpointing={"mode": "full", "selective": selective})
    assert relative_error(plain, gradients(model)) <= 1e-6
    assert GRAPHS, "nothing was compiled"


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "full", {"selective": ["matmul"]}])
def test_all_blocks_of_a_kind_share_one_graph(checkpointing: Any) -> None:
    model = tiny_llama(6)
    apply(model, compile=COMPILE, activation_checkpointing=checkpointing)
    for _ in range(3):
        gradients(model)
    assert kinds() == ["forward", "backward"]


def test_another_length_is_one_more_graph_and_then_all_lengths_have_one() -> None:
    model = tiny_llama(6)
    apply(model, compile=COMPILE, activation_checkpointing="full")
    for length in (12, 11, 10, 9, 8):
        gradients(model, input_ids=IDS[:, :length], labels=IDS[:, :length])
    assert kinds().count("forward") == 2


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3", "gpt2", "opt", "phi3"])
def test_families_need_no_graph_for_each_layer(family: str) -> None:
    torch.manual_seed(0)
    model: Any = text_models()[family]()
    apply(model, compile=COMPILE)
    for _ in range(2):
        gradients(model)
    assert 1 <= kinds().count("forward") <= 2, "Gemma has two kinds of layers, the others one"


def test_selective_inside_a_graph_keeps_the_named_operators() -> None:
    """The backward graph recomputes what was not named, and of what was named nothing."""
    counts = {}
    for name, checkpointing in {
        "none": "none",
        "matmul": {"selective": ["matmul"]},
        "attention": {"selective": ["attention"]},
    }.items():
        torch._dynamo.reset()
        GRAPHS.clear()
        model = tiny_llama(2)
        apply(model, compile=COMPILE, activation_checkpointing=checkpointing)
        gradients(model)
        (backward,) = [graph for kind, graph in GRAPHS if kind == "backward"]
        # An operator that may draw random numbers is an argument of the one that sets the generator back.
        counts[name] = Counter(
            str(item) for node in backward.graph.nodes for item in (node.target, *node.args) if "aten" in str(item)
        )
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert counts["matmul"]["aten.mm.default"] == counts["none"]["aten.mm.default"]
    assert counts["attention"]["aten.mm.default"] > counts["none"]["aten.mm.default"]
    assert counts["matmul"][flash] == 1 and counts["attention"][flash] == 0


class Counting(nn.Module):
    """Each block's forward depends on a number of its own, so no two share a graph."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.index


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(index + 1) for index in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_too_many_graphs_are_an_error_and_never_run_uncompiled() -> None:
    model = Stack(compilation.MAX_GRAPHS + 1)
    apply(model, compile={"blocks": True, "backend": "aot_eager"})
    with pytest.raises(ShardingError, match=f"layers.{compilation.MAX_GRAPHS} .* needs more than 16 graphs"):
        model(torch.randn(2, 4))


def test_the_limit_itself_is_allowed_and_above_torchs_own() -> None:
    model = Stack(compilation.MAX_GRAPHS)
    apply(model, compile=COMPILE)
    model(torch.randn(2, 4)).sum().backward()
    assert kinds().count("forward") == compilation.MAX_GRAPHS > torch._dynamo.config.recompile_limit


# -- everything else stays --------------------------------------------------------------------------------------------


def test_names_generation_and_evaluation_are_as_before() -> None:
    plain, compiled = tiny_llama(3), tiny_llama(3)
    apply(compiled, compile=COMPILE, activation_checkpointing="full")
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in compiled.named_modules()]
    gradients(compiled)
    number = len(GRAPHS)
    plain.eval(), compiled.eval()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(compiled.generate(IDS[:, :4], **options), plain.generate(IDS[:, :4], **options))
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        assert compiled(input_ids=IDS).past_key_values is not None
    assert len(GRAPHS) == number, "generation is not compiled, token by token"


def test_an_unknown_backend_is_refused_with_those_that_are_near() -> None:
    model = tiny_llama(1)
    with pytest.raises(ConfigError, match="compile.backend='inductr' is not a backend") as caught:
        apply(model, compile={"blocks": True, "backend": "inductr"})
    (problem,) = caught.value.problems
    assert problem.near == "inductor" and "backend: inductor" in problem.fix
    assert "forward" not in vars(model.model.layers[0])


def test_selective_with_gathers_inside_the_block_is_refused() -> None:
    model = tiny_llama(2)
    blocks = list(find_blocks(model).blocks.values())
    norms = [layer.input_layernorm for layer in model.model.layers]
    config = FSDPConfig(compile="blocks", activation_checkpointing={"selective": ["matmul"]})
    with pytest.raises(ConfigError, match="need each block as one graph") as caught:
        plan_activations(model, config, blocks, norms)
    assert "keep_norms_fp32: false" in caught.value.problems[0].fix
    plan_activations(model, config, blocks)  # what the advice leads to
    plan = plan_activations(model, FSDPConfig(compile="blocks", activation_checkpointing="full"), blocks, norms)
    apply_activations(model, plan)


def test_mode_and_backend_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    apply(tiny_llama(1), compile={"blocks": True, "mode": "max-autotune-no-cudagraphs"})
    assert asked["backend"] == "inductor" and asked["mode"] == "max-autotune-no-cudagraphs"
    apply(tiny_llama(1), compile={"blocks": True, "backend": "aot_eager"})
    assert asked["backend"] == "aot_eager" and asked["mode"] is None
