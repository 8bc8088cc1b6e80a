"""Content keys (block hashes): the key of a block is a 16-byte hash of everything that the block's KV depends on
(hazard H14). Every process computes the same keys.

A block's KV depends on the model (config, weights, dtype), the layout, and all tokens from the start of the sequence to
the block's end. The hash of a block includes the key of the block before, so equal keys mean equal prefixes. The hash
is BLAKE2b: with a faster, non-cryptographic hash, a user could forge a collision and get another user's KV.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.types import Key

KEY_BYTES = 16

# Hashing 32,768 tokens takes 1.4 to 2.4 ms, holds the interpreter lock, and delays the scheduling of the request. Most
# prompts begin like an earlier prompt. So an LRU cache of about _CACHE_BYTES bytes maps a parent key and a piece of
# _PIECE_TOKENS tokens to the keys of the piece.
_PIECE_TOKENS = 512
_CACHE_BYTES = 32 << 20
# Python's overhead in this cache for each key (an object and a list entry), and for each piece.
_KEY_OVERHEAD_BYTES = 64
_PIECE_OVERHEAD_BYTES = 512


class BlockKeys:
    """Computes the keys for one model, one KV layout and one salt of the engine."""

    def __init__(
        self, *, fingerprint: str, layout: BlockLayout, salt: str = "", states: StateLayout | None = None
    ) -> None:
        """`layout`: that of the tiers, if there are any, because what comes back from them depends on it.
        `states`: layout of the model's recurrent states, which are kept under keys of blocks; None: it has none."""
        parts = {} if states is None else {"states": states.describe()}
        # rule: key-identity
        identity = json.dumps(
            {"fingerprint": fingerprint, "layout": layout.describe(), "salt": salt, **parts}, sort_keys=True
        )
        # rule: keys-have-a-version
        self._set_root(
            hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, person=b"sidestream-kv-1").digest(),
            layout.block_tokens,
        )

    @classmethod
    def from_root(cls, root: Key, block_tokens: int) -> BlockKeys:
        """Make an equal BlockKeys in another process, from the `root` of the original."""
        keys = cls.__new__(cls)
        keys._set_root(root, block_tokens)
        return keys

    def _set_root(self, root: Key, block_tokens: int) -> None:
        self.root = root
        """The parent key of a sequence's first block, for requests without a salt."""
        self._block_tokens = block_tokens
        self._piece_blocks = -(-_PIECE_TOKENS // block_tokens)
        block_bytes = block_tokens * np.dtype(np.int64).itemsize + _KEY_OVERHEAD_BYTES
        piece_bytes = _PIECE_OVERHEAD_BYTES + self._piece_blocks * block_bytes
        self._cached_chain = functools.lru_cache(maxsize=_CACHE_BYTES // piece_bytes)(_chain)

    def extend(self, keys: list[Key], tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> None:
        """`keys` has the keys of the first blocks of `tokens`: append the keys of all further complete blocks. Callable
        from any thread.

        `salt` is the salt of the request, and must be the same in every call for it. Requests with different salts
        never share a key.
        """
        size, first, parent = self._block_tokens, len(keys), keys[-1] if keys else self._root_of(salt)
        count = len(tokens) // size - first
        if count <= 0:
            return
        part = tokens[first * size : (first + count) * size]
        # For the one block of a decode step, numpy takes 5 us, and pack 1.5.
        data = part.astype(np.int64).tobytes() if isinstance(part, np.ndarray) else struct.pack(f"{len(part)}q", *part)
        width = len(data) // count
        piece = width * self._piece_blocks
        for start in range(0, len(data), piece):
            part = data[start : start + piece]
            keys.extend((self._cached_chain if len(part) == piece else _chain)(parent, part, width))
            parent = keys[-1]  # rule: cached-keys-belong-to-their-prefix

    def _root_of(self, salt: str) -> Key:
        """The parent key of a sequence's first block."""
        if not salt:  # rule: key-contains-the-requests-salt
            return self.root
        # This hash is keyed, and has a personalisation string (`person`) of its own, so no user can choose a salt whose
        # hash is the key of a block.
        data = salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self.root, person=b"sidestream-slt-1").digest()


def _chain(parent: Key, data: bytes, width: int) -> tuple[Key, ...]:
    """Keys of consecutive blocks after `parent`; each block has `width` bytes of tokens."""
    keys: list[Key] = []  # `list[Key]()` takes as long as the hash of a block
    for start in range(0, len(data), width):
        # rule: key-contains-its-prefix
        parent = hashlib.blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return tuple(keys)
