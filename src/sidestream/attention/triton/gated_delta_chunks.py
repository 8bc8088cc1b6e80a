"""The Triton kernels of a gated delta rule for rows with many tokens: 64 tokens of a row at a time, by matrix products.
Launched by `gated_delta` only.

Token t of a row changes the state S by its key k, its value v, its strength b and its decay exp(g):

    u_t = b_t (v_t - exp(g_t) S_(t-1)^T k_t)        S_t = exp(g_t) S_(t-1) + k_t u_t^T        output: S_t^T q_t

For a chunk of tokens after the state S, with G_t the sum of the chunk's g up to t, all u follow from one system of
linear equations, whose matrix does not depend on S:

    (I + A) U = b (V - exp(G) K S)        A_tj = b_t exp(G_t - G_j) (k_t . k_j) for j < t

`solve` computes the inverse of I + A for all chunks at once, and `advance` computes the state from chunk to chunk.
Tokens after the end of a row have keys and values of zero and no decay, so they change no state.
"""

import triton
import triton.language as tl

from sidestream.attention.triton.gated_delta_kernels import log_decay_of, strength_of


@triton.jit
def _unit_vectors(mixed, tokens, mask, first, SIZE: tl.constexpr, channels: tl.constexpr):
    """Queries or keys of one head, of length 1, `[tokens, SIZE]`."""
    offsets = tokens[:, None] * channels + first + tl.arange(0, SIZE)[None, :]
    vectors = tl.load(mixed + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, 1) + 1e-6)[:, None]


@triton.jit
def _gates(beta, alpha, a_log, dt_bias, tokens, mask, stride, head):
    """Strengths of the tokens, and sums of the logarithms of their decays up to each token."""
    strength = strength_of(tl.load(beta + tokens * stride + head, mask=mask, other=0.0))
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    log_decay = log_decay_of(tl.load(alpha + tokens * stride + head, mask=mask, other=0.0), bias, rate)
    return strength, tl.cumsum(tl.where(mask, log_decay, 0.0), 0)


@triton.jit(do_not_specialize=["num_decode"])
def solve(
    mixed,
    beta,
    alpha,
    a_log,
    dt_bias,
    inverses,
    cu_seqlens_q,
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
        mask = first + index < length
        tokens = (tl.load(cu_seqlens_q + row) + first + index).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        k = _unit_vectors(mixed, tokens, mask, (KEY_HEADS + key_head) * KEY_SIZE, KEY_SIZE, channels)
        strength, sums = _gates(beta, alpha, a_log, dt_bias, tokens, mask, stride, head)
        is_below = index[:, None] > index[None, :]
        decay = tl.exp(tl.where(is_below, sums[:, None] - sums[None, :], 0.0))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        matrix = tl.where(is_below, products * decay * strength[:, None], 0.0)
        identity = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        same_block = index[:, None] // 8 == index[None, :] // 8
        diagonal = tl.where(same_block, matrix, 0.0)
        inverse = identity - diagonal
        power = tl.dot(diagonal, diagonal, input_precision=PRECISION)
        inverse += tl.dot(inverse, power, input_precision=PRECISION)
        power = tl.dot(power, power, input_precision=PRECISION)
        inverse += tl.dot(inverse, power, input_precision=PRECISION)
        off_diagonal = tl.dot(inverse, tl.where(same_block, 0.0, matrix), input_precision=PRECISION)
        power = tl.dot(off_diagonal, off_diagonal, input_precision=PRECISION)
        outer_inverse = identity - off_diagonal
        outer_inverse += tl.dot(outer_inverse, power, input_precision=PRECISION)
        power = tl.dot(power, power, input_precision=PRECISION)
        outer_inverse += tl.dot(outer_inverse, power, input_precision=PRECISION)
        inverse = tl.dot(outer_inverse, inverse, input_precision=PRECISION)
        offsets = (tokens[:, None] * VALUE_HEADS + head) * TOKENS + index[None, :]
        tl.store(inverses + offsets, inverse, mask=mask[:, None])


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
    cu_seqlens_q,
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
        offsets = head * KEY_SIZE * VALUE_SIZE + key[:, None] * VALUE_SIZE + value[None, :]
        state = tl.load(states + tl.load(reads + row) * state_stride + offsets)
        start = tl.load(cu_seqlens_q + row)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        for first in range(0, length, TOKENS):
            mask = first + index < length
            tokens = (start + first + index).to(tl.int64)
            q = _unit_vectors(mixed, tokens, mask, key_head * KEY_SIZE, KEY_SIZE, channels) * scale
            k = _unit_vectors(mixed, tokens, mask, (KEY_HEADS + key_head) * KEY_SIZE, KEY_SIZE, channels)
            begin = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
            v = tl.load(mixed + tokens[:, None] * channels + begin + value[None, :], mask=mask[:, None], other=0.0)
            strength, sums = _gates(beta, alpha, a_log, dt_bias, tokens, mask, stride, head)
            total = tl.sum(tl.where(index == TOKENS - 1, sums, 0.0), 0)
            columns = (tokens[:, None] * VALUE_HEADS + head) * TOKENS + index[None, :]
            inverse = tl.load(inverses + columns, mask=mask[:, None], other=0.0)
            decay = tl.exp(sums)[:, None]
            predicted = tl.dot(k, state, input_precision=PRECISION) * decay
            corrections = strength[:, None] * (v.to(tl.float32) - predicted)
            u = tl.dot(inverse, corrections, input_precision=PRECISION)
            is_causal = index[:, None] >= index[None, :]
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights *= tl.exp(tl.where(is_causal, sums[:, None] - sums[None, :], 0.0))
            weights = tl.where(is_causal, weights, 0.0)
            output = tl.dot(q, state, input_precision=PRECISION) * decay
            output = tl.dot(weights, u, output, input_precision=PRECISION)
            target = (tokens[:, None] * VALUE_HEADS + head) * VALUE_SIZE + value[None, :]
            tl.store(out + target, output.to(v.dtype), mask=mask[:, None])
            decayed_keys = k * tl.exp(total - sums)[:, None]
            state = tl.dot(tl.trans(decayed_keys), u, state * tl.exp(total), input_precision=PRECISION)
        tl.store(states + tl.load(writes + row) * state_stride + offsets, state)
