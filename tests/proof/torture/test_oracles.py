"""Each oracle objects when it should: to a missing rule, to a device or a client that was doctored, to bytes that were
changed by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.mutations import Mutation, applied, find
from proof.mutations.marks import marks_in
from proof.mutations.operators import Append, Become, Operator, SetArgument, Value
from proof.torture import (
    ORACLES,
    Asked,
    Event,
    Fault,
    Outcome,
    Workload,
    draw_workload,
    reference_of,
    run_one,
    run_schedule,
)
from proof.torture.judge import stray_records, wrong_answer
from proof.torture.losses import EvictionOrder
from proof.torture.oracle import Sample
from proof.torture.run import _Schedule
from proof.torture.script import ScriptedTier
from proof.torture.verdict import Verdict
from sidestream.schedule.prefix_cache import TierLoads
from sidestream.schedule.states import StateCache
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.tiers.index import TierIndex
from sidestream_order.checker import Checker
from sidestream_order.sim import make_policy
from sidestream_order.sim.device import SimStream
from sidestream_order.trace import Recorder

PLAIN = Workload(
    0,
    (Asked(at=0, prompt=tuple(range(1, 12)), max_tokens=4), Asked(at=1, prompt=tuple(range(1, 10)), max_tokens=3)),
    slots=8,
)


def doctored(
    function: Callable[..., object], line: str, operator: Operator
) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which the statement on this line of a function is changed."""

    def context() -> AbstractContextManager[None]:
        path, text = Path(inspect.getfile(function)), inspect.getsource(function)
        assert text.count(line) == 1
        marked = path.read_text(encoding="utf-8").replace(text, text.replace(line, f"{line}  # rule: doctored"))
        marks = {mark.name: mark for mark in marks_in(marked, path, function.__module__)}
        mutation = Mutation(name="doctored", hazard="H1", change=operator, consequence="whatever the test says")
        return applied(mutation, marks)

    return context


def without(rule: str) -> Callable[[], AbstractContextManager[None]]:
    return functools.partial(applied, find(rule))


LOST_FENCE = doctored(
    SimStream._do, "fence.done, self.busy = True, False", Value("not label.startswith('decode'), False")
)
NOT_EVER_FINISHED = doctored(
    _Schedule._busy,
    "return engine.loop.in_flight is not None or (transfers is not None and transfers.has_work)",
    Value("True"),
)

OBJECTIONS: dict[str, tuple[Callable[[], AbstractContextManager[None]], int, str, int]] = {
    "checker": (without("release-waits-for-the-transfers"), 0, "late", 1),
    "tokens": (without("only-the-last-chunk-samples"), 0, "random", 0),
    "accept lengths": (without("slot-begins-with-its-own-history"), 8, "late", 0),
    "content": (without("key-contains-its-prefix"), 0, "random", 0),
    "events": (without("removals-are-not-merged-over-a-store"), 7, "starve:store", 56),
    "evictions": (without("least-recently-used-block-is-evicted-first"), 1, "random", 0),
    "hits": (without("blocks-on-the-device-are-reused"), 1, "random", 0),
    "self-check": (without("second-run-begins-with-the-hidden-states-of-the-first"), 67, "random", 67),
    "balance": (without("unfindable-block-is-free"), 30, "random", 1),
    "answered": (without("request-ends-before-its-client-is-notified"), 0, "random", 0),
    "deadlock": (LOST_FENCE, 0, "random", 0),
    "no progress": (NOT_EVER_FINISHED, 0, "random", 0),
    "error": (without("share-counts-its-reference"), 0, "random", 0),
}


def run(workload: Workload) -> Outcome:
    return run_schedule(workload, make_policy("random", random.Random(0)))


@pytest.mark.parametrize("oracle", ORACLES)
def test_an_oracle_objects(oracle: str) -> None:
    changed, number, policy, seed = OBJECTIONS[oracle]
    workload = draw_workload(number)
    reference = reference_of(workload)  # by the code as it is
    assert run_one(workload, policy, seed, reference).findings == ()
    with changed():
        outcome = run_one(workload, policy, seed, reference)
    assert oracle in outcome.oracles
    assert run_one(workload, policy, seed, reference).findings == ()


