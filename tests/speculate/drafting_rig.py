"""What tests of proposers share."""

from __future__ import annotations

from sidestream import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
PROMPTS = [[10 + position * step % 200 for position in range(length)] for step, length in ((3, 37), (7, 18), (11, 5), (5, 52))]

Seen = dict[tuple[int, ...], list[list[int]]]
"""Drafts that were made behind which tokens."""
