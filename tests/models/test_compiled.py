"""Compiled layers: joined projections multiply once, and nothing comes out otherwise. By the compiler's front half, which needs no C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from sidestream.attention.paged import PagedBatch, ungated
from sidestream.models import PagedModel, load_model
from sidestream.models.compiled import _MergeProducts, compile_layers, decoder_layers, decompile
from sidestream.models.mtp import attach_head
from sidestream.testing.tiny_models import save_head, tiny_model_dir

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)  # torch's own, of torch
LENGTHS = (5, 40, 1, 17)


def logits(model: PagedModel) -> list[torch.Tensor]:
    results = []
    for length in LENGTHS:
        positions = torch.arange(length)
        kv = torch.zeros(model.layout.shape(4))
        batch = PagedBatch(
            kv=kv,
            slots=positions.clone(),
            block_tables=torch.arange(4)[None],
            query_starts=(0, length),
            kv_lens=(length,),
            num_decode=0,
            before_layer=lambda layer: None,
        )
        results.append(model.forward(positions * 7 % 200, positions, batch, torch.tensor([length - 1])))
    return results


def counting(graphs: list[int]) -> Callable[..., Any]:
    def compiler(module: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        _MergeProducts()(module.graph)
        module.recompile()
        graphs.append(sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes))
        assert not any(node.target is torch.ops.aten.bmm.default for node in module.graph.nodes)  # positions times frequencies
        return module

    return aot_autograd(fw_compiler=compiler)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_compiled_layers_give_the_same_and_multiply_once_for_each_input(family: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = load_model(str(tiny_model_dir(family, tmp_path, 1)), block_tokens=16)
    expected = logits(model)
    graphs: list[int] = []
    compile_layers(model, backend=counting(graphs))
    assert decoder_layers(model)
    for got, wanted in zip(logits(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert sorted(set(graphs)) == [0, 1, 2]  # norms · queries, keys and values, or the way out · gate and up, and down
    decompile(model)
    graphs.clear()
    for got, wanted in zip(logits(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert graphs == []


def test_number_of_compilations_does_not_grow_with_layers_or_lengths(tmp_path: Path) -> None:
    torch._dynamo.reset()
    graphs: list[int] = []
    model = load_model(str(tiny_model_dir("llama", tmp_path, 1, num_hidden_layers=6)), block_tokens=16)
    compile_layers(model, backend=counting(graphs))
    logits(model)
    assert len(graphs) <= 12  # four parts of a layer and two around them, for one token and for any number


def test_what_a_batch_is_like_is_no_reason_to_compile_again_p3(tmp_path: Path) -> None:
    """Rows of other numbers, other waits, and a head that only keeps up: all that flights differ in besides how many tokens they have."""
    torch._dynamo.reset()
    graphs: list[int] = []
    directory = tiny_model_dir("llama", tmp_path, 1)
    model = load_model(str(directory), block_tokens=16)
    head = attach_head(model, save_head(directory, tmp_path / "head.safetensors", seed=5))
    backend = counting(graphs)
    compile_layers(model, backend=backend)
    compile_layers(head, backend=backend)
    tokens = torch.arange(5)

    def batch(tables: torch.dtype, before_layer: Callable[[int], None]) -> PagedBatch:
        kv = torch.zeros(model.layout.shape(4))
        return PagedBatch(kv, tokens.clone(), torch.arange(4, dtype=tables)[None], (0, 5), (5,), 0, before_layer)

    def every(given: PagedBatch) -> None:
        told: list[torch.Tensor] = []
        model.forward_with_hidden(tokens, tokens.clone(), given, tokens[-1:], left=told.append)
        (hidden,) = told
        head.keep_up(tokens, hidden, tokens.clone(), given)
        head.step(tokens, hidden, tokens.clone(), given)

    every(batch(torch.int64, lambda layer: None))
    every(batch(torch.int32, ungated))
    every(batch(torch.int64, [].append))
    assert len(graphs) == 7  # four parts of a layer, the head's among them; the last norm, the positions, and what feeds a head


def test_equal_products_are_merged_and_others_are_not() -> None:
    def work(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a @ b, (a @ b)[:1], b @ a

    module = make_fx(work)(torch.eye(3), torch.ones(3, 3))
    _MergeProducts()(module.graph)
    module.recompile()
    assert sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes) == 2
    for got, wanted in zip(module(torch.eye(3), torch.ones(3, 3)), work(torch.eye(3), torch.ones(3, 3)), strict=True):
        assert got.equal(wanted)
