"""The pins of an engine's tiers. A pin holds in host memory and in the persistent tiers, from which a block comes back
to the device; on the device only if the engine has no other tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sidestream.engine.parts import Parts
from sidestream_kv.kv.pins import Pin, Pins
from sidestream_kv.types import DEVICE, HOST, Key


class TierPins:
    """Pins that are in all tiers at once, because a pin in one of them is of use without the others. Any thread."""

    def __init__(self, parts: Parts) -> None:
        clock = parts.device.now
        self._of_tiers: dict[str, Pins] = {}
        self._of_states: Pins | None = None  # without tiers: pins of checkpoints on the device
        if (tiers := parts.tiers) is not None:
            pool = tiers.host.pool
            self._of_tiers[HOST] = pool.pins = Pins(clock=clock, size=lambda: pool.size)
            for name, tier in tiers.persistent.items():
                entries = partial(int, tier.index.max_entries)
                self._of_tiers[name] = tier.index.prefix_pins = Pins(clock=clock, size=entries)
            return
        blocks = parts.blocks
        self._of_tiers[DEVICE] = blocks.pins = Pins(clock=clock, size=lambda: blocks.size)
        if (states := parts.states) is not None:
            self._of_states = states.pins = Pins(clock=clock, size=lambda: states.size)

    @property
    def fullest(self) -> Pins:
        """The pins of the tier with most room for them."""
        return max(self._of_tiers.values(), key=lambda pins: pins.room)

    def add(self, keys: Sequence[Key], state_parts: Sequence[Key], *, ttl_s: float, hint: bool) -> bool:
        """Pin a prefix of blocks with these keys, under the key of its last block. Returns whether a tier had room.

        state_parts   keys of the parts of the checkpoint at its end
        """
        name, every = keys[-1], [*keys, *state_parts]
        held = [pins.add(name, every, ttl_s=ttl_s, hint=hint) for pins in self._of_tiers.values()]
        if self._of_states is not None:
            self._of_states.add(name, [name], ttl_s=ttl_s, hint=hint)
        return any(held)

    def move(self, earlier: Key, keys: Sequence[Key], state_parts: Sequence[Key], *, ttl_s: float) -> bool:
        """Let the hint `earlier` hold another prefix; see `Pins.move`. Returns whether a tier had room."""
        name, every = keys[-1], [*keys, *state_parts]
        held = [pins.move(earlier, name, every, ttl_s=ttl_s) for pins in self._of_tiers.values()]
        if self._of_states is not None:
            self._of_states.move(earlier, name, [name], ttl_s=ttl_s)
        return any(held)

    def end(self, name: Key) -> None:
        """End the pin of this name."""
        for pins in self._all():
            pins.end(name)

    def forget(self, keys: Sequence[Key], state_parts: Sequence[Key], tier: str | None) -> None:
        """End the pins that hold one of these keys in `tier`; None: in all tiers."""
        for name, pins in self._of_tiers.items():
            if tier in (None, name):
                pins.forget((*keys, *state_parts))
        if tier in (None, DEVICE) and self._of_states is not None:
            self._of_states.forget(keys)

    def pinned(self) -> dict[Key, Pin]:
        """The pins by name; of a prefix that is pinned in several tiers, the one that lasts longest."""
        found: dict[Key, Pin] = {}
        for pins in self._of_tiers.values():
            for name, pin in pins.all().items():
                if name not in found or found[name].until_s < pin.until_s:
                    found[name] = pin
        return found

    def _all(self) -> list[Pins]:
        return [*self._of_tiers.values(), *(() if self._of_states is None else (self._of_states,))]
