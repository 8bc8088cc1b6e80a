"""Watching a schedule: who did what, as lines in columns, and whether anything from before a reset comes back.

A witness in front of another one. Called by whoever's turn it is, so the order of the calls is the order of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sidestream.testing import shadow
from sidestream.types import Accesses, Fence, Key, Witness

_WIDTH = 26
# Whoever reads a finding looks for the caller of the device or the pool, not for this file in between.
shadow._inner[__file__] = True


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One thing that somebody did.

    actor   `"host"`, or the stream
    fence   of the work that this is about, as `"stream:tick"`; "" for none
    """

    actor: str
    text: str
    fence: str = ""


class Recorder:
    """Passes everything on to `inner`; keeps lines if `lines` is a list.

    stale   keys that became findable for bytes that were taken hold of before the last reset (H8)
    """

    def __init__(self, inner: Witness, actor: Callable[[], str], lines: list[TraceLine] | None) -> None:
        self._inner = inner
        self._actor = actor
        self._lines = lines
        self._taken: dict[tuple[str, int], int] = {}
        self._resets = 0
        self._seen: set[str] = set()
        self.stale: list[str] = []

    def say(self, text: str, fence: str = "") -> None:
        """Add a line for whoever runs now."""
        if self._lines is not None:
            self._lines.append(TraceLine(self._actor(), text, fence))

    def reset(self) -> None:
        """From here on, nothing taken before may become findable."""
        self._resets += 1

    # ------------------------------------------------------------------ Witness

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """See `Witness.submitted`."""
        if self._lines is not None:
            self.say(f"gives {name_of(fence)} {label}", name_of(fence))
        self._inner.submitted(fence, accesses, label)

    def waited(self, stream: str, fence: Fence) -> None:
        """See `Witness.waited`."""
        if self._lines is not None:
            self.say(f"waited for {name_of(fence)}")
        self._inner.waited(stream, fence)

    def started(self, fence: Fence) -> None:
        """See `Witness.started`."""
        if self._lines is not None:
            self.say(f"begins {name_of(fence)}", name_of(fence))
        self._inner.started(fence)

    def touched(self, stream: str, accesses: Accesses) -> None:
        """See `Witness.touched`."""
        self._inner.touched(stream, accesses)

    def finished(self, fence: Fence) -> None:
        """See `Witness.finished`."""
        if self._lines is not None:
            self.say(f"ends {name_of(fence)}{'' if fence.failure is None else ': it failed'}", name_of(fence))
        self._inner.finished(fence)

    def observed(self, fence: Fence) -> None:
        """See `Witness.observed`."""
        if self._lines is not None and name_of(fence) not in self._seen:
            self._seen.add(name_of(fence))
            self.say(f"saw {name_of(fence)} done")
        self._inner.observed(fence)

    def host_touched(self, accesses: Accesses, label: str) -> None:
        """See `Witness.host_touched`."""
        if self._lines is not None:
            self.say(label)
        self._inner.host_touched(accesses, label)

    def stalled(self, reason: str) -> None:
        """See `Witness.stalled`."""
        if self._lines is not None:
            self.say(f"is held up: {reason}")
        self._inner.stalled(reason)

    def backed(self, pool: str, memory: str, item_bytes: int) -> None:
        """See `Witness.backed`."""
        self._inner.backed(pool, memory, item_bytes)

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Witness.took`."""
        for item in ids:
            self._taken[pool, item] = self._resets
        if self._lines is not None:
            self.say(f"takes {pool} {_short(ids)}")
        self._inner.took(pool, ids, after)

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        """See `Witness.shared`."""
        if self._lines is not None and ids:
            self.say(f"shares {pool} {_short(ids)}")
        self._inner.shared(pool, ids)

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Witness.released`."""
        if self._lines is not None and ids:
            behind = f" behind {', '.join(name_of(fence) for fence in after)}" if after else ""
            self.say(f"releases {pool} {_short(ids)}{behind}")
        self._inner.released(pool, ids, after)

    def published(self, pool: str, item: int, key: Key) -> None:
        """See `Witness.published`."""
        if self._taken.get((pool, item), self._resets) != self._resets:
            self.stale.append(f"{pool} {item} became findable as {key.hex()[:8]}, but holds what was there before the cache was reset")
        if self._lines is not None:
            self.say(f"publishes {pool} {item} as {key.hex()[:8]}")
        self._inner.published(pool, item, key)

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        """See `Witness.forgot`."""
        if self._lines is not None and ids:
            self.say(f"forgets {pool} {_short(ids)}")
        self._inner.forgot(pool, ids)


def name_of(fence: Fence) -> str:
    """`stream:tick`."""
    return f"{fence.stream}:{fence.tick}"


def render(lines: Sequence[TraceLine], marked: Iterable[str] = ()) -> str:
    """The interleaving: one line an event, one column an actor, in the order of their first turns; `marked` fences get a star."""
    actors = list(dict.fromkeys(["host", *(line.actor for line in lines)]))
    stars = set(marked)
    columns = {actor: at * _WIDTH for at, actor in enumerate(actors)}
    head = "    " + "".join(actor.ljust(_WIDTH) for actor in actors).rstrip()
    body = [f"{'  * ' if line.fence in stars else '    '}{' ' * columns[line.actor]}{line.text}" for line in lines]
    return "\n".join([head, *body])


def _short(ids: Sequence[int]) -> str:
    shown = ", ".join(str(item) for item in ids[:6])
    return f"{shown}, … ({len(ids)})" if len(ids) > 6 else shown
