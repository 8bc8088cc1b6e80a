"""Blocks the engine thread until work on the GPU ends. The thread first sleeps, then polls, then blocks in the
driver. A fence marks the end of the work. A bell, which another thread rings, can end the wait early.
"""

from __future__ import annotations

import time

from sidestream_kv.device.channel import Bell
from sidestream_kv.device.cuda.fences import CudaFence
from sidestream_kv.device.cuda.forecast import Forecast
from sidestream_kv.types import Fence

# Polling starts this long before the forecast end of the work, because a sleep ends late, and then the thread must get
# the GIL.
_AHEAD_S = 1e-3
# This long after the forecast end, the thread stops polling and blocks in the driver. This is a usual forecast error.
_POLLING_S = 1e-3
# Longest sleep. The forecast may be too late, for example if an earlier step waited for a load and this step does not.
_NAP_S = 500e-6


class FenceWaiter:
    """The waits of one thread, with a forecast for each stream."""

    def __init__(self) -> None:
        self.forecasts: dict[str, Forecast] = {}
        # The fence of a wait that a bell has ended, with label and enqueue time of its work.
        self._interrupted: tuple[CudaFence, tuple[str, float]] | None = None

    def is_done(self, fence: Fence) -> bool:
        """Poll `fence`. If it has ended after a bell interrupted the wait for it, update the forecast."""
        interrupted, self._interrupted = self._interrupted, None
        if not fence.poll():  # rule: unfinished-gpu-work-is-not-done
            return False
        if interrupted is not None and interrupted[0] is fence:
            self.forecasts[fence.stream].ended(*interrupted[1], time.perf_counter())
        return True

    def wait(self, fence: CudaFence, bell: Bell | None) -> bool:
        """Block until `fence` is done; False if `bell` rings while the thread sleeps. Raises DeviceLost."""
        launched = fence.owner.launched(fence)
        if launched is None:
            return fence.poll()
        forecast = self.forecasts.setdefault(fence.stream, Forecast())
        if not self.wait_until(fence, forecast.soonest_end_s(*launched), bell):
            self._interrupted = fence, launched
            return False
        forecast.ended(*launched, time.perf_counter())
        return fence.poll()

    def wait_until(self, fence: CudaFence, soonest_s: float | None, bell: Bell | None) -> bool:
        """Sleep until shortly before `soonest_s`, then poll, then block. Returns False if `bell` rings during the
        sleep.

        A thread that polls holds the GIL when the fence is done. A thread that blocks in the driver must first get the
        GIL back from other threads, which takes up to about 0.2 ms.
        """
        now_s = time.perf_counter()
        due_s = now_s if soonest_s is None else max(now_s, soonest_s)
        while not fence.poll():  # rule: host-waits-until-the-fence-is-done
            if now_s > due_s + _POLLING_S:
                fence.block(None)
                return True
            left_s = min(due_s - _AHEAD_S - now_s, _NAP_S)
            if left_s > 0:
                if bell is None:
                    time.sleep(left_s)
                elif bell.wait(left_s):
                    return False
            now_s = time.perf_counter()
        return True
