"""What a checkpoint is and needs, from its config and the headers of its files: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.models.config_checks import max_positions
from sidestream.models.directory import local_directory, name_of
from sidestream.models.loader import cache_parts, naming_model, precision_of, read_config
from sidestream.models.packed import copies_of, gguf_of, packing
from sidestream.models.text_part import text_config
from sidestream.models.weights import stored_dtype_and_bytes
from sidestream_kv.kv.layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a checkpoint that the checks of configs accept.

    kind            transformers' `model_type`
    text_of         the kind of the whole model, of which the text part is served; empty: all of it is
    quantisation    `quant_method` of its weights; empty: they are not quantised
    stored          dtype of its weights, once they are not quantised
    dtype, reason   the dtype in which it would be served here, and why
    weights_bytes   in that dtype, of all ranks; None: the files of the weights are not here
    packed_bytes    of a GGUF file whose weights can stay packed on a CPU; None: it is no such file
    stays_packed    whether they do: `weights_bytes` is then that number
    copies_bytes    of the repacked copies that they then have, unless `EngineConfig.repack` decides otherwise
    kv_cache_dtype  the dtype in which keys and values lie
    token_bytes     KV of one token, of one rank
    state_bytes     recurrent state of one request; 0: it has none
    block_tokens    tokens of a block
    max_positions   largest number of tokens of a request
    """

    kind: str
    text_of: str
    quantisation: str
    stored: str
    dtype: str
    reason: str
    weights_bytes: int | None
    packed_bytes: int | None
    stays_packed: bool
    copies_bytes: int
    kv_cache_dtype: str
    token_bytes: int
    state_bytes: int
    block_tokens: int
    max_positions: int


def facts_of(
    path_or_hub_id: str, *, dtype: str, device: torch.device, ranks: int = 1, kv_cache_dtype: str = "auto"
) -> ModelFacts:
    """The facts of a directory or hub id, of which at most the config is downloaded. Options are those of `load_model`.
    Raises ModelError with the reason if the model is not served.
    """
    parts = cache_parts(
        path_or_hub_id, dtype=dtype, block_tokens=None, device=device, ranks=ranks, kv_cache_dtype=kv_cache_dtype
    )
    chosen = precision_of(path_or_hub_id, dtype=dtype, device=device)
    with naming_model(name_of(path_or_hub_id)):
        directory = local_directory(path_or_hub_id, weights=False)
        config = read_config(directory)
        text, quantisation = text_config(config), getattr(config, "quantization_config", None)
        stored, num_bytes = stored_dtype_and_bytes(directory, quantisation)
        weights_bytes = num_bytes * DTYPE_BYTES[chosen.dtype] // DTYPE_BYTES[stored] if num_bytes else None
        packed_bytes, ggml, copies_bytes = None, None, 0
        if (gguf := gguf_of(directory, config)) is not None:
            packed_bytes = gguf.num_bytes(packed=True, value_bytes=DTYPE_BYTES[chosen.dtype])
            if (ggml := packing(device, ranks=ranks)) is not None:
                weights_bytes, copies_bytes = packed_bytes, copies_of(gguf, ggml, repack=None)
        return ModelFacts(
            kind=text.model_type,
            text_of="" if text is config else config.model_type,
            quantisation=gguf.kinds() if gguf else str((quantisation or {}).get("quant_method", "")),
            stored=stored,
            dtype=chosen.dtype,
            reason=chosen.reason,
            weights_bytes=weights_bytes,
            packed_bytes=packed_bytes,
            stays_packed=ggml is not None,
            copies_bytes=copies_bytes,
            kv_cache_dtype=parts.kv.dtype,
            token_bytes=parts.kv.token_bytes,
            state_bytes=0 if parts.state is None else parts.state.state_bytes,
            block_tokens=parts.kv.block_tokens,
            max_positions=max_positions(text),
        )