LOSSES: dict[str, tuple[Callable[[], AbstractContextManager[None]], int, str]] = {
    "order of a sequence": (without("end-of-a-sequence-is-evicted-first"), 1, "is evicted before"),
    "touched slot": (
        doctored(FencedPool.touch, "self._cached.touch_all(map(self._index.get, reversed(keys)))", Become("pass")),
        5,
        "host slots",
    ),
    "touched entry": (doctored(TierIndex.touch, "self._idle.move_to_end(key)", Become("pass")), 9, "disk"),
    "free block": (
        doctored(FencedPool.take, "evicted = max(0, count - len(free))", Value("min(count, len(self._cached))")),
        0,
        "are free",
    ),
    "host memory": (without("blocks-in-host-memory-are-reused"), 0, "on the device or in host memory"),
    "slower tier": (
        doctored(TierLoads.num_to_promote, "for other in self._queues.waiting.values())", Value("self._max_running")),
        0,
        "does not wait for slower tiers",
    ),
    "checkpoint": (
        doctored(StateCache.reach, "for count in range(num_blocks, 0, -1):", Value("range(num_blocks - 1, 0, -1)")),
        1,
        "are on the device",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_without_a_wrong_answer_is_found(loss: str) -> None:
    changed, number, text = LOSSES[loss]
    workload = draw_workload(number)
    reference = reference_of(workload)
    with changed():
        outcome = run_one(workload, "random", 0, reference)
    assert set(outcome.oracles) <= {"evictions", "hits"}
    assert any(text in finding.text for finding in outcome.findings)


def test_a_last_group_of_fewer_layers_is_drawn() -> None:
    workload = draw_workload(26)
    assert workload.large_groups
    with applied(find("last-group-of-layers-is-loaded")):
        assert "error" in run_one(workload, "random", 0).oracles
        assert run_one(dataclasses.replace(workload, large_groups=False), "random", 0).findings == ()


@pytest.mark.parametrize("in_use", [False, True])
def test_a_demoted_block_must_be_evicted_first_unless_it_was_used_since(in_use: bool) -> None:
    recorder = Recorder(Checker(), lambda: "host", None)
    order, pool = EvictionOrder(recorder), FencedPool("pool", 3, tracer=recorder)
    order.watch(pool)
    leases = [pool.take(1) for _ in range(3)]
    for lease, key in zip(leases, (b"a", b"b", b"c"), strict=True):
        pool.publish(lease.ids[0], key)
    if in_use:
        pool.demote([b"b", b"c"])
    for lease in leases:
        lease.release()
    if not in_use:
        pool.demote([b"b", b"c"])
    pool.share([1]).release()
    pool.take(1)
    assert order.wrong == []
    pool._cached.touch(0)
    pool.take(1)
    assert order.wrong == ["pool 1 is evicted before [0]"]


def test_a_file_without_an_entry_and_an_entry_without_a_file_are_found() -> None:
    kinds: dict[str, set[str]] = {"files": {"left"}, "entries": {"gone"}}
    disk: Any = SimpleNamespace(strays=lambda: (kinds["files"], kinds["entries"]))
    left, gone = stray_records(disk, damaged=False)
    assert left == "the record left is left on disk without a findable entry"
    assert gone == "entry gone is findable without a record"
    assert list(stray_records(disk, damaged=True)) == [left]


def test_the_first_objection_is_that_of_the_first_oracle_in_the_list() -> None:
    with applied(find("release-waits-for-transfers-that-only-the-host-observes")):
        outcome = run_one(draw_workload(1), "late", 1)
    assert list(outcome.oracles) == sorted(outcome.oracles, key=ORACLES.index)
    assert len(outcome.oracles) > 1


def test_a_plain_workload_is_clean_and_a_later_one_is_not_affected_by_an_earlier_one() -> None:
    outcome = run(PLAIN)
    assert outcome.findings == ()
    assert run(PLAIN) == outcome


# ---------------------------------------------------------------------- what clients are told

RIGHT = Sample([5, 6, 7], "abc", (-0.1, -0.2, -0.3), "length")


def objections(told: Sample, workload: Workload = PLAIN, *, over: bool = False) -> list[str]:
    return [oracle for oracle, _ in wrong_answer(workload, 0, told, RIGHT, over=over)]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (RIGHT, []),
        (Sample([5, 9, 7], "axc", (-0.1, -0.2, -0.3), "length"), ["tokens"]),
        (Sample([5, 6], "ab", (-0.1, -0.2), "length"), ["tokens"]),
        (Sample([5, 6, 7, 8], "abcd", (-0.1,) * 4, "length"), ["tokens"]),
        (dataclasses.replace(RIGHT, text="abd"), ["tokens"]),
        (dataclasses.replace(RIGHT, reason="stop"), ["tokens"]),
        (dataclasses.replace(RIGHT, logprobs=(-0.1, -0.25, -0.3)), ["tokens"]),
        (dataclasses.replace(RIGHT, logprobs=(-0.1, -0.2, -0.3, -0.4)), ["tokens"]),
        (dataclasses.replace(RIGHT, reason=None), ["answered"]),
        (dataclasses.replace(RIGHT, reason="abort"), ["answered"]),
        (dataclasses.replace(RIGHT, reason="error", error="broken"), ["answered"]),
    ],
)
def test_an_answer_is_right_or_an_oracle_says_which_way_it_is_wrong(told: Sample, expected: list[str]) -> None:
    assert objections(told) == expected


