"""Draw the next token of each row from its logits. Runs on the compute stream; which path a row takes is known to the host.

One row's draw, in this order:

1. logit bias is added; the repetition penalty divides the positive and multiplies the negative logits of tokens in prompt or
   output; frequency (per occurrence) and presence (once) penalties of tokens in the output are subtracted; before `min_tokens`
   outputs the ending ids are forbidden. Penalties are defined as in transformers and vLLM.
2. Temperature 0 or `top_k` 1: the likeliest token, the lowest id of equals.
3. Else temperature, softmax, then top-k, top-p and min-p, each on what the one before left (the order of transformers).
   A filter keeps or drops equally likely tokens together, so it may keep more than k.
4. One uniform number, a hash of (seed, output index), picks from what is left, in the order of ids.

**Same seed, same tokens, whatever else runs.** Softmax reduces each row alone; from there on probabilities are integers, whose
sums are exact in any order, and a filter is a floor on the probability, found without sorting. So no result depends on the
number, the position or the options of the other rows of a batch.

Log-probabilities are those of the raw logits, before step 1 (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.execute.state import DecodeState, RowSampling
from sidestream.types import SamplingSpec

# A float32 probability times 2**52 is exact (below 2**-29 it loses bits, below 2**-52 it is 0), and a row's sum stays below 2**53,
# so it is exact in float64 too.
_UNIT = 2.0**52
# Divisors smaller than this would overflow or vanish in float32.
_SMALLEST = 1e-30
# Requests may ask for 0 to 20 of them; always taking 20 makes the choice among equals independent of what other rows ask for.
TOP_LOGPROBS = 20
_MASK = (1 << 64) - 1
# Of splitmix64.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a flight's draws, by position in the batch; zeros where a row asked for none.

    drawn     float32 `[R]`, of the drawn tokens
    top_ids   int64 `[R, k]`, likeliest first, the lowest id first among equals; a row that asked for fewer takes its first ones
    top       float32 `[R, k]`
    """

    drawn: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn at the places of a flight: behind the last token of each row that samples, and behind each of its drafts.

    tokens     int64 `[R]`
    finite     bool `[R]`; False: the logits held NaN or +inf, or everything was forbidden, and the token is 0, which means nothing
    logprobs   None when no row asked for any
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Logprobs | None


def sample(
    logits: Tensor, rows: Sequence[int], output_indices: Sequence[int] | Tensor, state: DecodeState, *, drafted: Tensor | None = None
) -> Drawn:
    """Draw one token for each place; `state` is read, not changed (`state.commit` does that).

    logits float32 `[R, vocab_size]`, overwritten · rows: row number of each place, several times if tokens were drafted for it ·
    output_indices: the number of tokens that the row has output before this one, on the host or, int64 `[R]`, on the device · drafted int64
    `[R, K]`: what was drafted before each place since the row's last token, else -1: it counts as output. Reads no device value on the host.
    Raises InvariantError on a wrong shape or type.
    """
    if logits.shape != (len(rows), state.vocab_size) or logits.dtype != torch.float32 or len(output_indices) != len(rows):
        raise InvariantError(
            f"logits are {logits.dtype} {list(logits.shape)} for {len(rows)} rows, {len(output_indices)} output indices and "
            f"{state.vocab_size} ids: sampling takes float32 [rows, ids] and one index for each row"
        )
    plans = [state.row(row) for row in rows]
    asking = [at for at, plan in enumerate(plans) if plan.spec.top_logprobs >= 0]
    raw = logits[state.index(asking)].log_softmax(-1) if asking else None
    _adjust(logits, rows, plans, output_indices, state, drafted)
    finite = logits.amax(-1).isfinite()
    tokens = torch.where(finite, _choose(logits, plans, output_indices, state), 0)
    if raw is None:
        return Drawn(tokens, finite, None)
    width = max(TOP_LOGPROBS, *(plan.spec.top_logprobs for plan in plans))
    return Drawn(tokens, finite, _logprobs(raw, state.index(asking), tokens, min(width, state.vocab_size)))


