"""The self-check of a model while it loads: paged attention against transformers' own attention.

A model that the block pool cannot serve correctly fails this check and is refused. A comparison of logits alone would
not work: layers amplify rounding errors, and if rounding sends a token to a different expert, all later tokens change
as much as by a real error. So there are two passes:

reference   the whole text at once. Both attentions get the same queries, keys and values in each layer and must agree
            up to rounding; the next layer gets transformers' output.
replay      chunk by chunk through the block pool. The next layer gets the reference's attention output, so a token with
            a different expert changes no other token. Only the median error is bounded.

Error messages say "its" for the model, because `loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sidestream.attention.interface import Attended, AttentionBackend, AttentionBatch, AttentionSpec, BatchRows, ungated
from sidestream.attention.registry import select_backend
from sidestream.attention.states import StateBatch, StatePool
from sidestream.errors import ModelError
from sidestream.models.adapter import PAGED, OpaqueBatch, PagedModel, attention_window, paged_attention_hook
from sidestream.models.config_checks import max_positions
from sidestream.models.latent import keys_and_values
from sidestream.models.layer_heads import LayerHeads
from sidestream.models.recurrent import Compute, Observer
from sidestream_kv.kv.layout import AttentionChunk, window_start
from sidestream_kv.kv.state_layout import RESERVED_STATES

# Bound of a layer's attention, or of a module with attention code of its own: root mean square of the difference,
# divided by the root mean square of the output.
# Largest values for SmolLM2-135M and tiny models of 80 families, at any depth: 3e-7, 2.4e-4 and 1.9e-3.
ATTENTION_BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}
# Added to the bound per unit of the soft cap, because a CPU rounds scores to the dtype before the cap. The value is a
# quarter of half the dtype's relative step: x * sech(x)**2 is below 0.45, and the root mean square of rounding errors
# is about 0.4 of their maximum.
_CAP_ROUNDING = {"float32": 2**-26, "float16": 2**-13, "bfloat16": 2**-10}
# Bound of the median token of each stage: root mean square of the difference, divided by the root mean square of all
# tokens. Measured for SmolLM2-135M, in the same order: 4e-6, 3e-4 and 3e-3. Values are larger if matrix products with
# few rows round differently from products with many rows.
REPLAY_BOUNDS = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.25}

# transformers computes single tokens of a recurrent layer with other code. Largest values for tiny models of ten
# families: 4e-6, 1.5e-3 and 8.6e-3; in Nemotron-H, 9e-4 with bounds of time steps.
_DECODE_BOUNDS = {**REPLAY_BOUNDS, "float32": 3e-4}

# Three stages: a prefill without context, a prefill after a context, and decodes. Each has an odd number of tokens, so
# that the median is one token's value.
_STAGES = ((0, 13), (13, 20), (20, 25))
_CHUNKS = (*_STAGES[:2], *pairwise(range(20, 26)))
_NUM_TOKENS = 25
_BLOCK_TOKENS = 16  # the minimum of attention on a GPU
_BLOCK_TABLE = (2, 0)
_WINDOW = 5  # shorter than the check's context, whatever the model's own window
_COMPARED = "sidestream_compared"


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of transformers' own attention for the check's tokens.

    attended   attention output of each layer, `[25, heads, head_dim]`, in the model's dtype
    stateful   output of each layer with recurrent state, `[25, hidden_size]`, by the layer's number in the model
    logits     float32 `[25, vocab]`
    windows    see `KVLayout.windows`: what each layer passed to its attention
    """

    attended: list[torch.Tensor]
    stateful: dict[int, torch.Tensor]
    logits: torch.Tensor
    windows: tuple[int, ...]


