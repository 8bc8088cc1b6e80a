"""The Triton kernels of a layer with a gated delta rule (Qwen3-Next, Qwen3.5): convolution, recurrence, and norm. They
read and write states in a pool. Launched by `gated_delta` only.

One program computes a part of a decode row's state; a row is one request's part of the batch. The program reads the
part once, and replays the accepted drafts of the last step. Then it applies the row's own tokens one by one. It writes
the part as it is after the last token that is not a draft. So states are neither gathered nor copied, and a row with
drafts reads its state only once. Rows with many tokens have kernels of their own (`gated_delta_chunks.py`).

Programs find the tokens of their row on the device, so a captured CUDA graph serves every batch within its launch
bounds.
"""

import triton
import triton.language as tl


@triton.jit
def _input(index, row, replayed, start, new, kept, state, new_stride, kept_stride, kept_tokens, channel, mask):
    """One input of the convolution, for some channels. `number` counts from the row's first replayed token; earlier
    inputs, with negative numbers, are in the state.
    """
    is_before, is_replayed = index < 0, (index >= 0) & (index < replayed)
    from_state = tl.load(state + channel * 4 + 4 + index, mask & is_before, other=0.0)
    at = (row * kept_tokens + index).to(tl.int64)
    drafted = tl.load(kept + at * kept_stride + channel, mask & is_replayed, other=0.0)
    at = (start + index - replayed).to(tl.int64)
    from_batch = tl.load(new + at * new_stride + channel, mask & (index >= replayed), other=0.0)
    return tl.where(is_before, from_state, tl.where(is_replayed, drafted, from_batch))


@triton.jit
def strength_of(raw):
    """How strongly tokens change the state: the sigmoid, rounded to the model's dtype."""
    return tl.sigmoid(raw.to(tl.float32)).to(raw.dtype).to(tl.float32)


@triton.jit
def log_decay_of(alpha, bias, rate):
    """Logarithms of the decays that tokens cause."""
    time = alpha.to(tl.float32) + bias
    return rate * tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))


