"""Updates of the model's weights while the engine serves. An update may be announced at any time, and is applied when
no request uses the old weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sidestream.schedule.scheduler import Scheduler
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.offload.connector import OffloadConnector


class WeightUpdates:
    """The announced updates that are not applied yet. Engine thread only.

    Invariants:
    - After an announcement, no request begins with the old weights (hazard H26). Requests that have begun end with the
      old weights (hazard H8).
    - After an update, no block computed with the old weights is reachable in any tier, and new blocks have other keys
      (hazards H8, H14).
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        transfers: OffloadConnector | None,
        layout: KVLayout,
        salt: str,
        states: StateLayout | None,
    ) -> None:
        self._scheduler = scheduler
        self._transfers = transfers
        self._layout = layout
        self._salt = salt
        self._states = states
        self._announced: list[tuple[Callable[[], None], str, threading.Event]] = []

    def announce(self, apply: Callable[[], None], fingerprint: str, done: threading.Event) -> None:
        """Register an update: as soon as no request uses the weights, `apply` is called, and then `done` is set."""
        self._announced.append((apply, fingerprint, done))
        self._scheduler.pause_admission()  # rule: new-requests-wait-for-new-weights

    def apply(self) -> None:
        """Apply announced updates, unless a request that has begun uses the weights. Call it only while no step is in
        flight.
        """
        if not self._announced or self._scheduler.num_begun:  # rule: new-weights-wait-for-running-requests
            return
        for apply, fingerprint, done in self._announced:
            apply()
            # rule: new-weights-replace-the-keys
            self._scheduler.rekey(
                BlockKeys(fingerprint=fingerprint, layout=self._layout, salt=self._salt, states=self._states)
            )
            if self._transfers is not None:
                self._transfers.forget_all()  # rule: new-weights-drop-the-keys-of-the-tiers
            done.set()
        self._announced.clear()  # rule: new-weights-are-taken-once
        self._scheduler.resume_admission()  # rule: new-weights-end-the-pause
