"""A transformers model whose KV lies in a block pool, and the attention function that its layers call.

This file knows nothing of requests; the batch is an argument of the transformers module's forward. Error messages say
"it" for the model, because `loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig

from sidestream.attention.interface import Attended
from sidestream.attention.states import StateBatch
from sidestream.errors import InvariantError, ModelError
from sidestream.models.config_checks import attends, counted_token, layer_heads
from sidestream.models.divided import Division
from sidestream.models.invariant import forward_in_blocks
from sidestream.models.latent import keep_latents, latent_heads
from sidestream.models.layer_heads import DividedBatch, LayerHeads
from sidestream.models.lora import Adapters
from sidestream.models.recurrent import StatefulLayers, number_attention_layers
from sidestream.models.rotary import rotary_of
from sidestream.models.traced import TRACED, TracedLayers
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import AttentionChunk, KVLayout
from sidestream_kv.kv.state_layout import StateLayout

PAGED = "sidestream_paged"

# Padded lengths above _FINE tokens are multiples of _FINE. _CHUNK is the default of EngineConfig.chunk_tokens on a CPU.
_FINE = 16
_CHUNK = 256

# Arguments that models pass to attention; the batch already contains their information.
_REDUNDANT = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "is_causal", "output_router_logits", "output_attentions"}
)
# Models whose decoder layers do not pass the arguments of a forward to their attention.
_DROPS_ARGUMENTS = frozenset({"nemotron", "stablelm"})
# Models whose layers count positions themselves.
_COUNT_BY_CACHE = frozenset({"llama4_text"})
_UNSUPPORTED = {"indices": "sparse attention", "position_bias": "a position bias"}


class OpaqueBatch:
    """Hides a batch from torch.compile. The compiler would trace into the batch's dataclass, and compile again for each
    dtype, class and `before_layer` callback.

    windows   see `KVLayout.windows`: KV before a layer's window may be missing
    places    where each layer's heads lie; empty: all layers are alike. `batch` and `windows` count the model's layers
    """

    def __init__(self, batch: Attended, windows: tuple[int, ...] = (), places: tuple[LayerHeads, ...] = ()) -> None:
        self.batch = batch
        self.windows = windows
        self.places = places


class PagedModel:
    """Owner of a transformers module whose KV lives in a block pool.

    name            last part of the directory or hub id
    config          transformers' config of the model
    layout          shape of the model's KV blocks
    state_layout    shape of the model's recurrent states; None: the model has no recurrent state
    vocab_size      width of the logits
    num_heads       number of query heads; in a sharded model, of this rank
    num_attention_layers   the model's layers with attention
    places          see `layer_heads`
    max_model_len   largest number of positions that the config allows
    eos_token_ids   end-of-sequence tokens of the model's generation config
    padding_token   see `counted_token`; prompts must not contain this token
    fingerprint     128-bit hash in hex of config, weights and dtype, equal in every process; in a sharded model, also
                    of the rank and the number of ranks. With `batch_invariant`, followed by what bits depend on
    weights_fingerprint  the hash of the whole model, equal on all ranks
    module          the transformers module; call it through `forward`
    pads            whether a forward computes padding tokens
    in_blocks       whether a forward computes few tokens at a time: see `forward_in_blocks`
    adapters        its LoRA adapters; None: it can have none
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        layout: KVLayout,
        state_layout: StateLayout | None = None,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        fingerprint: str,
        weights_fingerprint: str | None = None,
        num_heads: int | None = None,
        divided: Mapping[str, Division] = MappingProxyType({}),
    ) -> None:
        """`weights_fingerprint`, `num_heads` and `divided` (by the names of Linears) are given for a sharded model.
        None: the same as `fingerprint`, and the number in the config.
        """
        self.name = name
        self.config: PreTrainedConfig = module.config
        self.layout = layout
        self.state_layout = state_layout
        self.vocab_size = int(module.config.vocab_size)
        self.places = layer_heads(self.config)
        self.num_attention_layers = (len(self.places) or layout.num_layers) if attends(self.config) else 0
        if num_heads is None:
            num_heads = int(module.config.num_attention_heads) if self.num_attention_layers else layout.num_kv_heads
        self.num_heads = num_heads
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.padding_token = counted_token(self.config)
        self._first_position = 0 if self.padding_token is None else self.padding_token + 1
        self.fingerprint = fingerprint
        self.weights_fingerprint = fingerprint if weights_fingerprint is None else weights_fingerprint
        module.config._attn_implementation = PAGED
        if layout.latent_dim:
            keep_latents(module)
        if self.config.model_type in _DROPS_ARGUMENTS:
            for layer in module.base_model.layers:
                _pass_batch_on(layer)
        self.stateful: StatefulLayers | None = None
        if state_layout is not None:
            self.stateful = StatefulLayers(module)
            number_attention_layers(module)
        self.traced: TracedLayers | None = None
        if self.config.model_type in TRACED:
            self.traced = TracedLayers(module, num_kv_heads=layout.num_kv_heads)
        self.module = module
        self.pads = on_host(module.device)
        self.in_blocks = False
        self._divided = divided
        self.adapters: Adapters | None = None
        self._on_hidden: Callable[[torch.Tensor], None] | None = None

    @property
    def needs_chunk_lengths(self) -> bool:
        """Whether the host must know the lengths of prefill chunks. If so, a step with chunks cannot be captured in a
        CUDA graph.
        """
        return self.stateful is not None and self.stateful.needs_chunk_lengths

    def add_adapters(self, *, slots: int, rank: int) -> None:
        """Make room for LoRA adapters. Raises ModelError for a model that cannot have them."""
        if self.stateful is not None:
            raise ModelError(f"{self.config.model_type} keeps recurrent state, with which adapters are not supported")
        dtype = getattr(torch, self.layout.compute_dtype)
        self.adapters = Adapters(
            self.module, slots=slots, rank=rank, dtype=dtype, pads=self.pads, divided=self._divided
        )

    def expose_hidden_states(self) -> None:
        """Enable `left` of `forward`. Call once, before a CUDA graph captures the first forward."""

        def report_hidden(module: Any, args: Any, out: Any) -> None:
            if self._on_hidden is not None:
                on_hidden, self._on_hidden = self._on_hidden, None
                on_hidden(out.last_hidden_state[0])

        self.module.base_model.register_forward_hook(report_hidden)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: Attended | OpaqueBatch,
        logit_rows: torch.Tensor,
        *,
        states: StateBatch | None = None,
        left: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Logits `[R, vocab_size]` in the model's dtype, at the packed positions `logit_rows`. Writes the tokens' KV to
        the block pool, and the recurrent states of the rows to the state pool.

        tokens, positions   int64 [T], on the model's device
        logit_rows          int64 [R], on the model's device; R may be 0
        states              the rows' recurrent states; None: the model has no recurrent state
        left                called with the hidden states after the model's last norm, `[T, hidden_size]`, once the
                            layers are enqueued; needs `expose_hidden_states`

        Runs on the calling thread; on a GPU, kernels are enqueued on the current stream. One call at a time.
        """
        if self.in_blocks and not isinstance(batch, OpaqueBatch):
            return forward_in_blocks(self._forward, tokens, positions, batch, logit_rows)
        if left is not None:
            self._on_hidden = lambda hidden: left(hidden[: len(tokens)])
        try:
            logits = self._forward(tokens, positions, batch, logit_rows, states=states)
            if self._on_hidden is not None:
                raise InvariantError("the model reported no hidden states: call expose_hidden_states first")
            return logits
        finally:
            self._on_hidden = None

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: Attended | OpaqueBatch,
        logit_rows: torch.Tensor,
        *,
        states: StateBatch | None = None,
    ) -> torch.Tensor:
        if self.pads:
            missing = padded_length(len(tokens)) - len(tokens)
            tokens, positions = pad(tokens, (0, missing)), pad(positions, (0, missing))
        if self.adapters is not None:
            self.adapters.begin_pass(len(tokens))

        opaque = batch if isinstance(batch, OpaqueBatch) else self.opaque(batch)
        counted = {"past_key_values": _Counted(positions)} if self.config.model_type in _COUNT_BY_CACHE else {}

        def run() -> torch.Tensor:
            logits = self.call_module(
                opaque,
                **counted,
                input_ids=tokens[None],
                position_ids=(positions + self._first_position if self._first_position else positions)[None],
                logits_to_keep=logit_rows,
            )
            return logits[0]

        if self.stateful is None:
            return run()
        if states is None:
            raise InvariantError(f"{self.name} keeps recurrent state: its forward needs the states of the rows")
        logits: torch.Tensor = self.stateful.run(states, run)
        return logits

    def opaque(self, batch: Attended) -> OpaqueBatch:
        """A batch of the pool, as the model's layers use it."""
        if not self.places:
            return OpaqueBatch(batch, self.layout.windows)
        windows = tuple(self.layout.window_of(place.first) for place in self.places)
        return OpaqueBatch(DividedBatch(batch, self.places), windows, self.places)

    def call_module(self, batch: OpaqueBatch, **inputs: Any) -> torch.Tensor:
        """The logits of transformers' module, whose layers attend with `batch`."""
        call = partial(self.module, **inputs, use_cache=False)
        if self.traced is None:
            output = call(paged_batch=batch)
        else:
            output = self.traced.run(batch, partial(call, **self.traced.inputs))
        logits: torch.Tensor = output.logits
        return logits


