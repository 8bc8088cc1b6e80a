"""Who goes next, when several could. Deterministic: a policy sees names and a seeded generator, nothing else.

random        any of them, equally likely
late          the host runs ahead as far as it can; a stream moves only when the host waits for it
early         every stream runs as soon as it may; the host goes on when none can
starve:NAME   random, but NAME moves only when nobody else can
pct:D         probabilistic concurrency testing with D - 1 preemptions (Burckhardt et al., ASPLOS 2010): random
              priorities, the first in rank runs, and at D - 1 random points whoever runs falls to the end of the ranks.
              A bug of depth D is found with probability at least 1 / (n * k ** (D - 1)) by each run of n actors and k
              points
pct:D:K       the same for programs of about K points; without it 150, which a schedule of the torture test has
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sidestream.errors import ConfigError

HOST = "host"
POLICIES = ("random", "late", "early", "starve", "pct")

# How often a sleeping host looks again before a stream that is held back may move.
_NAPS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision to be made.

    able         names of the actors that can go on, the host first if it is one of them
    current      who has just given the turn away
    may_nap      the host sleeps: choosing `HOST` lets time pass until it wakes
    needed       says which actor the host cannot go on without, if it waits for one
    """

    able: Sequence[str]
    current: str
    may_nap: bool
    needed: Callable[[], str | None]


class Policy(Protocol):
    """Decides who goes next; one object for each run."""

    def choose(self, choice: Choice) -> str:
        """One of `choice.able`, or HOST if `choice.may_nap`."""
        ...


class Random:
    """Any of those that can, equally likely."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        return choice.able[int(self._rng.random() * len(choice.able))]


class Late:
    """The host first; else the one stream that it waits for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._naps = 0

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        if choice.able[0] == HOST:
            return HOST
        if choice.may_nap and self._naps < _NAPS:
            self._naps += 1
            return HOST
        self._naps = 0
        return choice.needed() or choice.able[int(self._rng.random() * len(choice.able))]


class Early:
    """Streams first, each as far as it can."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        streams = [name for name in choice.able if name != HOST]
        return streams[int(self._rng.random() * len(streams))] if streams else HOST


class Starve:
    """Random without one actor, as long as there is another."""

    def __init__(self, rng: random.Random, victim: str) -> None:
        self._rng = rng
        self._victim = victim
        self._naps = 0

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        others = [name for name in choice.able if name != self._victim]
        if others:
            return others[int(self._rng.random() * len(others))]
        if choice.may_nap and self._naps < _NAPS:
            self._naps += 1
            return HOST
        self._naps = 0
        return self._victim


class Pct:
    """Ranks, and a few points at which the one that runs falls behind all others."""

    def __init__(self, rng: random.Random, depth: int, length: int = 150) -> None:
        """`length`: about how many decisions a run takes; the points lie among the first so many."""
        self._rng = rng
        self._ranks: dict[str, float] = {}
        self._falls = {rng.randrange(length) for _ in range(depth - 1)}
        self._count = 0
        self._lowest = 0.0

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        for name in choice.able:
            if name not in self._ranks:
                self._ranks[name] = 1.0 + self._rng.random()
        first = max(choice.able, key=self._ranks.__getitem__)
        if self._count in self._falls:
            self._lowest -= 1.0
            self._ranks[first] = self._lowest
            first = max(choice.able, key=self._ranks.__getitem__)
        self._count += 1
        return first


class Steered:
    """Goes on with whoever runs, but for the decisions that it was told: what a failure is shrunk to.

    turns   decision number → name; a name that cannot go at that point is passed over
    """

    def __init__(self, turns: dict[int, str]) -> None:
        self._turns = turns
        self._count = 0

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        told = self._turns.get(self._count)
        self._count += 1
        if told in choice.able or (told == HOST and choice.may_nap):
            assert told is not None
            return told
        return choice.current if choice.current in choice.able else choice.able[0]


def make_policy(spec: str, rng: random.Random) -> Policy:
    """The policy that `spec` names: see the module's list. Raises ConfigError, naming the known ones."""
    name, _, argument = spec.partition(":")
    match name:
        case "random" if not argument:
            return Random(rng)
        case "late" if not argument:
            return Late(rng)
        case "early" if not argument:
            return Early(rng)
        case "starve" if argument:
            return Starve(rng, argument)
        case "pct" if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", argument):
            return Pct(rng, *map(int, argument.split(":")))
    raise ConfigError(
        f"policy is {spec!r}: give random, late, early, starve:STREAM or pct:DEPTH[:POINTS] (whole numbers from 1)"
    )
