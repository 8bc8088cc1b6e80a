"""Everything that a storage for SGLang's HiCache does, without SGLang's interface, so that it runs without SGLang.

SGLang calls it on its threads for queries, prefetches and backups, at most 128 pages in a call. A page that SGLang
hands over as a tensor is one block. With "interface_v1", a page has several parts, such as K and V, and each is a
block, which is read straight into SGLang's host memory. Knows the protocol PersistentTier, and no tier.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from sidestream_kv.config import options_checked
from sidestream_kv.connectors.chunks import key_of
from sidestream_kv.connectors.sglang_identity import Server
from sidestream_kv.connectors.shared_store import SharedStore
from sidestream_kv.connectors.tier_options import TierOptions
from sidestream_kv.errors import ConfigError, TierTimeout
from sidestream_kv.offload.tiers.base import Block
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What SGLang itself has in the same JSON object.
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class StorageOptions(TierOptions):
    """Options in --hicache-storage-backend-extra-config: those of TierOptions, and

    keep_after_flush  whether blocks are served after SGLang flushed its cache: only if weights never change in place
    """

    keep_after_flush: bool = False


class Pages:
    """The methods of SGLang's HiCacheStorage. A failure is a miss and a line in the log, and never raised, because it
    would end SGLang's thread in some versions.
    """

    def __init__(self, storage_config: Any, server: Server) -> None:
        """Raises ConfigError if an option is wrong. The medium is opened when SGLang registers its host memory."""
        server.check_version(storage_config)
        extra = storage_config.extra_config or {}
        self._config, self._server = storage_config, server
        self._options = StorageOptions(**{name: extra[name] for name in extra if name not in _OF_SGLANG})
        self._in_place = bool(extra.get("interface_v1", 0))
        self._store: SharedStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the medium. Raises ConfigError if the layout of host memory is not supported, if another engine uses the
        medium, or if another model or layout made it.
        """
        self.mem_pool_host = mem_pool_host
        sizes = self._part_sizes(mem_pool_host)
        self._parts = len(sizes)
        self._cleared = mem_pool_host.mem_state  # SGLang makes another one whenever it clears the pool
        self._server.let_every_rank_write(self._config)
        layout = self._server.layout(
            mem_pool_host, self._config, block_bytes=sizes[0], parts=self._parts if self._in_place else 0
        )
        weights = self._options.fingerprint or self._server.weights()
        self._store = SharedStore(
            self._options.open(self._server.directory(self._config), layout, weights),
            num_threads=self._options.threads,
            max_pending_bytes=self._options.max_pending_bytes,
            deadline_s=self._options.load_deadline_s,
        )

    def _part_sizes(self, pool: Any) -> list[int]:
        if not self._in_place:
            return [pool.get_dummy_flat_data_page().nbytes]
        if pool.layout == "layer_first":
            raise ConfigError(
                "with interface_v1, a page must be contiguous, but --hicache-mem-layout is layer_first: give "
                "page_first, or page_first_direct with --hicache-io-backend direct, or leave interface_v1 out"
            )
        sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))[1]
        if len(set(sizes)) != 1:
            raise ConfigError(f"parts of a page have different sizes {sizes}, which Sidestream does not support")
        return [int(size) for size in sizes]

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises ConfigError if the model has other state than KV of full attention."""
        if host_pool is not self.mem_pool_host:  # rule: model-with-other-state-is-refused
            self.close()
            raise ConfigError(
                f"the cache of this model has a pool {host_pool_name!s} besides its KV (sliding windows, Mamba, an "
                "indexer, a draft model), which Sidestream does not store: leave the storage backend out"
            )

    def _opened(self) -> SharedStore:
        """The store, which is off if SGLang cleared its host memory: perhaps because it got other weights."""
        if self._store is None:
            raise ConfigError("SGLang uses a storage before it registers its host memory, or after it closed it")
        # rule: storage-is-off-after-a-flush
        if self.mem_pool_host.mem_state is not self._cleared and not self._options.keep_after_flush:
            self._store.stop("SGLang flushed its cache, and its weights may have changed (option keep_after_flush)")
        return self._store

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Number of leading pages that would be found now."""
        parts = [part for key in keys for part in self._keys_of(key)]
        return self._safely(lambda: self._opened().lookup(parts) // self._parts, 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of host memory. Returns which are filled and verified."""
        return self._safely(lambda: self._get(keys, self._parts_at(host_indices), reused=True), [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of host memory. Returns which the tier has."""
        return self._safely(lambda: self._set(keys, self._parts_at(host_indices)), [False] * len(keys))

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill tensors of a page. Returns None for those that are not filled and verified."""

        def found() -> list[Any]:
            good = self._get(keys, [_bytes_of(tensor) for tensor in target_locations], reused=False)
            return [tensor if ok else None for tensor, ok in zip(target_locations, good, strict=True)]

        return self._safely(found, [None] * len(keys))

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store tensors of a page. Returns whether the tier has all of them."""
        return self._safely(lambda: all(self._set(keys, [_bytes_of(one.contiguous()) for one in values])), False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """See batch_get."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """See batch_set."""
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        """See batch_exists."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget every page."""
        self._safely(lambda: self._opened().clear(), None)

    def close(self) -> None:
        """Finish the copies and close the medium. SGLang's threads have ended before. Idempotent."""
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        except TierTimeout:
            _log.exception("sidestream storage: its directory stays locked until this process ends")

    def _safely(self, work: Callable[[], T], missing: T) -> T:
        try:
            return work()
        except Exception:
            _log.exception("sidestream storage: a call failed")
            return missing  # rule: failure-is-a-miss-for-sglang

    def _get(self, keys: list[str], parts: Sequence[Block], *, reused: bool) -> list[bool]:
        good = self._opened().load(self._blocks(keys, parts), reused=reused)
        return [good.issuperset(self._keys_of(key)) for key in keys]

    def _set(self, keys: list[str], parts: Sequence[Block]) -> list[bool]:
        good = self._opened().store(self._blocks(keys, parts))
        return [good.issuperset(self._keys_of(key)) for key in keys]

    def _blocks(self, keys: list[str], parts: Sequence[Block]) -> list[tuple[Key, Block]]:
        return list(zip([name for key in keys for name in self._keys_of(key)], parts, strict=True))

    def _keys_of(self, key: str) -> list[Key]:
        return [key_of(f"{key}/{part}".encode()) for part in range(self._parts)]  # rule: key-of-a-page-has-its-part

    def _parts_at(self, host_indices: Any) -> list[Block]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
            for pointer, size in zip(pointers, sizes, strict=True)
        ]


def _bytes_of(tensor: Any) -> Block:
    block: Block = tensor.view(torch.uint8).reshape(-1).numpy()
    return block
