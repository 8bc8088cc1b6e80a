"""Triton kernels for the work of a step outside the model. Each kernel replaces tens of launches of torch, and launches
take most of the time of a small step.

They are launched on the current stream, and the host reads no device values, so CUDA graphs may capture them. Their
results are bit-equal to those of `ops/torch_ops.py`, except for exponentials and penalties; tests compare both.
`ops/interface.py` explains rows, request slots and shapes.

Sampling compares tokens by their power: the token's probability divided by that of the row's likeliest token. The
weight of a token is its power as a whole number. A filter (top-k, top-p, min-p) drops all tokens whose power is below
its floor.
"""

import triton
import triton.language as tl

from sidestream.ops.rules import COLUMNS

LANES = tl.constexpr(128)
# Arguments that are parts of one buffer with all inputs of a step. The address of a part depends on the sizes of the
# other parts, so Triton must not compile variants for its alignment.
_NUMBERS = [
    "tokens",
    "positions",
    "token_rows",
    "kv_lens",
    "rows",
    "places",
    "blocks",
    "draws",
    "firsts",
    "starts",
    "origins",
    "slots",
]
# Number of logits that a program processes at once. Triton compiles a variant for sizes that are multiples of 16, with
# wide loads; this pays off here, because vocabulary size and strides do not change.
WIDE = tl.constexpr(4096)
# The same constants as in `ops/torch_sampling.py` and `ops/rules.py`.
_UNIT = tl.constexpr(2.0**40)
# The floor of a filter (see `search`) is found digit by digit, with two bits per digit. For each digit, one pass over
# all logits measures the mass (number of tokens, or sum of weights) above each of three candidates.
BITS, DIGITS = tl.constexpr(2), tl.constexpr(4)
# Maximum number of parts of a row's logits. One program processes one part, tile by tile.
PARTS = tl.constexpr(64)
TILE = tl.constexpr(2048)
_SMALLEST, _LARGEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)
_RULES = tl.constexpr(len(COLUMNS))
_TEMPERATURE = tl.constexpr(COLUMNS["temperature"])
_TOP_K = tl.constexpr(COLUMNS["top_k"])
_TOP_P = tl.constexpr(COLUMNS["top_p"])
_MIN_P = tl.constexpr(COLUMNS["min_p"])
_REPETITION = tl.constexpr(COLUMNS["repetition_penalty"])
_PRESENCE = tl.constexpr(COLUMNS["presence_penalty"])
_FREQUENCY = tl.constexpr(COLUMNS["frequency_penalty"])
_PENALISED = tl.constexpr(COLUMNS["penalised"])
_SEED = tl.constexpr(COLUMNS["seed"])
_GOLDEN, _FIRST, _SECOND = (
    tl.constexpr(-7046029254386353131),
    tl.constexpr(-4658895280553007687),
    tl.constexpr(-7723592293110705685),
)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_NUMBERS)
def update_block_tables(places, blocks, tables, count):
    """Write each block id at its flat index in the block tables; an index of -1 writes nothing. Grid (tiles,)."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    place = tl.load(places + at, mask=at < count, other=-1)
    tl.store(tables + place, tl.load(blocks + at, mask=at < count, other=0).to(tl.int32), mask=place >= 0)


@triton.jit(
    do_not_specialize=["num_tokens", "padding_slot", "table_width", "width", "num_drafts", "size"],
    do_not_specialize_on_alignment=_NUMBERS,
)
def resolve_inputs(
    tokens,
    positions,
    token_rows,
    kv_lens,
    rows,
    last,
    lengths,
    tables,
    drafts,
    to_tokens,
    to_positions,
    to_kv_lens,
    to_slots,
    to_tables,
    num_tokens,
    padding_slot,
    table_width,
    width,
    num_drafts,
    size,
    DRAFTS: tl.constexpr,
):
    """See `Ops.resolve_inputs`. The first programs handle one tile of tokens each, the other programs one row each.
    Grid (tiles + rows,).
    """
    tiles = tl.cdiv(num_tokens, LANES)
    if tl.program_id(0) < tiles:
        at = tl.program_id(0) * LANES + tl.arange(0, LANES)
        real = at < num_tokens
        row = tl.load(token_rows + at, mask=real, other=0)
        token = tl.load(tokens + at, mask=real, other=0)
        chosen = tl.where(token < 0, tl.load(last + row, mask=real, other=0), token)
        if DRAFTS:
            drafted = real & (token < -1)
            chosen = tl.where(drafted, tl.load(drafts + row * num_drafts - 2 - token, mask=drafted, other=0), chosen)
        position = tl.load(positions + at, mask=real, other=0)
        position = tl.where(position < 0, tl.load(lengths + row, mask=real, other=0) - 1 - position, position)
        somebody = real & (row != padding_slot)
        block = tl.load(tables + row * table_width + position // size, mask=somebody, other=0).to(tl.int64)
        tl.store(to_tokens + at, chosen, mask=real)
        tl.store(to_positions + at, position, mask=real)
        tl.store(to_slots + at, tl.where(somebody, block * size + position % size, -1), mask=real)
    else:
        index = tl.program_id(0).to(tl.int64) - tiles
        number = tl.load(rows + index)
        kv_len = tl.load(kv_lens + index)
        if kv_len < 0:
            kv_len = tl.load(lengths + number) - kv_len
        tl.store(to_kv_lens + index, kv_len)
        for begin in range(0, width, LANES):
            column = begin + tl.arange(0, LANES)
            held = tl.load(tables + number * table_width + column, mask=column < width)
            tl.store(to_tables + index * width + column, held, mask=column < width)


@triton.jit(
    do_not_specialize=["padding_slot", "table_width", "width", "hidden_size"], do_not_specialize_on_alignment=_NUMBERS
)
def draft_rows(
    positions,
    starts,
    kv_lens,
    rows,
    last,
    lengths,
    tables,
    hidden,
    to_tokens,
    to_lengths,
    to_bounds,
    to_padding,
    to_tables,
    to_hidden,
    padding_slot,
    table_width,
    width,
    hidden_size,
):
    """The state of one decode row before drafting. Grid (rows,)."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    length = tl.load(positions + tl.load(starts + at))
    if length < 0:
        length = tl.load(lengths + row)
    bound = tl.load(kv_lens + at)
    if bound < 0:
        bound = length - bound
    tl.store(to_tokens + at, tl.load(last + row))
    tl.store(to_lengths + at, length + 1)
    tl.store(to_bounds + at, tl.maximum(bound - 1, 0))
    tl.store(to_padding + at, (row == padding_slot).to(tl.uint8))
    for begin in range(0, width, LANES):
        column = begin + tl.arange(0, LANES)
        tl.store(
            to_tables + at * width + column,
            tl.load(tables + row * table_width + column, mask=column < width),
            mask=column < width,
        )
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(hidden + row * hidden_size + lane, mask=lane < hidden_size)
        tl.store(to_hidden + at * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(do_not_specialize=["size", "width"], do_not_specialize_on_alignment=["positions", "bounds", "padding"])
def draft_slots(tables, positions, bounds, padding, slots, kv_lens, size, width):
    """The slot and KV length of one row's token, at its position, or at its bound if that is smaller. Grid (rows,)."""
    at = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.load(positions + at), tl.load(bounds + at))
    slot = tl.load(tables + at * width + position // size).to(tl.int64) * size + position % size
    kv_len = position + 1
    if tl.load(padding + at) != 0:
        slot, kv_len = slot * 0 - 1, kv_len * 0
    tl.store(slots + at, slot)
    tl.store(kv_lens + at, kv_len)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=_NUMBERS)
