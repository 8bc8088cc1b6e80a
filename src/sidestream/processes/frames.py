"""Numbered frames of msgpack over a Unix stream socket, between two processes of one engine.

The kernel neither loses nor reorders bytes. The frame numbers detect bugs in Sidestream: the receiver reports a
missing, duplicated or reordered frame as an error and never decodes it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from sidestream.errors import EngineStopped, InvariantError

_HEAD = struct.Struct("<II")
MAX_FRAME_BYTES = 256 << 20
"""Maximum size of a frame. No message is nearly as long, so a longer frame means that the connection is broken."""


class FrameEncoder:
    """Encodes messages as numbered frames. Only one thread may use it at a time.

    sent   number of frames that were sent on the connection before
    """

    def __init__(self, *, sent: int = 0) -> None:
        self._msgpack = msgspec.msgpack.Encoder().encode
        self._number = sent

    def encode(self, message: Any) -> bytes:
        """The next frame. Raises InvariantError for a message over `MAX_FRAME_BYTES`."""
        body = self._msgpack(message)
        if len(body) > MAX_FRAME_BYTES:
            raise InvariantError(
                f"a {type(message).__name__} of {len(body)} bytes: a message has at most {MAX_FRAME_BYTES}"
            )
        self._number += 1
        return _HEAD.pack(len(body), self._number & 0xFFFFFFFF) + body


class FrameDecoder(msgspec.Struct):
    """Decodes the bytes of one connection to messages."""

    decoder: msgspec.msgpack.Decoder[Any]
    buffer: bytearray = msgspec.field(default_factory=bytearray)
    number: int = 0

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes; yields the messages that are now complete. Raises EngineStopped for a frame that is out
        of order or cannot be decoded.
        """
        size, buffer = _HEAD.size, self.buffer
        if not buffer and len(data) >= size:  # nearly always, `data` is one frame, and needs no buffer
            length, number = _HEAD.unpack_from(data)
            if length == len(data) - size and number == self.number + 1:
                self.number = number
                return iter((self._decode(data[size:]),))
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Any]:
        buffer, start = self.buffer, 0
        buffer += data
        try:
            while len(buffer) - start >= _HEAD.size:
                length, number = _HEAD.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise EngineStopped(
                        f"a frame has {length} bytes, but the limit is {MAX_FRAME_BYTES}: the connection is broken"
                    )
                if len(buffer) - start - _HEAD.size < length:
                    return
                self.number = (self.number + 1) & 0xFFFFFFFF
                if number != self.number:  # rule: number-of-a-frame-is-checked
                    raise EngineStopped(
                        f"frame {number} came in place of frame {self.number}: the connection is broken"
                    )
                body = bytes(memoryview(buffer)[start + _HEAD.size : start + _HEAD.size + length])
                start += _HEAD.size + length
                yield self._decode(body)
        finally:
            del buffer[:start]

    def _decode(self, body: bytes) -> Any:
        try:
            return self.decoder.decode(body)
        except Exception as error:  # raised by msgspec, or by a dataclass that checks its values
            raise EngineStopped(f"a message cannot be read ({error}): both sides must run the same version") from error
