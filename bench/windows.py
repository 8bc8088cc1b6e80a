"""TTFT with KV in host memory, for a model in which most layers have a sliding window: loads that leave out KV that no
window reaches, compared with loads of all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from bench.engine import ModelRig, Sizes
from proof.report import Figure, at_most
from sidestream_kv.device.kinds import CUDA

_ROUNDS = 7
_FULL = Sizes(
    kv_memory="12GiB",
    host="16GiB",
    max_model_len=36864,
    max_running=8,
    decode=(),
    cold=(),
    from_host=((4096, 1.0, 1.0), (16384, 1.0, 1.0), (32768, 1.0, 1.0)),
    others_context=0,
    resumed=0,
    outputs=1,
)
_TINY = Sizes("4MiB", "16MiB", 512, 2, (), (), ((128, 1.0, 1.0),), 0, 0, 1)
# With 5 of 34 layers without a window and windows of 1,024 tokens, a load of 16,384 tokens has a fifth of the bytes.
_BOUNDED_LENGTH = 16384


@dataclass(frozen=True, slots=True)
class _Times:
    """By number of prompt tokens: TTFT in seconds without cached KV and with KV in host memory, and bytes of a load."""

    cold_s: dict[int, float]
    host_s: dict[int, float]
    num_bytes: dict[int, float]


def measure(*, device: str, shape: str, on_progress: Callable[[str], None]) -> list[Figure]:
    """The figures of an engine that leaves layers out, and of an engine that does not."""
    sizes = _FULL if device == CUDA else _TINY
    some, whole = (_times(device, shape, sizes, windows, on_progress) for windows in (True, False))
    figures = []
    for length, *_ in sizes.from_host:
        ratio = some.host_s[length] / whole.host_s[length]
        bound = at_most(0.6) if length == _BOUNDED_LENGTH else None
        figures += [
            Figure(f"windows_ttft_host_over_all_layers_{length}", ratio, "ratio", bound),
            Figure(f"windows_ttft_host_ms_{length}", 1e3 * some.host_s[length], "ms"),
            Figure(f"all_layers_ttft_host_ms_{length}", 1e3 * whole.host_s[length], "ms"),
            Figure(f"ttft_cold_ms_{length}", 1e3 * some.cold_s[length], "ms"),
            Figure(f"windows_loaded_share_{length}", some.num_bytes[length] / whole.num_bytes[length], "share"),
        ]
    return figures


def _times(device: str, shape: str, sizes: Sizes, windows: bool, on_progress: Callable[[str], None]) -> _Times:
    def tell(text: str) -> None:
        on_progress(f"{'only layers that are read' if windows else 'all layers'}: {text}")

    times = _Times({}, {}, {})
    with closing(ModelRig(device, shape, sizes, tell, windows=windows)) as rig:
        rig.ask(rig.prompt(40), 4).wait()
        for length, *_ in sizes.from_host:
            tell(f"first token, {length} tokens from host memory")
            cold, warm = [], []
            before = rig.parts.metrics.value("transfer_bytes_total", "load")
            for _ in range(_ROUNDS):
                prompt = rig.prompt(length + 1)
                cold.append(rig.ask(prompt, 1).wait().ttft_s)
                warm.append(rig.ask_from_host(prompt).ttft_s)
            rig.forget_device()  # waits for the end of the last load
            times.num_bytes[length] = rig.parts.metrics.value("transfer_bytes_total", "load") - before
            times.cold_s[length], times.host_s[length] = median(cold), median(warm)
    return times
