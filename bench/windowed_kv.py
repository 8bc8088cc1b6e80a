"""The KV that a long sequence holds if layers with a sliding window free what is behind it: counted in the scheduler's
own pool, which has the shape of a model and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proof.random_models import random_layout
from proof.report import Figure, at_most
from sidestream.config import SamplingParams
from sidestream.schedule.limits import Limits
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import Scheduler
from sidestream.types import RowResult
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.kv.window_layout import WindowedLayers

_SHAPES = ("gpt-oss-20b", "gemma3-4b")
_LENGTHS = (4096, 32768)
_CHUNK_TOKENS, _OUTPUTS = 2048, 64


@dataclass(frozen=True, slots=True)
class _Done:
    """A fence of work that has ended."""

    stream: str = "compute"
    tick: int = 0
    failure: BaseException | None = None

    def poll(self) -> bool:
        return True


def measure(*, on_progress: Callable[[str], None]) -> list[Figure]:
    """For each shape and length of a prompt: bytes that the sequence holds while it decodes and at most, divided by
    those of all layers for all its tokens; and the same by arithmetic.
    """
    figures = []
    for shape in _SHAPES:
        layout = random_layout(shape)
        for length in _LENGTHS:
            on_progress(f"{shape}, {length} tokens")
            decoding, most = _shares(layout, length)
            expected = _expected(layout, length + _OUTPUTS)
            name = f"{shape.replace('-', '_')}_{length}"
            figures += [
                # Pages are whole, and are released when a block is complete: at most three more than the window.
                Figure(f"windowed_kv_share_{name}", decoding, "share", at_most(expected + _rounding(layout, length))),
                Figure(f"windowed_kv_share_arithmetic_{name}", expected, "share"),
                Figure(f"windowed_kv_share_in_prefill_{name}", most, "share"),
            ]
    return figures


def _expected(layout: KVLayout, length: int) -> float:
    tokens = sum(min(layout.window_of(layer) or length, length) for layer in range(layout.num_layers))
    return tokens / (length * layout.num_layers)


def _rounding(layout: KVLayout, length: int) -> float:
    windows = WindowedLayers.of(layout)
    assert windows is not None
    page = windows.parts * windows.blocks.block_bytes
    unused = page - len(windows.layers) * layout.layer_bytes
    pages = windows.most_pages(length, 1)
    return (4 * page + pages * unused) / (layout.num_blocks_for(length) * layout.block_bytes)


def _shares(layout: KVLayout, length: int) -> tuple[float, float]:
    """The largest share while the sequence decodes, and while its prompt is computed."""
    windows = WindowedLayers.of(layout)
    assert windows is not None
    blocks = FencedPool("blocks", 4 * layout.num_blocks_for(length) * (1 + windows.parts))
    scheduler = Scheduler(
        limits=Limits(layout.block_tokens, _CHUNK_TOKENS, _CHUNK_TOKENS, tail_apart=False),
        blocks=blocks,
        slots=FencedPool("rows", 1),
        keys=BlockKeys(fingerprint="", layout=windows.blocks),
        windows=windows,
    )
    spec = SamplingParams(temperature=0).spec(seed=0, eos_ids=())
    request = Request(1, tuple(range(length)), spec, _OUTPUTS, frozenset(), 0)
    scheduler.submit(request)
    most = {True: 0.0, False: 0.0}
    while request.num_outputs < _OUTPUTS:
        plan, fence = scheduler.plan(), _Done()
        prefill = request.in_prefill or request.num_outputs == 0
        scheduler.launched(plan.batch, fence)
        held = blocks.num_used * windows.blocks.block_bytes
        tokens = max(length, request.launched_len)  # the blocks of the whole prompt are leased at its admission
        most[prefill] = max(most[prefill], held / (layout.num_blocks_for(tokens) * layout.block_bytes))
        results = [RowResult((1,)) for samples in plan.batch.columns.samples if samples]
        committed = scheduler.commit(plan.batch, results, fence)
        scheduler.publish(committed)
        scheduler.trim(committed)
    return most[False], most[True]