def uniform(seed: int, output_index: int) -> float:
    """The random number of one draw, in [0, 1), a multiple of 2**-53. Hash of both arguments by splitmix64 (Steele et al. 2014).

    The seed is hashed before the index is added, so neighbouring seeds do not run along the same sequence.
    """
    return (_mix(_mix(seed & _MASK) + output_index * _GOLDEN) >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], output_indices: Tensor, state: DecodeState) -> Tensor:
    """`uniform` of each seed and index, the indices int64 `[R]` on the device: float64 `[R]`, equal to the bit."""
    hashed = state.index([_signed(_mix(seed & _MASK)) for seed in seeds])
    value = hashed + output_indices * _signed(_GOLDEN) + _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    value = value ^ _shifted(value, 31)
    return _shifted(value, 11).to(torch.float64) * 2.0**-53


def probability_floor(probs: Tensor, measure: Tensor, limit: Tensor) -> Tensor:
    """The smallest value whose strictly larger entries measure less than `limit`, in each row: float32 `[R, 1]`, or 0.

    probs float32 in [0, 1] · measure int64, not negative · limit `[R, 1]`, positive. A radix select: three histograms over the
    bits of the values, each inside the bucket that the one before found; no sort, and exact in any order of summing.
    """
    bits = probs.view(torch.int32)  # values that are not negative have the order of their bits
    base = bits.new_zeros(bits.shape[0], 1)
    for shift in (20, 10, 0):
        # bucket 0: below base · 1 .. 1024: base + [0, 1024) << shift · 1025: above all of them
        bucket = (bits - base).bitwise_right_shift_(shift).clamp_(-1, 1024).add_(1)
        held = measure.new_zeros(bits.shape[0], 1026).scatter_add_(1, bucket.to(torch.int64), measure)
        above = held.sum(-1, keepdim=True) - held.cumsum(-1)
        found = (above >= limit).sum(-1, keepdim=True).clamp_(min=1)  # 0 would be: everything together measures less
        base += (found - 1).to(torch.int32) << shift
    return base.view(torch.float32)


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The number of the same 64 bits as a tensor of int64 holds it, which wraps as well."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _adjust(
    logits: Tensor,
    rows: Sequence[int],
    plans: Sequence[RowSampling],
    output_indices: Sequence[int] | Tensor,
    state: DecodeState,
    drafted: Tensor | None,
) -> None:
    for at, plan in enumerate(plans):
        if plan.spec.logit_bias:
            logits[at].index_add_(0, plan.bias_ids, plan.bias)
    penalised = [at for at, plan in enumerate(plans) if plan.penalised]
    if penalised:
        where = state.index(penalised)
        counts, in_prompt = state.seen([rows[at] for at in penalised])
        if drafted is not None:
            before = drafted[where]
            counts.scatter_add_(1, before.clamp(min=0), (before >= 0).to(counts.dtype))
        logits[where] = _penalise(logits[where], counts, in_prompt, [plans[at].spec for at in penalised], state)
    for at, plan in enumerate(plans):
        if isinstance(output_indices, Tensor):
            if plan.spec.min_tokens:
                early, row = output_indices[at] < plan.spec.min_tokens, logits[at]
                row.index_copy_(0, plan.forbidden, torch.where(early, -torch.inf, row[plan.forbidden]))
        elif output_indices[at] < plan.spec.min_tokens:
            logits[at].index_fill_(0, plan.forbidden, -torch.inf)


