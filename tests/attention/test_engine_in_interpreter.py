"""A whole engine whose attention is Triton's, in the interpreter: what a GPU runs, as far as a CPU can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proof.tiny_models import save_head, tiny_model_dir
from sidestream import LLM, OffloadConfig, RequestError, RequestOutput, SamplingParams, SpeculativeConfig
from sidestream.attention.interface import BatchRows, ungated
from sidestream.attention.triton import DeviceBatch, SplitKVWorkspace, TritonAttention
from sidestream.engine import rank_parts
from sidestream.engine.parts import Parts
from sidestream.engine.warm_up import WarmUpSteps
from sidestream.models import loader
from sidestream.models.invariant import InvariantLinear, use_invariant_linears
from sidestream.models.rotary import RotatingAttention, rotate_in_attention
from sidestream.ops import Ops, select_ops
from sidestream.runner.executor import Executor
from sidestream.runner.step_inputs import SHORT_TOKENS, GraphKey
from sidestream.speculate.proposer import DraftModelProposer, MtpProposer

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a GPU runs the engine itself: tests/engine/test_cuda_engine.py"
    ),
]

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[10 + position * step % 200 for position in range(length)] for step, length in ((3, 37), (7, 18), (11, 5))]


def _modules(model: Any) -> Any:
    return model.module.modules()


OPS: dict[int, Ops] = {0: Ops()}
"""The operations of engines that are built."""


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceBatch]]:
    """Every engine that is built meanwhile attends, and is warmed up, as one on a GPU; these are its eager steps."""
    seen: list[DeviceBatch] = []
    eager: list[bool] = []

    class Interpreted(Executor):
        def __init__(self, **parts: Any) -> None:
            layout = parts["model"].layout
            workspace = SplitKVWorkspace.allocate(
                query_tokens=28, kv_tokens=256, heads=parts["model"].num_heads, head_dim=layout.value_dim, device="cpu"
            )
            invariant = any(isinstance(part, InvariantLinear) for part in _modules(parts["model"]))
            attention = TritonAttention(workspace, invariant=invariant)
            super().__init__(**{**parts, "attention": attention, "ops": OPS[0]})
            self._runs_eagerly = self._work._run_eagerly
            self._work._run_eagerly = self._told  # type: ignore[method-assign]

        def _told(self, *given: Any) -> Any:
            eager.append(True)
            try:
                return self._runs_eagerly(*given)
            finally:
                eager.clear()

    make_batch = TritonAttention.batch

    def record(self: TritonAttention, kv: Tensor, rows: BatchRows, before_layer: Callable[[int], None]) -> DeviceBatch:
        batch = make_batch(self, kv, rows, before_layer)
        if eager and before_layer is not ungated:  # drafting is ungated
            seen.append(batch)
        return batch

    monkeypatch.setattr(TritonAttention, "batch", record)
    monkeypatch.setattr(rank_parts, "Executor", Interpreted)
    yield seen
    assert all(isinstance(batch, DeviceBatch) for batch in seen)
    assert {batch.block_tables.dtype for batch in seen} <= {
        torch.int32
    }  # captured steps' type: kernels are compiled for one of them


def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, engines have the operations of a GPU, in the interpreter."""
    monkeypatch.setitem(OPS, 0, select_ops(has_kernels=True))


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "minicpm3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {
        # The layers with a window take two blocks.
        "gemma2": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "minicpm3": {"num_key_value_heads": 2},
    }.get(request.param, {})
    return tiny_model_dir(request.param, tmp_path_factory.mktemp(request.param), 3, **{**SMALL, **own})


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        model, dtype="float32", kv_memory="64KiB", max_running=4, max_model_len=128, compute_threads=1, **options
    )


def warm_up(parts: Parts, block_ids: tuple[int, ...], *, chunk_tokens: int) -> None:
    steps = WarmUpSteps(parts.scheduler.slots.size, parts.layout.block_tokens, chunk_tokens)
    parts.executor.warm_up(steps.on(block_ids))


def served_and_drafting(executor: Executor) -> list[tuple[Any, Any]]:
    """The served module and the drafting one, each with the model whose embeddings it has."""
    served, proposer = executor._model.module, executor._forward._proposer
    if isinstance(proposer, MtpProposer):
        return [(served, served), (proposer.head, served)]
    assert isinstance(proposer, DraftModelProposer)
    return [(served, served), (proposer.model.module, proposer.model.module)]


def rotating(part: tuple[Any, Any]) -> int:
    """Number of layers that rotate in their attention from now on, as compiled ones do."""
    rotate_in_attention(*part)
    return sum(isinstance(module, RotatingAttention) for module in part[0].modules())


