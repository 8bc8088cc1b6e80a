"""Kernels of experts against torch's operations. On a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE, Glm4MoeLiteTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from proof.tiny_models import tiny_model_dir
from sidestream.models import experts as models
from sidestream.models import load_model
from sidestream.models.compiled import _MERGE_PRODUCTS, compile_layers
from sidestream.models.joined import join_projections

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

from sidestream.ops import experts as ops

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
GATED = {"hidden_size": 48, "moe_intermediate_size": 40}
MODULES = [
    (Qwen3MoeExperts, Qwen3MoeConfig(num_experts=8, **GATED)),
    (GptOssExperts, GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=8)),
    (NemotronHExperts, NemotronHConfig(n_routed_experts=8, **GATED)),
]


def random_choice(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, experts, device=HERE).topk(top_k)


def module(kind: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(kind)
    kind_of_module, config = MODULES[kind]
    made: nn.Module = kind_of_module(config).to(HERE, dtype).requires_grad_(False)
    for part in made.parameters():
        nn.init.normal_(part, std=0.1)
    made.config = config
    models.use_own_experts(nn.ModuleList([made]), dtype)
    return made


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(2, 16, 4), (10, 16, 4), (75, 12, 4), (500, 7, 2)])
def test_pairs_are_sorted_by_expert_and_each_lies_in_one_tile(
    tokens: int, experts: int, top_k: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_kernel:
        monkeypatch.setattr(ops, "_MOST_SORTED", 0)
    chosen = random_choice(tokens, experts, top_k)[1].reshape(-1)
    by = ops.sort_by_expert(chosen, experts)
    values, order = chosen.sort(stable=True)
    assert by.order.tolist() == order.tolist()
    assert by.position[order].tolist() == [*range(len(chosen))]
    assert by.ends.tolist() == chosen.bincount(minlength=experts).cumsum(0).tolist()
    most_rows, most_tiles = ops._tiling(len(chosen), experts)
    tiles = [tile for tile in by.tiles[:most_tiles].tolist() if tile[0] < experts]
    assert [place for _, first, stop in tiles for place in range(first, stop)] == [*range(len(chosen))]
    assert all(0 < stop - first <= most_rows for _, first, stop in tiles)
    assert all(values[place] == expert for expert, first, stop in tiles for place in range(first, stop))


@pytest.mark.parametrize("tokens", [1, 3, 20, 150])
@pytest.mark.parametrize("kind", range(len(MODULES)))
def test_experts_compute_what_those_of_transformers_compute(
    kind: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "on_gpu", lambda device: True)
    experts, states = module(kind), torch.randn(tokens, 48, device=HERE)
    weights, chosen = random_choice(tokens, 8, 2)
    expected = grouped_mm_experts_forward(experts, states, chosen, weights)
    torch.testing.assert_close(models.experts_forward(experts, states, chosen, weights), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", range(len(MODULES)))
def test_torch_multiplies_many_pairs_and_a_kernel_activates(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "on_gpu", lambda device: True)
    monkeypatch.setattr(ops, "_GROUPED_ROWS", 1)
    experts, states = module(kind, torch.bfloat16), torch.randn(20, 48, device=HERE, dtype=torch.bfloat16)
    weights, chosen = random_choice(20, 8, 2)
    expected = grouped_mm_experts_forward(experts, states, chosen, weights.bfloat16())
    found = models.experts_forward(experts, states, chosen, weights.bfloat16())
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_each_activation_is_recognised_and_computed() -> None:
    products = torch.linspace(-8.5, 8.5, 120, device=HERE).view(3, 40)  # beyond the bounds of gpt-oss
    for gate, formula in ops.GATES.items():
        for alternate in (False, True):
            halves = (products[:, ::2], products[:, 1::2]) if alternate else products.chunk(2, -1)
            expected = formula(products, products) if gate == "relu2" else formula(*halves)
            part = SimpleNamespace(
                is_concatenated=not alternate, has_gate=gate != "relu2", act_fn=lambda x, f=formula: f(x, x),
                _apply_gate=lambda x, f=formula, a=alternate: f(x[:, ::2], x[:, 1::2]) if a else f(*x.chunk(2, -1)),
            )  # fmt: skip
            assert models._gate_of(part) == gate
            torch.testing.assert_close(ops._activate(products, gate, alternate and gate != "relu2"), expected)
    part.has_gate, part._apply_gate = True, lambda x: x.chunk(2, -1)[0] * 2
    assert models._gate_of(part) == ""


@pytest.mark.parametrize("kind", range(len(MODULES)))
def test_one_compilation_of_experts_serves_all_numbers_of_tokens(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "on_gpu", lambda device: True)
    experts, graphs = module(kind), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(models.experts_forward, backend=backend, dynamic=True)
    for tokens in (3, 20, 150):
        weights, chosen = random_choice(tokens, 8, 2)
        states = torch.randn(tokens, 48, device=HERE)
        torch.testing.assert_close(
            compiled(experts, states, chosen, weights), models.experts_forward(experts, states, chosen, weights)
        )
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_scores_come_in_order_and_infinite_ones_never_twice(dtype: torch.dtype) -> None:
    scores = torch.randn(5, 3, 20, device=HERE).to(dtype)
    scores[0, 0] = float("-inf")
    scores[1, 1, 3] = float("nan")
    scores[2, 2] = 1.0
    values, indices = ops.largest_of_rows(scores, 4)
    expected = scores.float().where(scores == scores, float("inf")).sort(dim=-1, descending=True, stable=True)
    assert values.float().tolist() == expected.values[..., :4].tolist()
    assert indices.tolist() == expected.indices[..., :4].tolist()


@pytest.mark.parametrize(
    ("width", "arguments", "replaced"),
    [
        (64, (4,), True),
        (64, (4, 1, True, True), True),
        (64, (4, 0), False),
        (64, (4, 1, False), False),
        (2048, (4,), False),
        (64, (40,), False),
    ],
)
def test_compiled_code_finds_few_largest_scores_by_one_kernel(
    width: int, arguments: tuple[Any, ...], replaced: bool
) -> None:
    graph = torch.fx.Graph()
    scores = graph.placeholder("scores")
    scores.meta["val"] = SimpleNamespace(shape=(3, width), is_cuda=True, is_floating_point=lambda: True, dim=lambda: 2)
    found = graph.call_function(torch.ops.aten.topk.default, (scores, *arguments))
    graph.output(found)
    _MERGE_PRODUCTS(graph)
    assert (found.target is torch.ops.sidestream.largest_of_rows.default) == replaced
    assert len(found.args) == (2 if replaced else 1 + len(arguments))


def changed(part: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A module with random weights, and a copy after `use_own_experts`."""
    torch.manual_seed(0)
    part.to(HERE).requires_grad_(False)
    for name, values in [*part.named_parameters(), *part.named_buffers()]:
        nn.init.normal_(values, std=0.1 if "expert" in name or "_proj" in name else 1.0)
    monkeypatch.setattr(models, "on_gpu", lambda device: True)
    own = copy.deepcopy(part)
    for parent in [each for each in part.modules() if hasattr(each, "act_fn") and hasattr(each, "up_proj")]:
        join_projections(parent, ("gate_proj", "up_proj"))
    models.use_own_experts(part, next(part.parameters()).dtype)
    return own, part


