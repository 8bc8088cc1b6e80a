"""Plays a miniature without its protection until it is caught, and with it under every policy."""

from __future__ import annotations

from proof.miniatures import MINIATURES, Miniature, run_miniature

BORDER = ("engine", "front end", "reading thread", "connection", "timer", "aborts", "reader")
STREAMS = ("compute", "store", "load", "disk", "inputs", "worker", "copy engine", "gather", "receive", "prefill")
MORE_STREAMS = ("load 1", "compute 1", "early part", "DMA", *BORDER)
POLICIES = ("random", "late", "early", "pct:2", "pct:4")
STARVING = tuple(f"starve:{name}" for name in ("host", *STREAMS, *MORE_STREAMS))
_BY_NAME = {miniature.name: miniature for miniature in MINIATURES}


def named(name: str) -> Miniature:
    return _BY_NAME[name]


def reenact(name: str, *, by: tuple[str, ...], within: int, seeds: int = 8) -> None:
    _assert_caught(name, by, within)
    _assert_clean(name, seeds)


def _assert_caught(name: str, by: tuple[str, ...], within: int) -> None:
    """Without its protection, every oracle of `by` notices within so many random schedules, and no other one
    ever does.
    """
    first: dict[str, int] = {}
    for seed in range(within):
        caught = run_miniature(named(name), "random", seed, protected=False)
        for oracle in caught.oracles if caught is not None else ():
            first.setdefault(oracle, seed)
    assert set(first) == set(by), f"{name}: noticed first by seed {first}, expected {by} within {within} schedules"


def _assert_clean(name: str, seeds: int) -> None:
    """With its protection, nothing notices anything under any policy."""
    for policy in (*POLICIES, *STARVING):
        for seed in range(seeds if policy in POLICIES else max(1, seeds // 4)):
            caught = run_miniature(named(name), policy, seed, protected=True)
            assert caught is None, f"{name} under {policy}, seed {seed}: {caught}"
