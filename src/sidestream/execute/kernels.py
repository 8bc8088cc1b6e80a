"""Kernels of what a captured pass does beside the model: each does at once what torch would launch tens of kernels for. Need triton.

A step of a small model is as long as its launches are many. Launched on the current stream; nothing is read back. What they compute is what
the torch code that calls them on a GPU computes elsewhere, to the bit: that is what tests hold them against.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(128)
# Parts of a frame, or of what a flight brings with it: where one begins depends on the others, and is no reason to compile another variant.
_NUMBERS = ["tokens", "positions", "token_rows", "kv_lens", "rows", "places", "blocks", "draws", "firsts", "starts", "origins", "slots"]
# Logits that a program looks at at once.
WIDE = tl.constexpr(4096)
# See `execute/draw.py` and `execute/rules.py`.
_UNIT = tl.constexpr(2.0**40)
_NO_WEIGHT = tl.constexpr(28.0)  # exp(-28) is less than 2**-40
_SMALLEST = tl.constexpr(1e-30)
_RULES = tl.constexpr(9)
_GOLDEN, _FIRST, _SECOND = tl.constexpr(-7046029254386353131), tl.constexpr(-4658895280553007687), tl.constexpr(-7723592293110705685)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_NUMBERS)
def change_tables(places, blocks, tables, count):
    """Write each block at its flat place; none at -1. Grid (tiles,)."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    place = tl.load(places + at, mask=at < count, other=-1)
    tl.store(tables + place, tl.load(blocks + at, mask=at < count, other=0).to(tl.int32), mask=place >= 0)


@triton.jit(do_not_specialize=["num_tokens", "nobody", "width", "num_drafts", "size"], do_not_specialize_on_alignment=_NUMBERS)
def inputs(
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
    nobody,
    width,
    num_drafts,
    size,
    DRAFTS: tl.constexpr,
):
    """Of a tile of tokens, or behind those of one row. Grid (tiles + rows,)."""
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
        somebody = real & (row != nobody)
        block = tl.load(tables + row * width + position // size, mask=somebody, other=0).to(tl.int64)
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
            held = tl.load(tables + number * width + column, mask=column < width)
            tl.store(to_tables + index * width + column, held, mask=column < width)


@triton.jit(do_not_specialize=["nobody", "width", "hidden_size"], do_not_specialize_on_alignment=_NUMBERS)
def standing(
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
    to_nobody,
    to_tables,
    to_hidden,
    nobody,
    width,
    hidden_size,
):
    """Where one row that decodes is, how far it has room, and what it is drafted from. Grid (rows,)."""
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
    tl.store(to_nobody + at, (row == nobody).to(tl.uint8))
    for begin in range(0, width, LANES):
        column = begin + tl.arange(0, LANES)
        tl.store(to_tables + at * width + column, tl.load(tables + row * width + column, mask=column < width), mask=column < width)
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(hidden + row * hidden_size + lane, mask=lane < hidden_size)
        tl.store(to_hidden + at * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(do_not_specialize=["size", "width"], do_not_specialize_on_alignment=["positions", "bounds", "nobody"])
def one_token_each(tables, positions, bounds, nobody, slots, kv_lens, size, width, PADDED: tl.constexpr):
    """Where one row's token goes: at its position, or at its bound if that is before. Grid (rows,)."""
    at = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.load(positions + at), tl.load(bounds + at))
    slot = tl.load(tables + at * width + position // size).to(tl.int64) * size + position % size
    kv_len = position + 1
    if PADDED:
        if tl.load(nobody + at) != 0:
            slot, kv_len = slot * 0 - 1, kv_len * 0
    tl.store(slots + at, slot)
    tl.store(kv_lens + at, kv_len)


@triton.jit(do_not_specialize=["width", "stride", "most"], do_not_specialize_on_alignment=_NUMBERS)
def penalise(logits, rows, reals, counts, in_prompt, drafted, to, width, stride, most):
    """Logits of one place less the penalties of its row. Grid (places, parts)."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = at < width
    row = tl.load(rows + place)
    repetition = tl.load(reals + row * _RULES + 4)
    presence = tl.load(reals + row * _RULES + 5).to(tl.float32)
    frequency = tl.load(reals + row * _RULES + 6).to(tl.float32)
    value = tl.load(logits + place * stride + at, mask=real, other=0.0).to(tl.float32)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
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
def _key(value, SHIFT: tl.constexpr):
    """A number with the order of a float32, without the bits that values of the type that it was read from do not have."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _power_of_key(key, top, heat, SHIFT: tl.constexpr):
    key = (key << SHIFT).to(tl.int32)
    if key < 0:
        key = (key | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return _power(key.to(tl.float32, bitcast=True), top, heat)


@triton.jit
def _power(value, top, heat):
    return tl.exp(tl.math.div_rn(value - top, heat))


@triton.jit
def _weight(power):
    return (power * _UNIT).to(tl.int64)


@triton.jit
def _floor(own, width, top, heat, low, high, limit, COUNTED: tl.constexpr, SHIFT: tl.constexpr):
    """The smallest power whose strictly larger ones measure less than the limit: weights, or tokens if COUNTED. `high` is large enough for that."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        above_first, above_second, above_third = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
        for begin in range(0, width, WIDE):
            at = begin + tl.arange(0, WIDE)
            value = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
            key = _key(value, SHIFT)
            measure = (at < width).to(tl.int64) if COUNTED else _weight(_power(value, top, heat))
            above_first += tl.where(key > first, measure, 0)
            above_second += tl.where(key > second, measure, 0)
            above_third += tl.where(key > third, measure, 0)
        by_first = tl.sum(above_first, 0).to(tl.float64) < limit
        by_second = tl.sum(above_second, 0).to(tl.float64) < limit
        by_third = tl.sum(above_third, 0).to(tl.float64) < limit
        high = tl.where(by_first, first, tl.where(by_second, second, tl.where(by_third, third, high)))
        low = tl.where(by_first, low, tl.where(by_second, first, tl.where(by_third, second, third)))
    return _power_of_key(high, top, heat, SHIFT)


@triton.jit
def _mass(own, width, top, heat, floor):
    """What the tokens weigh whose power reaches the floor."""
    held = tl.zeros([WIDE], tl.int64)
    for begin in range(0, width, WIDE):
        at = begin + tl.arange(0, WIDE)
        power = _power(tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32), top, heat)
        held += tl.where(power >= floor, _weight(power), 0)
    return tl.sum(held, 0)


@triton.jit
def _shifted(value, bits: tl.constexpr):
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit(do_not_specialize=["width", "stride"], do_not_specialize_on_alignment=[*_NUMBERS, "indices", "finite"])
def draw(logits, rows, indices, finite, rules, reals, tokens, width, stride, SHIFT: tl.constexpr):
    """One place: instead of the likeliest token, which is there, the one that its row's rules and random number draw. Grid (places,).

    SHIFT   bits of a float32 that are 0 in every number of the logits' type
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    temperature = tl.load(reals + row * _RULES)
    if (temperature > 0) & (tl.load(finite + place) != 0):
        own = logits + place * stride
        top = tl.load(own + tl.load(tokens + place)).to(tl.float32)
        heat = tl.maximum(temperature, _SMALLEST).to(tl.float32)
        low, high = _key(top - _NO_WEIGHT * heat, SHIFT) - 1, _key(top, SHIFT)
        top_k = tl.load(rules + row * _RULES + 1)
        top_p = tl.load(reals + row * _RULES + 2)
        floor = tl.load(reals + row * _RULES + 3).to(tl.float32)
        kept = floor * 0.0
        if (top_k > 0) & (top_k < width):
            kept = _floor(own, width, top, heat, low, high, top_k.to(tl.float64), True, SHIFT)
        if top_p < 1:
            limit = _mass(own, width, top, heat, kept).to(tl.float64) * top_p
            kept = tl.maximum(kept, _floor(own, width, top, heat, low, high, limit, False, SHIFT))
        floor = tl.maximum(floor, kept)
        total = _mass(own, width, top, heat, floor)
        number = tl.load(rules + row * _RULES + 7) + tl.load(indices + place) * _GOLDEN + _GOLDEN
        number = (number ^ _shifted(number, 30)) * _FIRST
        number = (number ^ _shifted(number, 27)) * _SECOND
        number = _shifted(number ^ _shifted(number, 31), 11)
        target = tl.minimum((total.to(tl.float64) * (number.to(tl.float64) * 1.1102230246251565e-16)).to(tl.int64), total - 1)
        before, begin, chosen = total * 0, 0, total * 0 - 1
        while (chosen < 0) & (begin < width):
            at = begin + tl.arange(0, WIDE)
            power = _power(tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32), top, heat)
            weight = tl.where(power >= floor, _weight(power), 0)
            here = tl.sum(weight, 0)
            if before + here > target:
                chosen = begin + tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int64), 0)
            before += here
            begin += WIDE
        tl.store(tokens + place, chosen)


