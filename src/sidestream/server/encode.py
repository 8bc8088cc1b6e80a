"""JSON that leaves the server: replies, events and errors. Compact UTF-8. Knows no field; parsing is in `body.py`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """The JSON text of `value`. Callers never pass NaN or an infinity: the encoder would write null for them.

    Raises UnicodeEncodeError for half of a surrogate pair.
    """
    return _ENCODER.encode(value)


class JsonReply(Response):
    """A response whose content is encoded with `to_json`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)
