"""One token for each place, from its logits and what the device knows of its row: by kernels on a GPU, which may be
captured; by torch elsewhere.

**Same seed, same tokens, whatever else runs.** A weight is a whole number, so sums are exact in any order and by any
tiling, and a filter is a floor on the weight, found without sorting. No result depends on the number, the position or
the options of the other rows of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.execute.rules import uniforms
from sidestream.execute.state import DecodeState
from sidestream.speculate import devices, likeliest

# The likeliest token's weight. What is 2**-40 times as likely has none; the sum over any vocabulary stays below 2**63.
UNIT = 2.0**40
# Smaller divisors would overflow or vanish in float32, and so would larger ones. Powers of two are the same number in
# every type.
SMALLEST, LARGEST = 2.0**-100, 2.0**100


def draw(logits: Tensor, rows: Tensor, output_indices: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
    """Tokens, int64 `[N]`, and whether each place's logits are numbers, bool `[N]`: else its token is 0.

    logits `[N, vocab_size]`, float32, bfloat16 or float16 · rows int64 `[N]`: row number of each place · output_indices
    int64 `[N]`: how many tokens the row has output before this one. On the current stream; reads nothing back on a GPU.
    """
    tokens, finite = likeliest(logits)
    if devices.has_kernels(logits):
        from sidestream.execute import launch  # Triton, which a CPU does not need

        launch.draw(logits, rows, output_indices, finite, state.rules, tokens)
        return tokens, finite
    random = (finite & (state.rules.temperature[rows] > 0)).nonzero().squeeze(1)
    if len(random):
        everything = len(random) == len(tokens)
        drawn = _drawn(logits if everything else logits[random], rows[random], output_indices[random], state)
        tokens = tokens.index_copy(0, random, drawn)
    return tokens, finite


def penalise(logits: Tensor, rows: Tensor, state: DecodeState, *, drafted: Tensor | None = None) -> Tensor:
    """The logits as float32, `[N, vocab_size]`, less the penalties of their rows; where they are float32 they may be
    overwritten.

    rows int64 `[N]` · drafted int64 `[N, K]`: what was drafted before each place since the row's last token, else -1:
    it counts as output
    """
    if devices.has_kernels(logits):
        from sidestream.execute import launch  # Triton, which a CPU does not need

        return launch.penalise(logits, rows, state, drafted)
    logits, rules = logits.float(), state.rules
    which = rules.penalised[rows].nonzero().squeeze(1)
    if not len(which):
        return logits
    mine, rows = logits[which], rows[which]
    counts, in_prompt = state.seen(rows)
    if drafted is not None:
        before = drafted[which]
        counts.scatter_add_(1, before.clamp(min=0), (before >= 0).to(counts.dtype))
    output = counts > 0
    # Dividing by 1 and subtracting 0 are exact: a penalty that a row has not changes nothing.
    repetition = _column(rules.repetition[rows].clamp(min=SMALLEST))
    repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
    mine = torch.where(in_prompt | output, repeated, mine)
    mine = mine - counts * _column(rules.frequency[rows]) - output * _column(rules.presence[rows])
    return logits.index_copy_(0, which, mine)


def probability_floor(powers: Tensor, measure: Tensor, limit: Tensor) -> Tensor:
    """The smallest value whose strictly larger entries measure less than `limit`, in each row: float32 `[R, 1]`, or 0.

    powers float32 in [0, 1] · measure int64, not negative · limit `[R, 1]`, positive. A radix select: three histograms
    over the bits of the values, each inside the bucket that the one before found; no sort, and exact in any order of
    summing.
    """
    bits = powers.view(torch.int32)  # values that are not negative have the order of their bits
    base = bits.new_zeros(bits.shape[0], 1)
    for shift in (20, 10, 0):
        # bucket 0: below base · 1 .. 1024: base + [0, 1024) << shift · 1025: above all of them
        bucket = (bits - base).bitwise_right_shift_(shift).clamp_(-1, 1024).add_(1)
        held = measure.new_zeros(bits.shape[0], 1026).scatter_add_(1, bucket.to(torch.int64), measure)
        above = held.sum(-1, keepdim=True) - held.cumsum(-1)
        found = (above >= limit).sum(-1, keepdim=True).clamp_(min=1)  # 0 would be: everything together measures less
        base += (found - 1).to(torch.int32) << shift
    return base.view(torch.float32)


def _drawn(logits: Tensor, rows: Tensor, output_indices: Tensor, state: DecodeState) -> Tensor:
    """Ids drawn by inverse CDF, `[R]`, of rows that are numbers, none of which takes its likeliest token."""
    rules = state.rules
    # Subtracted first, the maximum leaves nothing that a small temperature could make overflow into NaN.
    powers = logits.float()
    powers = (
        (powers - powers.amax(-1, keepdim=True))
        .mul_(_column(1 / rules.temperature[rows].clamp(SMALLEST, LARGEST)))
        .exp_()
    )
    weights = (powers * UNIT).to(torch.int64)
    _filter(weights, powers, rules.top_k[rows], rules.top_p[rows], rules.min_p[rows])
    # The first id whose cumulative weight exceeds `target` < the row's sum: it exists, and its own weight is not 0.
    cumulative = weights.cumsum(-1)
    total, number = cumulative[:, -1], uniforms(rules.seed[rows], output_indices)
    target = torch.minimum((total * number).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)


def _filter(weights: Tensor, powers: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set the weights of what top-k, top-p and min-p drop to 0, in place, each on what the one before left."""
    candidates, measure = powers, weights
    top_k = torch.where(top_k < weights.shape[-1], top_k, 0)
    if (most := int(top_k.amax())) > 0:
        highest = powers.topk(most).values
        kth = highest.gather(-1, (top_k - 1).clamp(min=0).unsqueeze(-1))
        _drop_below(torch.where(top_k.unsqueeze(-1) > 0, kth, 0), weights, powers)
        if bool(((top_k > 0) | (top_p == 1)).all()):
            candidates, measure = highest, (highest * UNIT).to(torch.int64)  # they tell the same floor of top-p, sooner
    if bool((top_p < 1).any()):
        limit = (weights.sum(-1) * top_p).unsqueeze(-1)
        _drop_below(probability_floor(candidates, measure, limit), weights, powers)
    if bool((min_p > 0).any()):
        _drop_below(_column(min_p), weights, powers)


def _drop_below(floor: Tensor, weights: Tensor, powers: Tensor) -> None:
    weights.masked_fill_(powers < floor, 0)


def _column(values: Tensor) -> Tensor:
    return values.to(torch.float32).unsqueeze(-1)
