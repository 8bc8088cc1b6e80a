"""Draws of a step from a frame and the device state alone: so they are captured too (P1).

Drafting, verifying, accepting and telling the host are then two graphs, and nothing between them is the host's.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from sidestream.runner.drafts import publish
from sidestream.runner.draw import draw, penalise
from sidestream.runner.forward import Computed
from sidestream.runner.frame import GraphInputs
from sidestream.runner.sample import SamplerOutput
from sidestream.runner.state import DecodeState
from sidestream.speculate import argmax, devices
from sidestream.types import SamplingSpec


class SamplingMode(IntEnum):
    """What a row's draws take; those of a step are the most that one of its rows takes. A row draws the same by each
    that is enough for it.

    ARGMAX   the likeliest token of its logits as they are
    RANDOM      temperature and filters
    PENALISED   and penalties
    HOST     and what only the host knows: biases, bans, log-probabilities. It launches them kernel by kernel
                (`runner/sample.py`)
    """

    ARGMAX = 0
    RANDOM = 1
    PENALISED = 2
    HOST = 3

    @classmethod
    def of(cls, spec: SamplingSpec, *, outputs: int) -> SamplingMode:
        """What a row that asks for this takes, once so many tokens of it were output."""
        banned = outputs < spec.min_tokens and spec.forbidden_until_min
        if spec.logit_bias or banned or spec.top_logprobs >= 0:
            return cls.HOST
        if spec.penalised:
            return cls.PENALISED
        return cls.ARGMAX if spec.greedy else cls.RANDOM


def draw_frame(
    frame: GraphInputs, computed: Computed, state: DecodeState, draws: SamplingMode
) -> tuple[SamplerOutput, Tensor | None]:
    """Draw at all places and make the rows go on: what was drawn, and how many tokens each row that samples goes on by,
    int64 `[B]`; None where nothing is drafted. Places and rows of padding draw for nobody. Behind drafts nothing is
    penalised here.
    """
    if draws is SamplingMode.ARGMAX:
        tokens, finite = argmax(computed.logits)
    else:
        rows = frame.rows_of_places(len(computed.logits), padding_slot=state.padding_slot)
        logits = penalise(computed.logits, rows, state) if draws is SamplingMode.PENALISED else computed.logits
        tokens, finite = draw(logits, rows, computed.positions + 1 - state.rules.prompt_len[rows], state)
    counted = draws is SamplingMode.PENALISED
    if devices.has_kernels(frame.buffer):
        from sidestream.runner import launch  # Triton, which a CPU does not need

        counts = launch.advance(frame, computed, tokens, state, counted=counted)
    else:
        counts = _advance(frame, computed, tokens, state, counted=counted)
    return SamplerOutput(tokens, finite, None), None if computed.proposed is None else counts


def _advance(frame: GraphInputs, computed: Computed, tokens: Tensor, state: DecodeState, *, counted: bool) -> Tensor:
    shape, last_place = frame.shape, len(tokens) - 1
    at, nobody = frame.draws.clamp(min=0), frame.draws < 0
    where = torch.where(nobody, state.padding_slot, frame.rows[at])
    num_drafts = torch.zeros_like(at)
    if shape.drafts:
        num_drafts = torch.where(
            at < shape.decodes, frame.cu_seqlens_q[at + 1] - frame.cu_seqlens_q[at] - 1, num_drafts
        )
    number = torch.arange(shape.drafts + 1, device=at.device)
    places = (frame.firsts[:, None] + torch.minimum(number, num_drafts[:, None])).clamp(max=last_place)
    if state.keeps_history:
        if computed.proposed is not None:
            proposed = computed.proposed.tokens[at.clamp(max=len(computed.proposed.tokens) - 1)]
            computed = computed._replace(proposed=computed.proposed._replace(tokens=proposed))
        counts = publish(state, computed, tokens, where=where, places=places, num_drafts=num_drafts, nobody=nobody)
    else:
        state.keep(where, tokens[places[:, 0]])
        counts = torch.ones_like(at)
    if counted:
        state.count(where, tokens[places], counts)
    return counts
