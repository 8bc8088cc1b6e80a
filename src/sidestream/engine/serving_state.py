"""The engine's health, and the number of its unfinished samples. Any thread may use it."""

from __future__ import annotations

import threading

from sidestream.errors import EngineStopped, QueueFull
from sidestream.types import Health


class ServingState:
    """The part of the engine's state that all threads may read and change.

    Invariants:
    - Health changes from ok to draining or failed, and from draining to failed, never back.
    - A sample counts as unfinished from `accept` until `release`, so an engine that closes knows of every accepted
      sample.

    lock  orders submissions and changes of health
    """

    def __init__(self, max_unfinished: int) -> None:
        self.lock = threading.Lock()
        self._max_unfinished = max_unfinished
        self._health = Health("ok", "")
        self._unfinished = 0

    @property
    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self._health

    @property
    def unfinished(self) -> int:
        """Number of samples that were submitted and have not ended."""
        return self._unfinished

    def check_room(self, num_samples: int) -> None:
        """Raise QueueFull or EngineStopped if the engine cannot accept `num_samples` more samples. The caller holds
        `lock`.
        """
        health, bound = self._health, self._max_unfinished
        if health.status != "ok":
            raise EngineStopped(
                f"the engine is {health.status}: {health.detail or 'send the request to another engine'}"
            )
        if self._unfinished + num_samples > bound:
            raise QueueFull(
                f"{self._unfinished} requests are running or waiting, the bound is {bound}: "
                "try again later, or raise max_waiting"
            )

    def accept(self, num_samples: int) -> None:
        """Count new samples. The caller has held `lock` since `check_room`."""
        self._unfinished += num_samples

    def release(self) -> None:
        """Count one sample less, because it has ended."""
        with self.lock:
            self._unfinished -= 1

    def drain(self) -> None:
        """Accept no more requests, unless the engine has failed already."""
        with self.lock:
            if self._health.status == "ok":
                self._health = Health("draining", "")

    def fail(self, error: BaseException) -> None:
        """Set the health to failed."""
        with self.lock:
            self._health = Health("failed", f"{type(error).__name__}: {error}")

    def release_all(self) -> None:
        """Set the count to 0, because a failure of the engine has ended all samples."""
        with self.lock:
            self._unfinished = 0
