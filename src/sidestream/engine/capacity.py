"""The default sizes of the device's pools. Pure arithmetic; called while an engine is built."""

from __future__ import annotations

from sidestream.kv.state_layout import RESERVED_STATES

# Largest default number of blocks. The pool keeps Python objects for each block, and a large GPU holds ten million
# blocks of a tiny model.
MAX_BLOCKS = 1 << 20

_SHARE = 0.9
# Memory that is left for activations, logits, captured graphs and kernels: Qwen3-8B with 256 requests took 6 GiB on an
# H200. On a small GPU, two fifths of the free memory, if that is less.
_ROOM_BYTES = 6 << 30
_MOST_ROOM = 0.4


def pool_bytes(free_bytes: int, *, token_bytes: int, scratch_token_bytes: int, max_model_len: int) -> int:
    """Bytes for the block pool, so that everything else that the engine allocates also fits.

    free_bytes           bytes of device memory that are free after the weights were loaded
    token_bytes          bytes of one token's KV, all layers
    scratch_token_bytes  bytes of attention's buffers for each token of the longest possible request. Its length is the
                         model's limit, or the size of the pool if that is less
    """
    budget = free_bytes - max((1 - _SHARE) * free_bytes, min(_ROOM_BYTES, _MOST_ROOM * free_bytes))
    beside_longest = budget - scratch_token_bytes * max_model_len  # if the pool holds more than the longest request
    beside_itself = budget * token_bytes / (token_bytes + scratch_token_bytes)  # if it holds less
    return max(0, int(max(beside_longest, beside_itself)))


def num_states(budget: int, *, state_bytes: int, block_bytes: int, max_running: int, state_memory: int | None) -> int:
    """Number of recurrent states, without the `RESERVED_STATES`. States and blocks share `budget` bytes.

    By default, there is a state for each running request and for each block, because each checkpoint has the key of a
    block; but states take at most half of the budget.

    state_memory   bytes for states that the user asked for; None: the default
    """
    if state_memory is not None:
        return state_memory // state_bytes - RESERVED_STATES
    useful = budget // (state_bytes + block_bytes) + max_running
    return min(useful, budget // 2 // state_bytes - RESERVED_STATES)