@torch.inference_mode()
def reference(model: PagedModel) -> Reference:
    """The reference pass. Raises ModelError when paged attention differs in any layer."""
    tokens = _tokens(model).to(model.module.device)
    pool, attention = _pool(model), _attention(model)
    compared = _Compared([model.opaque(_batch(attention, pool, start, end, ungated)) for start, end in _CHUNKS])
    stateful: dict[int, torch.Tensor] = {}
    states = _state_pool(model)

    def compare(layer: int, hidden: torch.Tensor, batch: StateBatch | None, compute: Compute) -> torch.Tensor:
        assert states is not None
        whole = compute(hidden, None)
        chunks = [
            compute(hidden[:, start:end], _state_batch(states, number, start, end, checked=False))
            for number, (start, end) in enumerate(_CHUNKS)
        ]
        _judge_stateful(model, layer, torch.cat(chunks, dim=1)[0].float() - whole[0].float(), whole[0].float())
        stateful[layer] = whole[0]
        return whole

    model.module.config._attn_implementation = _COMPARED
    try:
        with _narrow_windows(model.module) as narrowed, _observed(model, compare), _traced_compared(model):
            # No positions are given. So a model fails the check if `PagedModel.forward` counts them differently.
            logits = model.call_module(compared, input_ids=tokens[None])
    finally:
        model.module.config._attn_implementation = PAGED
    _check_reached(compared.layers, model.num_attention_layers)
    # Another window than the narrowed one is not known to be the layer's own: then the layer counts as without one.
    windows = tuple(narrowed if window == _WINDOW else 0 for window in compared.passed_windows)
    if model.places:
        own = dict(zip((place.layers for place in model.places), windows, strict=True))
        windows = tuple(window for layers, window in own.items() for _ in layers)
    return Reference(compared.attended, stateful, logits[0].float(), windows if any(windows) else ())


@torch.inference_mode()
def check_paged(model: PagedModel, expected: Reference) -> None:
    """The replay pass. Raises ModelError when the paged path differs, or does not reach every layer once."""
    with _narrow_windows(model.module):
        attended, stateful, logits = _replay(model, expected)
    for layer, (paged, own) in enumerate(zip(attended, expected.attended, strict=True)):
        _judge(model, f"the attention of layer {layer}", paged.float() - own, own)
    for layer, own in expected.stateful.items():
        _judge(model, f"the recurrent layer {layer}", stateful[layer].float() - own.float(), own)
    _judge(model, "the logits", logits - expected.logits, expected.logits - expected.logits.mean(-1, keepdim=True))


@torch.inference_mode()
def attention_error(model: PagedModel, expected: Reference) -> float:
    """The largest error of a layer's paged attention over the check's tokens, when the layers before compute exactly:
    root mean square of the difference, divided by the root mean square of the output.
    """
    with _narrow_windows(model.module):
        attended, _, _ = _replay(model, expected)
    pairs = zip(attended, expected.attended, strict=True)
    return max(
        (
            float((paged.float() - own).square().mean().sqrt() / own.float().square().mean().sqrt())
            for paged, own in pairs
        ),
        default=0.0,
    )


def _judge(model: PagedModel, what: str, difference: torch.Tensor, spread: torch.Tensor) -> None:
    """Raise ModelError when the relative error of the median token exceeds the bound in any stage. The relative error
    is the root mean square of the token's `difference`, divided by the root mean square of the `spread` of all tokens.
    """
    errors = difference.flatten(1).square().mean(-1).sqrt() / spread.float().square().mean().sqrt()
    # The median, because rounding sends only single tokens to different experts, and a real error affects most tokens.
    error = torch.stack([errors[start:end].median() for start, end in _STAGES]).max()
    bound = REPLAY_BOUNDS[model.layout.dtype]
    if not error <= bound:
        raise ModelError(
            f"the paged path computes {what} differently from transformers: most tokens differ by {error:.2g} of their "
            f"spread or more, and rounding explains at most {bound}. This kind of model cannot be served correctly"
        )


class _Compared(OpaqueBatch):
    """The batch of the reference pass: its chunks for the paged path, and the attention output of each layer."""

    def __init__(self, chunks: list[OpaqueBatch]) -> None:
        super().__init__(chunks[0].batch)
        self.chunks = chunks
        self.layers: list[int] = []
        self.attended: list[torch.Tensor] = []
        self.passed_windows: list[int] = []


