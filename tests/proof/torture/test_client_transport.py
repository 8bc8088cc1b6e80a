"""Schedules whose requests go through the border: drawn often enough, repeatable, and judged on both sides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from proof.mutations import applied, find
from proof.torture import POLICIES, Workload, draw_workload, run_one
from proof.torture.client_transport import Border
from proof.torture.shrinking import simpler_workloads
from proof.wire import wire_pair
from sidestream.client.messages import Failure as Said
from sidestream.client.messages import Rejected, decoder_of_outputs
from sidestream.engine import Engine, Handle
from sidestream.errors import InvariantError
from sidestream.processes.frames import FrameEncoder
from sidestream.schedule.limits import CheckedRequest
from sidestream.types import Delta

pytestmark = pytest.mark.slow

BEHIND_FRONT_ENDS = [workload for workload in map(draw_workload, range(240)) if workload.front_ends]


def test_about_one_workload_in_six_has_front_ends_and_some_of_those_die_or_refuse() -> None:
    assert 30 <= len(BEHIND_FRONT_ENDS) <= 50
    assert {workload.front_ends for workload in BEHIND_FRONT_ENDS} == {1, 2, 3}
    features = set().union(*(workload.features for workload in BEHIND_FRONT_ENDS))
    assert {"abort", "border", "close", "full_queue", "hang_up", "meanwhile", "restart"} <= features


@pytest.mark.parametrize("workload", BEHIND_FRONT_ENDS[:6], ids=lambda workload: f"workload {workload.seed}")
def test_answers_through_the_border_are_the_reference_s_and_nothing_is_left(workload: Workload) -> None:
    first, second = (run_one(workload, POLICIES[workload.seed % len(POLICIES)], workload.seed) for _ in range(2))
    assert first.findings == ()
    assert first == second


def test_devices_and_ranks_are_lost_behind_front_ends_too() -> None:
    behind = [workload.features for workload in map(draw_workload, range(6000)) if workload.front_ends]
    for loss, other in itertools.product(("device_loss", "rank_loss"), ("full_queue", "hang_up", "close")):
        assert any({loss, other} <= features for features in behind), (loss, other)


class AlwaysAhead(random.Random):
    """Has the engine run ahead in every call, which is rare otherwise, above all after a loss."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize("after_a_loss", [False, True])
@pytest.mark.parametrize("error", [InvariantError("injected: a step"), KeyError("injected: a step")], ids=repr)
def test_an_error_of_a_step_during_a_front_ends_call_is_found(
    monkeypatch: pytest.MonkeyPatch, error: Exception, after_a_loss: bool
) -> None:
    """The server would take it for a rejection or for the end of a front end. A lost device does not excuse it."""
    inside = []
    enqueue, step = Border._enqueue, Engine.step

    def enqueued(border: Border, request: CheckedRequest, sink: Callable[[Delta], None], **named: Any) -> Handle:
        inside.append(border)
        drawn, border._rng, border._runs_ahead = border._rng, AlwaysAhead(0), True
        try:
            return enqueue(border, request, sink, **named)
        finally:
            inside.pop()
            border._rng = drawn

    def stepped(engine: Engine) -> bool:
        if inside and (not after_a_loss or engine.parts.device.is_lost):
            raise error
        return step(engine)

    monkeypatch.setattr(Border, "_enqueue", enqueued)
    monkeypatch.setattr(Engine, "step", stepped)
    workloads = [w for w in map(draw_workload, range(2000)) if w.front_ends and "device_loss" in w.features]
    workloads = workloads[:8] if after_a_loss else BEHIND_FRONT_ENDS[:8]
    findings = (finding for workload in workloads for finding in run_one(workload, "random", 0).findings)
    assert any(finding.oracle == "error" and "injected" in finding.text for finding in findings)


def test_workloads_become_simpler_without_their_front_ends() -> None:
    workload = next(workload for workload in BEHIND_FRONT_ENDS if "hang_up" in workload.features)
    direct = next(simpler for simpler in simpler_workloads(workload) if not simpler.front_ends)
    assert not any(event.kind == "hang_up" for event in direct.events)
    assert direct.requests == workload.requests


def test_a_request_that_goes_on_without_its_client_is_found() -> None:
    workloads = [
        workload for workload in BEHIND_FRONT_ENDS if "hang_up" in workload.features and not workload.meanwhile
    ]
    with applied(find("disconnect-aborts-the-requests-of-a-front-end")):
        found = [run_one(workload, "random", 0).findings for workload in workloads[:6]]
    texts = [finding.text for findings in found for finding in findings]
    assert texts
    assert any("the engine continues with" in text for text in texts)


@pytest.mark.parametrize("capacity", [1, 7, 1 << 20])
def test_bytes_of_a_wire_arrive_as_they_were_sent_however_they_are_cut(capacity: int) -> None:
    here, there = wire_pair(random.Random(capacity), capacity=capacity)
    encoder, decoder = FrameEncoder(), decoder_of_outputs()
    sent = [Rejected(number, number + 1, Said("QueueFull", "try again " * number)) for number in range(20)]
    data, heard = b"".join(map(encoder.encode, sent)), list[object]()
    while data:
        if here.writable:
            data = data[here.send(data) :]
        if there.readable:
            heard.extend(decoder.feed(there.recv(1 << 16)))
    here.close()
    while more := there.recv(1 << 16):
        heard.extend(decoder.feed(more))
    assert heard == sent


def test_a_wire_without_room_and_one_without_bytes_do_not_wait() -> None:
    here, there = wire_pair(random.Random(0), capacity=3)
    while here.writable:
        here.send(b"abc")
    with pytest.raises(BlockingIOError, match="no room"):
        here.send(b"d")
    with pytest.raises(BlockingIOError, match="nothing has come"):
        here.recv(1)
    there.close()
    assert here.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        here.send(b"d")


def test_a_client_that_ended_one_sample_reads_only_the_others() -> None:
    """Output of the ended sample had come before, and was not read yet."""
    assert run_one(draw_workload(403840), "random", 403840).findings == ()
