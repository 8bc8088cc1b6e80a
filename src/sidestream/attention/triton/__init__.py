"""Paged attention on the device: prefill, decode and multi-token verification by one family of kernels.

`DeviceBatch` says how a packed batch lies in the pool, by tensors on the device; `paged_attention` writes its keys and
values and attends, with the meaning of `sidestream.attention.paged`; `warm_up` compiles before serving. Importable
without triton; a launch then raises.
"""

from sidestream.attention.triton.backend import TritonAttention
from sidestream.attention.triton.batch import LONG_TOKENS, ContiguousKV, DeviceBatch, SplitKVWorkspace, Tile, Tiles
from sidestream.attention.triton.launch import Variant, paged_attention, warm_up

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
