"""Requests that a front end has checked, and the times at which outputs are delivered to front ends."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from engine_rig import PATIENCE_S, Reply, Rig, serving

from sidestream.config import SamplingParams
from sidestream.errors import EngineStopped, QueueFull
from sidestream.schedule.limits import CheckedRequest
from sidestream.types import Delta
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.types import Key

PROMPT = list(range(1, 22))
PARAMS = SamplingParams(max_tokens=6)


def checked(rig: Rig, **changes: Any) -> CheckedRequest:
    return dataclasses.replace(rig.engine.checker.check(PROMPT, PARAMS), **changes)


def told(rig: Rig, request: CheckedRequest) -> Reply:
    reply = Reply()
    rig.engine.enqueue(request, reply)
    return reply.wait()


# ------------------------------------------------------------------ enqueue


def test_a_checked_request_is_served_like_a_submitted_one() -> None:
    with serving() as rig:
        rig.expect(told(rig, checked(rig)), PROMPT, 6)
        assert told(rig, checked(rig)).cached.device == 20


@pytest.mark.parametrize("version", [-1, 1])
def test_keys_of_another_version_are_recomputed(version: int) -> None:
    """Those that came with it are of other weights: they neither find blocks nor name any."""
    with serving(slots=16) as rig:
        wrong: list[Key] = []
        BlockKeys(fingerprint="other weights", layout=rig.model.layout).extend(wrong, PROMPT)
        rig.expect(told(rig, checked(rig, keys=wrong, keys_version=version)), PROMPT, 6)
        assert rig.ask(PROMPT, 6).cached.device == 20  # under the right keys
        rig.settle()
        host = rig.engine.parts.tiers.host
        assert host is not None
        right = rig.engine.checker.check(PROMPT, PARAMS).keys
        assert all(host.pool.get(key) is not None for key in right)
        assert all(host.pool.get(key) is None for key in wrong)


def test_keys_from_before_a_weight_change_are_recomputed() -> None:
    with serving() as rig:
        before = checked(rig)
        rig.ask(PROMPT, 6)
        assert rig.engine.update_weights(lambda: None, fingerprint="new weights").wait(PATIENCE_S)
        assert checked(rig).keys_version == before.keys_version + 1
        assert told(rig, before).cached.total == 0
        assert told(rig, checked(rig)).cached.device == 20  # what the first one has computed is under the new keys


def test_each_sample_of_a_request_counts_towards_the_queue_bound() -> None:
    with serving(max_running=2, max_waiting=1) as rig:
        hold = rig.hold("compute")
        replies = [Reply() for _ in range(3)]
        for reply in replies:
            rig.engine.enqueue(checked(rig), reply)
        with pytest.raises(QueueFull, match="3 requests are running or waiting, the bound is 3"):
            rig.engine.enqueue(checked(rig), Reply())
        hold.release()
        for reply in replies:
            rig.expect(reply, PROMPT, 6)


def test_a_closed_engine_refuses_checked_requests() -> None:
    rig = Rig()
    request = checked(rig)
    rig.close()
    with pytest.raises(EngineStopped, match="the engine is draining: send the request to another engine"):
        rig.engine.enqueue(request, Reply())


# ------------------------------------------------------------------ on_outputs


class Told:
    """Groups news as they are delivered."""

    def __init__(self, rig: Rig) -> None:
        self.groups: list[list[Delta]] = []
        self.threads: set[str] = set()
        self._now: list[Delta] = []
        rig.engine.on_outputs(self.deliver)

    def __call__(self, news: Delta) -> None:
        self._now.append(news)

    def deliver(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self._now:
            self.groups.append(self._now)
            self._now = []


def test_outputs_of_a_commit_are_delivered_together_on_the_engine_thread() -> None:
    with serving() as rig:
        told = Told(rig)
        hold = rig.hold("compute")
        for _ in range(3):
            rig.engine.enqueue(checked(rig), told)
        rig.turn_until(lambda: rig.engine.unfinished == 3)
        hold.release()
        rig.turn_until(lambda: rig.engine.unfinished == 0)
        rig.turn()
        assert told.threads == {"sidestream-engine"}
        assert sum(len(delta.token_ids) for group in told.groups for delta in group) == 18
        assert len(told.groups) <= rig.engine.num_steps
        assert max(map(len, told.groups)) == 3


def test_aborts_are_delivered_without_waiting_for_a_commit() -> None:
    with serving() as rig:
        told = Told(rig)
        hold = rig.hold("compute")
        handle = rig.engine.enqueue(checked(rig), told)
        rig.turn_until(lambda: rig.engine.unfinished == 1)
        rig.engine.abort(handle)
        hold.release()
        rig.turn_until(lambda: bool(told.groups))
        assert [delta.finish_reason for group in told.groups for delta in group][-1] == "abort"


def test_all_delivery_callbacks_are_called() -> None:
    with serving() as rig:
        called: set[int] = set()
        for number in range(3):
            rig.engine.on_outputs(lambda number=number: called.add(number))
        rig.ask(PROMPT, 2)
        rig.turn()
        assert called == {0, 1, 2}


@pytest.mark.parametrize("how", ["close", "failure"])
def test_outputs_at_close_or_failure_are_delivered(how: str) -> None:
    rig = Rig()
    told = Told(rig)

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("injected: a bug")

    hold = rig.hold("compute")
    rig.engine.enqueue(dataclasses.replace(checked(rig), max_outputs=60), told)
    rig.turn_until(lambda: rig.engine.unfinished == 1)
    if how == "failure":
        rig.engine.parts.scheduler.commit = fail  # type: ignore[method-assign]
        hold.release()
        rig.turn_until(lambda: rig.engine.health().status == "failed")
    rig.close()
    last = told.groups[-1][-1]
    assert last.finish_reason == ("abort" if how == "close" else "error")
