"""The format of a value in a shared store: a header, and the bytes of one block. Pure bytes: no I/O, nothing unpickled.

Other processes, other versions and other programs write to such a store too, so a reader trusts no value: it compares
every field of the header, and the checksum of header and block.

    [0, 8)    magic                        [8, 12)   format version
    [12, 28)  digest of model and layout   [28, 44)  key
    [44, 52)  bytes of the block           [52, 60)  serial
    [60, 64)  zeros                        [64, 80)  xxh3-128 of [0, 64) and the block
    [80, …)   the block
"""

from __future__ import annotations

import json
import struct

import xxhash

from sidestream_kv.errors import InvariantError
from sidestream_kv.offload.tiers.base import Block, TierContext
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.types import Key

FORMAT_VERSION = 1
HEADER_BYTES = 80
KEY_BYTES = 16

_MAGIC = b"SIDEVAL\n"
_FIELDS = struct.Struct("<8sI16s16sQQ4x")
_SERIAL = slice(52, 60)


class EntryFormat:
    """Headers of the blocks of one model and layout.

    identity    digest of model and layout, for names in the store: other models never share a name
    block_bytes size of every block
    """

    def __init__(self, context: TierContext) -> None:
        described = {"format_version": FORMAT_VERSION, **context.layout.describe(), "fingerprint": context.fingerprint}
        self.identity = xxhash.xxh3_128_digest(json.dumps(described, sort_keys=True).encode())
        self.block_bytes = context.layout.block_bytes

    @property
    def value_bytes(self) -> int:
        """Size of every value."""
        return HEADER_BYTES + self.block_bytes

    def view(self, block: Block) -> memoryview:
        """The bytes of a block. Raises InvariantError if it has another size."""
        view = (block if isinstance(block, memoryview) else block.data).cast("B")
        if view.nbytes != self.block_bytes:
            raise InvariantError(f"a block of this tier has {self.block_bytes} bytes, not {view.nbytes}")
        return view

    def fields(self, entry: Entry) -> bytes:
        """The header of an entry, without the checksum."""
        if len(entry.key) != KEY_BYTES:
            raise InvariantError(f"a key of a shared store has {KEY_BYTES} bytes, not {len(entry.key)}")
        return _FIELDS.pack(_MAGIC, FORMAT_VERSION, self.identity, entry.key, self.block_bytes, entry.serial)

    def first_bytes(self, entry: Entry) -> bytes:
        """The first bytes of this entry's value, which those of another write differ from. An entry that was found
        without a look at its header has serial 0, and the same first bytes as every write of its key.
        """
        return self.fields(entry)[: _SERIAL.stop if entry.serial else _SERIAL.start]

    def header(self, entry: Entry, block: memoryview) -> bytes:
        """The complete header of an entry with these bytes."""
        fields = self.fields(entry)
        return fields + _checksum(fields, block)

    def entry(self, key: Key, head: bytes | None) -> Entry | None:
        """The entry of a value under this key that begins with `head`; None: it is not a value of this key, model and
        layout. Says nothing about the block. If `head` is empty, the value was not looked at.
        """
        if head == b"":
            return Entry(key, 0)
        if head is None or len(head) != HEADER_BYTES:
            return None
        entry = Entry(key, int.from_bytes(head[_SERIAL], "little"))
        # A serial is the time of its write: see `StoreTier`.
        return entry if entry.serial < 1 << 62 and head.startswith(self.fields(entry)) else None

    def fault(self, key: Key, head: bytes, block: memoryview) -> str | None:
        """What is wrong with a value of the right length; None: it is the block of this key, to the last bit."""
        if not head or self.entry(key, head) is None:  # rule: value-is-of-its-key
            return "has the header of another block, model or layout"
        if head[_FIELDS.size :] != _checksum(head[: _FIELDS.size], block):  # rule: every-bit-of-a-value-is-verified
            return "does not match its checksum"
        return None


def _checksum(fields: bytes, block: memoryview) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(block)  # rule: checksum-of-a-value-covers-its-block
    return state.digest()
