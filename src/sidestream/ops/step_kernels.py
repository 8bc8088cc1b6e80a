"""Triton kernels for the work of a step outside the model. Each kernel replaces tens of launches of torch, and launches
take most of the time of a small step.

They are launched on the current stream, and the host reads no device values, so CUDA graphs may capture them. Their
results are bit-equal to those of `ops/torch_ops.py`, except for exponentials and penalties; tests compare both.
`ops/interface.py` explains rows, request slots and shapes.

Sampling compares tokens by their probability ratio: the token's probability divided by that of the row's likeliest
token. The weight of a token is this ratio as a whole number. A filter (top-k, top-p, min-p) drops all tokens whose
ratio is below its minimum ratio.
"""

import triton
import triton.language as tl

from sidestream.ops.rules import COLUMNS

LANES = tl.constexpr(128)
# Arguments that are parts of one buffer with all inputs of a step. The address of a part depends on the sizes of the
# other parts, so Triton must not compile variants for its alignment.
_STEP_INPUTS = [
    "tokens",
    "positions",
    "token_slots",
    "kv_lens",
    "slots",
    "indices",
    "block_ids",
    "sampling_rows",
    "first_logits",
    "first_tokens",
    "cu_seqlens_q",
    "hidden_sources",
    "slot_mapping",
]
# Number of logits to which a program applies penalties. Triton compiles a variant for sizes that are multiples of 16,
# with wide loads; this pays off here, because vocabulary size and strides do not change.
PENALTY_TILE = tl.constexpr(4096)
MASK_TILE = tl.constexpr(128)  # words of 32 tokens
# The same constants as in `ops/torch_ops.py` and `ops/rules.py`.
_UNIT = tl.constexpr(2.0**40)
# `search_threshold` finds a filter's threshold as a radix select does: digit by digit, with two bits per digit. For
# each digit, one pass over all logits computes the totals (numbers of tokens, or sums of weights) from each of the
# digit's candidates 1, 2 and 3 on.
DIGIT_BITS, DIGIT_VALUES = tl.constexpr(2), tl.constexpr(4)
# Maximum number of parts of a row's logits. One program processes one part, tile by tile.
PARTS = tl.constexpr(64)
TILE = tl.constexpr(2048)
_SMALLEST, _LARGEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)
_NUM_PARAMS = tl.constexpr(len(COLUMNS))
_TEMPERATURE = tl.constexpr(COLUMNS["temperature"])
_TOP_K = tl.constexpr(COLUMNS["top_k"])
_TOP_P = tl.constexpr(COLUMNS["top_p"])
_MIN_P = tl.constexpr(COLUMNS["min_p"])
_TYPICAL_P = tl.constexpr(COLUMNS["typical_p"])
_REPETITION = tl.constexpr(COLUMNS["repetition_penalty"])
_PRESENCE = tl.constexpr(COLUMNS["presence_penalty"])
_FREQUENCY = tl.constexpr(COLUMNS["frequency_penalty"])
_PENALISED = tl.constexpr(COLUMNS["penalised"])
_SEED = tl.constexpr(COLUMNS["seed"])
# The constants of splitmix64, a hash function.
_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = (
    tl.constexpr(-7046029254386353131),
    tl.constexpr(-4658895280553007687),
    tl.constexpr(-7723592293110705685),
)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_STEP_INPUTS)
def update_block_tables(indices, block_ids, block_tables, count):
    """Write each block id at its flat index in the block tables; an index of -1 writes nothing. Grid (tiles,)."""
    offsets = tl.program_id(0) * LANES + tl.arange(0, LANES)
    index = tl.load(indices + offsets, mask=offsets < count, other=-1)
    block_id = tl.load(block_ids + offsets, mask=offsets < count, other=0)
    tl.store(block_tables + index, block_id.to(tl.int32), mask=index >= 0)


