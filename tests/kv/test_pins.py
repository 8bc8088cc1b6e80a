"""Pins of prefixes in a pool: pinned blocks are evicted last, within a bound and until a time, and never in the way."""

from __future__ import annotations

import pytest

from sidestream_kv.kv.pins import Pins
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import Key


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keys(*numbers: int) -> list[Key]:
    return [number.to_bytes(16, "little") for number in numbers]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> FencedPool:
    pool = FencedPool("blocks", 6)
    pool.pins = Pins(clock=clock, size=lambda: pool.size)
    return pool


def cache(pool: FencedPool, *numbers: int) -> None:
    """Leave one cached block for each key number."""
    lease = pool.take(len(numbers))
    pool.publish_all(lease.ids, keys(*numbers))
    lease.release()


def pin(pool: FencedPool, *numbers: int, ttl_s: float = 60.0, hint: bool = False) -> bool:
    assert pool.pins is not None
    return pool.pins.add(keys(numbers[-1])[0], keys(*numbers), ttl_s=ttl_s, hint=hint)


def found(pool: FencedPool, *numbers: int) -> list[int]:
    return [number for number in numbers if pool.get(keys(number)[0]) is not None]


def test_pinned_blocks_are_evicted_after_all_others_that_are_not_in_use(pool: FencedPool) -> None:
    cache(pool, 1, 2)
    assert pin(pool, 1, 2)
    cache(pool, 3, 4, 5, 6)
    for number in range(7, 40, 4):
        cache(pool, *range(number, number + 4))
    assert found(pool, 1, 2) == [1, 2]


def test_blocks_in_use_end_pins_and_no_allocation_fails(pool: FencedPool) -> None:
    """A pool that is full of pinned blocks and of blocks in use must not block for ever."""
    cache(pool, 1, 2, 3)
    assert pin(pool, 1) and pin(pool, 1, 2, 3, ttl_s=30)
    used = pool.take(3)
    assert found(pool, 1, 2, 3) == [1, 2, 3]
    more = pool.take(2)
    assert found(pool, 1, 2, 3) == [1]
    last = pool.take(1)
    assert not pool.pins.held and not found(pool, 1)
    for lease in (used, more, last):
        lease.release()
    pool.check()


def test_a_pin_ends_with_its_time(pool: FencedPool, clock: Clock) -> None:
    cache(pool, 1, 2)
    pin(pool, 1, 2, ttl_s=5)
    clock.now_s = 4.9
    cache(pool, 3, 4, 5, 6)
    cache(pool, 7, 8, 9, 10)
    assert found(pool, 1, 2) == [1, 2]
    clock.now_s = 5.0
    cache(pool, *range(11, 17))
    assert not found(pool, 1, 2) and not pool.pins.held


def test_a_reset_ends_the_pins_with_their_blocks(pool: FencedPool) -> None:
    cache(pool, 1, 2)
    pin(pool, 1, 2)
    pool.forget_all()
    assert not pool.pins.held and pool.num_free == 6
    cache(pool, 1, 2, 3, 4, 5, 6)
    cache(pool, 7, 8, 9, 10)
    assert found(pool, 1, 2) == [1, 2]  # the two that were used last, as without a pin
    cache(pool, 11, 12)
    assert not found(pool, 1, 2)


def test_pins_hold_at_most_half_of_a_pool(pool: FencedPool) -> None:
    assert pin(pool, 1, 2, 3) and pin(pool, 1, 2)
    assert not pin(pool, 1, 4)
    assert pool.pins is not None and pool.pins.end(keys(3)[0])
    assert pin(pool, 1, 4)


def test_hints_give_way_to_an_operators_pin_and_never_the_reverse(pool: FencedPool) -> None:
    assert pin(pool, 1, 2, hint=True) and pin(pool, 3, hint=True, ttl_s=90)
    assert not pin(pool, 4, hint=True)
    assert not pin(pool, 11, 12, 13, 14) and pool.pins is not None and len(pool.pins.all()) == 2
    assert pin(pool, 5, 6)
    assert [bool(one.hint) for one in pool.pins.all().values()] == [True, False]  # of hints, the one that ends first
    assert pin(pool, 7)
    assert not pin(pool, 8) and not pin(pool, 8, hint=True)


def test_a_hint_renews_a_pin_and_never_shortens_it(pool: FencedPool, clock: Clock) -> None:
    assert pool.pins is not None
    for at_s, ttl_s, hint, until_s in ((0, 60, False, 60), (1, 5, True, 60), (2, 100, True, 102), (3, 10, False, 13)):
        clock.now_s = at_s
        pin(pool, 1, 2, ttl_s=ttl_s, hint=hint)
        (one,) = pool.pins.all().values()
        assert (one.until_s, one.hint) == (until_s, False)


def test_dropped_keys_end_the_pins_that_hold_them(pool: FencedPool) -> None:
    pin(pool, 1, 2)
    pin(pool, 3)
    assert pool.pins is not None
    pool.pins.forget(keys(1))
    assert list(pool.pins.all()) == keys(3) and len(pool.pins.held) == 1


@pytest.mark.parametrize("second", [(1, 2, 3, 4), (1, 5), (1,), (1, 2)])
def test_a_moved_hint_holds_other_keys_in_place_of_its_own(pool: FencedPool, second: tuple[int, ...]) -> None:
    assert pool.pins is not None and pin(pool, 1, 2, hint=True)
    pool.size = 8  # room for 4: the moved pin needs that of the earlier one
    assert pool.pins.move(keys(2)[0], keys(second[-1])[0], keys(*second), ttl_s=30.0)
    assert [pin.keys for pin in pool.pins.all().values()] == [tuple(keys(*second))]
    assert pool.pins.held == dict.fromkeys(keys(*second), 1)


@pytest.mark.parametrize("second", [(1, 2, 3, 4), (3, 4, 5, 6)])
def test_a_hint_stays_where_it_is_if_there_is_no_room(pool: FencedPool, second: tuple[int, ...]) -> None:
    assert pool.pins is not None and pin(pool, 1, 2, hint=True)
    assert not pool.pins.move(keys(2)[0], keys(second[-1])[0], keys(*second), ttl_s=60.0)
    assert pool.pins.held == dict.fromkeys(keys(1, 2), 1) and len(pool.pins.all()) == 1


def test_an_operators_pin_is_not_moved(pool: FencedPool) -> None:
    assert pool.pins is not None and pin(pool, 1, 2)
    assert pool.pins.move(keys(2)[0], keys(3)[0], keys(1, 2, 3), ttl_s=30.0)
    assert [pinned.hint for pinned in pool.pins.all().values()] == [False, True]
