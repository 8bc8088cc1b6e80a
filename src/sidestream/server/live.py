"""`/metrics/stream`: what the engine does, as server-sent events for people who watch (the page, `sidestream top`).

One task reads the metrics and the timeline a few times a second, while there are viewers, and gives each sample to all
of them. A viewer that reads slowly misses samples. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from sidestream.client.front_end import FrontEnd
from sidestream.errors import EngineStopped
from sidestream.server.body import EVENT_STREAM, to_json
from sidestream.server.errors import ApiError
from sidestream.server.middleware import CallbackEvent, CancelOnDisconnect
from sidestream.server.responses import Json
from sidestream_kv.metrics import MetricsSnapshot, Recent
from sidestream_kv.metrics.counters import HistogramValue

PERIOD_S = 0.25
"""Time between two samples."""
MAX_VIEWERS = 32
"""Maximum number of viewers of one process."""
_WINDOW = 9
"""Number of samples over which rates and means are taken: two seconds."""
_SILENCE_S = 30.0
"""Without a sample for this time, a stream ends. A sample takes a few seconds even if the engine's process hangs."""

Span = tuple[str, str, int, int]
"""Track, name, start and stop in nanoseconds."""


class _Viewer:
    """Holds the newest sample until its viewer takes it."""

    def __init__(self) -> None:
        self._sample = b""
        self._filled = asyncio.Event()

    def put(self, sample: bytes) -> None:
        self._sample = sample
        self._filled.set()

    async def take(self) -> bytes:
        await self._filled.wait()
        self._filled.clear()
        return self._sample


