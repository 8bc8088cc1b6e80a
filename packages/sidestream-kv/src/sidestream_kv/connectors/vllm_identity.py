"""What vLLM's configuration says of the model: the weights that its KV comes from, so that a directory never serves
that of another model, and whether all layers wait for loads. Imports nothing of vLLM, but knows attributes of its
configurations that all versions have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sidestream_kv.connectors.checkpoint import fingerprint_of
from sidestream_kv.connectors.chunks import digest_of
from sidestream_kv.errors import ConfigError


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


def each_layer_waits(vllm_config: Any, layers: Iterable[str]) -> bool:
    """Whether vLLM calls `wait_for_layer_load` for each of these layers. It does in its own classes of attention only:
    an indexer reads its keys before the attention after it calls.
    """
    modules = vllm_config.compilation_config.static_forward_context
    kinds = ({base.__name__ for base in type(modules.get(name)).__mro__} for name in layers)
    return all(kind & {"Attention", "MLAAttention"} for kind in kinds)  # rule: indexer-lets-the-step-wait
