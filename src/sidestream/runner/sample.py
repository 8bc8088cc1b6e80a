"""Draw the next token of each row of a step that is launched kernel by kernel. Runs on the compute stream; what a row
asks for is known to the host.

One row's draw, in this order:

1. logit bias is added; the repetition penalty divides the positive and multiplies the negative logits of tokens in
prompt or
   output; frequency (per occurrence) and presence (once) penalties of tokens in the output are subtracted; before
   `min_tokens` outputs the ending ids are forbidden. Penalties are defined as in transformers and vLLM.
2. Temperature 0 or `top_k` 1: the likeliest token, the lowest id of equals.
3. Else temperature, softmax, then top-k, top-p and min-p, each on what the one before left (the order of transformers).
   A filter keeps or drops equally likely tokens together, so it may keep more than k.
4. One uniform number, a hash of (seed, output index), picks from what is left, in the order of ids.

All but biases and bans is `runner/draw.py`'s, which captured steps use as well (`runner/draws.py`): so a row draws
the same in both.

Log-probabilities are those of the raw logits, before step 1 (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.runner.draw import draw, penalise
from sidestream.runner.state import DecodeState, RowSampling

# Requests may ask for 0 to 20 of them; always taking 20 makes the choice among equals independent of what other rows
# ask for.
TOP_LOGPROBS = 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a step's draws, by position in the batch; zeros where a row asked for none.

    drawn     float32 `[R]`, of the drawn tokens
    top_ids   int64 `[R, k]`, likeliest first, the lowest id first among equals; a row that asked for fewer takes its
              first ones
    top       float32 `[R, k]`
    """

    drawn: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn at the places of a step: behind the last token of each row that samples, and behind each of its
    drafts.

    tokens     int64 `[R]`
    finite     bool `[R]`; False: the logits held NaN or +inf, or everything was forbidden, and the token is 0, which
               means nothing
    logprobs   None when no row asked for any
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Logprobs | None


def sample(
    logits: Tensor,
    rows: Sequence[int],
    output_indices: Sequence[int] | Tensor,
    state: DecodeState,
    *,
    drafted: Tensor | None = None,
) -> SamplerOutput:
    """Draw one token for each place; `state` is read, not changed (`state.commit` does that).

    logits `[R, vocab_size]`, float32, bfloat16 or float16; float32 may be overwritten · rows: row number of each place,
    several times if tokens were drafted for it · output_indices: the number of tokens that the row has output before
    this one, on the host or, int64 `[R]`, on the device · drafted int64 `[R, K]`: what was drafted before each place
    since the row's last token, else -1: it counts as output. Reads no device value on the host. Raises InvariantError
    on a wrong shape or type.
    """
    if logits.shape != (len(rows), state.vocab_size) or logits.dtype not in _DTYPES or len(output_indices) != len(rows):
        raise InvariantError(
            f"logits are {logits.dtype} {list(logits.shape)} for {len(rows)} rows, {len(output_indices)} output indices and "
            f"{state.vocab_size} ids: sampling takes float32, bfloat16 or float16 [rows, ids] and one index for each row"
        )
    plans, where = [state.row(row) for row in rows], state.index(rows)
    indices = output_indices if isinstance(output_indices, Tensor) else state.index(output_indices)
    asking = [at for at, plan in enumerate(plans) if plan.spec.top_logprobs >= 0]
    raw = logits[state.index(asking)].float().log_softmax(-1) if asking else None
    if any(len(plan.bias) for plan in plans):
        logits = _biased(logits.float(), plans, state)
    if any(plan.spec.penalised for plan in plans):
        logits = penalise(logits, where, state, drafted=drafted)
    if any(len(plan.forbidden) for plan in plans):
        logits = _without_forbidden(logits.float(), plans, indices, state)
    tokens, finite = draw(logits, where, indices, state)
    if raw is None:
        return SamplerOutput(tokens, finite, None)
    width = max(TOP_LOGPROBS, *(plan.spec.top_logprobs for plan in plans))
    return SamplerOutput(tokens, finite, _logprobs(raw, state.index(asking), tokens, min(width, state.vocab_size)))


def _biased(logits: Tensor, plans: Sequence[RowSampling], state: DecodeState) -> Tensor:
    _, places = _flat([plan.bias_ids for plan in plans], state.vocab_size)
    bias = np.concatenate([plan.bias for plan in plans])
    logits.view(-1).index_add_(0, state.index(places), state.numbers(bias, torch.float32))
    return logits


def _without_forbidden(
    logits: Tensor, plans: Sequence[RowSampling], output_indices: Tensor, state: DecodeState
) -> Tensor:
    of, places = _flat([plan.forbidden for plan in plans], state.vocab_size)
    least = np.array([plan.spec.min_tokens for plan in plans])[of]
    early, where, flat = output_indices[state.index(of)] < state.index(least), state.index(places), logits.view(-1)
    flat.index_copy_(0, where, torch.where(early, -torch.inf, flat[where]))
    return logits


def _flat(ids: Sequence[npt.NDArray[np.int64]], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each id, which of the lists it is of, and where it is among all logits, of so many to a place."""
    of = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    return of, np.concatenate(ids) + of * width


def _logprobs(raw: Tensor, where: Tensor, tokens: Tensor, width: int) -> Logprobs:
    num_rows = tokens.shape[0]
    values, ids = raw.topk(width)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    drawn = raw.gather(-1, tokens[where].unsqueeze(-1)).squeeze(-1)
    return Logprobs(
        drawn=raw.new_zeros(num_rows).index_copy_(0, where, drawn),
        top_ids=ids.new_zeros(num_rows, width).index_copy_(0, where, ids.gather(-1, order)),
        top=raw.new_zeros(num_rows, width).index_copy_(0, where, values),
    )