@pytest.mark.parametrize(
    ("model", "form"),
    [("qwen3", "auto"), ("gemma2", "auto"), ("minicpm3", "auto"), ("gemma2", "fp8")],
    indirect=["model"],
)
def test_answers_equal_the_reference_uncached_and_from_device_and_host(
    model: Path, form: str, batches: list[DeviceBatch]
) -> None:
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(rank_parts, "Executor", Executor)
        with engine(model, kv_cache_dtype=form) as llm:
            expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert not batches

    with engine(model, kv_cache_dtype=form, offload=OffloadConfig(host="1MiB"), check_order=True) as llm:
        costs = llm.engine.parts.costs
        assert costs is not None
        costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # the interpreter's speed is no reason to compute or not
        for _ in ("cold", "from the device"):
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.flush()
        llm.engine.call(llm.engine.parts.blocks.forget_all)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert [output.cached.host for output in outputs] == [32, 16, 0]
    assert {batch.split_rows for batch in batches} >= {0, 1}
    for batch in batches:
        lengths = [stop - start for start, stop in zip(*offsets(batch), strict=True)]
        prefill = [length for length in lengths if length > 1]
        assert (batch.split_rows, batch.short_rows) == (
            len(lengths) - len(prefill),
            0 if sum(prefill) > SHORT_TOKENS else len(prefill),
        )
        assert batch.split_queries >= max(lengths[: batch.split_rows], default=0)
        assert batch.short_queries >= max(lengths[batch.split_rows : batch.rows_in_splits], default=0)


