"""What operators do with a running engine: flush and reset the KV cache, pause the admission of requests, cancel
requests by name, and replace the weights.

Any thread except the engine thread may call it; several may do so at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from sidestream.engine.adapters import LoadedAdapters
from sidestream.engine.inbox import ServingState
from sidestream.engine.parts import Parts
from sidestream.errors import CallTimeout, ConfigError, EngineStopped, InvariantError, ModelError, RequestRejected
from sidestream.types import Flushed
from sidestream_kv.types import DEVICE, HOST

# Polling interval of reset_prefix_cache().
_FORGETTING_POLL_S = 0.0005
# The same of update_weights().
_WEIGHTS_POLL_S = 0.005
# Time that the engine thread has for one turn in `flush`, even at the end of the timeout.
_TURN_S = 1.0


class Call(Protocol):
    """The type of `Engine.call`."""

    def __call__(self, work: Callable[[], None], *, timeout_s: float | None = None) -> None: ...


class Operations:
    """The operations of one engine.

    adapters      the loaded adapters
    cancel        `OutputStreams.cancel`
    replace       `Engine.update_weights`
    on_reset      called when the cache on the device was reset
    call          `Engine.call`
    wait_a_turn   lets the engine work for so many seconds
    is_alive      whether the engine thread has not ended
    """

    def __init__(
        self,
        parts: Parts,
        *,
        adapters: LoadedAdapters,
        serving: ServingState,
        cancel: Callable[[str], int],
        replace: Callable[..., threading.Event],
        on_reset: Callable[[], None],
        call: Call,
        wait_a_turn: Callable[[float], None],
        is_alive: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._adapters = adapters
        self._serving = serving
        self._cancel = cancel
        self._replace = replace
        self._reading = threading.Lock()
        self._on_reset = on_reset
        self._call = call
        self._wait_a_turn = wait_a_turn
        self._is_alive = is_alive

    def run(self, operation: str, *, timeout_s: float, name: str | None = None) -> dict[str, int]:
        """Carry out an operation. Returns what is left (`flush`), the blocks that were dropped (`reset_prefix_cache` of
        the tier `name`), the number of ended samples (`cancel` of the request `name`), or the slots of the loaded
        `adapters`. `load_adapter` has `NAME=PATH` as its name. Raises as the operation's method does.
        """
        match operation:
            case "flush":
                return dict(self.flush(timeout_s=timeout_s).left)
            case "reset_prefix_cache":
                return self.reset_prefix_cache(name, timeout_s=timeout_s)
            case "pause":
                self.pause(timeout_s=timeout_s)
            case "resume":
                self.resume(timeout_s=timeout_s)
            case "update_weights":
                self.update_weights(name or "", timeout_s=timeout_s)
            case "load_adapter":
                adapter, _, path = (name or "").partition("=")
                self._adapters.load(adapter, path, timeout_s=timeout_s)
            case "unload_adapter":
                self._adapters.unload(name or "")
            case "adapters":
                return self._adapters.names
            case "cancel":
                return {"cancelled": self.cancel(name or "", timeout_s=timeout_s)}
            case _:
                raise InvariantError(f"no call {operation!r}")
        return {}

    def flush(self, *, timeout_s: float) -> Flushed:
        """Write all blocks in host memory to the persistent tiers, and block until no transfer is in flight: then all
        complete blocks are in the tiers. After `timeout_s`, the result says what is left. Raises CallTimeout if the
        engine thread hangs.
        """
        transfers, device = self._parts.transfers, self._parts.device
        left: dict[str, int] = {}
        if transfers is None:
            return Flushed(left)
        until_s = device.now() + timeout_s

        self._call(transfers.write_rest, timeout_s=timeout_s)

        def look() -> None:
            nonlocal left
            sizes = {kind: count for kind, count in transfers.sizes().items() if count}
            left = (sizes or {"events": 1}) if transfers.has_work else {}

        while True:
            self._call(look, timeout_s=max(until_s - device.now(), _TURN_S))
            if not left or device.now() >= until_s:
                return Flushed(left)
            self._wait_a_turn(0.002)

    def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Make all blocks of `tier` unreachable at once (hazard H8); None: of all tiers, which are `device`, `host` and
        the persistent ones. Returns the number of blocks that each of them held.

        Running requests continue. Transfers in flight complete, but those between tiers publish no block. Blocks the
        caller until the tiers' indices are empty, too.

        Raises RequestRejected for a tier that the engine does not have. Raises CallTimeout after `timeout_s`; then the
        reset is still under way. Raises EngineStopped if transfers have failed, which ends the engine: the tiers may
        still hold blocks.
        """
        transfers, device = self._parts.transfers, self._parts.device
        tiers = (DEVICE, *(() if self._parts.tiers is None else (HOST, *self._parts.tiers.persistent)))
        if tier is not None and tier not in tiers:
            raise RequestRejected(f"tier is {tier!r}: this engine has {', '.join(tiers)}", param="tier")
        until_s = device.now() + timeout_s
        dropped: list[dict[str, int]] = []

        def forget() -> None:
            if tier in (None, DEVICE):
                dropped.append({DEVICE: self._parts.blocks.num_keys})
                self._parts.scheduler.forget_all()  # rule: reset-reaches-the-scheduler
                self._on_reset()
            if transfers is not None and tier != DEVICE:
                # rule: reset-reaches-the-tiers
                dropped.append(transfers.forget_all(None if tier is None else (tier,)))

        self._call(forget, timeout_s=timeout_s)
        # rule: reset-ends-after-the-tiers
        while transfers is not None and not transfers.has_forgotten and self._is_alive():
            if device.now() >= until_s:
                raise CallTimeout(f"the tiers are not reset after {timeout_s:g} s; the reset is still under way")
            device.sleep(_FORGETTING_POLL_S)
        if transfers is not None and (failure := transfers.failure) is not None:  # rule: reset-that-failed-says-so
            raise EngineStopped(
                f"the tiers were not reset, because transfers failed ({failure}): start the engine again"
            )
        return {name: count for held in dropped for name, count in held.items()}

    def pause(self, *, timeout_s: float = 60.0) -> None:
        """Start no request that has not begun, until `resume`: new requests wait in the queue, begun requests continue.
        Idempotent. Raises CallTimeout and EngineStopped.
        """
        self._call(lambda: self._set_paused(paused=True), timeout_s=timeout_s)

    def resume(self, *, timeout_s: float = 60.0) -> None:
        """End a `pause`. Idempotent. Raises CallTimeout and EngineStopped."""
        self._call(lambda: self._set_paused(paused=False), timeout_s=timeout_s)

    def cancel(self, name: str, *, timeout_s: float = 60.0) -> int:
        """End the requests with this name, of all front ends. Returns the number of samples that it ended; 0: there is
        no such request. Their last delta has the finish reason `abort` and an error. Raises CallTimeout and
        EngineStopped.
        """
        ended: list[int] = []
        self._call(lambda: ended.append(self._cancel(name)), timeout_s=timeout_s)
        return ended[0]

    def update_weights(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Replace the weights by those of a checkpoint of the same architecture, and block until it is done. Requests
        that have begun end with the old weights, which takes as long as their answers; others wait. All KV of the old
        weights becomes unreachable.

        Raises RequestRejected, and changes nothing, if the checkpoint cannot be read or does not fit, and if the engine
        cannot replace its weights. Raises CallTimeout after `timeout_s`, if the requests that have begun take longer:
        the weights will still be replaced. Raises EngineStopped.
        """
        read, device = self._parts.read_weights, self._parts.device
        if read is None or self._parts.ranks is not None:
            why = "it was built without a checkpoint" if read is None else "several ranks share them"
            raise RequestRejected(f"this engine cannot replace its weights, because {why}: start a new one")
        until_s = device.now() + timeout_s
        with self._reading:  # two checkpoints beside the old weights would take too much memory
            try:
                apply, fingerprint = read(path)
            except (ModelError, ConfigError) as error:
                raise RequestRejected(f"the weights stay as they are: {error}", param="model_path") from error
            done = self._replace(partial(self._take_weights, apply), fingerprint=fingerprint)
            while not done.is_set():
                if not self._is_alive():
                    raise EngineStopped("the weights were not replaced, because the engine has stopped")
                if device.now() >= until_s:
                    raise CallTimeout(
                        f"requests that use the old weights did not end within {timeout_s:g} s: the new weights are "
                        "read, and taken when they have ended"
                    )
                self._wait_a_turn(_WEIGHTS_POLL_S)

    def _take_weights(self, apply: Callable[[], None]) -> None:
        """Take read weights, on the engine thread: no request runs, so nothing waits for this."""
        fence = self._parts.executor.enqueue(apply, label="new weights")
        self._parts.device.wait_host(fence, reason="new weights")
        if fence.failure is not None:  # rule: weights-that-were-not-taken-end-the-engine
            raise fence.failure

    def _set_paused(self, *, paused: bool) -> None:
        if paused:
            self._parts.scheduler.pause_admission("operator")
        else:
            self._parts.scheduler.resume_admission("operator")
        self._serving.paused = paused
        self._parts.metrics.set("admission_paused", float(paused))
