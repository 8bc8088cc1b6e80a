"""The kernels of a gated delta rule compute what transformers does, on states that lie in a pool: chunks, decode rows,
drafts and their replay, and checkpoints. In Triton's interpreter on a CPU, compiled on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from proof.tiny_models import tiny_config
from sidestream.attention.states import DraftInputs, StatePool
from sidestream.models.recurrent import StatefulLayers, state_layout_of, stateful_modules
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.kv.state_layout import StateLayout, StateTensor

pytest.importorskip("triton", reason="triton is not installed: it comes with torch on Linux x86-64")

from sidestream.attention.triton.gated_delta import GatedDeltaShape, Projected, gated_delta
from sidestream.models.gated_delta import GatedDelta

pytestmark = pytest.mark.slow

DEVICE = torch.device(CUDA if torch.cuda.is_available() else "cpu")
KINDS = ("qwen3_next", "qwen3_5")  # the two ways of projecting
TOLERANCE = {"atol": 3e-4, "rtol": 1e-3}  # transformers computes a chunk in another order
BLOCK, SLOTS, DRAFTS, STATES = 4, 3, 3, 8


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest) -> tuple[Any, StateLayout]:
    return made(request.param)


def made(kind: str) -> tuple[Any, StateLayout]:
    """A layer 0 with weights that let the state matter, and the layout of the states of the model."""
    config = tiny_config(kind)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = AutoModelForCausalLM.from_config(config).eval()
        part = stateful_modules(module)[0]
        with torch.no_grad():
            for weight in part.parameters():
                weight.add_(torch.randn_like(weight) * 0.2)
    layout = state_layout_of(module, config)
    assert layout is not None
    return part.to(DEVICE), layout


class Both:
    """Two pools with equal states; one is advanced by transformers' code, the other by the kernels."""

    def __init__(self, part: Any, layout: StateLayout, *, drafts: bool) -> None:
        self.layout = layout
        self.pools = [
            StatePool(
                torch.zeros(STATES * layout.state_bytes, dtype=torch.uint8, device=DEVICE),
                layout,
                block_tokens=BLOCK,
                drafts=DraftInputs(layout, SLOTS + 1, DRAFTS, DEVICE) if drafts else None,
            )
            for _ in range(2)
        ]
        self.kernels = GatedDelta(part, 0)
        self._layers = StatefulLayers(torch.nn.ModuleList([part]))
        self._part = part
        self._random = torch.Generator().manual_seed(7)

    def step(
        self, rows: Sequence[tuple[int, int, int, int]], checkpoints: Sequence[int] = (), *, num_decode: int = 0
    ) -> None:
        """Run a step of rows (slot, state read, start, tokens), each of which writes the state of its slot, both ways;
        compare outputs and states.
        """
        slots, reads, starts, counts = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
        ends = counts.cumsum(0)
        chunks = [
            (int(end - count), int(end)) for end, count in zip(ends[num_decode:], counts[num_decode:], strict=True)
        ]
        hidden = torch.randn(int(ends[-1]), self.layout.input_size, generator=self._random).to(DEVICE)
        outputs = []
        for number, pool in enumerate(self.pools):
            batch = pool.batch(
                reads,
                slots,
                torch.tensor([*checkpoints] or [-1] * len(rows), device=DEVICE),
                slots=slots,
                cu_seqlens_q=torch.cat([torch.zeros_like(ends[:1]), ends]),
                kv_lens=starts + counts,
                num_decode=num_decode,
                decode_queries=int(counts[:num_decode].max()) if num_decode else 1,
                chunks=chunks,
            )
            assert not batch.wrong.any()
            with torch.inference_mode():
                if number == 0:
                    outputs.append(self._layers.run(batch, lambda: self._part(hidden[None])[0]))
                else:
                    outputs.append(batch.compute(0, hidden, _never, kernels=self.kernels))
                batch.finish(torch.zeros(0, 1, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE))
        torch.testing.assert_close(outputs[1], outputs[0], **TOLERANCE)
        written = [*{row[0] for row in rows}, *(state for state in checkpoints if state >= 0)]
        for part, expected in self.pools[0].layer(0).items():
            torch.testing.assert_close(self.pools[1].layer(0)[part][written], expected[written], **TOLERANCE)
        assert self.pools[0].covered.equal(self.pools[1].covered)


def _never(*_: object) -> torch.Tensor:
    raise AssertionError("the kernels compute all of these rows")


def test_chunks_and_decode_rows_equal_transformers_results(layer: tuple[Any, StateLayout]) -> None:
    both = Both(*layer, drafts=False)
    both.step([(0, -1, 0, 5), (1, -1, 0, 9)])
    both.step([(0, 0, 5, 1), (1, 1, 9, 3)], num_decode=1)
    both.step([(0, 0, 6, 1), (1, 1, 12, 1)], num_decode=2)
    both.step([(2, 1, 13, 1), (0, 0, 7, 1)], num_decode=2)  # a row that leaves another state than it reads


def test_accepted_drafts_are_replayed_and_checkpoints_end_at_block_boundaries(layer: tuple[Any, StateLayout]) -> None:
    both, rng = Both(*layer, drafts=True), random.Random(5)
    both.step([(0, -1, 0, 5), (1, -1, 0, 7), (2, -1, 0, 1)])
    starts, drafted = [5, 7, 1], [0, 0, 0]
    for turn in range(5):
        starts = [start + (turn > 0) + rng.randint(0, count) for start, count in zip(starts, drafted, strict=True)]
        drafted = [rng.randint(0, DRAFTS) for _ in starts]
        rows = [(slot, slot, start, 1 + count) for slot, (start, count) in enumerate(zip(starts, drafted, strict=True))]
        both.step(rows, [3, 4, 5], num_decode=3)