class LiveStream:
    """The endpoint. It samples the backend while there are viewers.

    draining   ends all streams when it is set
    """

    def __init__(self, backend: FrontEnd, draining: CallbackEvent, *, model_name: str, replica: str) -> None:
        self._backend = backend
        self._draining = draining
        self._head: Json = {"model": model_name, "replica": replica}
        self._viewers: set[_Viewer] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send samples until the viewer leaves or the server drains."""
        async with CancelOnDisconnect(scope, self._draining), self._viewing() as viewer:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.copy()})
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    sample = await viewer.take()
                await send({"type": "http.response.body", "body": sample, "more_body": True})

    @asynccontextmanager
    async def _viewing(self) -> AsyncIterator[_Viewer]:
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(
                503,
                f"{MAX_VIEWERS} viewers watch this server already: close a page or a `sidestream top`",
                kind="server_error",
                code="too_many_viewers",
                headers={"Retry-After": "10"},
            )
        viewer = _Viewer()
        if not self._viewers:
            self._sampler = asyncio.create_task(self._sample())
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._sampler.cancel()

    async def _sample(self) -> None:
        """Give a sample to all viewers each period."""
        samples: deque[tuple[float, MetricsSnapshot]] = deque(maxlen=_WINDOW)
        parts: deque[Sequence[Span]] = deque(maxlen=_WINDOW - 1)
        recent = Recent(0, 0)
        while True:
            health = self._backend.health()
            body = {**self._head, "time": time.time(), "health": health}
            try:
                metrics = await self._backend.metrics_snapshot()
                recent = await self._backend.recent_spans(recent.number)
            except EngineStopped:
                samples.clear()
                self._give(body)
            else:
                samples.append((time.monotonic(), metrics))
                if len(samples) > 1:  # what the timeline held before the first sample is old
                    parts.append(recent.spans)
                    (began_s, before), (ended_s, now) = samples[0], samples[-1]
                    spans = [span for some in parts for span in some]
                    self._give(body | figures(before, now, ended_s - began_s, spans) | _timeline(recent))
            await asyncio.sleep(PERIOD_S)

    def _give(self, body: Json) -> None:
        event = b"data: " + to_json(body) + b"\n\n"
        for viewer in self._viewers:
            viewer.put(event)


def _timeline(recent: Recent) -> Json:
    """The new spans: track, name, start and length in microseconds."""
    spans = [(track, name, start // 1000, (stop - start) // 1000) for track, name, start, stop in recent.spans]
    return {"timeline": {"now_us": recent.now_ns // 1000, "spans": spans}}


def figures(before: MetricsSnapshot, now: MetricsSnapshot, seconds: float, spans: Sequence[Span]) -> Json:
    """The figures of a sample: totals since the start of the engine, and rates and means of the last `seconds`.

    spans   of the timeline in this time, for the engine thread's part of a step
    """
    totals = _Totals(now)
    rates = {
        f"{name}_per_s": max(0.0, totals.value(f"{name}_total") - _Totals(before).value(f"{name}_total")) / seconds
        for name in ("output_tokens", "prompt_tokens", "steps")
    }
    names = ("step_seconds", "draft_seconds", "verify_seconds", "ttft_seconds", "itl_seconds", "queue_seconds")
    return {
        "age_s": totals.value("metrics_age_seconds"),
        "ready_s": totals.value("engine_ready_seconds"),
        "requests": {
            "running": totals.value("requests_running"),
            "waiting": totals.value("requests_waiting"),
            "ended": totals.series("requests_total"),
            "preempted": totals.value("preemptions_total"),
        },
        "tokens": {
            "prompt": totals.value("prompt_tokens_total"),
            "output": totals.value("output_tokens_total"),
            "cached": totals.series("cached_tokens_total"),
        },
        "steps": totals.value("steps_total"),
        "last": rates | {name: _mean(name, before, now) for name in names},
        "mean": {name: _mean(name, MetricsSnapshot({}, {}), now) for name in names},
        "engine_thread": _engine_thread(spans),
        "device": totals.device(),
        "tiers": totals.tiers(),
        "transfers": totals.transfers(),
        "drafts": _drafts(before, now),
        "saved": totals.saved(),
        "prefill_tokens_per_s": totals.prefill_rate(),
    }


class _Totals:
    """Values of a snapshot by name."""

    def __init__(self, metrics: MetricsSnapshot) -> None:
        self._values = metrics.values

    def value(self, name: str, *labels: str) -> float:
        return self._values.get(name, {}).get(labels, 0.0)

    def series(self, name: str) -> dict[str, float]:
        """The values by their only label."""
        return {labels[0]: value for labels, value in self._values.get(name, {}).items()}

    def device(self) -> Json:
        """Blocks by their use, and bytes of all of them."""
        blocks = {use: self.value(f"blocks_{use}") for use in ("used", "cached", "free")}
        return {"blocks": blocks, "bytes": self.value("kv_memory_bytes", "blocks")}

    def tiers(self) -> Json:
        """Contents of the tiers besides the device. `room_bytes`, `works`: None if the tier does not say. `saved_s`,
        `lost_s`: seconds that loads from a persistent tier saved and lost; None: there were no loads.
        """
        num_bytes, room = self.series("tier_bytes"), self.series("tier_ready_bytes")
        works, down = self.series("tier_works"), self.series("tier_turned_down")
        saved, lost = self.series("tier_saved_seconds_total"), self.series("tier_lost_seconds_total")
        return {
            name: {
                "blocks": blocks,
                "bytes": num_bytes.get(name, 0.0),
                "room_bytes": room.get(name),
                "works": None if name not in works else bool(works[name]),
                "saved_s": saved.get(name),
                "lost_s": lost.get(name),
                "turned_down": bool(down.get(name)),
            }
            for name, blocks in self.series("tier_blocks").items()
        }

    def transfers(self) -> Json:
        """Bytes that went well, and numbers of transfers by outcome."""
        found: Json = {kind: {"bytes": value} for kind, value in self.series("transfer_bytes_total").items()}
        for (kind, outcome), count in self._values.get("transfers_total", {}).items():
            found.setdefault(kind, {"bytes": 0.0})[outcome] = count
        return found

    def prefill_rate(self) -> float | None:
        """Prompt tokens that the engine computes in a second of prefill; None: not measured yet."""
        tokens, seconds = self.value("prefill_measured_tokens_total"), self.value("prefill_measured_seconds_total")
        return tokens / seconds if seconds else None

    def saved(self) -> Json:
        """Prompt tokens that were not computed, bytes of their KV, and the seconds that computing them would take."""
        tokens, rate = sum(self.series("cached_tokens_total").values()), self.prefill_rate()
        return {
            "tokens": tokens,
            "bytes": tokens * self.value("kv_token_bytes"),
            "seconds": None if rate is None else tokens / rate,
        }


def _mean(name: str, before: MetricsSnapshot, now: MetricsSnapshot) -> float | None:
    """The mean of what a histogram observed between two snapshots, over all labels; None: nothing."""
    total, count = (
        sum(sign * getattr(one, field) for sign, at in ((1, now), (-1, before)) for one in _histograms(name, at))
        for field in ("total", "count")
    )
    return total / count if count > 0 else None


def _histograms(name: str, at: MetricsSnapshot) -> list[HistogramValue]:
    return list(at.histograms.get(name, {}).values())


def _drafts(before: MetricsSnapshot, now: MetricsSnapshot) -> Json:
    """Drafts by proposer. `lengths[n - 1]` rows advanced by n tokens in a step."""
    totals, histograms = _Totals(now), now.histograms.get("accept_length", {})
    accepted = totals.series("accepted_tokens_total")
    return {
        proposer: {
            "drafted": drafted,
            "accepted": accepted.get(proposer, 0.0),
            "lengths": [] if (found := histograms.get((proposer,))) is None else found.counts,
            "accept_length": None if found is None or not found.count else found.total / found.count,
            "last_accept_length": _mean("accept_length", before, now),
        }
        for proposer, drafted in totals.series("draft_tokens_total").items()
    }


def _engine_thread(spans: Sequence[Span]) -> Json:
    """Mean seconds of the parts of the engine thread's turn. None: no step ended."""
    names = {"plan_s": "plan and launch", "wait_s": "wait for the step", "commit_s": "commit"}
    lengths = {
        key: [stop - start for track, name, start, stop in spans if (track, name) == ("engine", wanted)]
        for key, wanted in names.items()
    }
    return {key: sum(found) / len(found) / 1e9 if found else None for key, found in lengths.items()}
