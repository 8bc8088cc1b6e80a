"""The timeline that records only while somebody reads it."""

from __future__ import annotations

import pytest

from sidestream_kv.metrics import Timeline
from sidestream_kv.metrics import timeline as module

SECOND = 1_000_000_000


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = SECOND
        monkeypatch.setattr(module.time, "perf_counter_ns", lambda: self.now_ns)

    def record(self, timeline: Timeline, name: str = "decode 1") -> None:
        self.now_ns += 1
        timeline.record("compute", name, self.now_ns - 1, self.now_ns)


def test_a_timeline_on_demand_records_for_two_seconds_after_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeline = Clock(monkeypatch), Timeline(on_demand=True)
    clock.record(timeline, "before")
    assert clock.now_ns >= timeline.until_ns and timeline.read(0).spans == ()
    clock.record(timeline, "during")
    assert clock.now_ns < timeline.until_ns
    clock.now_ns += 2 * SECOND
    clock.record(timeline, "after")
    assert clock.now_ns >= timeline.until_ns
    assert [name for _, name, _, _ in timeline.read(0).spans] == ["during"]


def test_a_read_has_the_spans_since_the_one_before_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeline = Clock(monkeypatch), Timeline(on_demand=True)
    recent = timeline.read(0)
    for wanted in (["a", "b"], ["c"], []):
        for name in wanted:
            clock.record(timeline, name)
        recent = timeline.read(recent.number)
        assert [name for _, name, _, _ in recent.spans] == wanted
    assert (recent.number, recent.now_ns) == (3, clock.now_ns)


def test_recording_on_demand_stops_after_500_spans_of_a_quarter_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeline = Clock(monkeypatch), Timeline(on_demand=True)
    timeline.read(0)
    for _ in range(700):
        clock.record(timeline)
    assert timeline.read(0).number == 500
    clock.now_ns += SECOND // 4
    clock.record(timeline)
    assert timeline.read(0).number == 501


def test_a_timeline_for_a_file_records_always_and_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeline = Clock(monkeypatch), Timeline()
    for _ in range(700):
        clock.record(timeline)
    assert clock.now_ns < timeline.until_ns and len(timeline.spans()) == 700
    assert len(timeline.read(0).spans) == 500
