"""The sizes of the device's pools by default. Pure arithmetic; called while an engine is built."""

from __future__ import annotations

from sidestream.kv.state_layout import RESERVED_STATES

# The pool keeps Python objects for each block: a tiny model's blocks would fill a large GPU by the ten million.
MAX_BLOCKS = 1 << 20

_SHARE = 0.9
# Left for activations, logits, captured graphs and kernels: Qwen3-8B with 256 requests took 6 GiB on an H200. On a
# small GPU, at most two fifths of the free memory.
_ROOM_BYTES = 6 << 30
_MOST_ROOM = 0.4


def pool_bytes(free_bytes: int, *, token_bytes: int, scratch_token_bytes: int, max_model_len: int) -> int:
    """Bytes of the block pool beside everything else that the engine allocates.

    free_bytes           device memory that is free once the weights are loaded
    token_bytes          KV of one token, all layers
    scratch_token_bytes  attention's buffers, for each token that the longest request can have: the model's limit, or
                         the whole pool if that is less
    """
    budget = free_bytes - max((1 - _SHARE) * free_bytes, min(_ROOM_BYTES, _MOST_ROOM * free_bytes))
    beside_longest = budget - scratch_token_bytes * max_model_len  # if the pool holds more than the longest request
    beside_itself = budget * token_bytes / (token_bytes + scratch_token_bytes)  # if it holds less
    return max(0, int(max(beside_longest, beside_itself)))


def num_states(budget: int, *, state_bytes: int, block_bytes: int, max_running: int, state_memory: int | None) -> int:
    """Recurrent states, of the `budget` of bytes that they share with blocks. Besides them, `RESERVED_STATES` are
    allocated.

    By default as many as blocks can be of use: each checkpoint has the key of a block. If that takes more than half of
    the budget, half of it.

    state_memory   bytes for states, as asked; None: the default
    """
    if state_memory is not None:
        return state_memory // state_bytes - RESERVED_STATES
    useful = budget // (state_bytes + block_bytes) + max_running
    return min(useful, budget // 2 // state_bytes - RESERVED_STATES)
