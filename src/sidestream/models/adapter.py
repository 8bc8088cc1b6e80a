"""A transformers model served from a block pool: the hook that its attention modules call, and the owner of the module.

Knows nothing of requests; what a batch looks like travels with the call, as an argument of the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig

from sidestream.attention.paged import Attended, AttentionBatch
from sidestream.errors import InvariantError, ModelError
from sidestream.kv.layout import KVLayout

PAGED = "sidestream_paged"

# Tokens: lengths up to the first are multiples of few, a chunk of prefill has the second (EngineConfig.chunk_tokens by
# default).
_FINE = 16
_CHUNK = 256

# Arguments that models pass along and that say nothing which the batch does not say.
_KNOWN = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "is_causal", "output_router_logits", "output_attentions"}
)
# Models whose decoder layers take a forward's arguments and do not pass them on to their attention.
_DROPPING = frozenset({"nemotron", "stablelm"})
_MEANING = {"s_aux": "attention sinks", "indices": "sparse attention", "position_bias": "a position bias"}


class Unseen:
    """A batch on its way through a module that may be compiled. The compiler looks into a dataclass, and compiles again
    for each that differs in a dtype, in what it calls before a layer, or in its class.
    """

    def __init__(self, batch: Attended) -> None:
        self.batch = batch


class PagedModel:
    """Owner of a transformers module whose KV lives in a block pool.

    name            last part of the directory or hub id
    config          the model's own config
    layout          shape of its KV blocks
    vocab_size      width of its logits
    num_heads       query heads of its attention
    max_model_len   positions that it was made for
    eos_token_ids   tokens that end an answer, by the model's own generation config
    fingerprint     hex, 128 bits: equal in every process for equal config, weights and dtype
    module          the transformers module; call it through `forward`
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        layout: KVLayout,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        fingerprint: str,
    ) -> None:
        self.name = name
        self.config: PreTrainedConfig = module.config
        self.layout = layout
        self.vocab_size = int(module.config.vocab_size)
        self.num_heads = int(module.config.num_attention_heads)
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.fingerprint = fingerprint
        module.config._attn_implementation = PAGED
        if self.config.model_type in _DROPPING:
            for layer in module.base_model.layers:
                _pass_batch_on(layer)
        self.module = module
        self._left: Callable[[torch.Tensor], None] | None = None

    def leave_hidden(self) -> None:
        """Have every forward tell what the last layer left, for `forward_with_hidden`. Once, before the first forward
        that is captured.
        """

        def tell(module: Any, given: Any, out: Any) -> None:
            if self._left is not None:
                left, self._left = self._left, None
                left(out.last_hidden_state[0])

        self.module.base_model.register_forward_hook(tell)

    def forward_with_hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        *,
        left: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """`forward`; as soon as it is enqueued, `left` is told what the last layer left at each packed token, after the
        model's last norm: `[T, hidden_size]`. Behind `leave_hidden`.
        """
        self._left = lambda hidden: left(hidden[: len(tokens)])
        try:
            logits = self.forward(tokens, positions, batch, logit_rows)
            if self._left is not None:
                raise InvariantError("the model tells of no hidden states: leave_hidden comes first")
            return logits
        finally:
            self._left = None

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: Attended, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits `[R, vocab_size]`, in the model's dtype, at the packed positions `logit_rows`; the tokens' KV is in
        the pool afterwards.

        tokens, positions int64 [T] · logit_rows int64 [R], R may be 0; on the model's device. Runs on the calling
        thread, on a GPU it is enqueued on the current stream; one call at a time.
        """
        if tokens.device.type == "cpu":
            missing = padded_length(len(tokens)) - len(tokens)
            tokens, positions = pad(tokens, (0, missing)), pad(positions, (0, missing))
        logits: torch.Tensor = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            paged_batch=Unseen(batch),
        ).logits
        return logits[0]


def _pass_batch_on(layer: Any) -> None:
    """Have a layer's attention get the batch that the layer gets."""
    given: list[Unseen] = []

    def take(_: Any, args: Any, named: dict[str, Any]) -> None:
        given.append(named["paged_batch"])

    def give(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**named, "paged_batch": given.pop()}

    layer.register_forward_pre_hook(take, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(give, with_kwargs=True)


def padded_length(num_tokens: int) -> int:
    """How many tokens a forward pass of `num_tokens` computes on a CPU; the ones beyond reach neither the pool nor a
    logit.

    Whole chunks of 256 stay as they are, and so do they with 16 rows that decode; all else is rounded up by at most a
    quarter, above 16 tokens to a multiple of 16. Few lengths, because oneDNN keeps some 2.5 MiB of kernels for each:
    2,000 short requests of SmolLM2-135M in bfloat16 met hundreds, and the process grew by 415 MiB.
    """
    if num_tokens > _CHUNK and (rest := num_tokens % _CHUNK) <= _FINE:
        return num_tokens - rest + (_FINE if rest else 0)
    quarter = (1 << num_tokens.bit_length() >> 1) // 4  # of the power of two below
    step = max(quarter, 1 if num_tokens <= _FINE else _FINE)
    return -(-num_tokens // step) * step


def paged_attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: Unseen | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention module: query `[1, heads, T, head_dim]`; returns `[1, T, heads,
    head_dim]`.

    Raises ModelError for whatever paged attention would have to ignore.
    """
    if paged_batch is None:
        raise ModelError(
            "its layers do not pass a forward's arguments on to their attention, so paged attention cannot know the batch"
        )
    for name, other in others.items():
        if other is not None and name not in _KNOWN:
            raise ModelError(
                f"its attention takes {_MEANING.get(name, name)} ({name}), which paged attention does not know"
            )
    if attention_mask is not None:
        raise ModelError("it builds an attention mask of its own, which paged attention would ignore")
    if not getattr(module, "is_causal", True):
        raise ModelError("its attention is not causal: KV in a pool cannot change once it is written")
    batch = paged_batch.batch
    pool = batch.layer(module.layer_idx)
    if key.dtype != pool.dtype or not key.shape[1::2] == value.shape[1::2] == pool.shape[-2:]:
        raise ModelError(
            f"layer {module.layer_idx} has keys {tuple(key.shape[1::2])} and values {tuple(value.shape[1::2])} in {key.dtype}, the pool holds "
            f"{tuple(pool.shape[-2:])} in {pool.dtype}: all layers, keys and values must be alike"
        )
    count = len(batch.slots)  # the rest is padding: it writes nothing, attends to nothing and is thrown away
    q, k, v = (states[0, :, :count].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    seen = batch.attend(q, k, v, module.layer_idx, scale=scale, sliding_window=sliding_window, softcap=softcap)
    return (pad(seen, (0, 0, 0, 0, 0, query.shape[2] - count)) if query.shape[2] > count else seen)[None], None


AttentionInterface.register(PAGED, paged_attention_hook)
