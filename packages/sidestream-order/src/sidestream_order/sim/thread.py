"""Host threads of the simulated device."""

from __future__ import annotations

from collections.abc import Callable

from sidestream_kv.device.base import WakeUp
from sidestream_order.sim.stream import SimFence, StreamDevice


class SimThread:
    """See `HostThread`."""

    def __init__(self, device: StreamDevice, name: str, turn: Callable[[], WakeUp]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._device = device
        self._turns = device.turns
        self._turn = turn
        self._wake_up = WakeUp()
        self._woken = self._busy = self._closed = False
        if device.tracer is not None:
            device.tracer.sent(f"start of {name}", 1)
        device.turns.add(name, self._may_go_on, self._awaited, self._run, is_host=True)

    def wake(self) -> None:
        """See `HostThread.wake`. This is a point: other actors may run."""
        self._woken = True
        self._turns.point()

    def close(self) -> None:
        if not self._closed:
            self._turns.block(lambda: not self._busy, lambda: self.name)
            self._closed = True
            if self._device.tracer is not None:
                self._device.tracer.joined(self.name)

    def _may_go_on(self) -> bool:
        return not self._closed and (
            self._woken or any(isinstance(fence, SimFence) and fence.done for fence in self._wake_up.fences)
        )

    def _awaited(self) -> str | None:
        return next(
            (fence.stream for fence in self._wake_up.fences if isinstance(fence, SimFence) and not fence.done), None
        )

    def _run(self) -> None:
        if self._device.tracer is not None:
            self._device.tracer.own_timeline(self.name)
            self._device.tracer.received(f"start of {self.name}", 1)
        while self.failure is None:
            self._woken, self._busy = False, True
            try:
                wake_up = self._turn()
                self._wake_up = WakeUp(tuple(wake_up.fences), wake_up.until_s)
            except Exception as error:
                self.failure, self._wake_up, self._closed = error, WakeUp(), True
            self._busy = False
            self._turns.block(self._may_go_on, self._awaited, wake_s=None if self._closed else self._wake_up.until_s)
