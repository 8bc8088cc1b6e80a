"""Draws of a flight whose rows all take their likeliest token, from a frame and the device state alone: so they are captured too (P1).

Drafting, verifying, accepting and telling the host are then two graphs, and nothing between them is the host's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.execute.drafts import publish
from sidestream.execute.forward import Computed
from sidestream.execute.frame import Frame
from sidestream.execute.sample import Drawn
from sidestream.execute.state import DecodeState
from sidestream.speculate import devices, likeliest
from sidestream.types import SamplingSpec


def takes_likeliest(spec: SamplingSpec) -> bool:
    """Whether a row's draw is the likeliest token of its logits as they are, and nobody asks for log-probabilities."""
    forbids = spec.min_tokens and spec.forbidden_until_min
    return spec.greedy and not (spec.penalised or spec.logit_bias or forbids) and spec.top_logprobs < 0


def draw_likeliest(frame: Frame, computed: Computed, state: DecodeState) -> tuple[Drawn, Tensor | None]:
    """Draw at all places and make the rows go on: what was drawn, and how many tokens each row that samples goes on by, int64 `[B]`; None where
    nothing is drafted. Places and rows of padding draw for nobody.
    """
    drawn = Drawn(*likeliest(computed.logits), None)
    if devices.has_kernels(frame.buffer):
        from sidestream.execute import launch  # Triton, which a CPU does not need

        counts = launch.advance(frame, computed, drawn.tokens, state)
    else:
        counts = _advance(frame, computed, drawn.tokens, state)
    return drawn, None if computed.proposed is None else counts


def _advance(frame: Frame, computed: Computed, tokens: Tensor, state: DecodeState) -> Tensor:
    shape, last_place = frame.shape, len(tokens) - 1
    at, nobody = frame.draws.clamp(min=0), frame.draws < 0
    where = torch.where(nobody, state.nobody, frame.rows[at])
    if not state.keeps_history:
        state.keep(where, tokens[frame.firsts.clamp(max=last_place)])
        return torch.ones_like(at)
    num_drafts = torch.zeros_like(at)
    if shape.drafts:
        num_drafts = torch.where(at < shape.decodes, frame.query_starts[at + 1] - frame.query_starts[at] - 1, num_drafts)
    number = torch.arange(shape.drafts + 1, device=at.device)
    places = (frame.firsts[:, None] + torch.minimum(number, num_drafts[:, None])).clamp(max=last_place)
    if computed.proposed is not None:
        proposed = computed.proposed.tokens[at.clamp(max=len(computed.proposed.tokens) - 1)]
        computed = computed._replace(proposed=computed.proposed._replace(tokens=proposed))
    return publish(state, computed, tokens, where=where, places=places, num_drafts=num_drafts, nobody=nobody)
