"""Pins: prefixes whose blocks a tier evicts last, until a time. Knows keys (block hashes), not blocks: a pinned key may
be absent, and its block is held as soon as it is stored.

A pin never stops an allocation. If all blocks that could be evicted are pinned, because requests and transfers use all
others, the pin that ends first ends at once. Pins are in memory only: a new process has none.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream_kv.types import Key

PIN_SHARE = 0.5
"""Largest share of a tier's blocks that pins hold."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix.

    keys     the keys that it holds
    until_s  time of its end
    hint     a request asked for it: it ends early if an operator's pin needs its room
    """

    keys: tuple[Key, ...]
    until_s: float
    hint: bool


class Pins:
    """The pins of one tier, by the key of the prefix's last block. Any thread may call it; no call takes longer than a
    pass over all pins.

    clock  function that returns the time in seconds
    size   function that returns the number of the tier's blocks, of which pins hold at most `PIN_SHARE`
    """

    def __init__(self, *, clock: Callable[[], float], size: Callable[[], int]) -> None:
        self._clock = clock
        self._size = size
        self._pins: dict[Key, Pin] = {}
        self._lock = threading.Lock()
        self.held: Counter[Key] = Counter()
        """How many pins hold each key. Call `end_late` before you read it: pins do not end by themselves."""

    @property
    def room(self) -> int:
        """Number of blocks that pins may hold."""
        return int(self._size() * PIN_SHARE)

    def add(self, name: Key, keys: Sequence[Key], *, ttl_s: float, hint: bool = False) -> bool:
        """Pin `keys` for `ttl_s` seconds. A hint never shortens the pin `name`, and leaves an operator's pin one.

        Returns False, and changes nothing, if pins would hold too many blocks. Hints make room for an operator's pin.
        """
        with self._lock:
            self._end_late()
            known, until_s = self._pins.get(name), self._clock() + ttl_s
            if hint and known is not None:
                until_s, hint = max(until_s, known.until_s), known.hint
            wanted = {*keys}
            if self._exceeds(wanted):
                lasting = [one.keys for other, one in self._pins.items() if not one.hint and other != name]
                if hint or len(wanted.union(*lasting)) > self.room:
                    return False
                for _, other in sorted((one.until_s, other) for other, one in self._pins.items() if one.hint):
                    if self._exceeds(wanted):
                        self._end(other)
            self._end(name)
            self._pins[name] = Pin(tuple(keys), until_s, hint)
            self.held.update(wanted)
            return True

    def move(self, earlier: Key, name: Key, keys: Sequence[Key], *, ttl_s: float) -> bool:
        """Let the hint `earlier` hold `keys` instead, under this name. If `keys` continue its keys, as the next turn of
        a conversation does, only the new ones cost time. Without that hint, the same as `add` with a hint.

        Returns False, and changes nothing, if pins would hold too many blocks.
        """
        with self._lock:
            self._end_late()
            pin = self._pins.get(earlier)
            if pin is not None and pin.hint and (name == earlier or name not in self._pins):
                count = len(pin.keys)
                gone, fresh = ((), {*keys[count:]}) if (*keys[:count],) == pin.keys else (pin.keys, {*keys})
                self._let_go(gone)
                if self._exceeds(fresh):
                    self.held.update({*gone})
                    return False
                del self._pins[earlier]
                self._pins[name] = Pin(tuple(keys), self._clock() + ttl_s, hint=True)
                self.held.update(fresh)
                return True
        return self.add(name, keys, ttl_s=ttl_s, hint=True)

    def pass_over(self, order: OrderedDict[Key, Any]) -> None:
        """Make a key that no pin holds the first one: pinned ones before it move to the end, in their order. If pins
        hold all keys of `order`, which is not empty, pins end.
        """
        self.end_late()
        passed = 0
        while (key := next(iter(order))) in self.held:
            order.move_to_end(key)
            passed += 1
            if passed % len(order) == 0:
                self.end_first()

    def end(self, name: Key) -> bool:
        """End the pin `name`. Returns whether there was one."""
        with self._lock:
            return self._end(name)

    def end_late(self) -> None:
        """End the pins whose time is over."""
        with self._lock:
            self._end_late()

    def end_first(self) -> None:
        """End the pin that would end first, because its blocks are needed."""
        with self._lock:
            if self._pins:
                self._end(min(self._pins, key=lambda name: self._pins[name].until_s))

    def forget(self, keys: Iterable[Key]) -> None:
        """End the pins that hold one of these keys."""
        gone = {*keys}
        with self._lock:
            for name in [name for name, pin in self._pins.items() if not gone.isdisjoint(pin.keys)]:
                self._end(name)

    def clear(self) -> None:
        """End all pins."""
        with self._lock:
            self._pins.clear()
            self.held.clear()

    def all(self) -> dict[Key, Pin]:
        """The pins whose time is not over."""
        self.end_late()
        return self._pins.copy()

    def _exceeds(self, wanted: set[Key]) -> bool:
        """Whether pins would hold too many blocks with these keys in addition."""
        return len(self.held) + sum(key not in self.held for key in wanted) > self.room

    def _end_late(self) -> None:
        now_s = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.until_s <= now_s]:
            self._end(name)

    def _end(self, name: Key) -> bool:
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._let_go(pin.keys)
        return pin is not None

    def _let_go(self, keys: Sequence[Key]) -> None:
        for key in {*keys}:
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
