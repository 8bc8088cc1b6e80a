"""Adapters around transformers' own models: loading, checking, the attention function, models to fetch by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidestream_kv.device.garbage import collections_paused

if TYPE_CHECKING:
    from sidestream.models.adapter import PagedModel
    from sidestream.models.loader import cache_parts, kv_token_bytes, load_model, precision_of

__all__ = ["PagedModel", "cache_parts", "kv_token_bytes", "load_model", "precision_of"]


def __getattr__(name: str) -> Any:
    # Imported on first use: transformers' modelling code takes seconds to import, and `catalog` does not need it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collections_paused():
        from sidestream.models import adapter, loader

    return getattr(adapter if name == "PagedModel" else loader, name)
