"""JSON of replies, events and errors: compact UTF-8. `body.py` parses JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """The JSON text of `value`. `value` must not contain NaN or an infinity, because the encoder would write null.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    return _ENCODER.encode(value)


class JsonResponse(Response):
    """A response whose content is encoded with `to_json`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The encoded body."""
        return to_json(content)
