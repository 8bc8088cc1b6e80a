"""Launches the kernels of a layer with a gated delta rule (Qwen3-Next, Qwen3.5) on the current stream, without waits.

Called on the thread that runs the forward pass. Tests run the same launches on a CPU, in Triton's interpreter. A row is
one request's part of the batch. After a step with drafts, the layer's inputs for the drafts are kept, and the next step
replays the inputs of the accepted drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sidestream.attention.states import StateBatch
from sidestream.attention.triton import gated_delta_chunks as chunks
from sidestream.attention.triton import gated_delta_kernels as kernels
from sidestream.errors import InvariantError

_CHANNELS = 256
_TOKENS = 32  # tokens of a row that one program convolves
_VALUES = 32  # columns of a state that one program owns
_CHUNK = 64  # tokens of a row that the state takes in together; at most 64, as `solve` inverts matrices of this size


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """Sizes of a layer: numbers of key heads and of value heads, and the sizes of the heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """The projected inputs of T tokens, in the model's dtype. Each token's values are contiguous.

    mixed   [T, channels]: queries, keys and values of all heads, before the convolution
    beta    [T, value heads], before the sigmoid
    alpha   [T, value heads]: the decay, before its bias
    """

    mixed: torch.Tensor
    beta: torch.Tensor
    alpha: torch.Tensor


def gated_delta(
    new: Projected,
    kept: Projected,
    batch: StateBatch,
    shape: GatedDeltaShape,
    *,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """Compute the outputs of the gated delta rule, `[T, value heads, value_size]`, with zeros for padding. Reads and
    writes the rows' states.

    new                inputs of the packed tokens. The parts of a `Projected` must have the same stride
    kept               kept inputs of the last step's drafts; each decode row has the same number of them
    conv_states        [states, channels, 4] in the model's dtype; each state is dense
    recurrent_states   float32 [states, value heads, key_size, value_size]; each state is dense
    conv_weight        [channels, 4]
    a_log, dt_bias     [value heads]

    Enqueues two kernels on the current stream, or four if there are rows after the decode rows, and reads nothing back.
    """
    for part in (new, kept):
        if not part.mixed.stride(0) == part.beta.stride(0) == part.alpha.stride(0):
            raise InvariantError(
                f"the parts of projected inputs have strides {part.mixed.stride(0)}, {part.beta.stride(0)} and "
                f"{part.alpha.stride(0)}: they must be views of one tensor"
            )
    num_rows, count = len(batch.reads), len(new.mixed)
    strides = new.mixed.stride(0), kept.mixed.stride(0), len(kept.mixed) // max(1, batch.num_decode)
    convolved, replayed = _convolve(new, kept, batch, strides, conv_states, conv_weight)
    out = new.mixed.new_zeros(count, shape.value_heads, shape.value_size)
    if num_rows > batch.num_decode:
        _advance_chunks(convolved, new, batch, shape, out, recurrent_states, a_log, dt_bias)
    values = min(_VALUES, shape.value_size)
    programs = shape.value_heads * (shape.value_size // values)
    kernels.recur[(num_rows, shape.value_heads, shape.value_size // values)](
        new.mixed,
        kept.mixed,
        convolved,
        replayed,
        new.beta,
        kept.beta,
        new.alpha,
        kept.alpha,
        a_log,
        dt_bias,
        out,
        conv_states,
        recurrent_states,
        batch.reads,
        batch.writes,
        batch.checkpoints,
        batch.cu_seqlens_q,
        batch.lengths,
        batch.behind,
        batch.tokens_to_border,
        batch.num_decode,
        *strides,
        conv_states.stride(0),
        recurrent_states.stride(0),
        shape.key_size**-0.5,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_SIZE=shape.key_size,
        VALUE_SIZE=shape.value_size,
        VALUES=values,
        CONV_CHANNELS=triton.next_power_of_2(triton.cdiv(shape.channels, programs)),
    )
    return out


def _advance_chunks(
    convolved: torch.Tensor,
    new: Projected,
    batch: StateBatch,
    shape: GatedDeltaShape,
    out: torch.Tensor,
    states: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> None:
    """Enqueue the rows after the decode rows: write their part of `out`, and their states. They may have many tokens,
    and they have no drafts.
    """
    num_rows, count = len(batch.reads) - batch.num_decode, len(new.mixed)
    values = min(_VALUES, shape.value_size)
    inverses = torch.empty(count, shape.value_heads, _CHUNK, dtype=torch.float32, device=out.device)
    inputs = convolved, new.beta, new.alpha, a_log, dt_bias, inverses
    rows = batch.cu_seqlens_q, batch.lengths, batch.num_decode, new.mixed.stride(0)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_SIZE": shape.key_size,
        "VALUE_SIZE": shape.value_size,
        "TOKENS": _CHUNK,
    }
    # Products of three parts are nearly exact; float32 models need them throughout, others for the inverse.
    exact = new.mixed.dtype == torch.float32
    chunks.solve[(num_rows, shape.value_heads, triton.cdiv(count, _CHUNK))](*inputs, *rows, **sizes, PRECISION="tf32x3")
    chunks.advance[(num_rows, shape.value_heads, shape.value_size // values)](
        *inputs,
        out,
        states,
        batch.reads,
        batch.writes,
        *rows,
        states.stride(0),
        shape.key_size**-0.5,
        **sizes,
        VALUES=values,
        PRECISION="tf32x3" if exact else "tf32",
        num_stages=1,  # with more, the operands of two chunks together would not fit into shared memory
    )


def _convolve(
    new: Projected,
    kept: Projected,
    batch: StateBatch,
    strides: tuple[int, int, int],
    conv_states: torch.Tensor,
    conv_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue the convolution of `new.mixed` and of `kept.mixed`, and return its two outputs.

    strides   strides of `new.mixed` and of `kept.mixed`, and the number of kept tokens of a decode row
    """
    (count, channels), kept_tokens = new.mixed.shape, strides[2]
    convolved, replayed = (
        torch.empty(len(part.mixed), channels, dtype=part.mixed.dtype, device=part.mixed.device) for part in (new, kept)
    )
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    programs = len(batch.reads), triton.cdiv(channels, block), triton.cdiv(count + kept_tokens, _TOKENS)
    kernels.convolve[programs](
        new.mixed,
        kept.mixed,
        convolved,
        replayed,
        conv_states,
        conv_weight,
        batch.reads,
        batch.cu_seqlens_q,
        batch.lengths,
        batch.behind,
        *strides,
        conv_states.stride(0),
        channels,
        CHANNELS=block,
        TOKENS=_TOKENS,
    )
    return convolved, replayed


def gated_norm(values: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * norm(values) * silu(gates)`, `[T, heads, size]`; the norm is the root mean square norm over `size`.

    values   [T, heads, size], contiguous
    gates    [T, heads * size], dense in the last dimension
    """
    tokens, heads, size = values.shape
    out = torch.empty_like(values)
    if tokens:
        kernels.norm[(tokens, heads)](values, gates, weight, out, gates.stride(0), eps, HEADS=heads, SIZE=size)
    return out
