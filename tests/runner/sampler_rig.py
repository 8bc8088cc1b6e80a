"""Helpers of sampler tests: samples and commits with host values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidestream.ops import Ops
from sidestream.runner.sampler import SamplerOutput, SamplingMode, draw_tokens
from sidestream.runner.state import DecodeState


def sample(
    logits: Tensor,
    slots: Sequence[int],
    output_indices: Sequence[int],
    state: DecodeState,
    *,
    drafted: Tensor | None = None,
) -> SamplerOutput:
    """A draw for each slot with all of its options."""
    return draw_tokens(
        logits,
        torch.tensor([*slots], dtype=torch.int64),
        torch.tensor([*output_indices], dtype=torch.int64),
        state,
        Ops(),
        mode=SamplingMode.HOST,
        options=[state.sampling_of(slot) for slot in slots],
        drafted=drafted,
    )


def commit(state: DecodeState, slots: Sequence[int], tokens: Tensor) -> None:
    """Advance each slot by one token, as a step without drafts does."""
    rows = torch.arange(len(slots))
    Ops().advance(
        tokens,
        torch.zeros_like(rows),
        None,
        None,
        state.slot_tensors(counted=any(state.sampling_of(slot).spec.penalised for slot in slots)),
        sampling_rows=rows,
        first_logits=rows,
        slots=torch.tensor([*slots], dtype=torch.int64),
        cu_seqlens_q=torch.arange(len(slots) + 1),
        decodes=len(slots),
    )
