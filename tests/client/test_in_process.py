"""How outputs come from the engine thread to an event loop of the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidestream.client.base import OutputQueue
from sidestream.client.in_process import _LoopQueue
from sidestream.types import CachedTokens, Delta


class Client:
    """Stands for the client: puts each delta into its queue."""

    def on_output(self, outputs: OutputQueue, delta: Delta) -> None:
        outputs.put(delta)


def test_outputs_of_a_step_wake_their_event_loop_once_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_all() -> tuple[list[list[Delta]], int]:
        loop, calls = asyncio.get_running_loop(), list[Any]()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda work: calls.append(work) or wake(work))
        queue, client, requests = _LoopQueue(loop), Client(), [OutputQueue(number, 1) for number in range(3)]
        for step in range(2):  # the second one's outputs come after the delivery of the first one's
            for index, outputs in enumerate(requests):
                queue.put(client, outputs, Delta(index, str(step), (), (), None, 1, CachedTokens()))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        return [[await outputs.read(), await outputs.read()] for outputs in requests], len(calls)

    deltas, num_calls = asyncio.run(read_all())
    assert [[(delta.index, delta.text) for delta in of_one] for of_one in deltas] == [
        [(index, "0"), (index, "1")] for index in range(3)
    ]
    assert num_calls == 2


def test_a_closed_event_loop_receives_no_output() -> None:
    loop = asyncio.new_event_loop()
    queue, outputs = _LoopQueue(loop), OutputQueue(1, 1)
    loop.close()
    queue.put(Client(), outputs, Delta(0, "", (1,), (), None, 1, CachedTokens()))  # type: ignore[arg-type]
    assert not outputs._deltas