class _Counted:
    """A cache without content, for layers that count positions from the length of their cache on."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._length = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """For each token of a packed batch, the number that its place in the batch lacks to its position."""
        return self._length

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def _pass_batch_on(layer: Any) -> None:
    """Make a decoder layer pass its batch argument to its attention."""
    batches: list[OpaqueBatch] = []

    def keep_batch(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        batches.append(kwargs["paged_batch"])

    def add_batch(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "paged_batch": batches.pop()}

    layer.register_forward_pre_hook(keep_batch, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(add_batch, with_kwargs=True)


def padded_length(num_tokens: int) -> int:
    """Number of tokens, with padding, that a CPU computes for a forward of `num_tokens`. The pool and the logits do not
    depend on the padding.

    n * 256 and n * 256 + 16 tokens are not padded. Other lengths grow by at most a quarter; lengths above 16 grow to a
    multiple of 16. Few different lengths remain. This saves memory, because oneDNN keeps about 2.5 MiB of kernels for
    each length: with hundreds of lengths, 2,000 short requests of SmolLM2-135M in bfloat16 made the process grow by
    415 MiB.
    """
    if num_tokens > _CHUNK and (rest := num_tokens % _CHUNK) <= _FINE:
        return num_tokens - rest + (_FINE if rest else 0)
    quarter = (1 << num_tokens.bit_length() >> 1) // 4  # of the largest power of two <= num_tokens
    step = max(quarter, 1 if num_tokens <= _FINE else _FINE)
    return -(-num_tokens // step) * step


def attention_window(module: Any, sliding_window: int | None) -> int | None:
    """The window of a module that passes `sliding_window` to its attention: chunks are in the config only."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types and types[module.layer_idx] == "chunked_attention":
        return AttentionChunk(module.config.attention_chunk_size)
    return sliding_window