def _compared_attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: _Compared | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' own attention, in float32. Raises ModelError when the paged path differs by more than rounding."""
    if paged_batch is None:
        return paged_attention_hook(module, query, key, value, None, **named)  # always raises ModelError here
    paged = []
    for chunk, (start, end) in zip(paged_batch.chunks, _CHUNKS, strict=True):
        q, k, v = (states[:, :, start:end] for states in (query, key, value))
        paged.append(paged_attention_hook(module, q, k, v, None, paged_batch=chunk, **named)[0])
    window = attention_window(module, named.get("sliding_window"))
    _check_mask(module, attention_mask, window)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _causal_attention)
    mask = attention_mask if attention_mask is None or attention_mask.dtype == torch.bool else attention_mask.float()
    key, value = keys_and_values(module, key, value)
    expected: torch.Tensor = eager(module, query.float(), key.float(), value.float(), mask, **named)[0]
    error = (torch.cat(paged, dim=1).float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    dtype = str(query.dtype).removeprefix("torch.")
    bound = ATTENTION_BOUNDS[dtype] + _CAP_ROUNDING[dtype] * (named.get("softcap") or 0)
    if not error <= bound:
        raise ModelError(
            f"in layer {module.layer_idx}, paged attention and transformers' own give different values: they differ by "
            f"{error:.2g} of their size, and rounding explains at most {bound:.2g}. This kind of model cannot be "
            "served correctly"
        )
    paged_batch.layers.append(module.layer_idx)
    paged_batch.attended.append(expected[0].to(query.dtype))
    paged_batch.passed_windows.append(window or 0)
    return expected.to(query.dtype), None


def _causal_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """For models with attention code of their own; `_traced_compared` compares the code with this."""
    positions = torch.arange(query.shape[2], device=query.device)
    behind = positions[:, None] - positions
    seen = (behind >= 0) & (behind < (sliding_window or len(positions)))
    bias = torch.zeros(1, device=query.device) if slopes is None else slopes[:, None, None] * -behind
    mask = bias.masked_fill(~seen, -torch.inf)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2), None


def _traced_compared(model: PagedModel) -> contextlib.AbstractContextManager[None]:
    """Compare the modules with attention code of their own with this code, inside the context. Raises ModelError."""
    if model.traced is None:
        return contextlib.nullcontext()

    def compare(own: Callable[[], Any], traced: Callable[[], Any]) -> Any:
        expected, replaced = own(), traced()[0].float()
        difference = (replaced - expected[0].float()).square().mean().sqrt()
        error, bound = difference / expected[0].float().square().mean().sqrt(), ATTENTION_BOUNDS[model.layout.dtype]
        if not error <= bound:
            raise ModelError(
                "its attention code computes something else than causal attention with the scale that it was found to "
                f"have: they differ by {error:.2g} of their size, and rounding explains at most {bound}. This kind of "
                "model cannot be served correctly"
            )
        return expected

    return model.traced.observed(compare)


AttentionInterface.register(_COMPARED, _compared_attention_hook)
AttentionMaskInterface.register(_COMPARED, eager_mask)


def _check_mask(module: Any, mask: torch.Tensor | None, window: int | None) -> None:
    """Raise ModelError unless the model's mask is the causal mask with the window that its attention receives."""
    if mask is None:
        return
    seen = mask if mask.dtype == torch.bool else mask == 0
    positions = torch.arange(_NUM_TOKENS, device=mask.device)
    behind = positions[:, None] - positions
    expected = (behind >= 0) & (positions >= window_start(positions[:, None], window or _NUM_TOKENS))
    if not bool((seen == expected).all()):
        window_text = f"a sliding window of {window} tokens" if window else "no sliding window"
        raise ModelError(
            f"layer {module.layer_idx} does not have the mask of causal attention with {window_text}, "
            "which are the arguments of its attention: only such masks are served"
        )


