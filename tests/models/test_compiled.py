"""Compiled layers: joined projections multiply once, and nothing comes out otherwise. By the compiler's front half,
which needs no C++.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_rig import one_row
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from proof.random_models import random_model
from proof.tiny_models import save_head, tiny_model_dir
from sidestream import LLM, SamplingParams
from sidestream.attention.interface import ungated
from sidestream.attention.paged import PagedBatch
from sidestream.attention.states import StatePool
from sidestream.engine.warm_up import WarmUpSteps, capture, run_warm_up
from sidestream.errors import ModelError
from sidestream.models import PagedModel, compiled, few_rows, load_model
from sidestream.models.compiled import _MergeProducts, compile_layers, compiling, decoder_layers, decompile
from sidestream.models.invariant import use_invariant_linears
from sidestream.models.mtp import MtpHead, attach_head
from sidestream.models.shard import ShardCheck
from sidestream.runner.step_inputs import GraphKey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),  # torch's
]
LENGTHS = (5, 40, 1, 17)
# Four parts of a layer and two around them; behind attention one more, for what torch's own leaves of one token.
_MOST = 7


Counted = tuple[PagedModel, list[int]]
near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def nothing_is_compiled(request: pytest.FixtureRequest) -> None:
    if "counted" not in request.fixturenames:
        torch._dynamo.reset()


def loaded(directory: Path, family: str = "llama", **changes: Any) -> PagedModel:
    return load_model(str(tiny_model_dir(family, directory, 1, **changes)), block_tokens=16)


def with_head(directory: Path) -> tuple[PagedModel, MtpHead]:
    model = loaded(directory)
    return model, attach_head(model, save_head(directory, directory / "head.safetensors", seed=5))


def logits(model: PagedModel, lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    results = []
    for length in lengths:
        tokens, batch = torch.arange(length), one_row(torch.zeros(model.layout.shape(4)), length)
        results.append(model.forward(tokens * 7 % 200, tokens, batch, tokens[-1:]))
    return results


def counting(graphs: list[int]) -> Callable[..., Any]:
    def compiler(module: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        _MergeProducts()(module.graph)
        module.recompile()
        products = (torch.ops.aten.mm.default, torch.ops.sidestream.invariant_linear.default)
        graphs.append(sum(node.target in products for node in module.graph.nodes))
        batched = [node for node in module.graph.nodes if node.target is torch.ops.aten.bmm.default]
        assert not batched  # positions times frequencies
        return module

    return aot_autograd(fw_compiler=compiler)


# stablelm: its layers keep their arguments from their attention, so they are compiled with the batch.
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite_swa", "stablelm", "minicpm3"])
def test_compiled_layers_give_equal_results_with_one_product_per_input(family: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, family)
    expected = logits(model)
    graphs: list[int] = []
    compile_layers(model, backend=counting(graphs))
    assert decoder_layers(model)
    with compiling():
        near(logits(model), expected)
    assert sorted(set(graphs)) == [0, 1, 2]  # norms · queries, keys and values, or the way out · gate and up, and down
    decompile(model)
    graphs.clear()
    near(logits(model), expected)
    assert graphs == []


def test_invariant_linears_are_joined_as_others_are(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3")
    expected, graphs = logits(model), list[int]()
    use_invariant_linears(model.module)
    near(logits(model), expected)
    compile_layers(model, backend=counting(graphs), required=True)
    with compiling():
        near(logits(model), expected)
    assert sorted(set(graphs)) == [0, 1, 2]
    decompile(model)
    near(logits(model), expected)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """A model of six layers that was compiled for lengths equal to other sizes first, and its graphs. The tests that
    use it come one after another.
    """
    torch._dynamo.reset()
    graphs: list[int] = []
    model = loaded(tmp_path_factory.mktemp("counted"), num_hidden_layers=6)
    compile_layers(model, backend=counting(graphs))
    sizes = {model.layout.head_dim, model.num_heads, int(model.config.hidden_size)}
    assert min(sizes) > 1 and max(sizes) <= 64
    with compiling():
        logits(model, [*sizes, 1, 3])
    return model, graphs


def test_a_length_equal_to_another_size_causes_no_compilation_p3(counted: Counted) -> None:
    """The compiler takes sizes that are equal for one size: 128 rows on heads of 128 were compiled for alone."""
    assert len(counted[1]) <= _MOST


def test_number_of_compilations_does_not_grow_with_layers_or_lengths(counted: Counted) -> None:
    model, graphs = counted
    with compiling():
        logits(model)
    assert len(graphs) <= _MOST


def test_compiler_settings_of_the_process_are_not_changed(counted: Counted) -> None:
    """That no size is broadcast is true of tokens here, and not of what others compile."""
    added = torch.compile(lambda x, y: (x + y).sum(), dynamic=True, backend="eager")
    assert added(torch.ones(5, 3), torch.ones(5, 3)) == added(torch.ones(5, 3), torch.ones(1, 3)) == 30


def test_the_width_of_rotary_embeddings_is_compiled_as_static() -> None:
    """A layer that rotates a part of a head slices it, and torch 2.11 cannot halve a slice of dynamic size."""
    model = random_model("tiny-hybrid", device=torch.device("cpu"))
    width = int(model.config.head_dim * model.config.rope_parameters["partial_rotary_factor"])
    assert model.state_layout is not None
    memory = torch.zeros(4 * model.state_layout.state_bytes, dtype=torch.uint8)
    states = StatePool(memory, model.state_layout, block_tokens=16)
    widths: list[int | torch.SymInt] = []

    def compiler(module: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        widths.extend(held.shape[-1] for held in inputs if isinstance(held, torch.Tensor) and held.dim() == 3)
        return module

    compile_layers(model, backend=aot_autograd(fw_compiler=compiler))
    for length in (5, 9):
        tokens, zero = torch.arange(length), torch.tensor([0])
        batch = one_row(torch.zeros(model.layout.shape(1), dtype=torch.bfloat16), length)
        of_rows = states.batch(
            zero - 1,
            zero,
            zero - 1,
            slots=zero,
            cu_seqlens_q=torch.tensor([0, length]),
            kv_lens=torch.tensor([length]),
            num_decode=0,
            decode_queries=1,
            chunks=[(0, length)],
        )
        with compiling():
            model.forward(tokens, tokens, batch, zero, states=of_rows)
    assert [found for found in widths if isinstance(found, int)].count(width) == 2  # cosines and sines


def test_batches_of_another_kind_cause_no_compilation_p3(tmp_path: Path) -> None:
    """Rows of other numbers, other waits, and a head that only keeps up: all that steps differ in besides how many
    tokens they have.
    """
    graphs: list[int] = []
    model, head = with_head(tmp_path)
    backend = counting(graphs)
    compile_layers(model, backend=backend)
    compile_layers(head, backend=backend)
    tokens = torch.arange(5)

    def batch(tables: torch.dtype, before_layer: Callable[[int], None]) -> PagedBatch:
        kv = torch.zeros(model.layout.shape(4))
        return PagedBatch(kv, tokens.clone(), torch.arange(4, dtype=tables)[None], (0, 5), (5,), 0, before_layer)

    def every(given: PagedBatch) -> None:
        told: list[torch.Tensor] = []
        model.forward(tokens, tokens.clone(), given, tokens[-1:], left=told.append)
        (hidden,) = told
        head.write_kv(tokens, hidden, tokens.clone(), given)
        head.step(tokens, hidden, tokens.clone(), given)

    with compiling():
        every(batch(torch.int64, lambda layer: None))
        every(batch(torch.int32, ungated))
        every(batch(torch.int64, [].append))
    # Four parts of a layer, the head's among them; the last norm, the positions, and what feeds a head.
    assert len(graphs) == 7


def test_a_compiled_head_that_exits_its_layer_early_holds_no_argument(tmp_path: Path) -> None:
    """It keeps up in every step, by an exception: what that held would rest on the device until the garbage collector
    comes.
    """
    model, head = with_head(tmp_path)
    compile_layers(head, backend=counting([]))
    tokens = torch.arange(5)
    batch = one_row(torch.zeros(model.layout.shape(4)), 5)
    head.write_kv(tokens, torch.zeros(5, head.hidden_size), tokens.clone(), batch)  # what is compiled is kept
    gc.collect()
    gc.disable()
    try:
        before = torch.zeros(5, head.hidden_size)
        kept = weakref.ref(before)
        head.write_kv(tokens, before, tokens.clone(), batch)
        del before
        assert kept() is None
    finally:
        gc.enable()


class Marked(nn.Module):
    """What a layer computes with, and what only the compiler sees of it."""

    def __init__(self, works: nn.Module, *, marked: bool) -> None:
        super().__init__()
        self.works, self.marked = works, marked

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.works(states)
        return found + 0 * torch.erf(states) if self.marked else found


def failing(
    raised: Exception, fails: Callable[[torch.fx.Graph], bool], ran: list[int] | None = None
) -> Callable[..., Any]:
    """A compiler that cannot do some graphs; `ran` is told how many products there are in each of the others whenever
    that runs.
    """

    def compiler(module: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        if fails(module.graph):
            raise raised

        def run(*given: Any) -> Any:
            if ran is not None:
                ran.append(sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes))
            return module(*given)

        return run

    return aot_autograd(fw_compiler=compiler)


def is_marked(graph: torch.fx.Graph) -> bool:
    return any(node.target is torch.ops.aten.erf.default for node in graph.nodes)


def always(graph: torch.fx.Graph) -> bool:
    return True


def as_written(model: PagedModel) -> list[bool]:
    return [layer._compiled_call_impl is None for layer in decoder_layers(model)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sidestream.models.compiled"]


NO_KERNEL = "injected: no such kernel\nand much more"


@pytest.mark.parametrize(
    ("family", "apart", "name"),
    [
        ("gemma2", "type", "Gemma2DecoderLayer sliding_attention"),
        ("qwen3", "class", "Qwen3DecoderLayer full_attention"),
    ],
)
def test_only_layers_that_fail_to_compile_run_uncompiled(
    family: str, apart: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(tmp_path, family, num_hidden_layers=4)
    odd = [True, False, True, False]
    for layer, marked in zip(decoder_layers(model), odd, strict=True):
        mlp: Any = layer.mlp
        if apart == "type" or marked:
            mlp.act_fn = Marked(mlp.act_fn, marked=marked)
    expected = logits(model)
    ran: list[int] = []
    compile_layers(model, backend=failing(RuntimeError(NO_KERNEL), is_marked, ran))
    for _ in range(2):
        ran.clear()
        near(logits(model), expected)
        assert as_written(model) == odd
    assert sum(ran) == len(LENGTHS) * 7 * 2  # of two layers of four
    assert said(caplog) == [
        f"{name} cannot be compiled (RuntimeError: injected: no such kernel): it runs uncompiled, which is slower"
    ]
    decompile(model)
    assert as_written(model) == [True] * 4


def test_a_head_that_fails_to_compile_runs_uncompiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, head = with_head(tmp_path)
    tokens, before = torch.arange(5), torch.ones(5, head.hidden_size)

    def results() -> list[torch.Tensor]:
        kv = torch.zeros(model.layout.shape(4))
        batch = one_row(kv, 5)
        head.write_kv(tokens, before, tokens.clone(), batch)
        return [kv.clone(), *head.step(tokens, before, tokens.clone(), batch), *logits(model)]

    expected = results()
    compile_layers(model, backend=failing(RuntimeError(), is_marked))
    compile_layers(head, backend=failing(RuntimeError(NO_KERNEL), always))
    for _ in range(2):
        near(results(), expected)
    assert as_written(model) == [False] * 3
    assert [told.partition(" cannot be")[0] for told in said(caplog)] == [
        "MtpHead",
        "LlamaDecoderLayer",
        "LlamaRMSNorm",
    ]


def test_an_engine_captures_graphs_with_some_uncompiled_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = [[3, 5, 8, 13] * 5, [7, 9, 2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tiny_model_dir("gemma2", tmp_path, 1), device="cpu", dtype="float32", kv_memory="16MiB") as llm:
        parts = llm.engine.parts
        executor, model = parts.executor, parts.executor._model
        assert isinstance(model, PagedModel)
        for layer, marked in zip(decoder_layers(model), [True, False] * 2, strict=True):
            mlp: Any = layer.mlp
            mlp.act_fn = Marked(mlp.act_fn, marked=marked)
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        llm.engine.call(parts.blocks.forget_all)
        ran: list[int] = []
        backend = failing(RuntimeError(NO_KERNEL), is_marked, ran)
        monkeypatch.setattr(compiled, "compile_layers", partial(compile_layers, backend=backend))

        warmed_up: list[str] = []

        def warm_up(what: str) -> None:
            warmed_up.append(what)
            lease = parts.blocks.take(3)
            executor.warm_up(WarmUpSteps(3, parts.layout.block_tokens, 16).on(lease.ids))
            lease.release()

        shapes = [GraphKey(2), GraphKey(0, 32)]
        llm.engine.call(
            lambda: capture(
                executor, model, None, shapes, gate_layers=0, warm_up=warm_up, tell=lambda what, done, total: None
            )
        )
        assert executor._graphs is not None
        assert executor._graphs.keys == shapes
        assert warmed_up == ["compiling forward passes"]  # once, as steps will run
        ran.clear()
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        assert sum(ran) > 0
        assert as_written(model) == [True, False] * 2
    assert len(said(caplog)) == 1
    assert ("sidestream.engine.warm_up", "WARNING") not in {
        (record.name, record.levelname) for record in caplog.records
    }


@pytest.mark.parametrize("family", ["gemma2", "glm4_moe", "granite_swa", "phi3"])
def test_a_first_call_with_one_token_is_compiled_for_any_number_of_tokens(family: str, tmp_path: Path) -> None:
    graphs: list[int] = []
    model = loaded(tmp_path, family)
    lengths = [1, 5, 2, 40]
    expected = logits(model, lengths)
    compile_layers(model, backend=aot_autograd(fw_compiler=lambda module, _: graphs.append(1) or module))  # type: ignore[func-returns-value]
    with compiling():
        near(logits(model, lengths), expected)
    assert len(graphs) <= _MOST + 2  # glm4_moe's first layer has no experts


def test_several_models_are_compiled_in_one_process(tmp_path: Path) -> None:
    """The compiler gives up on code that it compiled often, eight times unless told otherwise, and all models of a
    class run the same.
    """
    for number in (1, 2, 3):
        graphs: list[int] = []
        model = loaded(tmp_path / str(number), num_hidden_layers=1, intermediate_size=16 * number)
        compile_layers(model, backend=counting(graphs))
        with torch._dynamo.config.patch(recompile_limit=2), compiling():
            logits(model, [5])
        assert len(graphs) >= 3  # what is alike in all of them was compiled before


@pytest.mark.parametrize("is_rank", [False, True])
@pytest.mark.parametrize("stage", ["compile_layers", "the first step"])
def test_an_engine_without_a_compiler_warms_up_uncompiled_layers(
    stage: str, is_rank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    told, steps = list[str](), list[bool]()
    with LLM(
        tiny_model_dir("llama", tmp_path, 1), device="cpu", dtype="float32", kv_memory="16MiB", max_running=2
    ) as llm:
        parts = llm.engine.parts
        executor, model, blocks = parts.executor, parts.executor._model, parts.blocks.num_available
        executor._is_rank = is_rank  # the ranks of one engine fail alike
        assert isinstance(model, PagedModel)
        forward = model.forward

        def once_it_fails(*given: Any, **named: Any) -> torch.Tensor:
            steps.append(as_written(model)[0])
            if stage == "the first step" and len(steps) == 1:
                fail()
            return forward(*given, **named)

        monkeypatch.setattr(model, "forward", once_it_fails)
        monkeypatch.setattr(
            compiled,
            "compile_layers",
            fail if stage == "compile_layers" else partial(compile_layers, backend=counting([])),
        )
        tell = lambda what, done, total: done or told.append(what)  # noqa: E731
        small = WarmUpSteps(2, parts.layout.block_tokens, 16)
        warm_up = partial(run_warm_up, executor, parts.blocks, small, tell)
        llm.engine.call(
            lambda: capture(executor, model, None, [GraphKey(2)], gate_layers=0, warm_up=warm_up, tell=tell)
        )
        assert executor._graphs is not None
        assert parts.blocks.num_available == blocks
    began = ["compiling forward passes"] if stage == "the first step" else []
    assert [what.partition(" (")[0] for what in told] == [
        *began,
        "warming up the GPU's kernels",
        "capturing forward passes",
    ]
    assert told[-1] == "capturing forward passes (2 decode rows, 0 prefill tokens)"
    assert told[-2] == "warming up the GPU's kernels (1 row, 16 tokens)"
    assert len(steps) > 2
    assert all(steps[len(began) :])
    assert "cannot be compiled and captured (RuntimeError: no compiler)" in caplog.text


def test_an_invariant_model_that_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    """Its norms would add in an order that depends on the number of rows."""
    model = loaded(tmp_path)
    compile_layers(model, backend=failing(RuntimeError(NO_KERNEL), lambda graph: True), required=True)
    with pytest.raises(ModelError, match=r"no such kernel.*leave batch_invariant out"):
        logits(model)


@pytest.mark.parametrize("compiles", [True, False])
def test_an_error_of_a_layer_itself_is_raised(compiles: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(tmp_path)
    compile_layers(model, backend=failing(RuntimeError(NO_KERNEL), is_marked if compiles else always))
    logits(model)
    model.layout = replace(model.layout, head_dim=8)
    with pytest.raises(ModelError, match="all layers, keys and values must be alike"):
        logits(model)
    assert as_written(model) == [not compiles] * 3
    assert bool(said(caplog)) == (not compiles)


def test_out_of_memory_in_the_compiler_does_not_count_against_a_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(tmp_path)
    compile_layers(model, backend=failing(torch.OutOfMemoryError("no room"), always))
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"):
        logits(model)
    assert as_written(model) == [False] * 3
    assert not said(caplog)


def test_equal_products_are_merged_and_others_are_not() -> None:
    def work(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a @ b, (a @ b)[:1], b @ a

    module = make_fx(work)(torch.eye(3), torch.ones(3, 3))
    _MergeProducts()(module.graph)
    module.recompile()
    assert sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes) == 2
    for got, wanted in zip(module(torch.eye(3), torch.ones(3, 3)), work(torch.eye(3), torch.ones(3, 3)), strict=True):
        assert got.equal(wanted)


@pytest.mark.parametrize("added", [None, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "early", "stored", "replaced"),
    [
        (torch.bfloat16, True, True, True),
        (torch.float32, True, True, False),
        (torch.bfloat16, False, True, False),
        (torch.bfloat16, True, False, False),
    ],
)
def test_products_with_stored_weights_of_16_bits_are_our_own_on_new_gpus(
    added: int | None,
    dtype: torch.dtype,
    early: bool,
    stored: bool,
    replaced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_rows, "starts_early", lambda device: early)
    graph = torch.fx.Graph()
    bias, states, weight = (graph.placeholder(name) for name in ("bias", "states", "weight"))
    weight.meta["val"] = SimpleNamespace(is_cuda=True, itemsize=dtype.itemsize, device=torch.device("cuda"))
    bias.meta["val"] = SimpleNamespace(dim=lambda: added)
    turned = graph.call_function(torch.ops.aten.permute.default, (weight, [1, 0]))
    other = graph.call_function(torch.ops.aten.neg.default, (turned,))
    products = torch.ops.aten.addmm if added else torch.ops.aten.mm
    given = (states, turned if stored else other)
    product = graph.call_function(products.default, (bias, *given) if added else given)
    graph.output(product)
    _MergeProducts()(graph)
    is_own = product.target is torch.ops.sidestream.multiply_few.default
    assert is_own == (replaced and added != 2)
    if is_own:
        assert product.args == (states, weight, bias if added else None)


class _Doubling:
    """A rank of two that stands for both: its sums are twice its own."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums = 0

    def all_reduce(self, values: torch.Tensor) -> None:
        self.sums += 1
        values.mul_(2)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, values], dim=-1)

    def broadcast(self, values: torch.Tensor) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_compiled_layers_of_a_rank_call_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model_dir("qwen2", tmp_path / "qwen2", 0, num_hidden_layers=1, vocab_size=260)
    monkeypatch.setattr(ShardCheck, "check", lambda self, module: None)  # two equal halves are another model
    group = _Doubling()
    model = load_model(str(directory), block_tokens=16, group=group)
    eager = logits(model)
    compile_layers(model, backend="eager")
    group.sums = 0

    with compiling():
        compiled = logits(model)

    assert group.sums == 2 * len(LENGTHS)  # after attention, and after the MLP
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


def test_weights_are_freed_one_layer_at_a_time_as_they_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept until the last layer is joined, they would take half as much memory as the model once more."""
    model = loaded(tmp_path, "qwen3")
    before: list[weakref.ref[nn.Parameter]] = []
    join = compiled.join_projections

    def joining(parent: nn.Module, names: Sequence[str]) -> None:
        assert not [weight for weight in before if weight() is not None]
        before.extend(weakref.ref(getattr(parent, name).weight) for name in names)
        join(parent, names)

    monkeypatch.setattr(compiled, "join_projections", joining)
    compile_layers(model, backend="eager")
    layers = len(decoder_layers(model))
    assert len(before) == 5 * layers > 5
