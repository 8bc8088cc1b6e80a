"""Engines change garbage collection; the last one to end restores it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from sidestream.processes.garbage import freeze_gc_heap
from sidestream_kv.device.garbage import collections_paused


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture
def nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection looks at all modules of this process, which takes a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def test_collections_pause_for_imports_and_stay_off_where_they_were() -> None:
    with pytest.raises(ImportError), collections_paused():
        with collections_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_is_collected")
def test_the_heap_stays_frozen_until_the_last_engine_ends() -> None:
    gc.set_threshold(701, 11, 12)
    first, second = freeze_gc_heap(), freeze_gc_heap()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == (10_000, 11, 12)
    first()
    first()  # twice does no harm
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == (10_000, 11, 12)
    second()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == (701, 11, 12)


@pytest.mark.usefixtures("nothing_is_collected")
@pytest.mark.parametrize("young", [0, 50_000])
def test_a_higher_or_disabled_gc_threshold_is_kept(young: int) -> None:
    gc.set_threshold(young, 20, 20)
    end = freeze_gc_heap()
    assert gc.get_threshold() == (young, 20, 20)
    end()
    assert gc.get_threshold() == (young, 20, 20)


def test_cycles_of_a_closed_engine_are_freed_while_another_one_serves() -> None:
    class Weights:
        own: object

    weights = Weights()
    weights.own = weights
    first, second = freeze_gc_heap(), freeze_gc_heap()
    held = weakref.ref(weights)
    del weights
    first()
    assert held() is None
    assert gc.get_freeze_count() > 10_000
    second()
