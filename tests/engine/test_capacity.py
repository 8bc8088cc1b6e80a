"""How much of a GPU's memory becomes KV when no size is given."""

from __future__ import annotations

from sidestream.engine.build_plan import pool_bytes

GIB = 1 << 30
TOKEN = 147_456  # of Qwen3-8B in bfloat16
SCRATCH = 20_000


def needed(pool: int, *, longest: int, scratch: int = SCRATCH) -> int:
    """Bytes of the pool and of attention's buffers over the longest request that it allows."""
    return pool + scratch * min(longest, pool // TOKEN)


def test_pool_and_buffers_leave_memory_for_activations_and_use_most_of_the_rest() -> None:
    for free_gib in [0.5, 3, 6, 20, 60, 123]:
        for longest in [2048, 40_960, 131_072, 1 << 20]:
            free = int(free_gib * GIB)
            pool = pool_bytes(free, token_bytes=TOKEN, scratch_token_bytes=SCRATCH, max_model_len=longest)
            room = free - needed(pool, longest=longest)
            least = max(0.1 * free, min(6 * GIB, 0.4 * free))
            assert least - TOKEN <= room <= least + SCRATCH + TOKEN


def test_a_large_gpu_keeps_10_percent_free_and_a_small_one_40_percent() -> None:
    assert pool_bytes(100 * GIB, token_bytes=TOKEN, scratch_token_bytes=0, max_model_len=1) == 90 * GIB
    assert pool_bytes(20 * GIB, token_bytes=TOKEN, scratch_token_bytes=0, max_model_len=1) == 14 * GIB
    assert pool_bytes(1 * GIB, token_bytes=TOKEN, scratch_token_bytes=0, max_model_len=1) == int(0.6 * GIB)


def test_a_full_gpu_gets_a_pool_of_zero_bytes() -> None:
    assert pool_bytes(0, token_bytes=TOKEN, scratch_token_bytes=SCRATCH, max_model_len=2048) == 0
