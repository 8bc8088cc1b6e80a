"""The Triton kernels of a gated delta rule for rows with many tokens: 64 tokens of a row at a time, by matrix products.
Launched by `gated_delta` only.

Token t of a row changes the state S by its key k, its value v, its strength b and its decay exp(g):

    u_t = b_t (v_t - exp(g_t) S_(t-1)^T k_t)        S_t = exp(g_t) S_(t-1) + k_t u_t^T        output: S_t^T q_t

For a chunk of tokens after the state S, with G_t the sum of the chunk's g up to t, all u follow from one system of
linear equations, whose matrix does not depend on S:

    (I + A) U = b (V - exp(G) K S)        A_tj = b_t exp(G_t - G_j) (k_t . k_j) for j < t

`solve` computes the inverse of I + A for all chunks at once, and `advance` follows the state from chunk to chunk.
Tokens after the end of a row have keys and values of zero and no decay, so they change no state.
"""

import triton
import triton.language as tl

from sidestream.attention.triton.gated_delta_kernels import log_decay_of, strength_of


@triton.jit
def _unit_vectors(mixed, at, inside, first, SIZE: tl.constexpr, channels: tl.constexpr):
    """Queries or keys of one head, of length 1, `[tokens, SIZE]`."""
    place = at[:, None] * channels + first + tl.arange(0, SIZE)[None, :]
    found = tl.load(mixed + place, mask=inside[:, None], other=0.0).to(tl.float32)
    return found * tl.rsqrt(tl.sum(found * found, 1) + 1e-6)[:, None]


@triton.jit
def _gates(beta, alpha, a_log, dt_bias, at, inside, stride, head):
    """Strengths of the tokens, and sums of the logarithms of their decays up to each token."""
    strength = strength_of(tl.load(beta + at * stride + head, mask=inside, other=0.0))
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    log_decay = log_decay_of(tl.load(alpha + at * stride + head, mask=inside, other=0.0), bias, rate)
    return strength, tl.cumsum(tl.where(inside, log_decay, 0.0), 0)


@triton.jit(do_not_specialize=["num_decode"])
def solve(
    mixed,
    beta,
    alpha,
    a_log,
    dt_bias,
    inverses,
    starts,
    lengths,
    num_decode,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the inverse of I + A for one chunk of one row and one head. Grid (rows, value heads, chunks).

    With D the blocks of 8 tokens on the diagonal of A, and E what is below them, I + A = (I + D) (I + N) where
    N = (I + D)^-1 E. As D^8 and N^8 are zero, (I - X) (I + X^2) (I + X^4) inverts both factors I + X. Powers of larger
    blocks could have terms of thousands, which cancel.
    """
    row, head = num_decode + tl.program_id(0), tl.program_id(1)
    length, first = tl.load(lengths + row), tl.program_id(2) * TOKENS
    if first < length:
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
        index = tl.arange(0, TOKENS)
        inside = first + index < length
        at = (tl.load(starts + row) + first + index).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        k = _unit_vectors(mixed, at, inside, (KEY_HEADS + key_head) * KEY_SIZE, KEY_SIZE, channels)
        strength, sums = _gates(beta, alpha, a_log, dt_bias, at, inside, stride, head)
        below = index[:, None] > index[None, :]
        decay = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        matrix = tl.where(below, products * decay * strength[:, None], 0.0)
        unit = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        near = index[:, None] // 8 == index[None, :] // 8
        diagonal = tl.where(near, matrix, 0.0)
        inverse = unit - diagonal
        power = tl.dot(diagonal, diagonal, input_precision=PRECISION)
        inverse += tl.dot(inverse, power, input_precision=PRECISION)
        power = tl.dot(power, power, input_precision=PRECISION)
        inverse += tl.dot(inverse, power, input_precision=PRECISION)
        rest = tl.dot(inverse, tl.where(near, 0.0, matrix), input_precision=PRECISION)
        power = tl.dot(rest, rest, input_precision=PRECISION)
        whole = unit - rest
        whole += tl.dot(whole, power, input_precision=PRECISION)
        power = tl.dot(power, power, input_precision=PRECISION)
        whole += tl.dot(whole, power, input_precision=PRECISION)
        inverse = tl.dot(whole, inverse, input_precision=PRECISION)
        place = (at[:, None] * VALUE_HEADS + head) * TOKENS + index[None, :]
        tl.store(inverses + place, inverse, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_decode"])
def advance(
    mixed,
    beta,
    alpha,
    a_log,
    dt_bias,
    inverses,
    out,
    states,
    reads,
    writes,
    starts,
    lengths,
    num_decode,
    stride,
    state_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Advances some columns of one head's state of one row over the row's tokens, and computes the outputs for these
    columns. Grid (rows, value heads, parts of columns).
    """
    row, head = num_decode + tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
        key, value = tl.arange(0, KEY_SIZE), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        index = tl.arange(0, TOKENS)
        place = head * KEY_SIZE * VALUE_SIZE + key[:, None] * VALUE_SIZE + value[None, :]
        state = tl.load(states + tl.load(reads + row) * state_stride + place)
        start = tl.load(starts + row)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        for first in range(0, length, TOKENS):
            inside = first + index < length
            at = (start + first + index).to(tl.int64)
            q = _unit_vectors(mixed, at, inside, key_head * KEY_SIZE, KEY_SIZE, channels) * scale
            k = _unit_vectors(mixed, at, inside, (KEY_HEADS + key_head) * KEY_SIZE, KEY_SIZE, channels)
            begin = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
            v = tl.load(mixed + at[:, None] * channels + begin + value[None, :], mask=inside[:, None], other=0.0)
            strength, sums = _gates(beta, alpha, a_log, dt_bias, at, inside, stride, head)
            total = tl.sum(tl.where(index == TOKENS - 1, sums, 0.0), 0)
            columns = (at[:, None] * VALUE_HEADS + head) * TOKENS + index[None, :]
            inverse = tl.load(inverses + columns, mask=inside[:, None], other=0.0)
            decay = tl.exp(sums)[:, None]
            seen = tl.dot(k, state, input_precision=PRECISION) * decay
            wanted = strength[:, None] * (v.to(tl.float32) - seen)
            u = tl.dot(inverse, wanted, input_precision=PRECISION)
            since = index[:, None] >= index[None, :]
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights *= tl.exp(tl.where(since, sums[:, None] - sums[None, :], 0.0))
            weights = tl.where(since, weights, 0.0)
            found = tl.dot(q, state, input_precision=PRECISION) * decay
            found = tl.dot(weights, u, found, input_precision=PRECISION)
            target = (at[:, None] * VALUE_HEADS + head) * VALUE_SIZE + value[None, :]
            tl.store(out + target, found.to(v.dtype), mask=inside[:, None])
            left = k * tl.exp(total - sums)[:, None]
            state = tl.dot(tl.trans(left), u, state * tl.exp(total), input_precision=PRECISION)
        tl.store(states + tl.load(writes + row) * state_stride + place, state)
