"""Content keys: 16 bytes that name a block by everything its KV depends on (H14), the same in every process.

A block's KV depends on the model (config, weights, dtype), the layout, and all tokens from the start of the sequence to the
block's end; the key of each block hashes its parent's key, so equal keys mean equal prefixes. BLAKE2b, not a faster
non-cryptographic hash: a forged collision would serve one user's KV to another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidestream.kv.layout import KVLayout
from sidestream.types import Key

KEY_BYTES = 16


class BlockKeys:
    """Makes the keys of one model in one layout under one salt."""

    def __init__(self, *, fingerprint: str, layout: KVLayout, salt: str = "") -> None:
        identity = json.dumps({"fingerprint": fingerprint, "layout": layout.describe(), "salt": salt}, sort_keys=True)
        self._root = hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, person=b"sidestream-kv-1").digest()
        self._block_tokens = layout.block_tokens

    def extend(self, keys: list[Key], tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Append to `keys` (the keys of the first blocks of `tokens`) those of all further complete blocks."""
        size, first, parent = self._block_tokens, len(keys), keys[-1] if keys else self._root
        count = len(tokens) // size - first
        if count <= 0:
            return
        data = np.asarray(tokens[first * size : (first + count) * size], np.int64).tobytes()
        width, blake2b = len(data) // count, hashlib.blake2b
        for start in range(0, len(data), width):
            parent = blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest()
            keys.append(parent)
