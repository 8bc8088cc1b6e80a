"""What the bytes of vLLM's KV chunks depend on, so that a directory never serves those of another model or layout.
Imports nothing of vLLM, but knows attributes of its configurations that all versions have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sidestream_kv.connectors.checkpoint import fingerprint_of
from sidestream_kv.errors import ConfigError
from sidestream_kv.types import Key

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Opaque chunks of vLLM's host memory, of all groups and workers.

    fields  what the bytes depend on besides the weights, by name
    """

    block_bytes: int
    block_tokens: int
    fields: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, int | str]:
        """The layout as plain values, for directories and messages."""
        return {
            "block_bytes": self.block_bytes,
            "block_tokens": self.block_tokens,
            **self.fields,
        }  # rule: layout-has-all-fields


def key_of(key: bytes) -> Key:
    """Our key of vLLM's offload key, which is a block hash and the index of a group of layers."""
    return hashlib.blake2b(key, digest_size=_KEY_BYTES).digest()  # rule: key-of-a-chunk-has-its-group


def digest_of(value: Any) -> str:
    """A short digest of plain values, for a field of which only equality matters."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def weights_of(vllm_config: Any) -> str:
    """Fingerprint of everything that decides the values of KV: weights, and the configuration that vLLM runs them
    with, including `--hf-overrides`. Also of a draft model, whose KV is in the same chunks.

    Raises ConfigError if weights cannot be found, or if there are LoRA adapters.
    """
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "vLLM's block hashes have only the names of LoRA adapters: give `fingerprint`, and another one whenever "
            "an adapter changes"
        )
    speculative = vllm_config.speculative_config
    drafts = [] if speculative is None or speculative.draft_model_config is None else [speculative.draft_model_config]
    load = vllm_config.load_config
    return digest_of([_model_of(model, load) for model in (vllm_config.model_config, *drafts)])


def _model_of(model: Any, load: Any) -> list[str]:
    config = json.loads(model.hf_config.to_json_string())
    config.pop("transformers_version", None)
    weights = fingerprint_of(model.model, revision=model.revision, download_dir=load.download_dir)
    effective = json.dumps(config, sort_keys=True)
    # rule: fingerprint-has-all-parts
    return [weights, effective, str(model.dtype), str(model.quantization), str(load.load_format)]