@triton.jit(
    do_not_specialize=["num_tokens", "padding_slot", "table_width", "width", "num_drafts", "block_tokens"],
    do_not_specialize_on_alignment=_STEP_INPUTS,
)
def resolve_inputs(
    tokens, positions, token_slots, kv_lens, slots, last_tokens, lengths, block_tables, drafts, out_tokens,
    out_positions, out_kv_lens, out_slot_mapping, out_block_tables, num_tokens, padding_slot, table_width, width,
    num_drafts, block_tokens, HAS_DRAFTS: tl.constexpr,
):  # fmt: skip
    """See `Ops.resolve_inputs`. The first programs handle one tile of tokens each, the other programs one row each.
    Grid (tiles + rows,).
    """
    tiles = tl.cdiv(num_tokens, LANES)
    if tl.program_id(0) < tiles:
        offsets = tl.program_id(0) * LANES + tl.arange(0, LANES)
        mask = offsets < num_tokens
        token_slot = tl.load(token_slots + offsets, mask=mask, other=0)
        packed = tl.load(tokens + offsets, mask=mask, other=0)
        token = tl.where(packed < 0, tl.load(last_tokens + token_slot, mask=mask, other=0), packed)
        if HAS_DRAFTS:
            is_draft = mask & (packed < -1)
            token = tl.where(
                is_draft, tl.load(drafts + token_slot * num_drafts - 2 - packed, mask=is_draft, other=0), token
            )
        position = tl.load(positions + offsets, mask=mask, other=0)
        position = tl.where(position < 0, tl.load(lengths + token_slot, mask=mask, other=0) - 1 - position, position)
        is_real_row = mask & (token_slot != padding_slot)
        block_ids = block_tables + token_slot * table_width
        block_id = tl.load(block_ids + position // block_tokens, mask=is_real_row, other=0).to(tl.int64)
        tl.store(out_tokens + offsets, token, mask=mask)
        tl.store(out_positions + offsets, position, mask=mask)
        slot_mapping = tl.where(is_real_row, block_id * block_tokens + position % block_tokens, -1)
        tl.store(out_slot_mapping + offsets, slot_mapping, mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64) - tiles
        slot = tl.load(slots + row)
        kv_len = tl.load(kv_lens + row)
        if kv_len < 0:
            kv_len = tl.load(lengths + slot) - kv_len
        tl.store(out_kv_lens + row, kv_len)
        for begin in range(0, width, LANES):
            column = begin + tl.arange(0, LANES)
            block_ids = tl.load(block_tables + slot * table_width + column, mask=column < width)
            tl.store(out_block_tables + row * width + column, block_ids, mask=column < width)


@triton.jit(
    do_not_specialize=["padding_slot", "table_width", "width", "hidden_size"],
    do_not_specialize_on_alignment=_STEP_INPUTS,
)
def draft_rows(
    positions, first_tokens, kv_lens, slots, last_tokens, lengths, block_tables, hidden, out_tokens, out_lengths,
    out_bounds, out_padding, out_block_tables, out_hidden, padding_slot, table_width, width, hidden_size,
):  # fmt: skip
    """The state of one decode row before drafting, see `Ops.draft_rows`. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    length = tl.load(positions + tl.load(first_tokens + row))
    if length < 0:
        length = tl.load(lengths + slot)
    bound = tl.load(kv_lens + row)
    if bound < 0:
        bound = length - bound
    tl.store(out_tokens + row, tl.load(last_tokens + slot))
    tl.store(out_lengths + row, length + 1)
    tl.store(out_bounds + row, tl.maximum(bound - 1, 0))
    tl.store(out_padding + row, (slot == padding_slot).to(tl.uint8))
    for begin in range(0, width, LANES):
        column = begin + tl.arange(0, LANES)
        tl.store(
            out_block_tables + row * width + column,
            tl.load(block_tables + slot * table_width + column, mask=column < width),
            mask=column < width,
        )
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(hidden + slot * hidden_size + lane, mask=lane < hidden_size)
        tl.store(out_hidden + row * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(
    do_not_specialize=["block_tokens", "width"], do_not_specialize_on_alignment=["positions", "bounds", "padding"]
)
def draft_slots(block_tables, positions, bounds, padding, slot_mapping, kv_lens, block_tokens, width):
    """The slot and KV length of one row's token. The token's position is limited to the row's bound. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.load(positions + row), tl.load(bounds + row))
    slot = (
        tl.load(block_tables + row * width + position // block_tokens).to(tl.int64) * block_tokens
        + position % block_tokens
    )
    kv_len = position + 1
    if tl.load(padding + row) != 0:
        slot, kv_len = slot * 0 - 1, kv_len * 0
    tl.store(slot_mapping + row, slot)
    tl.store(kv_lens + row, kv_len)


@triton.jit(do_not_specialize=["max_drafts"], do_not_specialize_on_alignment=_STEP_INPUTS)
def penalise(logits, slots, params_f64, output_counts, in_prompt, drafted, out, width, stride, max_drafts):
    """Apply the penalties of a request slot to a part of one row of logits. Grid (rows of logits, parts)."""
    logit_row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * PENALTY_TILE + tl.arange(0, PENALTY_TILE)
    mask = token_ids < width
    slot = tl.load(slots + logit_row)
    params = params_f64 + slot * _NUM_PARAMS
    logit = tl.load(logits + logit_row * stride + token_ids, mask=mask, other=0.0).to(tl.float32)
    if tl.load(params + _PENALISED) != 0:
        repetition = tl.load(params + _REPETITION)
        presence = tl.load(params + _PRESENCE).to(tl.float32)
        frequency = tl.load(params + _FREQUENCY).to(tl.float32)
        count = tl.load(output_counts + slot * width + token_ids, mask=mask, other=0)
        for draft in range(max_drafts):
            count += (tl.load(drafted + logit_row * max_drafts + draft) == token_ids).to(tl.int32)
        prompt_token = tl.load(in_prompt + slot * width + token_ids, mask=mask, other=0)
        divisor = tl.maximum(repetition, _SMALLEST).to(tl.float32)
        repeated = tl.where(logit > 0, tl.math.div_rn(logit, divisor), logit * divisor)
        logit = tl.where((count > 0) | (prompt_token != 0), repeated, logit)
        logit = logit - count.to(tl.float32) * frequency - (count > 0).to(tl.float32) * presence
    tl.store(out + logit_row * width + token_ids, logit, mask=mask)


@triton.jit
def mask(logits, rows, masks, width, stride, words):
    """Set the logits of tokens that are not allowed to -inf. Grid (masks, parts of a row). Each program reads its words
    once, side by side, because they are in host memory.
    """
    number = tl.program_id(0).to(tl.int64)
    word_ids = tl.program_id(1) * MASK_TILE + tl.arange(0, MASK_TILE)
    word = tl.load(masks + number * words + word_ids, mask=word_ids < words, other=0)
    bits = tl.arange(0, 32)[None, :]
    token_ids = word_ids[:, None] * 32 + bits
    allowed = (word[:, None] >> bits) & 1
    row = tl.load(rows + number)
    tl.store(logits + row * stride + token_ids, float("-inf"), mask=(token_ids < width) & (allowed == 0))


@triton.jit
def _sort_key(value, UNUSED_BITS: tl.constexpr):
    """Map float32 to whole numbers of 0 or more, in the same order. The low UNUSED_BITS bits are dropped: they are
    zero in every value of the logits' dtype.
    """
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> UNUSED_BITS


@triton.jit
def _prob_ratio_at(key, max_logit, inv_temperature, UNUSED_BITS: tl.constexpr):
    """The probability ratio of the logit whose `_sort_key` is `key`."""
    key_bits = (key << UNUSED_BITS).to(tl.uint32)
    bits = tl.where((key_bits >> 31) != 0, key_bits & 0x7FFFFFFF, (key_bits | ((1 << UNUSED_BITS) - 1)) ^ 0xFFFFFFFF)
    return _prob_ratio(bits.to(tl.float32, bitcast=True), max_logit, inv_temperature)


@triton.jit
def _load_logits(logits, logit_row, token_ids, stride, width):
    return tl.load(logits + logit_row * stride + token_ids, mask=token_ids < width, other=float("-inf")).to(tl.float32)


@triton.jit
def _prob_ratio(logit, max_logit, inv_temperature):
    return tl.exp((logit - max_logit) * inv_temperature)


@triton.jit
def _weight(prob_ratio):
    return (prob_ratio * _UNIT).to(tl.int64)


@triton.jit
def _extend_threshold(threshold_prefix, totals_above, limit, digits_left):
    """Append the next digit of the threshold: the number of its candidates whose total reaches the limit."""
    offsets = tl.arange(0, PARTS)[:, None] * DIGIT_VALUES + tl.arange(0, DIGIT_VALUES)[None, :]
    above = tl.sum(tl.load(totals_above + offsets), 0).to(tl.float64)
    return threshold_prefix + (tl.sum((above >= limit).to(tl.int64), 0) << (DIGIT_BITS * digits_left))


@triton.jit
def _load_sampling_params(logit_row, slots, finite, params_f64, logits, tokens, stride):
    """For one row of logits: whether its token is sampled at random, the offset of its sampling options, its largest
    logit, and 1 / temperature.
    """
    params_offset = tl.load(slots + logit_row) * _NUM_PARAMS
    temperature = tl.load(params_f64 + params_offset + _TEMPERATURE)
    is_random = (temperature > 0) & (tl.load(finite + logit_row) != 0)
    max_logit = tl.load(logits + logit_row * stride + tl.load(tokens + logit_row)).to(tl.float32)
    inv_temperature = (1 / tl.minimum(tl.maximum(temperature, _SMALLEST), _LARGEST)).to(tl.float32)
    return is_random, params_offset, max_logit, inv_temperature


@triton.jit
def _load_limit(logit_row, params_offset, params_i64, params_f64, weight_sums, width, IS_TOP_K: tl.constexpr):
    """Whether top-k (if IS_TOP_K) or top-p drops any token, and its limit: k tokens, or p of the total weight."""
    if IS_TOP_K:
        top_k = tl.load(params_i64 + params_offset + _TOP_K)
        is_active, limit = (top_k > 0) & (top_k < width), top_k.to(tl.float64)
    else:
        top_p = tl.load(params_f64 + params_offset + _TOP_P)
        total = tl.sum(tl.load(weight_sums + logit_row * PARTS + tl.arange(0, PARTS)), 0)
        is_active, limit = top_p < 1, total.to(tl.float64) * top_p
    return is_active, limit


@triton.jit(do_not_specialize=["num_logit_rows", "digit", "num_digits"], do_not_specialize_on_alignment=_STEP_INPUTS)
def search_threshold(
    logits, slots, finite, params_i64, params_f64, tokens, weight_sums, totals_above, thresholds, width, stride,
    part_size, num_logit_rows, digit, num_digits,
    IS_TOP_K: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Find one digit of a filter's threshold. Grid (rows of logits, parts).

    Threshold: the lowest logit kept. All larger logits together hold less than k tokens (top-k) or less than p of the
    weight (top-p). Each launch handles one digit, the highest first. It appends the previous digit to the threshold,
    and writes the totals of one part of a row of logits from each candidate for its own digit on.

    part_size      number of logits of a part
    totals_above   int64 `[2, rows of logits, PARTS, DIGIT_VALUES]`, initially zero: the totals of even digits and of
                   odd digits, numbers of tokens if IS_TOP_K, else sums of weights
    thresholds     int64 `[num_digits, rows of logits]`: the threshold as far as it was known before each digit
    """
    logit_row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_random, params_offset, max_logit, inv_temperature = _load_sampling_params(
        logit_row, slots, finite, params_f64, logits, tokens, stride
    )
    is_active, limit = _load_limit(logit_row, params_offset, params_i64, params_f64, weight_sums, width, IS_TOP_K)
    if is_random & is_active:
        part_totals = totals_above + logit_row * PARTS * DIGIT_VALUES
        threshold_prefix = logit_row * 0
        if digit > 0:
            previous_totals = part_totals + (digit - 1) % 2 * num_logit_rows * PARTS * DIGIT_VALUES
            threshold_prefix = tl.load(thresholds + (digit - 1) * num_logit_rows + logit_row)
            threshold_prefix = _extend_threshold(threshold_prefix, previous_totals, limit, num_digits - digit)
        if part == 0:
            tl.store(thresholds + digit * num_logit_rows + logit_row, threshold_prefix)
        digit_unit = (logit_row * 0 + 1) << (DIGIT_BITS * (num_digits - 1 - digit))
        first, second, third = (
            (threshold_prefix + digit_unit).to(tl.uint32),
            (threshold_prefix + 2 * digit_unit).to(tl.uint32),
            (threshold_prefix + 3 * digit_unit).to(tl.uint32),
        )
        total_dtype: tl.constexpr = tl.int32 if IS_TOP_K else tl.int64
        zeros = tl.zeros([TILE], total_dtype)
        above_first, above_second, above_third = zeros, zeros, zeros
        for begin in range(part * part_size, tl.minimum((part + 1) * part_size, width), TILE):
            token_ids = begin + tl.arange(0, TILE)
            logit = _load_logits(logits, logit_row, token_ids, stride, width)
            key = _sort_key(logit, UNUSED_BITS)
            if IS_TOP_K:
                amount = (token_ids < width).to(tl.int32)
            else:
                amount = _weight(_prob_ratio(logit, max_logit, inv_temperature))
            above_first += tl.where(key >= first, amount, 0)
            above_second += tl.where(key >= second, amount, 0)
            above_third += tl.where(key >= third, amount, 0)
        part_totals += (digit % 2 * num_logit_rows * PARTS + part) * DIGIT_VALUES
        tl.store(part_totals, tl.sum(above_first, 0))
        tl.store(part_totals + 1, tl.sum(above_second, 0))
        tl.store(part_totals + 2, tl.sum(above_third, 0))


@triton.jit
def _min_ratio(
    logit_row, max_logit, inv_temperature, limit, totals_above, thresholds, num_logit_rows, num_digits,
    UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """A filter's threshold, as a probability ratio."""
    last_totals = totals_above + ((num_digits - 1) % 2 * num_logit_rows + logit_row) * PARTS * DIGIT_VALUES
    threshold_prefix = tl.load(thresholds + (num_digits - 1) * num_logit_rows + logit_row)
    threshold = _extend_threshold(threshold_prefix, last_totals, limit, 0)
    return _prob_ratio_at(threshold, max_logit, inv_temperature, UNUSED_BITS)


@triton.jit(do_not_specialize=["num_logit_rows", "num_digits"], do_not_specialize_on_alignment=_STEP_INPUTS)
def sum_weights(
    logits, slots, finite, params_i64, params_f64, tokens, weight_sums, totals_above_k, thresholds_k, totals_above_p,
    thresholds_p, out_sums, min_ratios, width, stride, part_size, num_logit_rows, num_digits,
    ALL_FILTERS: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Sum the weights in one part of a row of logits: of the tokens that top-k keeps or, if ALL_FILTERS, of those that
    all filters keep. Grid (rows of logits, parts).

    min_ratios   float32 `[rows of logits]`, written if ALL_FILTERS: tokens with lower probability ratios are dropped
    """
    logit_row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_random, params_offset, max_logit, inv_temperature = _load_sampling_params(
        logit_row, slots, finite, params_f64, logits, tokens, stride
    )
    is_active_p, limit_p = _load_limit(logit_row, params_offset, params_i64, params_f64, weight_sums, width, False)
    if is_random & (is_active_p | ALL_FILTERS):
        min_ratio = inv_temperature * 0
        is_active, limit = _load_limit(logit_row, params_offset, params_i64, params_f64, weight_sums, width, True)
        if is_active:
            min_ratio = _min_ratio(
                logit_row, max_logit, inv_temperature, limit, totals_above_k, thresholds_k, num_logit_rows, num_digits,
                UNUSED_BITS,
            )  # fmt: skip
        if ALL_FILTERS:
            if is_active_p:
                min_ratio_p = _min_ratio(
                    logit_row, max_logit, inv_temperature, limit_p, totals_above_p, thresholds_p, num_logit_rows,
                    num_digits, UNUSED_BITS,
                )  # fmt: skip
                min_ratio = tl.maximum(min_ratio, min_ratio_p)
            min_ratio = tl.maximum(min_ratio, tl.load(params_f64 + params_offset + _MIN_P).to(tl.float32))
            if part == 0:
                tl.store(min_ratios + logit_row, min_ratio)
        weights = tl.zeros([TILE], tl.int64)
        for begin in range(part * part_size, tl.minimum((part + 1) * part_size, width), TILE):
            token_ids = begin + tl.arange(0, TILE)
            logit = _load_logits(logits, logit_row, token_ids, stride, width)
            prob_ratio = _prob_ratio(logit, max_logit, inv_temperature)
            weights += tl.where(prob_ratio >= min_ratio, _weight(prob_ratio), 0)
        tl.store(out_sums + logit_row * PARTS + part, tl.sum(weights, 0))


@triton.jit
def _is_typical(logit, max_logit, inv_temperature, mean, max_distance):
    """Whether the logarithm of the probability ratio is near enough to its mean."""
    return tl.abs((logit - max_logit) * inv_temperature - mean) <= max_distance


@triton.jit(do_not_specialize=["num_logit_rows"], do_not_specialize_on_alignment=_STEP_INPUTS)
def keep_typical(
    logits, slots, finite, params_f64, tokens, min_ratios, weight_sums, mean_and_distance, width, stride, part_size,
    num_logit_rows,
):  # fmt: skip
    """For one row of logits, find the tokens that typical-p keeps of those that all other filters keep, and sum their
    weights in each part again. Grid (rows of logits,). One program reads all logits of its row 18 times: few requests
    ask for it. See `keep_typical` in `ops/torch_ops.py`.

    mean_and_distance   float32 `[2, rows of logits]`, written: the mean logarithm of the probability ratio, and the
                        largest distance from it that is kept. Infinity: every token is kept
    """
    logit_row = tl.program_id(0).to(tl.int64)
    is_random, params_offset, max_logit, inv_temperature = _load_sampling_params(
        logit_row, slots, finite, params_f64, logits, tokens, stride
    )
    typical_p = tl.load(params_f64 + params_offset + _TYPICAL_P)
    mean, max_distance = inv_temperature * 0, inv_temperature * 0 + float("inf")
    if is_random & (typical_p < 1):
        min_ratio = tl.load(min_ratios + logit_row)
        weights, log_sums = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
        for begin in range(0, width, TILE):
            logit = _load_logits(logits, logit_row, begin + tl.arange(0, TILE), stride, width)
            prob_ratio = _prob_ratio(logit, max_logit, inv_temperature)
            weight = tl.where(prob_ratio >= min_ratio, _weight(prob_ratio), 0)
            log = tl.where(weight > 0, (logit - max_logit) * inv_temperature, 0.0)
            weights += weight
            log_sums += (prob_ratio * log * _UNIT).to(tl.int64)
        total = tl.sum(weights, 0)
        limit = total.to(tl.float64) * typical_p
        mean = (tl.sum(log_sums, 0).to(tl.float64) / total.to(tl.float64)).to(tl.float32)
        # Bits of the largest distance: the fewest that hold the limit, digit by digit as in `search_threshold`, from
        # the complements, which are in the opposite order.
        threshold = total * 0
        for digit in range(32 // DIGIT_BITS):
            digit_unit = (total * 0 + 1) << (32 - DIGIT_BITS * (digit + 1))
            zeros = tl.zeros([TILE], tl.int64)
            above_first, above_second, above_third = zeros, zeros, zeros
            for begin in range(0, width, TILE):
                logit = _load_logits(logits, logit_row, begin + tl.arange(0, TILE), stride, width)
                prob_ratio = _prob_ratio(logit, max_logit, inv_temperature)
                weight = tl.where(prob_ratio >= min_ratio, _weight(prob_ratio), 0)
                distance = tl.abs((logit - max_logit) * inv_temperature - mean)
                key = 0xFFFFFFFF - distance.to(tl.uint32, bitcast=True).to(tl.int64)
                above_first += tl.where(key >= threshold + digit_unit, weight, 0)
                above_second += tl.where(key >= threshold + 2 * digit_unit, weight, 0)
                above_third += tl.where(key >= threshold + 3 * digit_unit, weight, 0)
            number = (tl.sum(above_first, 0).to(tl.float64) >= limit).to(tl.int64)
            number += (tl.sum(above_second, 0).to(tl.float64) >= limit).to(tl.int64)
            number += (tl.sum(above_third, 0).to(tl.float64) >= limit).to(tl.int64)
            threshold += number * digit_unit
        max_distance = (0xFFFFFFFF - threshold).to(tl.uint32).to(tl.float32, bitcast=True)
        for part in range(0, PARTS):
            weights = tl.zeros([TILE], tl.int64)
            for begin in range(part * part_size, tl.minimum((part + 1) * part_size, width), TILE):
                logit = _load_logits(logits, logit_row, begin + tl.arange(0, TILE), stride, width)
                prob_ratio = _prob_ratio(logit, max_logit, inv_temperature)
                is_kept = (prob_ratio >= min_ratio) & _is_typical(logit, max_logit, inv_temperature, mean, max_distance)
                weights += tl.where(is_kept, _weight(prob_ratio), 0)
            tl.store(weight_sums + logit_row * PARTS + part, tl.sum(weights, 0))
    tl.store(mean_and_distance + logit_row, mean)
    tl.store(mean_and_distance + num_logit_rows + logit_row, max_distance)


@triton.jit
def _shifted_right(value, bits: tl.constexpr):
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit(do_not_specialize=["num_logit_rows"], do_not_specialize_on_alignment=_STEP_INPUTS)
def sample_token(
    logits, slots, indices, finite, params_i64, params_f64, tokens, weight_sums, min_ratios, mean_and_distance, width,
    stride, part_size, num_logit_rows, IS_TYPICAL: tl.constexpr,
):  # fmt: skip
    """Sample the token for one row of logits: the first id whose cumulative weight exceeds the row's random number
    times the total weight. The kernel finds first the id's part, then its tile, then the id. Grid (rows of logits,).
    """
    logit_row = tl.program_id(0).to(tl.int64)
    is_random, params_offset, max_logit, inv_temperature = _load_sampling_params(
        logit_row, slots, finite, params_f64, logits, tokens, stride
    )
    if is_random:
        number = tl.load(params_i64 + params_offset + _SEED) + tl.load(indices + logit_row) * _GOLDEN + _GOLDEN
        number = (number ^ _shifted_right(number, 30)) * _MULTIPLIER_1
        number = (number ^ _shifted_right(number, 27)) * _MULTIPLIER_2
        number = _shifted_right(number ^ _shifted_right(number, 31), 11)
        weights = tl.load(weight_sums + logit_row * PARTS + tl.arange(0, PARTS))
        total = tl.sum(weights, 0)
        target = tl.minimum(
            (total.to(tl.float64) * (number.to(tl.float64) * 1.1102230246251565e-16)).to(tl.int64), total - 1
        )
        passed = tl.cumsum(weights, 0) <= target
        target -= tl.sum(tl.where(passed, weights, 0), 0)
        min_ratio = tl.load(min_ratios + logit_row)
        mean = tl.load(mean_and_distance + logit_row, mask=IS_TYPICAL, other=0.0)
        max_distance = tl.load(mean_and_distance + num_logit_rows + logit_row, mask=IS_TYPICAL, other=0.0)
        begin, chosen = tl.sum(passed.to(tl.int32), 0) * part_size, total * 0 - 1
        while (chosen < 0) & (begin < width):
            token_ids = begin + tl.arange(0, TILE)
            logit = _load_logits(logits, logit_row, token_ids, stride, width)
            prob_ratio = _prob_ratio(logit, max_logit, inv_temperature)
            weight = tl.where(prob_ratio >= min_ratio, _weight(prob_ratio), 0)
            if IS_TYPICAL:
                is_kept = _is_typical(logit, max_logit, inv_temperature, mean, max_distance)
                weight = tl.where(is_kept, weight, 0)
            here = tl.sum(weight, 0)
            if here > target:
                chosen = begin + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int64), 0)
            target -= here
            begin += TILE
        tl.store(tokens + logit_row, chosen, mask=chosen >= 0)


@triton.jit(
    do_not_specialize=["num_decodes", "max_drafts", "width", "hidden_size", "vocab_size"],
    do_not_specialize_on_alignment=_STEP_INPUTS,
)
def advance(
    sampling_rows, first_logits, slots, cu_seqlens_q, tokens, positions, drafts, hidden, last_tokens, lengths, history,
    out_hidden, accept_lengths, params_f64, output_counts, num_decodes, max_drafts, width, hidden_size, vocab_size,
    TRACKS_HISTORY: tl.constexpr, TRACKS_HIDDEN: tl.constexpr, COUNTS_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Verify the drafts of one row that samples, and update the state of its request slot. Does nothing for padding.
    Grid (rows,).
    """
    program = tl.program_id(0)
    row = tl.load(sampling_rows + program)
    accept_length = program * 0 + 1
    if row >= 0:
        slot = tl.load(slots + row)
        first = tl.load(first_logits + program)
        num_drafts = row * 0
        if row < num_decodes:
            num_drafts = tl.minimum(tl.load(cu_seqlens_q + row + 1) - tl.load(cu_seqlens_q + row) - 1, max_drafts)
        accepted = num_drafts >= 0
        for index in range(max_drafts):
            if index < num_drafts:
                accepted = accepted & (tl.load(drafts + row * max_drafts + index) == tl.load(tokens + first + index))
                accept_length += accepted.to(tl.int32)
        tl.store(last_tokens + slot, tl.load(tokens + first + accept_length - 1))
        if COUNTS_OUTPUTS:
            if tl.load(params_f64 + slot * _NUM_PARAMS + _PENALISED) != 0:
                for index in range(accept_length):
                    tl.atomic_add(output_counts + slot * vocab_size + tl.load(tokens + first + index), 1)
        if TRACKS_HISTORY:
            start = tl.load(positions + first)
            tl.store(lengths + slot, start + accept_length)
            for index in range(accept_length):
                position = start + 1 + index
                if position < width - 1:
                    tl.store(history + slot * width + position, tl.load(tokens + first + index).to(tl.int32))
        if TRACKS_HIDDEN:
            for begin in range(0, hidden_size, LANES):
                lane = begin + tl.arange(0, LANES)
                values = tl.load(hidden + (first + accept_length - 1) * hidden_size + lane, mask=lane < hidden_size)
                tl.store(out_hidden + slot * hidden_size + lane, values, mask=lane < hidden_size)
    tl.store(accept_lengths + program, accept_length.to(tl.int64))


@triton.jit(
    do_not_specialize=["num_rows", "stride", "block_stride", "hidden_size"], do_not_specialize_on_alignment=_STEP_INPUTS
)
def previous_hidden(
    hidden, cu_seqlens_q, slots, hidden_sources, by_slot, by_block, out, num_rows, stride, block_stride, hidden_size
):
    """The hidden state of the token before one token. Grid (tokens,)."""
    token = tl.program_id(0)
    row, is_first = token * 0, token * 0  # the token's row, and whether the token is the row's first
    for begin in range(0, num_rows, LANES):
        rows = begin + tl.arange(0, LANES)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        stops = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
        row += tl.sum(((stops <= token) & (rows < num_rows)).to(tl.int32))
        is_first += tl.sum(((starts == token) & (stops > token)).to(tl.int32))
    source = hidden + tl.maximum(token - 1, 0).to(tl.int64) * stride
    # Number of values to read; 0 if there is no state. A bool does not work: Triton 3.9's interpreter broadcasts it to
    # integers, which cannot be a mask.
    num_values = hidden_size
    if is_first > 0:
        hidden_source = tl.load(hidden_sources + row)
        num_values = tl.where(hidden_source >= -1, hidden_size, 0)
        source = by_slot + tl.load(slots + row) * hidden_size
        if hidden_source >= 0:
            source = by_block + hidden_source * block_stride
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(source + lane, mask=lane < num_values, other=0.0)
        tl.store(out + token.to(tl.int64) * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(
    do_not_specialize=["num_tokens", "stride", "block_stride", "hidden_size", "block_tokens"],
    do_not_specialize_on_alignment=_STEP_INPUTS,
)
def keep_hidden(
    hidden, positions, slot_mapping, cu_seqlens_q, slots, by_slot, by_block, num_tokens, stride, block_stride,
    hidden_size, block_tokens,
):  # fmt: skip
    """Write the hidden state of one token that completes a block to this block. The programs after the tokens write the
    last hidden state of one row to its request slot. Grid (tokens + rows,).
    """
    program = tl.program_id(0)
    if program < num_tokens:
        token = program.to(tl.int64)
        slot = tl.load(slot_mapping + token)
        is_kept = ((tl.load(positions + token) + 1) % block_tokens == 0) & (slot >= 0)
        target = by_block + tl.maximum(slot, 0) // block_tokens * block_stride
    else:
        row = program - num_tokens
        stop = tl.load(cu_seqlens_q + row + 1)
        token = tl.maximum(stop - 1, 0)
        is_kept = stop > tl.load(cu_seqlens_q + row)
        target = by_slot + tl.load(slots + row) * hidden_size
    if is_kept:
        for begin in range(0, hidden_size, LANES):
            lane = begin + tl.arange(0, LANES)
            tl.store(
                target + lane, tl.load(hidden + token * stride + lane, mask=lane < hidden_size), mask=lane < hidden_size
            )