def paged_attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: OpaqueBatch | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for transformers' AttentionInterface. Takes a query `[1, heads, T, head_dim]` and returns
    `[1, T, heads, head_dim]`. `rotary`: see `RotatingAttention`.

    Raises ModelError for an argument that paged attention would have to ignore.
    """
    if paged_batch is None:
        raise ModelError(
            "its layers do not pass a forward's arguments on to their attention, "
            "so paged attention does not receive the batch"
        )
    for name, other in others.items():
        if other is not None and name not in _REDUNDANT:
            raise ModelError(
                f"its attention takes {_UNSUPPORTED.get(name, name)} ({name}), which paged attention does not support"
            )
    if attention_mask is not None:
        raise ModelError("it builds an attention mask of its own, which paged attention would ignore")
    if not getattr(module, "is_causal", True):
        raise ModelError("its attention is not causal: KV in a pool cannot change once it is written")
    window = attention_window(module, sliding_window) or 0
    checked = paged_batch.windows[module.layer_idx] if paged_batch.windows else 0
    if checked and (type(window) is not type(checked) or not 0 < window <= checked):
        said = f"a sliding window of {window} tokens" if window else "no sliding window"
        raise ModelError(
            f"layer {module.layer_idx} attends with {said}, but was checked with one of {checked}, and KV before that "
            "may be missing"
        )
    batch = paged_batch.batch
    pool = batch.layer(module.layer_idx)
    latent = latent_heads(module) if pool.shape[1] == 1 else None
    if paged_batch.places:
        fits = (key.shape[1], key.shape[-1], value.shape[-1]) == paged_batch.places[module.layer_idx].sizes
    elif latent is None:
        fits = key.shape[1::2] == value.shape[1::2] == pool.shape[-2:]
    else:
        fits = (key.shape[1], key.shape[-1] + value.shape[-1]) == pool.shape[-2:]
    if pool.dtype not in (key.dtype, torch.float8_e4m3fn) or not fits:
        raise ModelError(
            f"layer {module.layer_idx} has keys {tuple(key.shape[1::2])} and values {tuple(value.shape[1::2])} "
            f"in {key.dtype}, the pool holds {tuple(pool.shape[-2:])} in {pool.dtype}: "
            "all layers, keys and values must be alike"
        )
    count = len(batch.slot_mapping)  # later tokens are padding
    q, k, v = (states[0, :, :count].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attended = batch.attend(
        q, k, v, module.layer_idx,
        scale=scale, sliding_window=window or None, softcap=softcap, sinks=s_aux, slopes=slopes, latent=latent,
        rotary=None if rotary is None else rotary_of(module, rotary, count),
    )  # fmt: skip
    padding = query.shape[2] - count
    return (pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended)[None], None


AttentionInterface.register(PAGED, paged_attention_hook)