def _penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor, specs: Sequence[SamplingSpec], state: DecodeState) -> Tensor:
    # Dividing by 1 and subtracting 0 are exact, so skipping a penalty that no row has changes nothing for the others.
    output = counts > 0
    if any(spec.repetition_penalty != 1 for spec in specs):
        penalty = _column([max(spec.repetition_penalty, _SMALLEST) for spec in specs], logits.dtype, state)
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(in_prompt.logical_or_(output), repeated, logits)
    if any(spec.frequency_penalty != 0 for spec in specs):
        logits = logits - counts * _column([spec.frequency_penalty for spec in specs], logits.dtype, state)
    if any(spec.presence_penalty != 0 for spec in specs):
        logits = logits - output * _column([spec.presence_penalty for spec in specs], logits.dtype, state)
    return logits


def _choose(logits: Tensor, plans: Sequence[RowSampling], output_indices: Sequence[int] | Tensor, state: DecodeState) -> Tensor:
    random = [at for at, plan in enumerate(plans) if not plan.spec.greedy]
    if not random:
        return logits.argmax(-1)
    specs = [plans[at].spec for at in random]
    where = None if len(random) == len(plans) else state.index(random)
    if isinstance(output_indices, Tensor):
        indices = output_indices if where is None else output_indices[where]
        numbers = uniforms([spec.seed for spec in specs], indices, state).unsqueeze(-1)
    else:
        numbers = _column([uniform(spec.seed, output_indices[at]) for spec, at in zip(specs, random, strict=True)], torch.float64, state)
    if where is None:
        return _draw(logits, specs, numbers, state)
    return logits.argmax(-1).index_copy_(0, where, _draw(logits[where], specs, numbers, state))


def _draw(logits: Tensor, specs: Sequence[SamplingSpec], numbers: Tensor, state: DecodeState) -> Tensor:
    """Ids drawn by inverse CDF, `[R]`. A row without a finite maximum yields some number that means nothing, and nothing else."""
    # Subtracted first, the maximum leaves nothing that a small temperature could make overflow into NaN.
    temperature = _column([max(spec.temperature, _SMALLEST) for spec in specs], logits.dtype, state)
    probs = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)
    weights = _weigh(probs)
    _filter(weights, probs, specs, state)
    # The first id whose cumulative weight exceeds `target` < the row's sum: it exists, and its own weight is not 0.
    cumulative = weights.cumsum(-1)
    target = (cumulative[:, -1:] * numbers).to(torch.int64)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _filter(weights: Tensor, probs: Tensor, specs: Sequence[SamplingSpec], state: DecodeState) -> None:
    """Set the weights of what top-k, top-p and min-p drop to 0, in place. Limits of rows without a filter drop nothing."""
    candidates, measure = probs, weights
    top_k = [spec.top_k if spec.top_k < weights.shape[-1] else 0 for spec in specs]
    if any(top_k):
        likeliest = probs.topk(max(top_k)).values
        kth = likeliest.gather(-1, _column([max(k - 1, 0) for k in top_k], weights.dtype, state))
        _drop_below(torch.where(_column(top_k, weights.dtype, state) > 0, kth, 0), weights, probs)
        if all(k or spec.top_p == 1 for spec, k in zip(specs, top_k, strict=True)):
            candidates, measure = likeliest, _weigh(likeliest)  # they tell the same floor of top-p, sooner
    if any(spec.top_p < 1 for spec in specs):
        limit = weights.sum(-1, keepdim=True) * _column([spec.top_p for spec in specs], torch.float64, state)
        _drop_below(probability_floor(candidates, measure, limit), weights, probs)
    if any(spec.min_p > 0 for spec in specs):
        share = _column([spec.min_p for spec in specs], probs.dtype, state)
        _drop_below(probs.amax(-1, keepdim=True) * share, weights, probs)


def _weigh(probs: Tensor) -> Tensor:
    return (probs * _UNIT).to(torch.int64)


def _drop_below(floor: Tensor, weights: Tensor, probs: Tensor) -> None:
    weights.masked_fill_(probs < floor, 0)


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


def _column(values: Sequence[float], dtype: torch.dtype, state: DecodeState) -> Tensor:
    return state.numbers(values, dtype).unsqueeze(-1)
