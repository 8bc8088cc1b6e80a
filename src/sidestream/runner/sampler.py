"""The sampler: samples a token at each row of logits, accepts drafts, and updates the request slots. The same code runs
in eager and in captured steps. `Sampler.sample` runs on the compute stream, everything else on the engine thread.

One row is sampled in this order:

1. Add the logit bias. For tokens in the prompt or the output, divide positive logits by the repetition penalty and
   multiply negative logits by it. For tokens in the output, subtract the frequency penalty (per occurrence) and the
   presence penalty (once). Before `min_tokens` outputs, forbid the ids that end the answer. Forbid the ids that the
   request's grammar does not allow. Penalties are defined as in transformers and vLLM.
2. Temperature 0 or `top_k` 1: argmax, the lowest id among equals.
3. Else temperature, softmax, then top-k, top-p, min-p and typical-p, each applied to the tokens that the previous
   filter kept (the order of transformers). A filter keeps or drops equally likely tokens together, so it may keep more
   than k.
4. A uniform number, made by a hash of (seed, output index), picks one of the remaining tokens, in the order of ids.

Log-probabilities are those of the raw logits, before step 1 (vLLM's `raw_logprobs`).

A row with k drafts has 1 + k rows of logits, and a token is sampled at each of them. The row's output ends with the
first sampled token that differs from the draft at its position, see `Ops.advance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.ops import Ops
from sidestream.runner.forward import ForwardOutput
from sidestream.runner.state import DecodeState, SlotSampling
from sidestream.runner.step_inputs import InputSizes, StepInputs
from sidestream.types import BatchPlan, RowColumns, RowPlan, SamplingSpec
from sidestream_kv.device.group import Group

# Requests may ask for 0 to 20 log-probabilities. A step always computes 20, so that which of several equal values a row
# gets does not depend on other rows.
TOP_LOGPROBS = 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SamplingMode(IntEnum):
    """The operations of sampling. A step has the highest mode of its rows; a row gets the same token in its own mode
    and in every higher mode.

    ARGMAX      argmax of the raw logits
    RANDOM      temperature and filters
    PENALISED   also penalties
    HOST        also options that only the host knows: logit bias, token ids that are forbidden before `min_tokens`
                outputs, log-probabilities; and typical-p, whose kernel reads all logits many times. Never captured
    """

    ARGMAX = 0
    RANDOM = 1
    PENALISED = 2
    HOST = 3

    @classmethod
    def of(cls, spec: SamplingSpec, *, outputs: int) -> SamplingMode:
        """The mode of a row with the options `spec` after `outputs` output tokens."""
        banned = outputs < spec.min_tokens and spec.forbidden_until_min  # rule: ban-is-needed
        if spec.logit_bias or banned or spec.top_logprobs >= 0 or spec.is_typical:
            return cls.HOST
        if spec.penalised:
            return cls.PENALISED
        return cls.ARGMAX if spec.greedy else cls.RANDOM


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a step's sampled tokens; zeros for rows that did not request log-probabilities.

    drawn     float32 `[N]`: log-probabilities of the sampled tokens
    top_ids   int64 `[N, k]`: ids of the k most likely tokens, most likely first, the lowest id first among equals. A
              row that requested fewer than k uses its first columns
    top       float32 `[N, k]`: log-probabilities of `top_ids`
    """

    drawn: Tensor
    top_ids: Tensor
    top: Tensor


class TokenMasks(NamedTuple):
    """Masks of some rows of logits, see `Ops.mask`."""

    rows: Tensor
    masks: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step, one for each row of logits.

    tokens     int64 `[N]`
    finite     bool `[N]`; False: the logits held NaN or +inf, or every token was forbidden, and the token is 0
    logprobs   None if no row requested log-probabilities
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Logprobs | None


