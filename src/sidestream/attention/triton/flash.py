"""FlashAttention-3 over contiguous KV, where a wheel of it is installed. Neither wheel is a dependency.

A forward operation comes from such a wheel. It is launched on the current stream, without waits, and a CUDA graph may
capture it. It computes each row alone, in a fixed order, so the bits of a row do not depend on other rows.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

Forward = Callable[..., object]
"""The operation `fwd` of a wheel. Tests call a stand-in with the same schema."""

_WHEELS = ("flash_attn_3", "fa3_fwd")  # the official one; one for inference, with bfloat16 only
_PROBE_TOKENS = 128


def attend(
    forward: Forward,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
) -> None:
    """Compute causal attention of the planned rows into `out`. Queries that are not planned are not written.

    query, out [T, heads, head_dim] · keys, values [kv_heads, capacity, head_dim] · plan: int32 [4, rows + 1], the first
    query and the first key of each row, and the numbers of its queries and keys, both 0 for a row to be left out. The
    last column holds ends, and in the numbers nothing.
    """
    forward(
        query, keys.transpose(0, 1), values.transpose(0, 1), out=out,
        cu_seqlens_q=plan[0], cu_seqlens_k=plan[1], seqused_q=plan[2, :-1], seqused_k=plan[3, :-1],
        max_seqlen_q=len(query), max_seqlen_k=keys.shape[1], softmax_scale=scale, is_causal=True, num_splits=1,
    )  # fmt: skip


def find(heads: int, keys: torch.Tensor, values: torch.Tensor) -> Forward | None:
    """The forward operation of an installed wheel, after it has computed one row with these sizes; else None. A wheel
    that does not load or does not compute is logged. Writes into `keys` and `values`; waits for the device.
    """
    for wheel in _WHEELS:
        try:
            importlib.import_module(f"{wheel}._C")
            forward: Forward = getattr(torch.ops, wheel).fwd
            _probe(forward, heads, keys, values)
        except ModuleNotFoundError:
            continue
        except (ImportError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("%s is installed and not used, other kernels attend: %s", wheel, reason)
        else:
            logger.info("prefill attends with FlashAttention-3 from %s", wheel)
            return forward
    return None


def _probe(forward: Forward, heads: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise RuntimeError unless a row with equal values gets these values."""
    query = keys.new_zeros(_PROBE_TOKENS, heads, keys.shape[2])
    out = torch.full_like(query, float("nan"))
    ends = [0, min(_PROBE_TOKENS, keys.shape[1])]
    plan = torch.tensor([ends, ends, ends[::-1], ends[::-1]], dtype=torch.int32, device=keys.device)
    values.fill_(1.0)
    attend(forward, query, keys, values, out, plan, 1.0)
    values.zero_()
    if not bool((out[: ends[1]] == 1).all()):
        raise RuntimeError("its result for a row of equal values is wrong")