def test_long_chunks_beside_rows_with_drafts_continue_in_place(layer: tuple[Any, StateLayout]) -> None:
    both = Both(*layer, drafts=True)
    both.step([(0, -1, 0, 5), (1, -1, 0, 70)])
    both.step([(0, 0, 5, 3), (1, 1, 70, 67)], num_decode=1)
    both.step([(0, 0, 8, 1), (2, 1, 137, 2)], num_decode=2)  # both drafts were accepted


@pytest.mark.parametrize(("size", "fits"), [(8, False), (16, True), (128, True), (256, False)])
def test_unsupported_head_sizes_are_computed_by_transformers(size: int, fits: bool) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config("qwen3_5", linear_key_head_dim=size))
    assert GatedDelta.fits(stateful_modules(module)[0]) is fits


def exactly(mixed: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor, shape: GatedDeltaShape) -> torch.Tensor:
    """The rule token by token in float64, for one key head and one value head with a bias of 0 and a rate of -1, on
    inputs that were convolved. The outputs `[T, value_size]`, and after them the state.
    """
    q, k, v = mixed.double().split([shape.key_size, shape.key_size, shape.value_size], dim=1)
    q, k = (part * (part.square().sum(1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    strength, decay = beta.sigmoid().double(), (-functional.softplus(alpha.double())).exp()
    state, outputs = torch.zeros(shape.key_size, shape.value_size, dtype=torch.float64, device=mixed.device), []
    for token in range(len(mixed)):
        state = state * decay[token]
        state = state + torch.outer(k[token], strength[token] * (v[token] - k[token] @ state))
        outputs.append(q[token] @ state * shape.key_size**-0.5)
    return torch.cat([torch.stack(outputs), state])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", ["random", "equal", "alternating"])
def test_long_rows_are_exact_for_ill_conditioned_inputs(keys: str, dtype: torch.dtype) -> None:
    """With equal keys, full strength and no decay, all entries of the matrix to invert are 1. Sums of its powers then
    have terms of thousands that cancel.
    """
    shape, count = GatedDeltaShape(1, 1, 16, 16), 150
    random = torch.Generator().manual_seed(5)
    hard = keys != "random"
    mixed = torch.randn(count, shape.channels, generator=random)
    if hard:
        mixed[:, 16:32] = mixed[0, 16:32]
    if keys == "alternating":
        mixed[1::2, 16:32] *= -1
    mixed = torch.cat([mixed, torch.full((count, 1), 9.0 if hard else 0.3), torch.full((count, 1), -9.0)], 1)
    mixed = mixed.to(DEVICE, dtype)
    layout = StateLayout(
        (
            StateTensor(0, "conv", 0, (shape.channels, 4), str(dtype).removeprefix("torch.")),
            StateTensor(0, "recurrent", 0, (1, 16, 16), "float32"),
        ),
        shape.channels,
        str(dtype).removeprefix("torch."),
    )
    pool = StatePool(
        torch.zeros(STATES * layout.state_bytes, dtype=torch.uint8, device=DEVICE), layout, block_tokens=BLOCK
    )
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    batch = pool.batch(
        one - 1,
        one,
        one - 1,
        slots=one,
        cu_seqlens_q=torch.tensor([0, count], device=DEVICE),
        kv_lens=one + count,
        num_decode=0,
        decode_queries=1,
        chunks=[(0, count)],
    )
    new = Projected(mixed[:, :-2], mixed[:, -2:-1], mixed[:, -1:])
    weight = torch.zeros(shape.channels, 4, dtype=dtype, device=DEVICE)
    weight[:, 3] = 1  # each token is only its own
    found = gated_delta(
        new,
        Projected(new.mixed[:0], new.beta[:0], new.alpha[:0]),
        batch,
        shape,
        conv_states=pool.layer(0)["conv", 0],
        recurrent_states=pool.layer(0)["recurrent", 0],
        conv_weight=weight,
        a_log=torch.zeros(1, dtype=dtype, device=DEVICE),
        dt_bias=torch.zeros(1, dtype=dtype, device=DEVICE),
    )
    expected = exactly(functional.silu(new.mixed), new.beta[:, 0], new.alpha[:, 0], shape)
    state = pool.layer(0)["recurrent", 0][0, 0]
    # Here the interpreter cuts bits of bfloat16 off, and on a GPU tf32 cuts bits of the operands off.
    rounding = 1e-4 if dtype == torch.float32 else 2e-2
    largest = expected.abs().max()
    assert (found[:, 0].double() - expected[:count]).abs().max() < rounding * largest
    assert (state.double() - expected[count:]).abs().max() < rounding * largest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_equal_transformers_results(kind: str) -> None:
    """The tests of this file run the kernels compiled where there is a GPU; this one names them for `make test-gpu`."""
    part, layout = made(kind)
    test_chunks_and_decode_rows_equal_transformers_results((part, layout))
    test_long_chunks_beside_rows_with_drafts_continue_in_place((part, layout))
    for keys in ("random", "equal", "alternating"):
        for dtype in (torch.float32, torch.bfloat16):
            test_long_rows_are_exact_for_ill_conditioned_inputs(keys, dtype)
    test_accepted_drafts_are_replayed_and_checkpoints_end_at_block_boundaries((part, layout))
