"""Policies of the simulated device: they choose the next actor (the host, a stream or a thread) if several can run. A
policy is deterministic, because it sees only names and a seeded random generator. It decides at points, the moments
when another actor may run.

random        all actors have the same probability
late          the host runs ahead as far as it can; a stream runs only when the host waits for it
early         every stream runs as soon as it can; the host runs when no stream can
starve:NAME   random, but the actors NAME, NAME-… (`load-0`) and NAME/… (`rank1/load-0`) run only when no other can
pct:D         probabilistic concurrency testing with D - 1 preemptions (Burckhardt et al., ASPLOS 2010). Actors have
              random priorities, and the actor with the highest priority runs; at D - 1 random points, the running actor
              gets the lowest priority. Each run of n actors and k points finds a bug of depth D (a bug that D ordering
              constraints cause) with probability at least 1 / (n * k ** (D - 1))
pct:D:K       pct:D for programs of about K points; the default, 150, fits a schedule of the torture test
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sidestream_kv.errors import ConfigError

HOST = "host"
POLICIES = ("random", "late", "early", "starve", "pct")

# Number of times that a policy lets a sleeping host wake up before it runs a stream that it has held back.
_NAPS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision.

    able         names of the actors that can run; if the host can, it is the first
    current      the actor that has just ended its turn
    may_nap      whether the host sleeps; choosing `HOST` then lets time pass until it wakes up
    needed       function that returns the actor that the host waits for, if there is one
    """

    able: Sequence[str]
    current: str
    may_nap: bool
    needed: Callable[[], str | None]


class Policy(Protocol):
    """Chooses the next actor; one object for each run."""

    def choose(self, choice: Choice) -> str:
        """One of `choice.able`, or HOST if `choice.may_nap`."""
        ...


class Random:
    """Chooses all actors with the same probability."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, choice: Choice) -> str:
        return choice.able[int(self._rng.random() * len(choice.able))]


class Late:
    """Chooses the host if it can run, else the stream that the host waits for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._naps = 0

    def choose(self, choice: Choice) -> str:
        if choice.able[0] == HOST:
            return HOST
        if choice.may_nap and self._naps < _NAPS:
            self._naps += 1
            return HOST
        self._naps = 0
        return choice.needed() or choice.able[int(self._rng.random() * len(choice.able))]


class Early:
    """Chooses a stream if any stream can run, else the host."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, choice: Choice) -> str:
        streams = [name for name in choice.able if name != HOST]
        return streams[int(self._rng.random() * len(streams))] if streams else HOST


class Starve:
    """Chooses at random, but never chooses one actor, or a family of actors, while another can run."""

    def __init__(self, rng: random.Random, victim: str) -> None:
        self._rng = rng
        self._victim = victim
        self._family = (f"{victim}-", f"{victim}/")
        self._naps = 0

    def choose(self, choice: Choice) -> str:
        others = [name for name in choice.able if name != self._victim and not name.startswith(self._family)]
        if others:
            return others[int(self._rng.random() * len(others))]
        if choice.may_nap and self._naps < _NAPS:
            self._naps += 1
            return HOST
        self._naps = 0
        return choice.able[int(self._rng.random() * len(choice.able))]


class Pct:
    """Chooses by random priorities. At a few points, the running actor gets the lowest priority."""

    def __init__(self, rng: random.Random, depth: int, length: int = 150) -> None:
        """`length`: approximate number of decisions of a run, from which the points are chosen."""
        self._rng = rng
        self._ranks: dict[str, float] = {}
        self._falls = {rng.randrange(length) for _ in range(depth - 1)}
        self._count = 0
        self._lowest = 0.0

    def choose(self, choice: Choice) -> str:
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
    """Keeps the running actor, except at given decisions. Used to repeat a failure that was shrunk to few switches.

    turns   name of the actor to choose, by number of the decision; ignored if that actor cannot run
    """

    def __init__(self, turns: dict[int, str]) -> None:
        self._turns = turns
        self._count = 0

    def choose(self, choice: Choice) -> str:
        chosen = self._turns.get(self._count)
        self._count += 1
        if chosen in choice.able or (chosen == HOST and choice.may_nap):
            assert chosen is not None
            return chosen
        return choice.current if choice.current in choice.able else choice.able[0]


def make_policy(spec: str, rng: random.Random) -> Policy:
    """The policy with this name (see the list at the top of the module). Raises ConfigError with the known names."""
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