@pytest.mark.parametrize(
    ("model", "form"),
    [("qwen3", "auto"), ("llama", "auto"), ("minicpm3", "auto"), ("qwen3", "fp8")],
    indirect=["model"],
)
def test_captured_forward_passes_give_the_same_answers_as_eager_ones(
    model: Path, form: str, batches: list[DeviceBatch]
) -> None:
    prompts = [*PROMPTS[1:], PROMPTS[0][:20]]
    options = {"chunk_tokens": 16, "token_budget": 20, "offload": OffloadConfig(host="1MiB"), "check_order": True}
    options["kv_cache_dtype"] = form
    with engine(model, **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    with engine(model, **options) as llm:
        executor = llm.engine.parts.executor
        module = executor._model.module
        assert rotating((module, module)) == 2
        llm.engine.call(lambda: executor.capture([GraphKey(4), GraphKey(0, 16), GraphKey(4, 16), GraphKey(4, 20)]))
        graphs = executor._graphs
        assert graphs is not None
        replayed: list[GraphKey] = []
        replay = graphs.replay
        graphs.replay = lambda captured, **how: replayed.append(captured.key) or replay(captured, **how)  # type: ignore[method-assign,func-returns-value]
        batches.clear()
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
        assert [
            output.token_ids for output in llm.generate(prompts, GREEDY)
        ] == expected  # from the device's prefix cache
        assert {GraphKey(4), GraphKey(0, 16), GraphKey(4, 16)} <= set(replayed)
        assert batches == []  # nothing ran eagerly


@pytest.mark.slow  # an engine whose products are computed row by row
@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize("model", ["qwen3", "gemma2"], indirect=True)
def test_an_invariant_request_has_the_same_bits_alone_and_in_any_batch(
    model: Path, batches: list[DeviceBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: whole and cut into chunks, with and without drafts, from the device's prefix cache."""
    monkeypatch.setattr(loader, "make_invariant", lambda model, quantised: use_invariant_linears(model.module))
    prompts = [*PROMPTS[1:], PROMPTS[0][:34], [5, 6, 7] * 5]
    params = dataclasses.replace(GREEDY, max_tokens=6, logprobs=2)

    def answers(outputs: list[RequestOutput]) -> list[Any]:
        return [(output.token_ids, output.completions[0].logprobs) for output in outputs]

    with engine(model, batch_invariant=True, prefix_cache=False) as llm:
        alone = answers([llm.generate([prompt], params)[0] for prompt in prompts])
    speculative = SpeculativeConfig("ngram", 2, adaptive=False)
    cut = {"chunk_tokens": 16, "token_budget": 20, "separate_tail_chunk": False}
    with engine(model, batch_invariant=True, speculative=speculative, **cut) as llm:
        assert answers(llm.generate(prompts, params)) == alone
        assert answers(llm.generate(prompts, params)) == alone
        assert llm.metrics.value("draft_tokens_total", "ngram") > 0
    assert all(batch.invariant for batch in batches)
    assert {batch.split_rows for batch in batches} >= {0, 1, 3}


@pytest.mark.parametrize(("model", "what"), [("qwen3", "update_block_tables"), ("qwen3", "begin")], indirect=["model"])
def test_a_failure_to_fill_a_graph_does_not_change_the_next_step(
    model: Path, batches: list[DeviceBatch], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with engine(model, chunk_tokens=16) as llm:
        executor = llm.engine.parts.executor
        expected = llm.generate(PROMPTS[1:2], GREEDY)[0].token_ids
        llm.engine.call(llm.engine.parts.blocks.forget_all)
        llm.engine.call(lambda: executor.capture([GraphKey(1), GraphKey(0, 16)]))
        owner, left = executor._state if what == "begin" else executor._work._ops, [1]
        works = getattr(owner, what)

        def fail_once(*given: Any) -> None:
            if left:
                left.pop()
                raise MemoryError("no room for the blocks")
            works(*given)

        tables, believed = executor._tables, []
        forget = tables.forget

        def forget_and_tell() -> None:
            forget()
            believed.append(
                any(tables._held)
            )  # at once: the step behind the failed one, if it is packed by then, holds blocks again

        monkeypatch.setattr(owner, what, fail_once)
        monkeypatch.setattr(tables, "forget", forget_and_tell)
        with pytest.raises(RequestError, match="no room for the blocks"):
            llm.generate(PROMPTS[1:2], GREEDY)
        assert believed == [False]  # nobody knows what the device's tables say
        assert llm.generate(PROMPTS[1:2], GREEDY)[0].token_ids == expected


def offsets(batch: DeviceBatch) -> tuple[list[int], list[int]]:
    starts = batch.cu_seqlens_q.tolist()
    return starts[:-1], starts[1:]


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_warm_up_runs_both_attention_paths_and_releases_its_blocks(model: Path, batches: list[DeviceBatch]) -> None:
    with engine(model, check_order=True) as llm:
        parts = llm.engine.parts
        lease = parts.blocks.take(3)
        warm_up(parts, lease.ids, chunk_tokens=40)
        lease.release()
        ways = {(batch.split_rows, len(batch.kv_lens), len(batch.slot_mapping)) for batch in batches}
        assert {(3, 3, 3), (1, 1, 1), (0, 1, 40)} <= ways
        batches.clear()
        lease = parts.blocks.take(
            4
        )  # a block for each row: more than the chunk has, which must not look longer than a row may be
        warm_up(parts, lease.ids, chunk_tokens=40)
        lease.release()
        assert [batch.block_tables.shape[1] for batch in batches if len(batch.slot_mapping) == 40] == [3]
        assert parts.device.host_waits().keys() <= {"step"}
        assert parts.executor._mailbox._pool.num_used == 0
        assert llm.generate(PROMPTS[2], GREEDY)[0].completions[0].finish_reason == "length"


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_warm_up_raises_the_error_of_a_step(
    model: Path, batches: list[DeviceBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model) as llm:
        parts = llm.engine.parts

        def explode(*_: Any, **__: Any) -> None:
            raise RuntimeError("injected: no such kernel")

        monkeypatch.setattr(parts.executor._model, "forward", explode)
        lease = parts.blocks.take(1)
        with pytest.raises(RuntimeError, match="no such kernel"):
            warm_up(parts, lease.ids, chunk_tokens=16)
        lease.release()
        assert parts.executor._mailbox._pool.num_used == 0


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
@pytest.mark.parametrize("proposer", ["mtp", "draft"])
def test_drafting_steps_of_a_gpu_give_the_same_tokens_eager_and_captured(
    model: Path, proposer: str, batches: list[DeviceBatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPTS[2], PROMPTS[2][::-1]]
    params = dataclasses.replace(GREEDY, max_tokens=4)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(rank_parts, "Executor", Executor)
        with engine(model) as llm:
            expected = [output.token_ids for output in llm.generate(prompts, params)]
    kernels_run_here(monkeypatch)
    if proposer == "mtp":
        speculative = SpeculativeConfig(
            "mtp", 2, adaptive=False, head=save_head(model, tmp_path / "head.safetensors", seed=1)
        )
    else:
        other = tiny_model_dir("llama", tmp_path / "draft", 4, **{**SMALL, "num_hidden_layers": 1})
        speculative = SpeculativeConfig("draft", 2, adaptive=False, model=other)
    with engine(model, chunk_tokens=16, token_budget=20, speculative=speculative, check_order=True) as llm:
        executor, rows = llm.engine.parts.executor, []
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        assert max(batch.split_queries for batch in batches) == 3
        llm.engine.call(llm.engine.parts.blocks.forget_all)
        assert [rotating(part) for part in served_and_drafting(executor)] == [2, 1]
        llm.engine.call(
            lambda: executor.capture(
                [GraphKey(2, 0, 2), GraphKey(2, 0, 2, 1), GraphKey(2), GraphKey(0, 16), GraphKey(2, 20, 2)]
            )
        )
        graphs = executor._graphs
        assert graphs is not None
        run = graphs._forward.run
        graphs._forward.run = lambda tokens, *rest, **named: rows.append(len(tokens)) or run(tokens, *rest, **named)  # type: ignore[method-assign,func-returns-value]
        drafted = llm.metrics.value("draft_tokens_total", proposer)
        batches.clear()
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        assert llm.metrics.value("draft_tokens_total", proposer) > drafted
        assert batches == []  # nothing ran eagerly
        assert {2 * 3, 16} <= set(rows)