def penalise(logits, rows, reals, counts, in_prompt, drafted, to, width, stride, most):
    """Apply the penalties of a row's request slot to a part of the row's logits. Grid (rows of logits, parts)."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = at < width
    row = tl.load(rows + place)
    rules = reals + row * _RULES
    value = tl.load(logits + place * stride + at, mask=real, other=0.0).to(tl.float32)
    if tl.load(rules + _PENALISED) != 0:
        repetition = tl.load(rules + _REPETITION)
        presence = tl.load(rules + _PRESENCE).to(tl.float32)
        frequency = tl.load(rules + _FREQUENCY).to(tl.float32)
        count = tl.load(counts + row * width + at, mask=real, other=0)
        for number in range(most):
            count += (tl.load(drafted + place * most + number) == at).to(tl.int32)
        prompt = tl.load(in_prompt + row * width + at, mask=real, other=0)
        divisor = tl.maximum(repetition, _SMALLEST).to(tl.float32)
        repeated = tl.where(value > 0, tl.math.div_rn(value, divisor), value * divisor)
        value = tl.where((count > 0) | (prompt != 0), repeated, value)
        value = value - count.to(tl.float32) * frequency - (count > 0).to(tl.float32) * presence
    tl.store(to + place * width + at, value, mask=real)


@triton.jit
def _place_in_order(value, SPARE: tl.constexpr):
    """Map float32 to whole numbers of 0 or more, in the same order. The low SPARE bits are dropped, because they are
    zero in every value of the logits' dtype.
    """
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> SPARE


@triton.jit
def _power_at(place, top, cold, SPARE: tl.constexpr):
    """The power of the value that `_place_in_order` maps to `place`."""
    whole = (place << SPARE).to(tl.uint32)
    bits = tl.where((whole >> 31) != 0, whole & 0x7FFFFFFF, (whole | ((1 << SPARE) - 1)) ^ 0xFFFFFFFF)
    return _power(bits.to(tl.float32, bitcast=True), top, cold)


@triton.jit
def _power(value, top, cold):
    return tl.exp((value - top) * cold)


@triton.jit
def _weight(power):
    return (power * _UNIT).to(tl.int64)


@triton.jit
def _next_digits(begun, masses, limit, turns_left):
    """The digits of a floor that are known: `begun`, and the digit that follows from the masses of the last turn."""
    at = tl.arange(0, PARTS)[:, None] * DIGITS + tl.arange(0, DIGITS)[None, :]
    above = tl.sum(tl.load(masses + at), 0).to(tl.float64)
    return begun + (tl.sum((above >= limit).to(tl.int64), 0) << (BITS * turns_left))


@triton.jit
def _asked(place, rows, finite, reals, logits, tokens, stride):
    """For one row of logits: whether its token is sampled at random, the offset of its options, its largest logit, and
    1 / temperature.
    """
    rules = tl.load(rows + place) * _RULES
    temperature = tl.load(reals + rules + _TEMPERATURE)
    random = (temperature > 0) & (tl.load(finite + place) != 0)
    top = tl.load(logits + place * stride + tl.load(tokens + place)).to(tl.float32)
    return random, rules, top, (1 / tl.minimum(tl.maximum(temperature, _SMALLEST), _LARGEST)).to(tl.float32)


@triton.jit
def _limit(place, rules, numbers, reals, sums, width, COUNTED: tl.constexpr):
    """Whether top-k (if COUNTED) or top-p drops anything, and its limit: the mass above the floor is below the
    limit.
    """
    if COUNTED:
        top_k = tl.load(numbers + rules + _TOP_K)
        drops, limit = (top_k > 0) & (top_k < width), top_k.to(tl.float64)
    else:
        top_p = tl.load(reals + rules + _TOP_P)
        drops, limit = top_p < 1, tl.sum(tl.load(sums + place * PARTS + tl.arange(0, PARTS)), 0).to(tl.float64) * top_p
    return drops, limit


@triton.jit(do_not_specialize=["places", "turn", "turns"], do_not_specialize_on_alignment=_NUMBERS)
def search(
    logits, rows, finite, numbers, reals, tokens, sums, masses, found, width, stride, span, places, turn, turns,
    COUNTED: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """One turn of the search for a filter's floor. Measures, in one part of a row of logits, the mass above each
    candidate for the next digit. Grid (rows of logits, parts).

    The floor is the smallest value (by its place in the order of floats) for which the mass of all larger values is
    below the filter's limit. The mass is a number of tokens if COUNTED (top-k), else a sum of weights (top-p). Each
    launch finds one digit, the highest first, from the masses that the previous launch wrote.

    span     number of logits of a part
    masses   int64 `[2, rows of logits, PARTS, DIGITS]`, initially zero: masses of even turns and of odd turns
    found    int64 `[turns, rows of logits]`: the digits that were known before each turn
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    random, rules, top, cold = _asked(place, rows, finite, reals, logits, tokens, stride)
    drops, limit = _limit(place, rules, numbers, reals, sums, width, COUNTED)
    if random & drops:
        own = masses + place * PARTS * DIGITS
        begun = place * 0
        if turn > 0:
            before = own + (turn - 1) % 2 * places * PARTS * DIGITS
            begun = _next_digits(tl.load(found + (turn - 1) * places + place), before, limit, turns - turn)
        if part == 0:
            tl.store(found + turn * places + place, begun)
        step = (place * 0 + 1) << (BITS * (turns - 1 - turn))
        first, second, third = (
            (begun + step).to(tl.uint32),
            (begun + 2 * step).to(tl.uint32),
            (begun + 3 * step).to(tl.uint32),
        )
        kind: tl.constexpr = tl.int32 if COUNTED else tl.int64
        above_first, above_second, above_third = tl.zeros([TILE], kind), tl.zeros([TILE], kind), tl.zeros([TILE], kind)
        for begin in range(part * span, tl.minimum((part + 1) * span, width), TILE):
            at = begin + tl.arange(0, TILE)
            value = tl.load(logits + place * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
            in_order = _place_in_order(value, SPARE)
            measure = (at < width).to(tl.int32) if COUNTED else _weight(_power(value, top, cold))
            above_first += tl.where(in_order >= first, measure, 0)
            above_second += tl.where(in_order >= second, measure, 0)
            above_third += tl.where(in_order >= third, measure, 0)
        own += (turn % 2 * places * PARTS + part) * DIGITS
        tl.store(own, tl.sum(above_first, 0))
        tl.store(own + 1, tl.sum(above_second, 0))
        tl.store(own + 2, tl.sum(above_third, 0))


@triton.jit
def _floor(place, top, cold, limit, masses, found, places, turns, SPARE: tl.constexpr):
    """The floor of a filter, as a power."""
    last = masses + ((turns - 1) % 2 * places + place) * PARTS * DIGITS
    digits = _next_digits(tl.load(found + (turns - 1) * places + place), last, limit, 0)
    return _power_at(digits, top, cold, SPARE)


@triton.jit(do_not_specialize=["places", "turns"], do_not_specialize_on_alignment=_NUMBERS)
def weigh(
    logits, rows, finite, numbers, reals, tokens, sums, masses_k, found_k, masses_p, found_p, to, floors, width, stride,
    span, places, turns, FINAL: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Add up weights in one part of a row of logits: those of the tokens that top-k keeps or, if FINAL, that all
    filters keep. Grid (rows of logits, parts).

    floors   float32 `[rows of logits]`, written if FINAL: tokens with lower powers are dropped
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    random, rules, top, cold = _asked(place, rows, finite, reals, logits, tokens, stride)
    drops_p, limit_p = _limit(place, rules, numbers, reals, sums, width, False)
    if random & (drops_p | FINAL):
        floor = cold * 0
        drops, limit = _limit(place, rules, numbers, reals, sums, width, True)
        if drops:
            floor = _floor(place, top, cold, limit, masses_k, found_k, places, turns, SPARE)
        if FINAL:
            if drops_p:
                floor = tl.maximum(floor, _floor(place, top, cold, limit_p, masses_p, found_p, places, turns, SPARE))
            floor = tl.maximum(floor, tl.load(reals + rules + _MIN_P).to(tl.float32))
            if part == 0:
                tl.store(floors + place, floor)
        weights = tl.zeros([TILE], tl.int64)
        for begin in range(part * span, tl.minimum((part + 1) * span, width), TILE):
            at = begin + tl.arange(0, TILE)
            power = _power(
                tl.load(logits + place * stride + at, mask=at < width, other=float("-inf")).to(tl.float32), top, cold
            )
            weights += tl.where(power >= floor, _weight(power), 0)
        tl.store(to + place * PARTS + part, tl.sum(weights, 0))


@triton.jit
def _shifted(value, bits: tl.constexpr):
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit(do_not_specialize_on_alignment=[*_NUMBERS, "indices"])
def pick(logits, rows, indices, finite, numbers, reals, tokens, sums, floors, width, stride, span):
    """Sample the token for one row of logits: the first id whose cumulative weight exceeds the row's random number
    times the total weight. The kernel finds first the id's part, then its tile, then the id. Grid (rows of logits,).
    """
    place = tl.program_id(0).to(tl.int64)
    random, rules, top, cold = _asked(place, rows, finite, reals, logits, tokens, stride)
    if random:
        number = tl.load(numbers + rules + _SEED) + tl.load(indices + place) * _GOLDEN + _GOLDEN
        number = (number ^ _shifted(number, 30)) * _FIRST
        number = (number ^ _shifted(number, 27)) * _SECOND
        number = _shifted(number ^ _shifted(number, 31), 11)
        weights = tl.load(sums + place * PARTS + tl.arange(0, PARTS))
        total = tl.sum(weights, 0)
        target = tl.minimum(
            (total.to(tl.float64) * (number.to(tl.float64) * 1.1102230246251565e-16)).to(tl.int64), total - 1
        )
        passed = tl.cumsum(weights, 0) <= target
        target -= tl.sum(tl.where(passed, weights, 0), 0)
        floor, begin, chosen = tl.load(floors + place), tl.sum(passed.to(tl.int32), 0) * span, total * 0 - 1
        while (chosen < 0) & (begin < width):
            at = begin + tl.arange(0, TILE)
            power = _power(
                tl.load(logits + place * stride + at, mask=at < width, other=float("-inf")).to(tl.float32), top, cold
            )
            weight = tl.where(power >= floor, _weight(power), 0)
            here = tl.sum(weight, 0)
            if here > target:
                chosen = begin + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int64), 0)
            target -= here
            begin += TILE
        tl.store(tokens + place, chosen, mask=chosen >= 0)


