"""Small stand-ins of what a storage of SGLang's HiCache sees: its interface, a pool of host memory, and the two ways in
which the cache controller moves pages. `installed` puts them in place of SGLang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stand_ins import in_place_of, modules_of

ADAPTER = ("sglang_storage",)


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {host_pool_name: host_pool}

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...
    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...
    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...
    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...
    @abstractmethod
    def exists(self, key: str) -> bool: ...


@dataclasses.dataclass
class OldestConfig:
    """HiCacheStorageConfig of 0.5.20."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "served"
    extra_config: dict[str, Any] | None = None


@dataclasses.dataclass
class OldConfig(OldestConfig):
    """HiCacheStorageConfig of 0.5.22."""

    dp_rank: int = 0


@dataclasses.dataclass
class Config(OldConfig):
    """HiCacheStorageConfig of 0.5.23."""

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


class Pool:
    """SGLang's MHATokenToKVPoolHost of 8 pages, as far as a storage uses it."""

    dtype, page_size, layer_num, head_num, head_dim, size = torch.bfloat16, 4, 2, 1, 8, 32

    def __init__(self, layout: str = "page_first") -> None:
        self.layout = layout
        self.kv_buffer = torch.zeros((2, self.size, self.layer_num, self.head_num, self.head_dim), dtype=self.dtype)
        self.clear()

    def clear(self) -> None:
        self.mem_state = torch.zeros(self.size, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        part = self.layer_num * self.page_size * self.head_num * self.head_dim * self.dtype.itemsize
        starts = [self.kv_buffer[half].data_ptr() + int(row) * part // 4 for row in indices[::4] for half in (0, 1)]
        return starts, [part] * len(starts)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index : index + self.page_size].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        rows = self.kv_buffer[:, index : index + self.page_size]
        rows.copy_(data_page.reshape(rows.shape))


@dataclasses.dataclass
class Sglang:
    """A fake SGLang, whose server has these arguments."""

    model: Any
    lora: Any
    replica: int | None = None

    @property
    def storage(self) -> Any:
        return importlib.import_module("sidestream_kv.connectors.sglang_storage")

    def runtime(self) -> dict[str, Any]:
        """What is read of sglang.srt.runtime_context."""
        parallel = lambda: SimpleNamespace(dp_rank=self.replica)  # noqa: E731
        return {"get_model": lambda: self.model, "get_lora": lambda: self.lora, "get_parallel": parallel}


@contextlib.contextmanager
def installed(model: Path) -> Iterator[Sglang]:
    """A server of this model in place of SGLang."""
    arguments = {"model_path": str(model), "revision": None, "download_dir": None, "kv_cache_dtype": "auto"}
    sglang = Sglang(SimpleNamespace(**arguments), SimpleNamespace(enable_lora=False))
    modules = modules_of(
        {
            "sglang.version": {"__version__": "0.5.23"},
            "sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": HiCacheStorage},
            "sglang.srt.runtime_context": sglang.runtime(),
        }
    )
    with in_place_of("sglang", modules, ADAPTER):
        yield sglang


class Controller:
    """SGLang's cache controller over a storage: how it calls the storage, for both interfaces."""

    def __init__(self, storage: Any, pool: Any, *, zero_copy: bool) -> None:
        self.storage, self.pool, self.zero_copy = storage, pool, zero_copy
        storage.register_mem_pool_host(pool)

    def fill(self, page: int, value: int) -> None:
        """K of this value, and V of its negative."""
        rows = self.pool.kv_buffer[:, page * 4 : page * 4 + 4]
        rows[0], rows[1] = value, -value

    def page(self, page: int) -> int | None:
        """The value of a whole page; None: it has no single one."""
        (keys, values) = self.pool.kv_buffer[:, page * 4 : page * 4 + 4].unbind()
        value = int(keys.flatten()[0])
        return value if (keys == value).all() and (values == -value).all() else None

    def backup(self, pages: dict[str, int]) -> bool:
        if self.zero_copy:
            return all(self.storage.batch_set_v1(list(pages), self._rows(pages)))
        return bool(self.storage.batch_set(list(pages), [self.pool.get_data_page(page * 4) for page in pages.values()]))

    def prefetch(self, pages: dict[str, int]) -> int:
        """Query and read leading pages; their number."""
        hits = self.storage.batch_exists(list(pages))
        pages = dict(list(pages.items())[:hits])
        if self.zero_copy:
            good = self.storage.batch_get_v1(list(pages), self._rows(pages))
        else:
            found = self.storage.batch_get(list(pages), [self.pool.get_dummy_flat_data_page() for _ in pages])
            good = [data is not None for data in found]
            for page, data in zip(pages.values(), found, strict=True):
                if data is not None:
                    self.pool.set_from_flat_data_page(page * 4, data)
        return (good.index(False)) if False in good else len(good)

    def _rows(self, pages: dict[str, int]) -> torch.Tensor:
        return torch.cat([torch.arange(page * 4, page * 4 + 4) for page in pages.values()] or [torch.arange(0)])