@triton.jit(do_not_specialize=["decodes", "proposed", "width", "hidden_size", "vocab_size"], do_not_specialize_on_alignment=_NUMBERS)
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
    """One row that samples: how far it goes, and its state. Grid (rows,); nothing of padding changes."""
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
            rules = reals + row * _RULES
            if (tl.load(rules + 4) != 1) | (tl.load(rules + 5) != 0) | (tl.load(rules + 6) != 0):
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


@triton.jit(do_not_specialize=["num_rows", "stride", "block_stride", "hidden_size"], do_not_specialize_on_alignment=_NUMBERS)
def before(hidden, starts, rows, origins, by_row, by_block, to, num_rows, stride, block_stride, hidden_size):
    """The hidden state before one token. Grid (tokens,)."""
    token = tl.program_id(0)
    at, begins = token * 0, token * 0  # the row that it is of, and whether it is its first
    for begin in range(0, num_rows, LANES):
        row = begin + tl.arange(0, LANES)
        start = tl.load(starts + row, mask=row < num_rows, other=0)
        stop = tl.load(starts + row + 1, mask=row < num_rows, other=0)
        at += tl.sum(((stop <= token) & (row < num_rows)).to(tl.int32))
        begins += tl.sum(((start == token) & (stop > token)).to(tl.int32))
    source = hidden + tl.maximum(token - 1, 0).to(tl.int64) * stride
    something = token >= 0
    if begins > 0:
        origin = tl.load(origins + at)
        something = origin >= -1
        source = by_row + tl.load(rows + at) * hidden_size
        if origin >= 0:
            source = by_block + origin * block_stride
    for begin in range(0, hidden_size, LANES):
        lane = begin + tl.arange(0, LANES)
        values = tl.load(source + lane, mask=(lane < hidden_size) & something, other=0.0)
        tl.store(to + token.to(tl.int64) * hidden_size + lane, values, mask=lane < hidden_size)


@triton.jit(do_not_specialize=["num_tokens", "stride", "block_stride", "hidden_size", "size"], do_not_specialize_on_alignment=_NUMBERS)
def keep(hidden, positions, slots, starts, rows, by_row, by_block, num_tokens, stride, block_stride, hidden_size, size):
    """One token's hidden state into its block, or behind those a row's last one into its row. Grid (tokens + rows,)."""
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
            tl.store(target + lane, tl.load(hidden + token * stride + lane, mask=lane < hidden_size), mask=lane < hidden_size)