def _replay(model: PagedModel, expected: Reference) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], torch.Tensor]:
    """The attention output of each layer, the output of each layer with recurrent state, and the logits, for all
    tokens.
    """
    device, num_layers = model.module.device, model.num_attention_layers
    states = _state_pool(model)
    stateful: dict[int, list[torch.Tensor]] = {layer: [] for layer in expected.stateful}
    pool, attention = _pool(model), _attention(model)
    tokens = _tokens(model).to(device)
    attended: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
    logits: list[torch.Tensor] = []
    for start, end in _CHUNKS:
        reached: list[int] = []
        batch = model.opaque(_batch(attention, pool, start, end, reached.append))
        batch.batch = _Replayed(batch.batch, attended, [own[start:end] for own in expected.attended])
        rows = torch.arange(end - start, device=device)

        def replace(
            layer: int,
            hidden: torch.Tensor,
            batch: StateBatch | None,
            compute: Compute,
            chunk: slice = slice(start, end),
        ) -> torch.Tensor:
            output, count = compute(hidden, batch), chunk.stop - chunk.start
            stateful[layer].append(output[0, :count].clone())
            output[0, :count] = expected.stateful[layer][chunk]
            return output

        with _observed(model, replace):
            kept = None if states is None else _state_batch(states, len(logits), start, end)
            logits.append(model.forward(tokens[start:end], rows + start, batch, rows, states=kept))
            if kept is not None:
                logits[-1] = kept.finish(logits[-1], rows)
        _check_reached(reached, num_layers, model.places)
    outputs = {layer: torch.cat(parts) for layer, parts in stateful.items()}
    return [torch.cat(layer) for layer in attended], outputs, torch.cat(logits).float()


def _observed(model: PagedModel, observer: Observer) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if model.stateful is None else model.stateful.observed(observer)


def _judge_stateful(model: PagedModel, layer: int, difference: torch.Tensor, whole: torch.Tensor) -> None:
    """Raise ModelError when a recurrent layer computes any token differently in chunks than in one piece.

    Both computations get the same input, so the bound applies to every token, not to the median token. A layer that
    loses the inputs before a chunk is wrong only in the first tokens of the chunk.
    """
    errors = difference.square().mean(-1).sqrt() / whole.square().mean().sqrt()
    dtype = model.layout.dtype
    decodes = _STAGES[-1][0]
    for tokens, bound in ((slice(0, decodes), ATTENTION_BOUNDS[dtype]), (slice(decodes, None), _DECODE_BOUNDS[dtype])):
        if not (error := errors[tokens].max()) <= bound:
            raise ModelError(
                f"its recurrent layer {layer} gives other values in chunks than in one piece: a token differs by "
                f"{error:.2g} of their size, and rounding explains at most {bound:.2g}. transformers cannot continue "
                "this layer from a state, so prompts cannot be computed in chunks"
            )


def _state_pool(model: PagedModel) -> StatePool | None:
    """States full of NaN, so that a read of a state that was not written is detected."""
    layout = model.state_layout
    if layout is None:
        return None
    count = 2 + RESERVED_STATES
    return StatePool(
        torch.full((count * layout.state_bytes,), 255, dtype=torch.uint8, device=model.module.device),
        layout,
        block_tokens=model.layout.block_tokens,
    )


def _state_batch(pool: StatePool, chunk: int, start: int, end: int, *, checked: bool = True) -> StateBatch:
    """The states of a batch of one row. Its chunks write two states alternately.

    checked   False: no forward has recorded how many tokens the states cover, so the number is set here
    """
    read = pool.zero if chunk == 0 else (chunk - 1) % 2
    ids = torch.tensor([[read], [chunk % 2]], device=pool.device)
    decodes = int(end - start == 1)
    if not checked:
        pool.covered[read] = start
    one = torch.zeros(1, dtype=torch.int64, device=pool.device)
    return pool.batch(
        ids[0],
        ids[1],
        one - 1,
        slots=one,
        cu_seqlens_q=torch.tensor((0, end - start), device=pool.device),
        kv_lens=torch.tensor((end,), device=pool.device),
        num_decode=decodes,
        decode_queries=1,
        chunks=() if decodes else ((0, end - start),),
    )