class Sampler:
    """Samples the tokens of steps. Owner of those sampling options of each slot that decide how the host launches a
    step.
    """

    def __init__(self, state: DecodeState, ops: Ops, group: Group | None = None) -> None:
        """`group`: the ranks that sample the same steps; all of them continue with the tokens that rank 0 sampled."""
        self._group = group
        self._state = state
        self._ops = ops
        self._top_logprobs: dict[int, int] = {}  # requested number of each slot that requested log-probabilities
        self._modes: dict[int, SamplingMode] = {}  # modes of the slots whose mode is above ARGMAX
        self._bans: dict[int, SamplingSpec] = {}  # of slots whose mode becomes lower after `min_tokens` outputs
        self._masked: set[int] = set()  # slots whose tokens need masks

    def begin(self, slot: int, spec: SamplingSpec) -> None:
        """Record the sampling options of a new request, which has the slot from the next launched step on."""
        if spec.top_logprobs >= 0:
            self._top_logprobs[slot] = spec.top_logprobs
        else:
            self._top_logprobs.pop(slot, None)  # rule: slot-begins-on-the-host
        (self._masked.add if spec.masked else self._masked.discard)(slot)  # rule: slot-begins-with-its-need-of-masks
        self._bans.pop(slot, None)
        if spec.min_tokens and spec.forbidden_until_min:
            self._bans[slot] = spec
        self._set_mode(slot, SamplingMode.of(spec, outputs=0))

    def mode_of(self, columns: RowColumns) -> SamplingMode:
        """The mode of a step that is about to be launched."""
        for slot, outputs in zip(columns.slot, columns.min_output_index, strict=True) if self._bans else ():
            # rule: ban-lasts-until-min-tokens
            if (spec := self._bans.get(slot)) is not None and outputs >= spec.min_tokens:
                del self._bans[slot]
                self._set_mode(slot, SamplingMode.of(spec, outputs=outputs))
        if not self._modes:
            return SamplingMode.ARGMAX
        modes = map(self._modes.get, compress(columns.slot, columns.samples), repeat(SamplingMode.ARGMAX))
        return max(modes, default=SamplingMode.ARGMAX)  # rule: captured-sampling-suits-every-row

    def needs_masks(self, columns: RowColumns) -> bool:
        """Whether a row that samples in this step needs a token mask."""
        masked = self._masked
        return bool(masked) and not masked.isdisjoint(compress(columns.slot, columns.samples))

    def top_logprobs_of(self, columns: RowColumns) -> tuple[int, ...]:
        """The number of log-probabilities that each sampling row requested (-1: none); empty: no row requested any."""
        if not self._top_logprobs:
            return ()
        return tuple(self._top_logprobs.get(slot, -1) for slot in compress(columns.slot, columns.samples))

    def sample(
        self,
        inputs: StepInputs,
        output: ForwardOutput,
        mode: SamplingMode,
        batch: BatchPlan | None = None,
        masks: TokenMasks | None = None,
    ) -> tuple[SamplerOutput, Tensor | None]:
        """Sample at all logits and update the slots. Returns the sampled tokens, and the accept lengths of the sampling
        rows, int64 `[B]`, or None if the step has no drafts.

        batch   the step's batch. Required by mode HOST, and by PENALISED with drafts. None: the call may be captured in
                a graph; then it samples at padding, too
        masks   of rows of logits that may not get every token, for mode HOST. For other modes, mask the logits before;
                HOST needs them without masks, for log-probabilities
        """
        state, proposed = self._state, output.proposed
        count = len(output.logits) if batch is None else InputSizes.of(batch).logits
        logits, penalised = output.logits[:count], mode is SamplingMode.PENALISED
        if mode is SamplingMode.ARGMAX:
            drawn = SamplerOutput(*self._ops.argmax(logits), None)
        else:
            options: list[SlotSampling] = []
            if mode is SamplingMode.HOST:
                options = [state.sampling_of(row.slot) for row in _sampling_rows(batch) for _ in range(1 + row.drafts)]
                penalised = any(option.spec.penalised for option in options)
            slots = inputs.slots_of_logits(count, padding_slot=state.padding_slot)
            # rule: sampling-uses-the-index-of-its-output
            output_indices = output.positions[:count] + 1 - state.rules.prompt_len[slots]
            drafted = None
            if batch is not None and proposed is not None and penalised:
                # rule: drafts-count-for-later-penalties-in-their-row
                drafted = self._drafted_before(_sampling_rows(batch), proposed.tokens)
            drawn = draw_tokens(
                logits,
                slots,
                output_indices,
                state,
                self._ops,
                mode=mode,
                options=options,
                drafted=drafted,
                masks=masks,
            )
        if self._group is not None:
            self._group.broadcast(drawn.tokens)  # rule: sampled-tokens-are-those-of-rank-0
        # rule: sampled-tokens-count-for-later-penalties
        accepted = self._ops.advance(
            drawn.tokens,
            output.positions,
            None if proposed is None else proposed.tokens,
            output.hidden,
            state.slot_tensors(counted=penalised),
            sampling_rows=inputs.sampling_rows,
            first_logits=inputs.first_logits,
            slots=inputs.slots,
            cu_seqlens_q=inputs.cu_seqlens_q,
            decodes=inputs.sizes.decodes,
        )
        return drawn, None if proposed is None else accepted

    def _drafted_before(self, rows: Sequence[RowPlan], drafts: Tensor) -> Tensor:
        """For each row of logits, the row's drafts before it, int64 `[N, K]`, padded with -1."""
        decodes = len(drafts)  # decode rows come first, and every decode row samples
        of_row = [min(at, decodes - 1) for at, row in enumerate(rows) for _ in range(1 + row.drafts)]
        number = self._state.index([number for row in rows for number in range(1 + row.drafts)])
        before = torch.arange(drafts.shape[1], device=drafts.device) < number[:, None]
        return torch.where(before, drafts[self._state.index(of_row)], -1)

    def _set_mode(self, slot: int, mode: SamplingMode) -> None:
        if mode:
            self._modes[slot] = mode  # rule: step-samples-in-the-mode-of-its-rows
        else:
            self._modes.pop(slot, None)


