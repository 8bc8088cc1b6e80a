"""The work on request bodies is bounded: how many wait, how long one takes, and how much memory it keeps."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from sidestream.errors import ContextTooLong, InvariantError, QueueFull, RequestRejected
from sidestream.server.errors import ApiError
from sidestream.server.text_work import SHORT_BODY_BYTES, ProcessBounds, TextWork

WAIT_S = 20.0
LONG = bytearray(SHORT_BODY_BYTES + 1)
BOUNDS = ProcessBounds(cpu_s=0.2, memory_bytes=64 << 20)


class Gate:
    """A handle that waits for `open` with long bodies, and notes the kinds of its calls."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.kinds: list[str] = []

    def __call__(self, kind: str, body: bytes | bytearray) -> str:
        self.kinds.append(kind)
        self.begun.set()
        if len(body) > SHORT_BODY_BYTES:
            assert self.open.wait(WAIT_S)
        return kind


async def _begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, WAIT_S)


def test_a_short_body_does_not_wait_for_long_ones() -> None:
    async def run(gate: Gate, work: TextWork) -> None:
        long = [asyncio.create_task(work.run(f"long {number}", LONG)) for number in range(8)]
        await _begun(gate)
        assert await work.run("short", bytearray(b"x")) == "short"
        assert gate.kinds == ["long 0", "short"]
        gate.open.set()
        assert len(await asyncio.gather(*long)) == 8

    gate = Gate()
    with TextWork(gate, room=lambda: 100) as work:
        asyncio.run(run(gate, work))


def test_waiting_bodies_count_towards_max_waiting_until_their_clients_leave() -> None:
    async def run(gate: Gate, work: TextWork) -> None:
        tasks = [asyncio.create_task(work.run(f"body {number}", LONG)) for number in range(3)]
        await _begun(gate)
        with pytest.raises(QueueFull, match="raise max_waiting"):
            await work.run("one too many", bytearray())
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        last = asyncio.create_task(work.run("last", LONG))
        gate.open.set()
        assert await asyncio.gather(tasks[0], tasks[2], last) == ["body 0", "body 2", "last"]
        assert gate.kinds == ["body 0", "body 2", "last"]

    gate = Gate()
    with TextWork(gate, room=lambda: 3) as work:
        asyncio.run(run(gate, work))


def _in_processes(handle: Any, *calls: tuple[str, bytearray], bounds: ProcessBounds = BOUNDS) -> list[Any]:
    """The results of the calls one after another, or their errors."""

    async def run() -> list[Any]:
        results: list[Any] = []
        for kind, body in calls:
            try:
                results.append(await work.run(kind, body))
            except Exception as error:
                results.append(error)
        return results

    with TextWork(handle, room=lambda: 1, bounds=bounds) as work:
        return asyncio.run(run())


def _hang(kind: str, body: bytes) -> Any:
    match kind:
        case "loop":
            while True:
                pass
        case "one call of C code":
            return 3**10_000_000_000
        case "memory":
            return "".ljust(1_000_000_000)
    return kind


@pytest.mark.parametrize("kind", ["loop", "one call of C code", "memory"])
def test_text_work_that_hangs_is_stopped_and_the_next_one_runs(kind: str) -> None:
    hung, *others = _in_processes(_hang, (kind, bytearray()), *[("next", bytearray())] * 3)
    assert isinstance(hung, RequestRejected)
    assert "the model's chat template is at fault" in str(hung)
    assert others == ["next"] * 3


def test_the_process_of_a_long_body_ends_after_it() -> None:
    first, second = _in_processes(lambda kind, body: os.getpid(), ("x", LONG), ("x", LONG))
    assert len({first, second, os.getpid()}) == 3


def test_errors_of_a_text_process_keep_all_their_fields() -> None:
    errors: dict[str, Exception] = {
        "api": ApiError(404, "no", kind="k", param="p", code="c", headers={"a": "b"}),
        "rejected": RequestRejected("no", param="p"),
        "too long": ContextTooLong("no", param="p"),
        "bug": ZeroDivisionError("secret"),
    }

    def fail(kind: str, body: bytes) -> None:
        raise errors[kind]

    api, rejected, too_long, bug = _in_processes(fail, *((kind, bytearray()) for kind in errors))
    assert (api.status, vars(api)) == (404, vars(errors["api"]))
    assert (type(rejected), str(rejected), rejected.param) == (RequestRejected, "no", "p")
    assert type(too_long) is ContextTooLong
    assert type(bug) is InvariantError and "ZeroDivisionError: secret" in str(bug)
