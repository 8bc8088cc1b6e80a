"""Reasons that several tables about the package offload give."""

from __future__ import annotations

GIVES_UP = "it saves time at a close whose flush time is over"
MESSAGE = "a message; rules above cover its content"
QUEUE = "a list"
COUNT = "a progress count; rules above cover its effects"
PLACE = "without it, there is no place to write to; rules above cover how long the place is held"
LOOKS = "it polls fences; rules above cover its decisions"