def likeliest(raw: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ids and values of each row's `width` largest numbers, the largest first, the lowest id first among equals."""
    values, ids = raw.topk(width)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values


def draw_tokens(
    logits: Tensor,
    slots: Tensor,
    output_indices: Tensor,
    state: DecodeState,
    ops: Ops,
    *,
    mode: SamplingMode,
    options: Sequence[SlotSampling] = (),
    drafted: Tensor | None = None,
    masks: TokenMasks | None = None,
) -> SamplerOutput:
    """Draw one token at each row of logits; `state` is read, not changed.

    logits `[N, vocab_size]`, float32, bfloat16 or float16; float32 logits may be overwritten · slots int64 `[N]` ·
    output_indices int64 `[N]`: number of the slot's earlier outputs · options: one for each row of logits, for mode
    HOST · drafted: see `Ops.penalise`. Raises InvariantError on a wrong shape or type.
    """
    if (
        logits.shape != (len(slots), state.vocab_size)
        or logits.dtype not in _DTYPES
        or len(output_indices) != len(slots)
    ):
        raise InvariantError(
            f"logits are {logits.dtype} {list(logits.shape)} for {len(slots)} rows, {len(output_indices)} output "
            f"indices and {state.vocab_size} ids: sampling takes float32, bfloat16 or float16 [rows, ids] and one "
            "index for each row"
        )
    asking = [at for at, option in enumerate(options) if option.spec.top_logprobs >= 0]
    raw = logits[state.index(asking)].float().log_softmax(-1) if asking else None
    if any(len(option.bias) for option in options):
        logits = _add_bias(logits.float(), options, state)
    if mode is SamplingMode.PENALISED or any(option.spec.penalised for option in options):
        logits = ops.penalise(logits, slots, state.rules.numbers, *state.seen_tables(), drafted)
    if any(len(option.forbidden) for option in options):
        logits = _forbid(logits.float(), options, output_indices, state)
    if masks is not None:
        ops.mask(logits, *masks)  # rule: masked-tokens-are-not-sampled-with-logprobs
    typical = any(option.spec.is_typical for option in options)
    tokens, finite = ops.draw(logits, slots, output_indices, state.rules.numbers, typical=typical)
    if raw is None:
        return SamplerOutput(tokens, finite, None)
    width = max(TOP_LOGPROBS, *(option.spec.top_logprobs for option in options))
    return SamplerOutput(tokens, finite, _logprobs(raw, state.index(asking), tokens, min(width, state.vocab_size)))


def _add_bias(logits: Tensor, options: Sequence[SlotSampling], state: DecodeState) -> Tensor:
    _, indices = _flat([option.bias_ids for option in options], state.vocab_size)
    bias = np.concatenate([option.bias for option in options])
    logits.view(-1).index_add_(0, state.index(indices), state.numbers(bias, torch.float32))
    return logits


def _forbid(logits: Tensor, options: Sequence[SlotSampling], output_indices: Tensor, state: DecodeState) -> Tensor:
    of, indices = _flat([option.forbidden for option in options], state.vocab_size)
    least = np.array([option.spec.min_tokens for option in options])[of]
    early, where, flat = output_indices[state.index(of)] < state.index(least), state.index(indices), logits.view(-1)
    flat.index_copy_(0, where, torch.where(early, -torch.inf, flat[where]))
    return logits


def _sampling_rows(batch: BatchPlan | None) -> list[RowPlan]:
    return [] if batch is None else [row for row in batch.rows if row.samples]


def _flat(ids: Sequence[npt.NDArray[np.int64]], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each id in `ids`: the index of the list that holds it, and its flat index in logits `[len(ids), width]`."""
    of = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    return of, np.concatenate(ids) + of * width


def _logprobs(raw: Tensor, where: Tensor, tokens: Tensor, width: int) -> Logprobs:
    count = len(tokens)
    ids, values = likeliest(raw, width)
    drawn = raw.gather(-1, tokens[where].unsqueeze(-1)).squeeze(-1)
    return Logprobs(
        drawn=raw.new_zeros(count).index_copy_(0, where, drawn),
        top_ids=ids.new_zeros(count, width).index_copy_(0, where, ids),
        top=raw.new_zeros(count, width).index_copy_(0, where, values),
    )


def prompt_logprobs(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Log-probabilities of `targets`, int64 `[P]`, at logits `[P, V]`, by the names of the mailbox's fields: those of
    the targets, their ranks (1: the likeliest), and ids and log-probabilities of the likeliest tokens. No host sync.
    """
    raw = logits.float().log_softmax(-1)
    drawn = raw.gather(-1, targets.unsqueeze(-1))
    ids, top = likeliest(raw, min(TOP_LOGPROBS, raw.shape[-1]))
    ranks = 1 + (raw > drawn).sum(-1)
    return {"prompt_ranks": ranks, "prompt_ids": ids, "prompt_drawn": drawn.squeeze(-1), "prompt_top": top}
