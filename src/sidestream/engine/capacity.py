"""The default sizes of the device's pools. Pure arithmetic; called while an engine is built."""

from __future__ import annotations

from sidestream_kv.kv.state_layout import RESERVED_STATES

# Largest default number of blocks. The pool keeps Python objects for each block, and a large GPU holds ten million
# blocks of a tiny model.
MAX_BLOCKS = 1 << 20

_SHARE = 0.9
# Memory kept for activations, logits, captured graphs and kernels: Qwen3-8B with 256 requests took 6 GiB on an H200. On
# a small GPU, two fifths of the free memory are kept if that is less than 6 GiB.
_ROOM_BYTES = 6 << 30
_MOST_ROOM = 0.4


def pool_bytes(free_bytes: int, *, token_bytes: int, scratch_token_bytes: int, max_model_len: int) -> int:
    """Bytes for the block pool. The remaining memory is enough for everything else that the engine allocates.

    free_bytes           bytes of device memory that are free after the weights were loaded
    token_bytes          bytes of one token's KV, all layers
    scratch_token_bytes  bytes of attention's buffers for each token of the longest possible request, which has
                         `max_model_len` tokens, or as many as the pool holds if that is less
    """
    budget = free_bytes - max((1 - _SHARE) * free_bytes, min(_ROOM_BYTES, _MOST_ROOM * free_bytes))
    beside_longest = budget - scratch_token_bytes * max_model_len  # if the longest request fits into the pool
    beside_itself = budget * token_bytes / (token_bytes + scratch_token_bytes)  # if the pool is smaller
    return max(0, int(max(beside_longest, beside_itself)))


def num_states(budget: int, *, state_bytes: int, block_bytes: int, max_running: int, state_memory: int | None) -> int:
    """Number of recurrent states that requests can lease, without the `RESERVED_STATES`. States and blocks share
    `budget` bytes.

    By default, there is a state for each running request and for each block, because a kept state is found under the
    key of a block. States take at most half of the budget.

    state_memory   bytes for states, if the user set them; None: the default
    """
    if state_memory is not None:
        return state_memory // state_bytes - RESERVED_STATES
    useful = budget // (state_bytes + block_bytes) + max_running
    return min(useful, budget // 2 // state_bytes - RESERVED_STATES)