@triton.jit(
    do_not_specialize=["decodes", "proposed", "width", "hidden_size", "vocab_size"],
    do_not_specialize_on_alignment=_NUMBERS,
)
def advance(
    draws,
    firsts,
    rows,
    starts,
    tokens,
    positions,
    drafts,
    hidden,
    last,
    lengths,
    history,
    to_hidden,
    counts,
    reals,
    output_counts,
    decodes,
    proposed,
    width,
    hidden_size,
    vocab_size,
    KEEPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Verify the drafts of one row that samples, and update the state of its request slot. Does nothing for padding.
    Grid (rows,).
    """
    program = tl.program_id(0)
    at = tl.load(draws + program)
    count = program * 0 + 1
    if at >= 0:
        row = tl.load(rows + at)
        first = tl.load(firsts + program)
        num_drafts = at * 0
        if at < decodes:
            num_drafts = tl.minimum(tl.load(starts + at + 1) - tl.load(starts + at) - 1, proposed)
        right = num_drafts >= 0
        for number in range(proposed):
            if number < num_drafts:
                right = right & (tl.load(drafts + at * proposed + number) == tl.load(tokens + first + number))
                count += right.to(tl.int32)
        tl.store(last + row, tl.load(tokens + first + count - 1))
        if COUNTED:
            if tl.load(reals + row * _RULES + _PENALISED) != 0:
                for number in range(count):
                    tl.atomic_add(output_counts + row * vocab_size + tl.load(tokens + first + number), 1)
        if KEEPS:
            start = tl.load(positions + first)
            tl.store(lengths + row, start + count)
            for number in range(count):
                position = start + 1 + number
                if position < width - 1:
                    tl.store(history + row * width + position, tl.load(tokens + first + number).to(tl.int32))
        if HIDDEN:
            for begin in range(0, hidden_size, LANES):
                lane = begin + tl.arange(0, LANES)
                values = tl.load(hidden + (first + count - 1) * hidden_size + lane, mask=lane < hidden_size)
                tl.store(to_hidden + row * hidden_size + lane, values, mask=lane < hidden_size)
    tl.store(counts + program, count.to(tl.int64))


@triton.jit(
    do_not_specialize=["num_rows", "stride", "block_stride", "hidden_size"], do_not_specialize_on_alignment=_NUMBERS
)
def previous_hidden(hidden, starts, rows, origins, by_row, by_block, to, num_rows, stride, block_stride, hidden_size):
    """The hidden state of the token before one token. Grid (tokens,)."""
    token = tl.program_id(0)
    at, begins = token * 0, token * 0  # the token's row, and whether the token is the row's first
    for begin in range(0, num_rows, LANES):
        row = begin + tl.arange(0, LANES)
        start = tl.load(starts + row, mask=row < num_rows, other=0)
        stop = tl.load(starts + row + 1, mask=row < num_rows, other=0)
        at += tl.sum(((stop <= token) & (row < num_rows)).to(tl.int32))
        begins += tl.sum(((start == token) & (stop > token)).to(tl.int32))
    source = hidden + tl.maximum(token - 1, 0).to(tl.int64) * stride
    # Number of values to read; 0 if there is no state. A bool does not work: Triton 3.9's interpreter broadcasts it to
    # integers, which cannot be a mask.
    known = hidden_size
    if begins > 0:
        origin = tl.load(origins + at)
        known = tl.where(origin >= -1, hidden_size, 0)
        source = by_row + tl.load(rows + at) * hidden_size
        if origin >= 0:
            source = by_block + origin * block_stride
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(source + lane, mask=lane < known, other=0.0)
        tl.store(to + token.to(tl.int64) * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(
    do_not_specialize=["num_tokens", "stride", "block_stride", "hidden_size", "size"],
    do_not_specialize_on_alignment=_NUMBERS,
)
def keep_hidden(
    hidden, positions, slots, starts, rows, by_row, by_block, num_tokens, stride, block_stride, hidden_size, size
):
    """Write the hidden state of one token that completes a block to this block. The programs after the tokens write the
    last hidden state of one row to its request slot. Grid (tokens + rows,).
    """
    program = tl.program_id(0)
    if program < num_tokens:
        token = program.to(tl.int64)
        slot = tl.load(slots + token)
        wanted = ((tl.load(positions + token) + 1) % size == 0) & (slot >= 0)
        target = by_block + tl.maximum(slot, 0) // size * block_stride
    else:
        at = program - num_tokens
        stop = tl.load(starts + at + 1)
        token = tl.maximum(stop - 1, 0)
        wanted = stop > tl.load(starts + at)
        target = by_row + tl.load(rows + at) * hidden_size
    if wanted:
        for begin in range(0, hidden_size, LANES):
            lane = begin + tl.arange(0, LANES)
            tl.store(
                target + lane, tl.load(hidden + token * stride + lane, mask=lane < hidden_size), mask=lane < hidden_size
            )