def _check_reached(layers: list[int], num_layers: int, places: tuple[LayerHeads, ...] = ()) -> None:
    if layers != ([layer for place in places for layer in place.layers] or list(range(num_layers))):
        raise ModelError(
            f"its attention used layers {layers} of {num_layers}: layers must attend "
            "once each, in order, with their own keys and values"
        )


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A batch whose attention appends the paged output to `attended` and returns the reference's output."""

    batch: Attended
    attended: list[list[torch.Tensor]]
    expected: list[torch.Tensor]

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self.batch.slot_mapping

    def layer(self, index: int) -> torch.Tensor:
        return self.batch.layer(index)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **how: Any
    ) -> torch.Tensor:
        self.attended[layer].append(self.batch.attend(query, key, value, layer, **how))
        return self.expected[layer]


def _pool(model: PagedModel) -> torch.Tensor:
    """Blocks full of NaN, so that a read of an unwritten token is detected."""
    layout = model.layout
    *outer, _, kv_heads, head_dim = layout.shape(max(_BLOCK_TABLE) + 1)
    shape = (*outer, _BLOCK_TOKENS, kv_heads, head_dim)
    return torch.full(shape, float("nan"), dtype=getattr(torch, layout.dtype), device=model.module.device)


def _attention(model: PagedModel) -> AttentionBackend:
    """The attention backend that serves the model on its device."""
    layout, device = model.layout, model.module.device
    spec = AttentionSpec(
        heads=model.num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=getattr(torch, layout.compute_dtype),
        device=device,
        query_tokens=1,
        latent_dim=layout.latent_dim,
    )
    kv_tokens = len(_BLOCK_TABLE) * _BLOCK_TOKENS
    return select_backend(device).create(spec, kv_tokens=kv_tokens, chunk_tokens=_NUM_TOKENS)


def _batch(
    attention: AttentionBackend, pool: torch.Tensor, start: int, end: int, before_layer: Callable[[int], None]
) -> AttentionBatch:
    """A batch of one row."""
    device = pool.device
    table = torch.tensor([_BLOCK_TABLE], device=device)
    positions = torch.arange(start, end, device=device)
    rows = BatchRows(
        slot_mapping=table[0, positions // _BLOCK_TOKENS] * _BLOCK_TOKENS + positions % _BLOCK_TOKENS,
        block_tables=table,
        cu_seqlens_q=torch.tensor((0, end - start), device=device),
        kv_lens=torch.tensor((end,), device=device),
        decode_rows=int(end - start == 1),
    )
    return attention.batch(pool, rows, before_layer)


def _tokens(model: PagedModel) -> torch.Tensor:
    tokens = torch.randint(model.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    if model.padding_token is not None:
        tokens[tokens == model.padding_token] = (model.padding_token + 1) % model.vocab_size
    return tokens


@contextlib.contextmanager
def _narrow_windows(module: Any) -> Iterator[int]:
    """Shorten the model's sliding window inside the context, so that a few tokens reveal a mask that ignores it. Yields
    the window for which `_WINDOW` stands inside the context; 0: none was shortened.

    A window that is not shorter than the model's context stays: some models declare such a window, but do not pass it
    to their attention.
    """
    chunk = getattr(module.config, "attention_chunk_size", None)
    name, window = "sliding_window", getattr(module.config, "sliding_window", None) or 0
    if chunk:
        name, window = "attention_chunk_size", AttentionChunk(chunk)
    binds = 0 < window < max_positions(module.config)
    holders = [part for part in (module.config, *module.modules()) if binds and getattr(part, name, None) == window]
    for part in holders:
        setattr(part, name, _WINDOW)
    try:
        yield window if binds else 0
    finally:
        for part in holders:
            setattr(part, name, int(window))
