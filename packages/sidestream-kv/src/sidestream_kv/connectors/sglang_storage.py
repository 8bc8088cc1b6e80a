"""A storage for SGLang's HiCache: pages of KV in SGLang's host memory are also kept in a persistent tier, which is
bounded, verified on every read, and survives restarts and kill -9 (docs/sglang.md).

SGLang makes it in each scheduler process, as its storage backend `dynamic`. All but the names of SGLang's interface is
in `sglang_pages`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_lora, get_model, get_parallel
from sglang.version import __version__

from sidestream_kv.connectors.sglang_identity import Server
from sidestream_kv.connectors.sglang_pages import Pages


class SidestreamStorage(Pages, HiCacheStorage):  # type: ignore[misc]
    """A persistent tier behind SGLang's host memory. See StorageOptions."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises ConfigError if an option is wrong or this version tells too little."""
        server = Server(__version__, get_model(), bool(get_lora().enable_lora), get_parallel().dp_rank)
        super().__init__(storage_config, server)