class Contrary(Qwen3MoeTopKRouter):
    """Gives the weights of one expert to another one."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = super().forward(hidden_states)[0]
        return logits, torch.ones_like(logits[:, :1]), logits.argmin(-1, keepdim=True)


ROUTERS = [
    (Contrary(Qwen3MoeConfig(num_experts=16, hidden_size=48, num_experts_per_tok=1)), False),
    (Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=16, hidden_size=48, norm_topk_prob=True)), True),
    (Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=16, hidden_size=48, norm_topk_prob=False)), True),
    (GptOssTopKRouter(GptOssConfig(num_local_experts=16, hidden_size=48)), True),
    (Glm4MoeLiteTopkRouter(Glm4MoeLiteConfig(n_routed_experts=16, hidden_size=48, routed_scaling_factor=1.8)), True),
    # Multiplies in float32.
    (Glm4MoeLiteTopkRouter(Glm4MoeLiteConfig(n_routed_experts=16, hidden_size=48)).bfloat16(), True),
    (DeepseekV2TopkRouter(DeepseekV2Config(n_routed_experts=16, hidden_size=64, num_experts_per_tok=3)), True),
    # Only some groups of experts are chosen from.
    (DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=16, hidden_size=48)), False),
    # The same, where the others seldom have the largest score.
    (DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=16, hidden_size=48, num_experts_per_tok=1)), False),
    (Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=2000, hidden_size=48)), False),
]


@pytest.mark.parametrize(("router", "replaced"), ROUTERS)
def test_routers_choose_and_weigh_by_one_kernel(
    router: nn.Module, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, part = changed(copy.deepcopy(router), monkeypatch)
    assert isinstance(part, models.ChoosingRouter) == replaced
    states = torch.randn(20, own.weight.shape[1], device=HERE, dtype=own.weight.dtype)
    (logits, weights, chosen), (expected_logits, *expected) = part(states), own(states)
    torch.testing.assert_close(logits, expected_logits)
    assert weights.dtype == expected[0].dtype
    mixed, expected_mixed = (
        logits.new_zeros(logits.shape).scatter(1, at, values) for values, at in ((weights, chosen), tuple(expected))
    )
    torch.testing.assert_close(mixed, expected_mixed)


@pytest.mark.parametrize("tokens", [1, 3, 20, 150])
def test_an_expert_of_all_tokens_is_multiplied_with_the_others(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Glm4MoeLiteConfig(n_routed_experts=32, **GATED)
    config._experts_implementation = "grouped_mm"
    own, part = changed(Glm4MoeLiteMoE(config), monkeypatch)
    assert isinstance(part, models.SharingMixture)
    states = torch.randn(1, tokens, 48, device=HERE)
    found = part(states)
    config._experts_implementation = own.experts.config._experts_implementation = "grouped_mm"
    torch.testing.assert_close(found, own(states), atol=1e-4, rtol=1e-4)


def test_torch_multiplies_many_tokens_by_the_expert_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_GROUPED_ROWS", 1)
    config = Glm4MoeLiteConfig(n_routed_experts=8, **GATED)
    own, part = changed(Glm4MoeLiteMoE(config).bfloat16(), monkeypatch)
    own.experts.config._experts_implementation = "grouped_mm"
    states = torch.randn(1, 20, 48, device=HERE, dtype=torch.bfloat16)
    torch.testing.assert_close(part(states), own(states), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("tokens", "whole"), [(3, True), (20, True), (3, False)])
def test_compiled_mixtures_add_what_is_added_to_their_output(
    tokens: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = changed(Glm4MoeLiteMoE(Glm4MoeLiteConfig(n_routed_experts=32, **GATED)), monkeypatch)[1]
    sums = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Any:
        _MERGE_PRODUCTS(graph.graph)
        graph.recompile()
        sums.append(sum(node.target is torch.ops.aten.add.Tensor for node in graph.graph.nodes))
        return graph

    states, residual = torch.randn(1, tokens, 48, device=HERE), torch.randn(tokens if whole else 1, 48, device=HERE)
    compiled = torch.compile(
        lambda states, residual: residual[None] + part(states), backend=aot_autograd(fw_compiler=compiler)
    )
    with torch.inference_mode():
        torch.testing.assert_close(compiled(states, residual), residual + part(states))
    assert sums == [0 if whole else 1]


def test_compiled_layers_use_these_experts(tmp_path: Path) -> None:
    model = load_model(str(tiny_model_dir("qwen3_moe", tmp_path / "model", 0)), block_tokens=4, dtype="float32")
    found = [part for part in model.module.modules() if isinstance(part, Qwen3MoeExperts)]
    compile_layers(model, backend="eager")
    assert found
    assert {ALL_EXPERTS_FUNCTIONS[part.config._experts_implementation] for part in found} == {models.experts_forward}


@pytest.mark.gpu
@pytest.mark.skipif(HERE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 40, 2000])
@pytest.mark.parametrize("kind", range(len(MODULES)))
def test_captured_experts_in_bfloat16_are_near_those_in_float32(kind: int, tokens: int) -> None:
    experts, whole = module(kind, torch.bfloat16), module(kind)
    states = torch.randn(tokens, 48, device=HERE, dtype=torch.bfloat16)
    weights, chosen = random_choice(tokens, 8, 2)
    models.experts_forward(experts, states, chosen, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = models.experts_forward(experts, states, chosen, weights)
    graph.replay()
    expected = grouped_mm_experts_forward(whole, states.float(), chosen, weights)
    torch.testing.assert_close(result.float(), expected, atol=0.03, rtol=0.03)
