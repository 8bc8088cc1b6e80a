"""The self-check of a model that loads: transformers' own eager attention, without a cache, against the paged path.

Whatever a model does that the block pool cannot express shows here as other logits, and the model is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sidestream.attention.paged import AttentionBatch, PagedBatch
from sidestream.attention.triton import DeviceBatch, Partials
from sidestream.errors import ModelError
from sidestream.models.adapter import PagedModel

# Root mean square of the difference, over that of the logits.
# For SmolLM2-135M: 3e-6, 0.009 and 0.06; in bfloat16, eager attention alone is 0.11 from the float32 result.
BOUNDS = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.25}

_NUM_TOKENS = 24
_CHUNK_ENDS = (17, 23, 24)  # a prefill from nothing, one behind a context, and a decode
_BLOCK_TOKENS = 16  # the least that attention on a GPU takes
_BLOCK_TABLE = (2, 0)
_WINDOW = 5  # shorter than the check's context, whatever the model's window is


@torch.inference_mode()
def eager_logits(module: Any) -> torch.Tensor:
    """Float32 logits `[24, vocab]` of the check's tokens, where the module is, which was loaded with eager attention."""
    with _narrow_windows(module):
        tokens = _tokens(module.config.vocab_size).to(module.device)
        logits: torch.Tensor = module(input_ids=tokens[None], use_cache=False).logits
    return logits[0].float()


def check_paged(model: PagedModel, expected: torch.Tensor) -> None:
    """Raise ModelError when the paged path does not give the `expected` logits, or does not reach every layer once."""
    with _narrow_windows(model.module):
        logits = _paged_logits(model)
    error = (logits - expected).square().mean().sqrt()
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    bound = BOUNDS[model.layout.dtype]
    if not error <= bound * spread:
        raise ModelError(
            f"paged attention gives other logits than transformers' own: they differ by {error / spread:.2g} of their spread, at most {bound} is "
            "rounding. This kind of model cannot be served right"
        )


def _paged_logits(model: PagedModel) -> torch.Tensor:
    layout = model.layout
    shape = (max(_BLOCK_TABLE) + 1, layout.num_layers, 2, _BLOCK_TOKENS, layout.num_kv_heads, layout.head_dim)
    # What nobody wrote is not a number, and neither is what comes of reading it.
    device = model.module.device
    pool = torch.full(shape, float("nan"), dtype=getattr(torch, layout.dtype), device=device)
    tokens = _tokens(model.vocab_size).to(device)
    logits = []
    for start, end in zip((0, *_CHUNK_ENDS), _CHUNK_ENDS, strict=False):
        positions = torch.arange(start, end, device=device)
        reached: list[int] = []
        batch = _batch(model, pool, positions, start, end, reached.append)
        logits.append(model.forward(tokens[start:end], positions, batch, torch.arange(end - start, device=device)))
        if reached != list(range(layout.num_layers)):
            raise ModelError(f"its attention asked for layers {reached} of {layout.num_layers}: each must attend once, in order")
    return torch.cat(logits)


def _batch(
    model: PagedModel, pool: torch.Tensor, positions: torch.Tensor, start: int, end: int, before_layer: Callable[[int], None]
) -> AttentionBatch:
    """One row, by the attention that the model will be served with where it is."""
    device = pool.device
    table = torch.tensor([_BLOCK_TABLE], device=device)
    slots = table[0, positions // _BLOCK_TOKENS] * _BLOCK_TOKENS + positions % _BLOCK_TOKENS
    decodes = int(end - start == 1)
    if device.type == "cpu":
        return PagedBatch(pool, slots, table, (0, end - start), (end,), decodes, before_layer)
    return DeviceBatch(
        pool,
        slots,
        table,
        query_starts=torch.tensor((0, end - start), device=device),
        kv_lens=torch.tensor((end,), device=device),
        split_rows=decodes,
        partials=Partials.allocate(
            query_tokens=1,
            kv_tokens=len(_BLOCK_TABLE) * _BLOCK_TOKENS,
            heads=model.num_heads,
            head_dim=model.layout.head_dim,
            device=device,
        ),
        before_layer=before_layer,
    )


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def _narrow_windows(module: Any) -> Iterator[None]:
    """Shorten the model's sliding window meanwhile, so that a few tokens show whether mask and attention agree on it."""
    window = getattr(module.config, "sliding_window", None)
    holders = [part for part in (module.config, *module.modules()) if window and getattr(part, "sliding_window", None) == window]
    for part in holders:
        part.sliding_window = _WINDOW
    try:
        yield
    finally:
        for part in holders:
            part.sliding_window = window