@triton.jit
def convolve(
    new,
    kept,
    out_new,
    out_kept,
    states,
    weight,
    reads,
    cu_seqlens_q,
    lengths,
    replay_lens,
    new_stride,
    kept_stride,
    kept_tokens,
    state_stride,
    channels,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Computes the convolution and SiLU for some channels of some tokens of one row, replayed tokens first. Grid (rows,
    parts of channels, parts of tokens).
    """
    row = tl.program_id(0)
    length, replayed = tl.load(lengths + row), tl.load(replay_lens + row)
    first = tl.program_id(2) * TOKENS
    total = tl.where(length > 0, replayed + length, 0)
    if first < total:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        mask = channel < channels
        start = tl.load(cu_seqlens_q + row)
        state = states + tl.load(reads + row) * state_stride
        w0 = tl.load(weight + channel * 4, mask).to(tl.float32)
        w1 = tl.load(weight + channel * 4 + 1, mask).to(tl.float32)
        w2 = tl.load(weight + channel * 4 + 2, mask).to(tl.float32)
        w3 = tl.load(weight + channel * 4 + 3, mask).to(tl.float32)
        x1 = _input(
            first - 3, row, replayed, start, new, kept, state, new_stride, kept_stride, kept_tokens, channel, mask
        )
        x2 = _input(
            first - 2, row, replayed, start, new, kept, state, new_stride, kept_stride, kept_tokens, channel, mask
        )
        x3 = _input(
            first - 1, row, replayed, start, new, kept, state, new_stride, kept_stride, kept_tokens, channel, mask
        )
        for index in range(first, tl.minimum(first + TOKENS, total)):
            x0, x1, x2 = x1, x2, x3
            x3 = _input(
                index, row, replayed, start, new, kept, state, new_stride, kept_stride, kept_tokens, channel, mask
            )
            weighted = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
            summed = weighted.to(x3.dtype).to(tl.float32)
            convolved = (summed * tl.sigmoid(summed)).to(x3.dtype)
            if index < replayed:
                tl.store(out_kept + (row * kept_tokens + index).to(tl.int64) * channels + channel, convolved, mask)
            else:
                tl.store(out_new + (start + index - replayed).to(tl.int64) * channels + channel, convolved, mask)


@triton.jit
def recur(
    new,
    kept,
    mixed_new,
    mixed_kept,
    beta_new,
    beta_kept,
    alpha_new,
    alpha_kept,
    a_log,
    dt_bias,
    out,
    conv_states,
    states,
    reads,
    writes,
    checkpoints,
    cu_seqlens_q,
    lengths,
    replay_lens,
    tokens_to_border,
    num_decode,
    new_stride,
    kept_stride,
    kept_tokens,
    conv_stride,
    state_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    CONV_CHANNELS: tl.constexpr,
):
    """Advances some columns of one head's state of one decode row, and computes the outputs for these columns. Each
    program also updates some channels of the row's convolution state, which holds the last four inputs; this is all it
    does for other rows. Grid (rows, value heads, parts of columns).
    """
    row, head = tl.program_id(0), tl.program_id(1)
    length, replayed = tl.load(lengths + row), tl.load(replay_lens + row)
    if length > 0:
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
        read, written = tl.load(reads + row), tl.load(writes + row)
        checkpoint, border = tl.load(checkpoints + row), tl.load(tokens_to_border + row)
        num_certain = replayed + tl.where(row < num_decode, 1, length)
        start = tl.load(cu_seqlens_q + row)

        channel = (head * tl.num_programs(2) + tl.program_id(2)) * CONV_CHANNELS + tl.arange(0, CONV_CHANNELS)
        mask = channel < channels
        conv = conv_states + read * conv_stride
        reaches_border = (border > 0) & (border <= num_certain)
        end = tl.where(reaches_border, border, num_certain)
        c0 = _input(
            num_certain - 4, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask
        )
        c1 = _input(
            num_certain - 3, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask
        )
        c2 = _input(
            num_certain - 2, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask
        )
        c3 = _input(
            num_certain - 1, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask
        )
        b0 = _input(end - 4, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask)
        b1 = _input(end - 3, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask)
        b2 = _input(end - 2, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask)
        b3 = _input(end - 1, row, replayed, start, new, kept, conv, new_stride, kept_stride, kept_tokens, channel, mask)
        conv_target = conv_states + written * conv_stride + channel * 4
        tl.store(conv_target, c0, mask)
        tl.store(conv_target + 1, c1, mask)
        tl.store(conv_target + 2, c2, mask)
        tl.store(conv_target + 3, c3, mask)
        if reaches_border:
            conv_target = conv_states + checkpoint * conv_stride + channel * 4
            tl.store(conv_target, b0, mask)
            tl.store(conv_target + 1, b1, mask)
            tl.store(conv_target + 2, b2, mask)
            tl.store(conv_target + 3, b3, mask)

        if row < num_decode:
            key, value = tl.arange(0, KEY_SIZE), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
            offsets = head * KEY_SIZE * VALUE_SIZE + key[:, None] * VALUE_SIZE + value[None, :]
            state = tl.load(states + read * state_stride + offsets)
            rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
            bias = tl.load(dt_bias + head).to(tl.float32)
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            for index in range(0, replayed + length):
                is_replayed = index < replayed
                if is_replayed:
                    at = (row * kept_tokens + index).to(tl.int64)
                    mixed, beta, alpha = (
                        mixed_kept + at * channels,
                        beta_kept + at * kept_stride,
                        alpha_kept + at * kept_stride,
                    )
                else:
                    at = (start + index - replayed).to(tl.int64)
                    mixed, beta, alpha = (
                        mixed_new + at * channels,
                        beta_new + at * new_stride,
                        alpha_new + at * new_stride,
                    )
                q = tl.load(mixed + key_head * KEY_SIZE + key).to(tl.float32)
                k = tl.load(mixed + (KEY_HEADS + key_head) * KEY_SIZE + key).to(tl.float32)
                v = tl.load(mixed + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value)
                strength = strength_of(tl.load(beta + head))
                q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
                k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                state = state * tl.exp(log_decay_of(tl.load(alpha + head), bias, rate))
                delta = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * strength
                state = state + k[:, None] * delta[None, :]
                if not is_replayed:
                    output = tl.sum(state * q[:, None], 0)
                    tl.store(out + (at * VALUE_HEADS + head) * VALUE_SIZE + value, output.to(v.dtype))
                if index + 1 == num_certain:
                    tl.store(states + written * state_stride + offsets, state)
                if reaches_border & (index + 1 == border):
                    tl.store(states + checkpoint * state_stride + offsets, state)


@triton.jit
def norm(values, gates, weight, out, gate_token_stride, eps, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Computes one head of one token: root mean square norm, times the gate's SiLU. Grid (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, SIZE)
    offsets = (token * HEADS + head) * SIZE + lane
    x = tl.load(values + offsets)
    x_f32 = x.to(tl.float32)
    normed = (x_f32 * tl.rsqrt(tl.sum(x_f32 * x_f32, 0) / SIZE + eps)).to(x.dtype)
    factor = tl.load(weight + lane)
    scaled = factor.to(tl.float32) * normed.to(tl.float32)
    if factor.dtype == x.dtype:
        scaled = scaled.to(x.dtype).to(tl.float32)
    gate = tl.load(gates + token * gate_token_stride + head * SIZE + lane).to(tl.float32)
    tl.store(out + offsets, (scaled * gate * tl.sigmoid(gate)).to(x.dtype))
