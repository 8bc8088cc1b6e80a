"""An idle engine trims its device's memory once, and again only after it has worked."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from engine_rig import serving

from sidestream.engine import loop
from sidestream_kv.device.cpu import CpuDevice


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every call of `trim_memory`."""
    taken: list[Any] = []
    monkeypatch.setattr(loop, "_TRIM_AFTER_S", 0.01)

    def trim(device: CpuDevice) -> None:
        taken.append(device)

    monkeypatch.setattr(CpuDevice, "trim_memory", trim)
    return taken


def test_an_idle_engine_trims_memory_once_after_each_period_of_work(trims: list[Any]) -> None:
    with serving() as rig:
        rig.turn_until(lambda: len(trims) == 1)
        rig.ask([1, 2, 3])
        rig.turn_until(lambda: len(trims) == 2)
        rig.submit([1, 2, 3]).wait().is_silent()  # a while in which it could trim often
        assert len(trims) == 3


def test_an_engine_does_not_trim_memory_during_transfers(trims: list[Any]) -> None:
    with serving(slots=24) as rig, rig.hold("store"):
        reply = rig.ask(list(range(1, 24)))
        before = len(trims)
        reply.is_silent()  # a while in which it could trim often
        assert len(trims) == before


def test_trim_memory_calls_malloc_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Library:
        def malloc_trim(self, pad: int) -> int:
            called.append(pad)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    device = CpuDevice(compute_threads=1)
    device.trim_memory()
    device.close()
    assert called == [0]


def test_trim_memory_does_nothing_without_malloc_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    device = CpuDevice(compute_threads=1)
    device.trim_memory()
    device.close()
