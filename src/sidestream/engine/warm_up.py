"""Makes an executor on a GPU ready before the engine serves: launches every kernel once, compiles the model's layers,
and captures CUDA graphs of forward passes.

A kernel's first launch waits for the device, and a step of a request must not wait. So the warm-up runs small steps
without requests, which launch every kernel that a request's step can launch. Called while an engine is built, on every
rank in the same order, because the steps of several ranks wait for each other in collectives.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidestream.config import SamplingParams
from sidestream.engine.build_plan import BuildPlan, ServableModel
from sidestream.errors import DeviceLost, OutOfDeviceMemory
from sidestream.runner.executor import Executor
from sidestream.runner.step_inputs import GraphKey
from sidestream.speculate import Proposer
from sidestream.types import BatchPlan, RowPlan, RowStart, SamplingSpec, StateIds
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.loads import layers_per_group

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.adapter import PagedModel
    from sidestream.models.mtp import MtpHead

logger = logging.getLogger(__name__)

_WARMING_UP = "warming up the GPU's kernels"


def _asking(**params: Any) -> SamplingSpec:
    """The options of a request with these parameters; greedy if no temperature is given."""
    return SamplingParams(**{"temperature": 0.0, **params}).spec(seed=0, eos_ids=())


# Sampling options that use different kernels.
GREEDY = _asking()
_VARIANTS = (
    GREEDY,
    _asking(temperature=1.0),
    _asking(temperature=1.0, top_k=2),
    _asking(temperature=1.0, top_p=0.5),
    _asking(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1),
    _asking(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    _asking(logit_bias={0: 1.0}, min_tokens=4, stop_token_ids=(0,)),
    _asking(logprobs=1),
    _asking(allowed_token_ids=(0,)),
)
# Sampling options that are warmed up in steps of one row each. A logit bias in one row promotes the logits of all rows
# of the step to float32. So the options without a bias run the kernels for logits in the model's dtype, and the others
# the kernels of penalties and masks for float32 logits.
_ALONE = (
    _asking(temperature=1.0),
    _asking(repetition_penalty=1.1),
    _asking(repetition_penalty=1.1, logit_bias={0: 1.0}),
    _asking(allowed_token_ids=(0,)),
    _asking(allowed_token_ids=(0,), logit_bias={0: 1.0}),
)


@dataclass(frozen=True, slots=True)
class WarmUpSteps:
    """Small steps that launch every kernel that a step of a request can launch.

    max_rows       largest number of rows of a step
    block_tokens   tokens in a block
    chunk_tokens   tokens of the largest prefill chunk
    max_drafts     largest number of drafts of a row; 0: no speculative decoding
    has_states     whether the model has recurrent state
    self_check     run each step twice, because steps of requests may run twice
    """

    max_rows: int
    block_tokens: int
    chunk_tokens: int
    max_drafts: int = 0
    has_states: bool = False
    self_check: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks with which every step has its full size. With fewer blocks, steps have fewer rows and a
        shorter chunk.
        """
        return max(self.max_rows, -(-self.chunk_tokens // self.block_tokens))

    def on(self, block_ids: Sequence[int]) -> Iterator[BatchPlan]:
        """The steps. They overwrite these blocks: each row uses one block, or one long chunk uses all of them."""
        size, count = self.block_tokens, min(self.max_rows, len(block_ids))
        tokens = min(self.chunk_tokens, len(block_ids) * size)
        yield from self._batches([warm_up_row(0, tuple(block_ids[: -(-tokens // size)]), tokens, GREEDY)])
        for first in range(0, len(_VARIANTS), count):
            begun = [
                warm_up_row(row, (block_ids[row],), 1, _VARIANTS[(first + row) % len(_VARIANTS)])
                for row in range(count)
            ]
            going_on = [
                row._replace(min_start=1, stop=2, tokens=None, min_output_index=1, begin=None)
                for row in begun
                if size > 1
            ]
            yield from self._batches(begun, going_on, going_on[:1], [*going_on[:1], *begun[1:]])
            if self.max_drafts and size > 2:
                drafts = min(self.max_drafts, size - 2)
                drafting = [row._replace(stop=row.stop + drafts, drafts=drafts) for row in going_on]
                yield from self._batches(drafting, drafting[:1], begun, [*drafting[:1], *begun[1:]])
        for spec in _ALONE:
            yield from self._batches([warm_up_row(0, (block_ids[0],), 1, spec)])

    def _batches(self, *steps: Sequence[RowPlan]) -> Iterator[BatchPlan]:
        states = StateIds(-1, -1) if self.has_states else None
        for rows in filter(None, steps):
            batch = BatchPlan(tuple(row._replace(states=states) for row in rows), any(row.drafts for row in rows))
            yield batch.with_self_check() if self.self_check else batch


def warm_up_row(slot: int, block_table: tuple[int, ...], num_tokens: int, spec: SamplingSpec = GREEDY) -> RowPlan:
    """A row without a request: a first chunk of `num_tokens` tokens, after which a token is sampled."""
    return RowPlan(
        request_id=-1 - slot,
        slot=slot,
        epoch=0,
        min_start=0,
        stop=num_tokens,
        tokens=(0,) * num_tokens,
        block_table=block_table,
        samples=True,
        min_output_index=0,
        begin=RowStart(sampling=spec, prompt=(0,) * num_tokens, outputs=(0,)),
    )


def make_ready(
    plan: BuildPlan,
    executor: Executor,
    blocks: FencedPool,
    *,
    gated: bool,
    tell: Callable[[str, int, int], None],
) -> None:
    """Warm up the kernels of a GPU, and capture forward passes unless `config.eager`. Blocks the caller.

    gated   whether steps may wait for loads of KV from tiers
    tell    see `build_engine`
    """
    sizes, model = plan.sizes, plan.model
    steps = WarmUpSteps(
        max_rows=sizes.max_running,
        block_tokens=model.layout.block_tokens,
        chunk_tokens=min(sizes.chunk_tokens, plan.bounds.max_model_len),
        max_drafts=plan.max_drafts,
        has_states=plan.region is not None,
        self_check=plan.config.self_check > 0,
    )
    warm_up = functools.partial(run_warm_up, executor, blocks, steps, tell)
    if plan.config.eager:
        warm_up(_WARMING_UP)
        return
    shapes = GraphKey.all_of(
        max_rows=sizes.max_running,
        chunk_tokens=sizes.chunk_tokens,
        max_tokens=min(sizes.token_budget, plan.bounds.pool_tokens),
        drafts=plan.max_drafts,
        has_states=model.state_layout is not None,
        chunks=not model.needs_chunk_lengths,
    )
    gates = gated and not model.needs_chunk_lengths  # only steps with prefill wait for loads
    gate_layers = layers_per_group(plan.layout, plan.device.segment_bytes) if gates else 0
    capture(
        executor,
        model,
        plan.proposer,
        shapes,
        gate_layers=gate_layers,
        shared=plan.group is not None,
        compiled=plan.config.batch_invariant,
        warm_up=warm_up,
        tell=tell,
    )


def run_warm_up(
    executor: Executor, blocks: FencedPool, steps: WarmUpSteps, tell: Callable[[str, int, int], None], what: str
) -> None:
    """Run the steps on free blocks of the pool, and report the activity `what` to `tell`. Blocks the caller."""
    start_s = time.monotonic()
    lease = blocks.take(min(blocks.num_available, steps.num_blocks))
    batches = list(steps.on(lease.ids))

    def told() -> Iterator[BatchPlan]:
        for number, batch in enumerate(batches):
            num_tokens = sum(row.num_tokens for row in batch.rows)
            rows = f"{batch.num_rows} row{'' if batch.num_rows == 1 else 's'}"
            tell(f"{what} ({rows}, {num_tokens} tokens)", number, len(batches))
            yield batch

    try:
        executor.warm_up(told())
    finally:
        lease.release()  # without fences, because every step of the warm-up has ended
    logger.info("the GPU's kernels are warm after %.1f s", time.monotonic() - start_s)


def capture(
    executor: Executor,
    model: ServableModel,
    proposer: Proposer | None,
    shapes: Sequence[GraphKey],
    *,
    gate_layers: int,
    shared: bool = False,
    compiled: bool = False,
    warm_up: Callable[[str], None],
    tell: Callable[[str, int, int], None],
) -> None:
    """Compile the layers, warm up, and capture graphs. Blocks the caller.

    If layers cannot be compiled, they are captured uncompiled. If they cannot be captured either, steps launch each
    kernel separately. The warm-up runs after that choice, because it must launch the same kernels as steps. Raises an
    error of a step only if it ran without compiled layers.

    `shared`: several ranks capture the same graphs. They find the same errors, so they choose the same way; only memory
    may run out on one rank alone, so that is an error. `compiled`: layers must be compiled, or it is an error too.
    """
    from sidestream.models.adapter import PagedModel
    from sidestream.models.compiled import compile_layers, compiling, decompile, reason_of

    start_s = time.monotonic()
    served: list[PagedModel | MtpHead] = [model, *_drafting(proposer)] if isinstance(model, PagedModel) else []
    for way in ("compiled and ", "") if served else ("",):
        if not way:
            for part in served:
                decompile(part)
            executor.forget_failure()
            warm_up(_WARMING_UP)
        try:
            with compiling():
                if way:
                    for part in served:
                        compile_layers(part, required=compiled)
                    warm_up("compiling forward passes")
                executor.capture(
                    shapes,
                    gate_layers=gate_layers,
                    shared=shared,
                    tell=lambda key, done, total: tell(f"capturing forward passes ({key.described})", done, total),
                )
        except DeviceLost:
            raise
        except Exception as error:  # transformers and model code raise errors of any type
            if compiled or (shared and isinstance(error, OutOfDeviceMemory)):
                raise
            logger.warning("forward passes cannot be %scaptured (%s): they run slower", way, reason_of(error))
        else:
            logger.info("forward passes are %scaptured after %.1f s", way, time.monotonic() - start_s)
            return


def _drafting(proposer: Proposer | None) -> Sequence[PagedModel | MtpHead]:
    """The proposer's modules, which are compiled like the model's layers."""
    from sidestream.speculate.proposer import DraftModelProposer, MtpProposer

    if isinstance(proposer, MtpProposer):
        return (proposer.head,)
    return (proposer.model,) if isinstance(proposer, DraftModelProposer) else ()
