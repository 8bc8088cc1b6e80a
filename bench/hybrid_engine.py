"""Models with recurrent state and random weights on a GPU: step time without and with drafts, and TTFT with KV in host
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from statistics import median

from bench.engine import ModelRig, Sizes, decode, ttft
from proof.report import Figure, at_most
from sidestream.config import EngineConfig, SpeculativeConfig, default_block_tokens
from sidestream_kv.device.kinds import CUDA

_DRAFTS = 3
_VERIFIED_ROWS = 8
_FULL = Sizes(
    kv_memory="20GiB",
    host="24GiB",
    max_model_len=20480,
    max_running=32,
    decode=((1, 1024, 1.5), (_VERIFIED_ROWS, 1024, 1.5), (32, 1024, 1.5)),
    cold=(),
    from_host=((16384, 1.15, 1.0),),
    others_context=1024,
    resumed=16000,
    outputs=64,
)
_TINY = Sizes("16MiB", "16MiB", 512, 8, ((1, 32, 1.5), (8, 16, 1.5)), (), ((128, 1.15, 1.0),), 32, 200, 12)


def measure(*, device: str, shape: str, block_tokens: int | None, on_progress: Callable[[str], None]) -> list[Figure]:
    """The figures of an engine without drafts and of an engine with drafts. The bounds are for a GPU only.

    block_tokens   tokens of a block; None: the default of models with recurrent states
    """
    if block_tokens is None:
        block_tokens = default_block_tokens(device, recurrent=True)
    EngineConfig(device=device, block_tokens=block_tokens)  # raises ConfigError for a size that cannot be used
    sizes = replace(_FULL if device == CUDA else _TINY, block_tokens=block_tokens)
    figures, plain_s, waits = _without_drafts(device, shape, sizes, on_progress)
    on_progress("an engine with drafts")
    figures += _with_drafts(device, shape, sizes, plain_s, waits, on_progress)
    return [replace(figure, name=f"hybrid_{figure.name}") for figure in figures]


def _without_drafts(
    device: str, shape: str, sizes: Sizes, on_progress: Callable[[str], None]
) -> tuple[list[Figure], float, int]:
    """The figures of an engine without drafts, the seconds of its steps that decode `_VERIFIED_ROWS` rows, and its host
    waits.
    """
    with closing(ModelRig(device, shape, sizes, on_progress)) as rig:
        rig.ask(rig.prompt(40), 4).wait()
        figures = [Figure("engine_ready_s", rig.startup_s, "s")]
        step_s = median(rig.steps(1, sizes.others_context, sizes.outputs)[0])
        figures += decode(rig, sizes, step_s, on_progress)
        figures += ttft(rig, sizes, step_s, on_progress)
        plain_s = median(rig.steps(_VERIFIED_ROWS, sizes.others_context, sizes.outputs)[0])
        return figures, plain_s, rig.host_waits()


def _with_drafts(
    device: str, shape: str, sizes: Sizes, plain_s: float, waits: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """The figures of an engine with drafts. `plain_s`, `waits`: see `_without_drafts`."""
    drafting = SpeculativeConfig("ngram", _DRAFTS, adaptive=False)
    with closing(
        ModelRig(device, shape, replace(sizes, max_running=_VERIFIED_ROWS), on_progress, speculative=drafting)
    ) as rig:
        rig.ask(rig.prompt(40), 4).wait()
        lengths, idle = rig.steps(_VERIFIED_ROWS, sizes.others_context, 4 * sizes.outputs, drafts=_DRAFTS)
        waits += rig.host_waits()
    return [
        Figure("verify_over_plain_step", median(lengths) / plain_s, "ratio", at_most(1.35)),
        Figure("verify_ms", 1e3 * median(lengths), "ms"),
        Figure("plain_ms", 1e3 * plain_s, "ms"),
        Figure("speculative_idle_share", sum(idle) / sum(lengths), "share", at_most(0.03)),
        Figure("host_waits_besides_commits", waits, "waits", at_most(0)),
    ]
