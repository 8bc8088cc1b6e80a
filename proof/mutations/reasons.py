"""Reasons that several tables about the package offload give."""

from __future__ import annotations

GIVES_UP = "it only saves time, in a close whose flush has timed out"
MESSAGE = "a message; other rules cover its content"
QUEUE = "a list"
COUNT = "a progress count; other rules cover its effects"
PINS = "it changes only which blocks are evicted first; tests/kv/test_pins.py covers it"
LOOKS = "it polls fences; other rules cover its decisions"
