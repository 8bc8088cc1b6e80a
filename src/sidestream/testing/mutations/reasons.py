"""Reasons that several tables of the offload room give."""

from __future__ import annotations

GIVES_UP = "saves time at a close whose flush time is over"
MESSAGE = "a message; rules above cover its content"
QUEUE = "a list"
COUNT = "a progress count; rules above cover its effects"
PLACE = "without it there is no place to write to; rules above cover how long it is held"
LOOKS = "polls fences; rules above cover its decisions"
