"""Prefill is cut at the same places whatever was found in a cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.schedule.limits import chunk_stop, reusable_tokens

SHAPES = st.builds(
    lambda block, blocks, known: (block, block * blocks, known),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 200),
)


def cuts_from(start: int, known: int, *, chunk_tokens: int, block_tokens: int) -> list[int]:
    stops = []
    while start < known:
        start = chunk_stop(start, known, chunk_tokens=chunk_tokens, block_tokens=block_tokens)
        stops.append(start)
    return stops


@settings(deadline=None, derandomize=True, max_examples=300)
@given(shape=SHAPES, data=st.data())
def test_chunks_after_a_cached_prefix_end_as_without_it(shape: tuple[int, int, int], data: st.DataObject) -> None:
    block, chunk, known = shape
    all_cuts = cuts_from(0, known, chunk_tokens=chunk, block_tokens=block)
    found = data.draw(st.integers(0, reusable_tokens(known, block) // block)) * block
    cuts = cuts_from(found, known, chunk_tokens=chunk, block_tokens=block)
    assert cuts == [stop for stop in all_cuts if stop > found]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(shape=SHAPES)
def test_the_tail_is_its_own_chunk_and_no_chunk_exceeds_the_limit(shape: tuple[int, int, int]) -> None:
    block, chunk, known = shape
    stops = cuts_from(0, known, chunk_tokens=chunk, block_tokens=block)
    starts = [0, *stops[:-1]]
    assert starts[-1] == reusable_tokens(known, block)
    assert stops[-1] == known
    assert 1 <= known - starts[-1] <= block
    assert all(stop - start <= chunk for start, stop in zip(starts, stops, strict=True))
    assert all(stop % chunk == 0 for stop in stops[:-2])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(known=st.integers(1, 200), block=st.integers(1, 16))
def test_reusable_tokens_are_whole_blocks_without_the_last_token(known: int, block: int) -> None:
    reusable = reusable_tokens(known, block)
    assert reusable % block == 0
    assert reusable < known <= reusable + block


def test_example_prompts_are_cut_at_the_expected_tokens() -> None:
    assert cuts_from(0, 600, chunk_tokens=256, block_tokens=16) == [256, 512, 592, 600]
    assert cuts_from(592, 600, chunk_tokens=256, block_tokens=16) == [600]
    assert cuts_from(0, 592, chunk_tokens=256, block_tokens=16) == [
        256,
        512,
        576,
        592,
    ]  # the last block too, for its logits
