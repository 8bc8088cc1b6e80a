"""The sampler in torch: applies penalties and filters (top-k, top-p, min-p), and samples one token for each row of
logits, with the options of the row's request.

**The same seed gives the same tokens, whatever else is in the batch.** No token depends on the number, the positions or
the options of the other rows. Probabilities become whole numbers (weights), so their sums are exact in any order of
summation. Each filter drops all tokens below some probability, and this bound is found without sorting.

    ratio    probability of a token divided by that of the row's likeliest token
    weight   the ratio times `UNIT`, as a whole number
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.ops.rules import SamplingTensors, uniforms

# Weight of the likeliest token. A token that is less than 2**-40 times as likely has weight 0. The sum of the weights
# of any vocabulary stays below 2**63.
UNIT = 2.0**40
# Bounds of temperature and repetition penalty as divisors. Beyond them, a quotient would overflow or become zero in
# float32. They are powers of two, which are exact in every type.
SMALLEST, LARGEST = 2.0**-100, 2.0**100


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops.argmax`."""
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, logits.argmax(-1), 0), finite


def draw(logits: Tensor, slots: Tensor, output_indices: Tensor, rules: SamplingTensors) -> tuple[Tensor, Tensor]:
    """See `Ops.draw`."""
    tokens, finite = argmax(logits)
    random_rows = (finite & (rules["temperature"][slots] > 0)).nonzero().squeeze(1)
    if len(random_rows):
        all_rows = len(random_rows) == len(tokens)
        drawn = _draw_random(
            logits if all_rows else logits[random_rows], slots[random_rows], output_indices[random_rows], rules
        )
        tokens = tokens.index_copy(0, random_rows, drawn)
    return tokens, finite


def penalise(
    logits: Tensor,
    slots: Tensor,
    rules: SamplingTensors,
    output_counts: Tensor,
    in_prompt: Tensor,
    drafted: Tensor | None,
) -> Tensor:
    """See `Ops.penalise`."""
    logits = logits.float()
    penalised_rows = rules.penalised[slots].nonzero().squeeze(1)
    if not len(penalised_rows):
        return logits
    penalised, slots = logits[penalised_rows], slots[penalised_rows]
    counts, in_prompt = output_counts[slots], in_prompt[slots]
    if drafted is not None:
        before = drafted[penalised_rows]
        counts.scatter_add_(1, before.clamp(min=0), (before >= 0).to(counts.dtype))
    output = counts > 0
    # Dividing by 1 and subtracting 0 are exact, so a penalty with its neutral value changes no bit.
    repetition = _column(rules["repetition_penalty"][slots].clamp(min=SMALLEST))
    repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(in_prompt | output, repeated, penalised)
    penalised = penalised - counts * _column(rules["frequency_penalty"][slots])
    penalised = penalised - output * _column(rules["presence_penalty"][slots])
    return logits.index_copy_(0, penalised_rows, penalised)


def filter_threshold(ratios: Tensor, amounts: Tensor, limit: Tensor) -> Tensor:
    """A filter's threshold for each row, float32 `[R, 1]`: the lowest ratio kept. All larger ratios of the row together
    have an amount below `limit`. 0: the filter keeps every token.

    ratios float32 in [0, 1] · amounts int64, not negative · limit `[R, 1]`, positive. This is a radix select: it makes
    three histograms over the bits of the ratios, each inside the bucket that the previous histogram found. It does not
    sort, and its result does not depend on the order of summation.
    """
    bits = ratios.view(torch.int32)  # for floats that are not negative, the order of the bits is the order of values
    base = bits.new_zeros(bits.shape[0], 1)
    for shift in (20, 10, 0):
        # bucket 0           bits below base
        # buckets 1 to 1024  bits from base on, in 1024 ranges of 1 << shift values
        # bucket 1025        bits above these ranges
        bucket = (bits - base).bitwise_right_shift_(shift).clamp_(-1, 1024).add_(1)
        histogram = amounts.new_zeros(bits.shape[0], 1026).scatter_add_(1, bucket.to(torch.int64), amounts)
        above = histogram.sum(-1, keepdim=True) - histogram.cumsum(-1)
        bucket_found = (above >= limit).sum(-1, keepdim=True).clamp_(min=1)  # 0: the total is below the limit
        base += (bucket_found - 1).to(torch.int32) << shift
    return base.view(torch.float32)


def _draw_random(logits: Tensor, slots: Tensor, output_indices: Tensor, rules: SamplingTensors) -> Tensor:
    """Ids `[R]`, sampled by inverse CDF, for finite rows whose temperature is not 0."""
    # The maximum is subtracted first, so that ratios do not overflow at any temperature.
    ratios = logits.float()
    ratios = (
        (ratios - ratios.amax(-1, keepdim=True))
        .mul_(_column(1 / rules["temperature"][slots].clamp(SMALLEST, LARGEST)))
        .exp_()
    )
    weights = (ratios * UNIT).to(torch.int64)
    _filter(weights, ratios, rules["top_k"][slots], rules["top_p"][slots], rules["min_p"][slots])
    # The result is the first id whose cumulative weight exceeds `target`. There is such an id, because `target` is
    # below the row's total weight. Its own weight is not 0, so no filter has dropped it.
    cumulative = weights.cumsum(-1)
    total, number = cumulative[:, -1], uniforms(rules.seed[slots], output_indices)
    target = torch.minimum((total * number).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)


def _filter(weights: Tensor, ratios: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set the weights of tokens that top-k, top-p or min-p drops to 0, in place. Each filter works on the tokens that
    the previous filter has kept.
    """
    candidates, amounts = ratios, weights
    top_k = torch.where(top_k < weights.shape[-1], top_k, 0)
    if (max_top_k := int(top_k.amax())) > 0:
        highest = ratios.topk(max_top_k).values
        kth_ratio = highest.gather(-1, (top_k - 1).clamp(min=0).unsqueeze(-1))
        _drop_below(torch.where(top_k.unsqueeze(-1) > 0, kth_ratio, 0), weights, ratios)
        if bool(((top_k > 0) | (top_p == 1)).all()):
            candidates, amounts = highest, (highest * UNIT).to(torch.int64)  # the same threshold of top-p, found faster
    if bool((top_p < 1).any()):
        limit = (weights.sum(-1) * top_p).unsqueeze(-1)
        _drop_below(filter_threshold(candidates, amounts, limit), weights, ratios)
    if bool((min_p > 0).any()):
        _drop_below(_column(min_p), weights, ratios)


def _drop_below(threshold: Tensor, weights: Tensor, ratios: Tensor) -> None:
    weights.masked_fill_(ratios < threshold, 0)


def _column(values: Tensor) -> Tensor:
    return values.to(torch.float32).unsqueeze(-1)
