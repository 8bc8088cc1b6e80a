"""Whose pages a directory serves: what SGLang tells of its weights, ranks and host memory. Imports nothing of SGLang,
but knows attributes of its configurations.

0.5.21   the first version that tells a storage its data-parallel rank, and clears its host memory only in a flush
0.5.23   the configuration of a storage decides which ranks of an MLA model write; before, only the first writes
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sidestream_kv.connectors.checkpoint import fingerprint_of
from sidestream_kv.connectors.chunks import ChunkLayout, digest_of
from sidestream_kv.errors import ConfigError

_log = logging.getLogger(__name__)

_TRIED = "0.5.23"

# Arguments that decide the values of KV, besides the checkpoint's files.
_VALUES = [
    *("json_model_override_args", "dtype", "quantization", "quantization_param_path", "load_format"),
    *("model_loader_extra_config", "modelopt_quant", "rl_quant_profile"),
]
# Attributes of a pool that decide the order of a page's bytes, besides its layout and number of bytes.
_GEOMETRY = [
    *("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "kv_cache_dim", "head_group_num", "storage_format_tag"),
]


@dataclass(frozen=True, slots=True)
class Server:
    """What the process knows of its server.

    model    arguments of the model, in effect
    replica  index among the replicas of --dp-size; None: there is one
    """

    version: str
    model: Any
    has_lora: bool
    replica: int | None

    def check_version(self, config: Any) -> None:
        """Raises ConfigError if this version tells a storage too little; logs if it is not the one that was tried."""
        if not hasattr(config, "dp_rank"):
            raise ConfigError(f"this is SGLang {self.version}, but Sidestream's storage needs 0.5.21 or later")
        if self.version != _TRIED:
            _log.warning(
                "SGLang %s: Sidestream's storage was tried with %s: watch its first hits", self.version, _TRIED
            )

    def weights(self) -> str:
        """A hash of the checkpoint's files and of the arguments that change KV.

        Raises ConfigError if the weights cannot be found, or if there are LoRA adapters.
        """
        if self.has_lora:
            raise ConfigError(
                "SGLang's page hashes have only names and paths of LoRA adapters: give `fingerprint`, and another one "
                "whenever an adapter changes"
            )
        model = self.model
        files = fingerprint_of(model.model_path, revision=model.revision, download_dir=model.download_dir)
        # rule: sglang-weights-have-all-parts
        return digest_of([files, *(str(getattr(model, name, None)) for name in _VALUES)])

    def directory(self, config: Any) -> str:
        """A name for what this process alone holds: a part of each page, or pages of other requests."""
        ranks = [("tp", config.tp_rank, config.tp_size), ("pp", config.pp_rank, config.pp_size)]
        ranks.append(("cp", config.attn_cp_rank, config.attn_cp_size))
        names = [f"{name}-{rank}-of-{size}" for name, rank, size in ranks if size > 1 or name == "tp"]
        replicas = [("dp", config.dp_rank), ("replica", self.replica)]
        return ".".join(names + [f"{name}-{rank}" for name, rank in replicas if rank])  # rule: rank-has-its-directory

    def let_every_rank_write(self, config: Any) -> None:
        """All ranks of an MLA model have equal KV, of which SGLang lets the first write. But a directory, and the index
        of what it holds, are of one process: so each rank keeps a copy. Raises ConfigError if SGLang cannot be told so.
        """
        if not config.is_mla_model or config.tp_size == 1:
            return
        if not hasattr(config, "is_storage_writer"):
            raise ConfigError(
                f"SGLang {self.version} lets only the first of {config.tp_size} ranks of an MLA model write, and each "
                "rank has its own directory: use 0.5.23 or later, or data-parallel attention (--dp-size as --tp-size)"
            )
        config.is_mla_model = False  # rule: every-rank-of-an-mla-model-writes

    def layout(self, pool: Any, config: Any, *, block_bytes: int, parts: int) -> ChunkLayout:
        """The layout of a host pool's pages of `parts` blocks; 0 parts: a block is a page as a tensor."""
        fields = {
            "sglang": self.version,
            "dtype": f"{pool.dtype} {self.model.kv_cache_dtype}",
            "pool": f"{type(pool).__name__} {pool.layout}",
            "geometry": digest_of([str(getattr(pool, name, None)) for name in _GEOMETRY]),
            "parts": str(parts),
            "rank": self.directory(config),
        }
        return ChunkLayout(block_bytes, int(pool.page_size), fields)
