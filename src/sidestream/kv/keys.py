"""Content keys: 16 bytes that name a block by everything its KV depends on (H14), the same in every process.

A block's KV depends on the model (config, weights, dtype), the layout, and all tokens from the start of the sequence to
the block's end; the key of each block hashes its parent's key, so equal keys mean equal prefixes. BLAKE2b, not a faster
non-cryptographic hash: a forged collision would serve one user's KV to another.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidestream.kv.layout import KVLayout
from sidestream.types import Key

KEY_BYTES = 16

# Hashing 32,768 tokens takes 1.4 to 2.4 ms, before their request can even be looked at, and nobody else gets the
# interpreter meanwhile. What comes back was mostly asked for before: pieces of prompts are remembered with their keys,
# the same tokens behind the same key, as many as so many bytes hold.
_PIECE_TOKENS = 512
_REMEMBERED_BYTES = 32 << 20
# In memory, beside its bytes: a key and its place in a list; what is looked up for a piece.
_BYTES_A_KEY = 64
_BYTES_A_PIECE = 512


class BlockKeys:
    """Makes the keys of one model in one layout under one salt."""

    def __init__(self, *, fingerprint: str, layout: KVLayout, salt: str = "") -> None:
        identity = json.dumps({"fingerprint": fingerprint, "layout": layout.describe(), "salt": salt}, sort_keys=True)
        self._begin(
            hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, person=b"sidestream-kv-1").digest(),
            layout.block_tokens,
        )

    @classmethod
    def from_root(cls, root: Key, block_tokens: int) -> BlockKeys:
        """Makes the same keys as those whose root it was, in another process."""
        made = cls.__new__(cls)
        made._begin(root, block_tokens)
        return made

    def _begin(self, root: Key, block_tokens: int) -> None:
        self.root = root
        """The parent of the first block of requests without a salt."""
        self._block_tokens = block_tokens
        self._piece_blocks = -(-_PIECE_TOKENS // block_tokens)
        piece_bytes = _BYTES_A_PIECE + self._piece_blocks * (block_tokens * np.dtype(np.int64).itemsize + _BYTES_A_KEY)
        self._remembered = functools.lru_cache(maxsize=_REMEMBERED_BYTES // piece_bytes)(_chain)

    def extend(self, keys: list[Key], tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> None:
        """Append to `keys` (the keys of the first blocks of `tokens`) those of all further complete blocks. Any thread.

        `salt` is the request's own: requests with different ones never have a key in common. `keys` were made with it.
        """
        size, first, parent = self._block_tokens, len(keys), keys[-1] if keys else self._root_of(salt)
        count = len(tokens) // size - first
        if count <= 0:
            return
        data = np.asarray(tokens[first * size : (first + count) * size], np.int64).tobytes()
        width = len(data) // count
        piece = width * self._piece_blocks
        for start in range(0, len(data), piece):
            tokens_of = data[start : start + piece]
            keys.extend((self._remembered if len(tokens_of) == piece else _chain)(parent, tokens_of, width))
            parent = keys[-1]

    def _root_of(self, salt: str) -> Key:
        """The parent of a sequence's first block."""
        if not salt:
            return self.root
        # Keyed and with a person string of its own, so that no salt can be chosen to make the key of a block.
        data = salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self.root, person=b"sidestream-slt-1").digest()


def _chain(parent: Key, data: bytes, width: int) -> tuple[Key, ...]:
    """Keys of blocks that follow one another behind `parent`, `width` bytes of tokens each."""
    keys, blake2b = list[Key](), hashlib.blake2b
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return tuple(keys)
