"""Paged attention on the device: one family of kernels for prefill, decode and multi-token verification.

`DeviceBatch` holds the location of a packed batch's KV in the pool, in device tensors. `paged_attention` writes the
batch's keys and values and attends, with the semantics of `sidestream.attention.paged`. `warm_up` compiles the kernels
before serving. The package can be imported without triton; a launch then raises ConfigError.
"""

from sidestream.attention.triton.backend import TritonAttention
from sidestream.attention.triton.launch import DeviceBatch, paged_attention
from sidestream.attention.triton.variants import Variant, warm_up
from sidestream.attention.triton.workspace import LONG_TOKENS, ContiguousKV, SplitKVWorkspace, Tile, Tiles

__all__ = [
    "LONG_TOKENS",
    "ContiguousKV",
    "DeviceBatch",
    "SplitKVWorkspace",
    "Tile",
    "Tiles",
    "TritonAttention",
    "Variant",
    "paged_attention",
    "warm_up",
]