def test_the_output_of_an_aborted_request_is_a_prefix_of_its_answer() -> None:
    asked = dataclasses.replace(PLAIN.requests[0], abort_at=2)
    leaves = dataclasses.replace(PLAIN, requests=(asked, PLAIN.requests[1]))
    assert objections(Sample([5, 6], "ab", (-0.1, -0.2), "abort"), leaves) == []
    assert objections(Sample([], "", (), "abort"), leaves) == []
    assert objections(Sample([6], "b", (-0.2,), "abort"), leaves) == ["tokens"]
    assert objections(Sample([5], "b", (-0.1,), "abort"), leaves) == ["tokens"]
    assert objections(Sample([5, 6], "ab", (), None), leaves) == ["answered"]


def test_the_requests_of_an_engine_that_is_gone_may_have_no_end_yet() -> None:
    assert objections(Sample([5], "a", (-0.1,), None), over=True) == []
    assert objections(Sample([6], "b", (-0.1,), None), over=True) == ["tokens"]


def test_only_steps_that_fail_may_end_a_request_with_an_error() -> None:
    broken = dataclasses.replace(PLAIN, faults=(Fault("forward", "nan", 0),))
    assert objections(Sample([], "", (), "error", "no numbers"), broken) == []


# ---------------------------------------------------------------------- bytes, keys and accounts that were changed by
# hand


def spoiling(deed: str) -> AbstractContextManager[None]:
    """At the end, before anything is judged, `deed` happens."""
    judged = 'self.judge_balance(life, clients, "idle")'
    changed = Become(f"engine, parts = life.engine, life.engine.parts; {deed}; {judged}")
    return doctored(Verdict.judge_idle, judged, changed)()


@pytest.mark.parametrize(
    ("spoilt", "oracle", "text"),
    [
        (
            "life.device.memory('kv').data[next(iter(parts.blocks._index._id_of.values())) * 192] ^= 1",
            "content",
            "1 of its 192 bytes are wrong",
        ),
        (
            "life.device.memory('host').data[next(iter(parts.tiers.host.pool._index._id_of.values())) * 192 + 7] ^= 1",
            "content",
            "the first at 7",
        ),
        ("self.contents.blocks.popitem()", "content", "which no request has"),
        ("parts.blocks.take(1)", "balance", "still in use"),
        ("parts.tiers.host.pool.take(1)", "balance", "host slots are still in use"),
        ("engine.streams._by_id[9] = None", "balance", "1 output streams are kept"),
        ("engine.serving._unfinished += 1", "balance", "1 requests are counted as unfinished"),
        ("parts.device.stall('queue full')", "balance", "the engine's thread was blocked: queue full"),
        ("parts.device.stall('queue full')", "checker", "the host waited for the reason `queue full`"),
    ],
)
def test_a_state_left_wrong_at_the_end_is_noticed(spoilt: str, oracle: str, text: str) -> None:
    with spoiling(spoilt):
        outcome = run(PLAIN)
    assert any(finding.oracle == oracle and text in finding.text for finding in outcome.findings), outcome.findings


def test_a_block_that_is_wrong_when_it_becomes_findable_is_noticed() -> None:
    early = doctored(
        Verdict.judge_idle,
        'self.judge_balance(life, clients, "idle")',
        Become("contents = self.contents.blocks; contents.clear(); contents.update(self.kept)"),
    )
    late = doctored(
        Verdict.__init__,
        "self._findings: dict[Finding, None] = {}",
        Append("self.kept = dict(self.contents.blocks); self.contents.blocks.popitem()"),
    )
    with early(), late():
        outcome = run(PLAIN)
    (finding,) = {finding for finding in outcome.findings if "device blocks" in finding.text}
    assert finding.oracle == "content"
    assert finding.text.startswith("published: ")


def test_a_reset_that_removes_no_key_is_noticed_at_once() -> None:
    reset = dataclasses.replace(PLAIN, events=(Event(6, "reset"),))
    assert run(reset).findings == ()
    with applied(find("reset-reaches-the-scheduler")):
        outcome = run(reset)
    assert any("findable right after the reset (H8)" in finding.text for finding in outcome.findings)


def test_a_damaged_file_is_an_objection_only_if_the_script_does_not_damage_files() -> None:
    disk = dataclasses.replace(PLAIN, disk_blocks=16)
    cut = doctored(
        ScriptedTier._write,
        "self._damage(grant.entry, fault)",
        SetArgument("_damage", 1, "Fault('write', 'truncated', 0)"),
    )
    scripted = dataclasses.replace(disk, faults=(Fault("write", "truncated", 0, every=1),))
    assert run(disk).findings == ()
    assert run(scripted).findings == ()
    with cut():
        outcome = run(disk)
    assert any("cannot be read" in finding.text for finding in outcome.findings)


def test_an_objection_about_an_exception_names_its_origin() -> None:
    broken = doctored(Verdict.judge_idle, 'self.judge_balance(life, clients, "idle")', Become("self._nobody"))
    with broken():
        outcome = run(PLAIN)
    (finding,) = [finding for finding in outcome.findings if finding.oracle == "error"]
    assert "AttributeError" in finding.text
    assert "judge_idle" in finding.text
