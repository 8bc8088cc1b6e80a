"""Adapters around transformers' own models: loading, checking, the attention hook, the demo model."""

from sidestream.models.adapter import PagedModel
from sidestream.models.loader import kv_token_bytes, load_model

__all__ = ["PagedModel", "kv_token_bytes", "load_model"]
