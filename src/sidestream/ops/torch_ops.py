"""The device operations in torch: for a CPU, and as the reference in tests of the Triton kernels. The shapes in
docstrings are those of `interface.py`.

The sampler applies penalties and filters (top-k, top-p, min-p), and samples one token for each row of logits, with the
options of the row's request. **The same seed gives the same tokens, whatever else is in the batch.** No token depends
on the number, the positions or the options of the other rows. Probabilities become whole numbers (weights), so their
sums are exact in any order of summation. Each filter drops all tokens below some probability, and this bound is found
without sorting.

    ratio    probability of a token divided by that of the row's likeliest token
    weight   the ratio times `UNIT`, as a whole number
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.ops.interface import FROM_SLOT, DraftRows, PackedRows, ResolvedInputs, SlotTensors
from sidestream.ops.rules import SamplingTensors, uniforms

# Weight of the likeliest token. A token that is less than 2**-40 times as likely has weight 0. The sum of the weights
# of any vocabulary stays below 2**63.
UNIT = 2.0**40
# Bounds of temperature and repetition penalty as divisors. Beyond them, a quotient would overflow or become zero in
# float32. They are powers of two, which are exact in every type.
SMALLEST, LARGEST = 2.0**-100, 2.0**100
_WORD_BITS = 32


class Ops:
    """The operations, in torch; `TritonOps` has each of them as a kernel. They enqueue work on the current stream. Some
    read device values on the host, which kernels never do. A docstring names the arguments that its method overwrites.
    """

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Id of each row's largest logit, `[N]` (the lowest id among equal logits); and whether the row is finite, bool
        `[N]`.

        logits `[N, V]`. A row is not finite if it has NaN or +inf, or only -inf; its id is then 0.
        """
        finite = logits.amax(-1).isfinite()
        return torch.where(finite, logits.argmax(-1), 0), finite

    def match_ngram(
        self, history: Tensor, slots: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int
    ) -> Tensor:
        """Drafts `[R, count]` by prompt lookup: the tokens that follow the longest earlier occurrence of a row's last
        tokens. Such an occurrence has `shortest` to `longest` tokens. history int32 `[S, width]`; slots and lengths
        `[R]`.
        """
        history, lengths = history[slots], lengths[:, None]
        width = history.shape[1]
        position = torch.arange(width, device=history.device)
        last = (lengths - 1).clamp(min=0)
        # After n iterations, matched[r, p] is the length, up to n, of the row's suffix that also ends at position p.
        matched = torch.zeros_like(history)
        matches = position < last
        for back in range(longest):
            wanted = history.gather(1, (last - back).clamp(min=0))
            matches = matches & (history.roll(back, 1) == wanted) & (position >= back)
            matched += matches
        # The rank orders matches by length, and equally long matches by position.
        rank = torch.where(matched >= shortest, matched.to(torch.int64) * width + position, -1)
        best, _ = rank.max(1, keepdim=True)
        found = torch.where(best >= 0, best % width, last - 1)
        positions = found + 1 + torch.arange(count, device=history.device) % (last - found)
        return history.gather(1, positions).to(torch.int64)

    def take_forced(self, drafts: Tensor, forced: Tensor, history: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Replace drafts by tokens that the grammars of rows leave no choice about. Overwrites `drafts`, `[R, K]`.

        forced    `[S, 2 + F]` by slot: the position of the first forced token, the number of forced tokens, and these
                  tokens. They count only if all tokens of the row from that position on are the first of them
        history   int32 `[S, width]`; slots and lengths `[R]`, as in `match_ngram`
        """
        start, count, tokens = forced[slots, :1], forced[slots, 1:2], forced[slots, 2:]
        # The number of forced tokens that the row has drawn.
        drawn = lengths[:, None] - start  # rule: forced-drafts-begin-behind-the-row
        number = torch.arange(tokens.shape[1], device=forced.device)
        places = (start + number).clamp(max=history.shape[1] - 1)
        # rule: forced-drafts-follow-their-own-beginning
        equal = (number >= drawn) | (history[slots[:, None], places] == tokens)
        holds = (drawn >= 0) & equal.all(1, keepdim=True)
        wanted = drawn + number[: drafts.shape[1]]
        found = tokens.gather(1, wanted.clamp(min=0, max=tokens.shape[1] - 1))
        drafts.copy_(torch.where(holds & (wanted < count), found, drafts))

    def update_block_tables(self, indices: Tensor, block_ids: Tensor, block_tables: Tensor) -> None:
        """Write block ids at flat indices of `block_tables`, int32 `[S, width]`. An index of -1 writes nothing."""
        real = indices >= 0
        block_tables.view(-1)[indices[real]] = block_ids[real].to(torch.int32)

    def resolve_inputs(
        self,
        packed: Tensor,
        positions: Tensor,
        token_slots: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        drafts: Tensor | None,
        block_tokens: int,
        width: int,
    ) -> ResolvedInputs:
        """Replace placeholders by device state. The host prepares a step before the results of the previous step are
        known, so its inputs contain negative numbers in place of unknown values.

        packed        `[T]`: token ids; -1: the last token of the slot; -2 - k: draft k of the slot
        positions     `[T]`; -1 - k: k positions after the last token of the slot
        token_slots   `[T]`: request slot of each token
        kv_lens       `[B]`; -k: k tokens more than the length of the slot
        slots         `[B]`: request slot of each row
        drafts        `[S, K]` by slot; None: the step has no drafts
        width         number of columns of the returned block tables
        """
        tokens = torch.where(packed < 0, last_tokens[token_slots], packed)
        if drafts is not None:
            number = (-2 - packed).clamp(min=0)
            tokens = torch.where(packed < -1, drafts[token_slots, number], tokens)
        positions = torch.where(positions < 0, lengths[token_slots] - 1 - positions, positions)
        kv_lens = torch.where(kv_lens < 0, lengths[slots] - kv_lens, kv_lens)
        block_ids = block_tables[token_slots, positions // block_tokens]
        padding = token_slots == len(last_tokens) - 1
        slot_mapping = torch.where(padding, -1, block_ids * block_tokens + positions % block_tokens)
        return ResolvedInputs(tokens, positions, kv_lens, slot_mapping, block_tables[:, :width][slots])

    def draft_rows(
        self,
        positions: Tensor,
        first_tokens: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        hidden: Tensor,
        width: int,
    ) -> DraftRows:
        """The state of R decode rows. positions `[T]` and kv_lens `[R]` are as in `resolve_inputs`. first_tokens `[R]`:
        the rows' first packed tokens; slots `[R]`.
        """
        known = positions[first_tokens]
        length = torch.where(known < 0, lengths[slots], known)
        bounds = (torch.where(kv_lens < 0, length - kv_lens, kv_lens) - 1).clamp(min=0)  # padding rows have length 0
        padding = slots == len(last_tokens) - 1
        return DraftRows(last_tokens[slots], length + 1, bounds, padding, block_tables[:, :width][slots], hidden[slots])

    def draft_slots(
        self, block_tables: Tensor, positions: Tensor, bounds: Tensor, padding: Tensor, *, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Slot mapping and KV lengths, both `[R]`, of a batch with one token in each row. The token is at the row's
        position, or at the row's bound if the bound is smaller. Padding rows write nothing and have length 0.
        """
        positions = torch.minimum(positions, bounds)  # rule: drafting-stays-in-the-blocks-of-its-row
        block_ids = block_tables.gather(1, (positions // block_tokens)[:, None]).squeeze(1).to(torch.int64)
        slot_mapping = block_ids * block_tokens + positions % block_tokens
        return torch.where(padding, -1, slot_mapping), torch.where(padding, 0, positions + 1)

    def penalise(
        self,
        logits: Tensor,
        slots: Tensor,
        sampling: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        drafted: Tensor | None,
    ) -> Tensor:
        """The logits with the penalties of their request slots applied, float32 `[N, V]`. Float32 logits may be
        overwritten.

        slots           `[N]`
        output_counts   int32 `[S, V]`
        in_prompt       bool `[S, V]`: whether the token is in the prompt
        drafted         `[N, K]`: the drafts before each row of logits, padded with -1. The penalties count them as
                        output tokens
        """
        rules = SamplingTensors(sampling)
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

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf. Overwrites `logits`, `[N, V]`.

        rows    `[M]`: the rows of logits to change
        masks   int32 `[M, ceil(V / 32)]`, on a GPU in mapped host memory: bit i of word w is set if the row may get
                token 32 w + i
        """
        bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
        for row, words in zip(rows, masks, strict=True):  # row by row: a table of all rows would not stay in the cache
            forbidden = ((words[:, None] >> bits) & 1 == 0).view(-1)[: logits.shape[1]]
            logits[row].masked_fill_(forbidden, -torch.inf)

    def draw(
        self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor, *, typical: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample one token for each row of logits. Returns the tokens, `[N]`, and whether the logits of each row are
        finite, bool `[N]`; if not, the token is 0.

        slots            `[N]`
        output_indices   `[N]`: number of the request's outputs before this token
        typical          some row has `typical_p` below 1; False: the option is not read
        """
        rules = SamplingTensors(sampling)
        tokens, finite = self.argmax(logits)
        random_rows = (finite & (rules["temperature"][slots] > 0)).nonzero().squeeze(1)
        if len(random_rows):
            chosen = logits if len(random_rows) == len(tokens) else logits[random_rows]
            drawn = _draw_random(chosen, slots[random_rows], output_indices[random_rows], rules, typical=typical)
            tokens = tokens.index_copy(0, random_rows, drawn)
        return tokens, finite

    def advance(
        self,
        tokens: Tensor,
        positions: Tensor,
        drafts: Tensor | None,
        hidden: Tensor | None,
        state: SlotTensors,
        *,
        sampling_rows: Tensor,
        first_logits: Tensor,
        slots: Tensor,
        cu_seqlens_q: Tensor,
        decodes: int,
    ) -> Tensor:
        """Verify drafts, and update the request slots of rows that sample; `state` is overwritten. Returns the accept
        lengths, `[B]`: the number of tokens by which each of these rows advances. Padding rows change only the padding
        slot.

        tokens          `[N]`: the sampled token of each row of logits
        positions       `[N]`: position of the token whose logits these are
        drafts          `[decodes or fewer, K]`: drafts of the first rows; None: the step has no drafts
        hidden          `[N, hidden_size]`: hidden states of these tokens; None: they are not kept
        sampling_rows   `[B]`: indices of the rows that sample, padded with -1
        first_logits    `[B]`: for each of these rows, the index of its first row of logits
        decodes         number of decode rows, which are the first rows
        """
        row, padding = sampling_rows.clamp(min=0), sampling_rows < 0
        # rule: padding-rows-sample-no-token
        slot = torch.where(padding, len(state.last_tokens) - 1, slots[row])
        width = 0 if drafts is None else drafts.shape[1]
        num_drafts = torch.zeros_like(row)
        if width:
            num_drafts = torch.where(row < decodes, cu_seqlens_q[row + 1] - cu_seqlens_q[row] - 1, num_drafts)
        # Indices of the logits of each row; a row with fewer drafts repeats its last index.
        number = torch.arange(width + 1, device=row.device)
        logit = first_logits[:, None] + torch.minimum(number, num_drafts[:, None])
        logit = logit.clamp(max=len(tokens) - 1)
        drawn, accepted = tokens[logit], torch.ones_like(row)
        if drafts is not None:
            # rule: only-verified-drafts-are-accepted
            accepted = accept_lengths(drafts[row.clamp(max=len(drafts) - 1)], drawn, num_drafts)
            accepted = torch.where(padding, 1, accepted)
        last = (accepted - 1)[:, None]
        taken = number < accepted[:, None]
        # rule: sampled-token-stays-on-the-device, last-token-is-the-last-accepted-one
        state.last_tokens[slot] = drawn.gather(1, last).squeeze(1)
        if ignored_column := max(0, state.history.shape[1] - 1):
            start = torch.where(padding, 0, positions[logit[:, 0]])
            state.lengths[slot] = start + accepted  # rule: length-is-published-by-its-step
            column = torch.where(taken, start[:, None] + 1 + number, ignored_column).clamp(max=ignored_column)
            # rule: accepted-run-is-published-before-the-next-step-reads-it
            state.history[slot[:, None], column] = drawn.to(torch.int32)
            if hidden is not None:
                # rule: hidden-state-is-of-the-last-accepted-token
                state.hidden[slot] = hidden[logit.gather(1, last).squeeze(1)]
        if state.output_counts is not None:
            # rule: accepted-tokens-count-for-later-penalties
            counted = (taken & SamplingTensors(state.sampling).penalised[slot][:, None]).to(torch.int32)
            state.output_counts.index_put_((slot[:, None], drawn), counted, accumulate=True)
        return accepted

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        """The hidden state of the token before each packed token, `[T, hidden_size]`.

        hidden     `[T, hidden_size]`: hidden states of this step
        by_slot    `[S, hidden_size]`: hidden states of request slots
        by_block   `[blocks, hidden_size]`: hidden states of blocks
        """
        sources = rows.hidden_sources[:, None]
        first = torch.where(sources == FROM_SLOT, by_slot[rows.slots], 0)
        first = torch.where(sources >= 0, by_block[rows.hidden_sources.clamp(min=0)], first)
        starts, stops, nowhere = rows.cu_seqlens_q[:-1], rows.cu_seqlens_q[1:], len(hidden)
        shifted = torch.cat([hidden[-1:], hidden])  # one row more, which takes the writes of rows without tokens
        return shifted.index_copy(0, torch.where(stops > starts, starts, nowhere), first)[:nowhere]

    def keep_hidden(
        self,
        hidden: Tensor,
        rows: PackedRows,
        by_slot: Tensor,
        by_block: Tensor,
        *,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tokens: int,
    ) -> None:
        """Write the hidden state of each complete block's last token to `by_block`, and of each row's last token to
        `by_slot`. The last block of `by_block` takes writes to be ignored.
        """
        completes = ((positions + 1) % block_tokens == 0) & (slot_mapping >= 0)
        # rule: hidden-state-is-written-to-its-block
        by_block[torch.where(completes, slot_mapping // block_tokens, len(by_block) - 1)] = hidden
        # rule: next-chunk-reads-the-hidden-state-of-the-last-chunk
        by_slot[rows.slots] = hidden[(rows.cu_seqlens_q[1:] - 1).clamp(min=0)]


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


def _draw_random(
    logits: Tensor, slots: Tensor, output_indices: Tensor, rules: SamplingTensors, *, typical: bool
) -> Tensor:
    """Ids `[R]`, sampled by inverse CDF, for finite rows whose temperature is not 0."""
    # The maximum is subtracted first, so that ratios do not overflow at any temperature.
    ratios = logits.float()
    logs = (ratios - ratios.amax(-1, keepdim=True)).mul_(
        _column(1 / rules["temperature"][slots].clamp(SMALLEST, LARGEST))
    )
    ratios = logs.exp() if typical else logs.exp_()
    weights = (ratios * UNIT).to(torch.int64)
    _filter(weights, ratios, rules["top_k"][slots], rules["top_p"][slots], rules["min_p"][slots])
    if typical:
        keep_typical(weights, ratios, logs, rules["typical_p"][slots])
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


def keep_typical(weights: Tensor, ratios: Tensor, logs: Tensor, typical_p: Tensor) -> None:
    """Set the weights of tokens that `typical_p` drops to 0, in place: those whose surprise, minus the logarithm of
    their probability, is farthest from its mean, the entropy (Meister et al. 2023). `logs`: logarithms of `ratios`.

    A logarithm of a ratio differs from one of a probability by a constant of the row, so both have the same distance
    from their mean.
    """
    is_kept, total = weights > 0, weights.sum(-1, keepdim=True)
    logs = torch.where(is_kept, logs, 0)
    mean = (ratios * logs * UNIT).to(torch.int64).sum(-1, keepdim=True).double() / total.double()
    # Distances are below 64. The keys are floats in [0, 1] as well, in the opposite order.
    one = torch.tensor(1.0).view(torch.int32)
    keys = (one.to(logs.device) - ((logs - mean.float()).abs() / 64).view(torch.int32)).view(torch.float32)
    threshold = filter_threshold(keys, weights, total * typical_p.unsqueeze(-1))
    _drop_below(torch.where(typical_p.unsqueeze(-1) < 1, threshold, 0), weights, keys)


def _drop_below(threshold: Tensor, weights: Tensor, ratios: Tensor) -> None:
    weights.masked_fill_(ratios < threshold, 0)


def _column(values: Tensor) -> Tensor:
    return values.to(torch.float32).unsqueeze(-1)


def accept_lengths(drafts: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
    """Accept length of each row: the number of its leading accepted drafts plus one, int64 `[R]`, from 1 to K + 1. A
    draft is accepted if it equals the token that the model samples at its position.

    Each sample uses the random number of its output position, whether there is a draft or not. So drafts change how
    early a token is sampled, but not which token: a request gets the same tokens as without drafts, greedy or sampled.
    A deterministic draft is accepted with the probability that the model gives it, as in rejection sampling (Leviathan
    et al. 2023). docs/decisions/0019-drafts-decide-when-and-never-which.md describes the disadvantage for sampled
    drafts.

    drafts       int64 `[R, K]`; row r has `num_drafts[r]` drafts, and the other values of the row are ignored
    sampled      int64 `[R, K + 1]`: the tokens that the model samples after the row's last token and after each draft

    No host sync.
    """
    index = torch.arange(drafts.shape[1], device=drafts.device)
    accepted = (drafts == sampled[:, :-1]) & (index < num_drafts[:, None])
    return 1 + accepted.to(torch.int64).cumprod(1).sum(1)
