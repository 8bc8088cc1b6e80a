"""The transfer engine: it moves KV cache blocks between a device, host memory and disk, while an engine computes on its
own streams. It depends on no engine.

An engine owns a `FencedPool` of block ids and the memory of the blocks, identifies the contents of blocks by
`BlockKeys`, and gives plans (`StorePlan`, `LoadPlan`, `PromotePlan`, `FindPlan`) to an `OffloadConnector`, which never
blocks. Before a step, its stream waits for the fences of `OffloadConnector.gates`.

Names that need torch are imported on first use, so that a process that only checks options starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sidestream_kv.config import OffloadConfig, parse_bytes
from sidestream_kv.errors import (
    ConfigError,
    DeviceError,
    DeviceLost,
    InvariantError,
    OutOfDeviceMemory,
    ProcessFailed,
    RaceError,
    SidestreamError,
    TierCorrupt,
    TierError,
    TierFull,
    TierLost,
    TierTimeout,
)
from sidestream_kv.types import (
    DEVICE,
    HOST,
    Access,
    Accesses,
    BlockId,
    Fence,
    FindPlan,
    Key,
    LayerGates,
    LoadPlan,
    PromotePlan,
    RequestId,
    StorePlan,
    Tracer,
    TransferPlan,
)
from sidestream_kv.version import VERSION

if TYPE_CHECKING:
    from sidestream_kv.device.base import CopyBatch, Device, Memory, Stream
    from sidestream_kv.device.cpu import CpuDevice
    from sidestream_kv.device.cuda.device import CudaDevice
    from sidestream_kv.kv.keys import BlockKeys
    from sidestream_kv.kv.layout import BlockLayout, KVLayout, LayeredLayout
    from sidestream_kv.kv.pool import FencedPool, Lease, PoolExhausted
    from sidestream_kv.metrics import Metrics
    from sidestream_kv.offload.connector import LoadFailed, LoadReady, OffloadConnector, TransferEvent
    from sidestream_kv.offload.loads import CostModel
    from sidestream_kv.offload.tickets import Promoted, StoreAgain
    from sidestream_kv.offload.tiers.base import PersistentTier, TierContext, TierKind
    from sidestream_kv.offload.tiers.stack import BlockMemory, TierStack, register

_LAZY = {
    "BlockKeys": "kv.keys",
    "BlockLayout": "kv.layout",
    "BlockMemory": "offload.tiers.stack",
    "CopyBatch": "device.base",
    "CostModel": "offload.loads",
    "CpuDevice": "device.cpu",
    "CudaDevice": "device.cuda.device",
    "Device": "device.base",
    "FencedPool": "kv.pool",
    "KVLayout": "kv.layout",
    "LayeredLayout": "kv.layout",
    "Lease": "kv.pool",
    "LoadFailed": "offload.connector",
    "LoadReady": "offload.connector",
    "Memory": "device.base",
    "Metrics": "metrics",
    "OffloadConnector": "offload.connector",
    "PersistentTier": "offload.tiers.base",
    "PoolExhausted": "kv.pool",
    "Promoted": "offload.tickets",
    "StoreAgain": "offload.tickets",
    "Stream": "device.base",
    "TierContext": "offload.tiers.base",
    "TierKind": "offload.tiers.base",
    "TierStack": "offload.tiers.stack",
    "TransferEvent": "offload.connector",
    "register": "offload.tiers.stack",
}

__all__ = [
    "DEVICE",
    "HOST",
    "Access",
    "Accesses",
    "BlockId",
    "BlockKeys",
    "BlockLayout",
    "BlockMemory",
    "ConfigError",
    "CopyBatch",
    "CostModel",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceError",
    "DeviceLost",
    "Fence",
    "FencedPool",
    "FindPlan",
    "InvariantError",
    "KVLayout",
    "Key",
    "LayerGates",
    "LayeredLayout",
    "Lease",
    "LoadFailed",
    "LoadPlan",
    "LoadReady",
    "Memory",
    "Metrics",
    "OffloadConfig",
    "OffloadConnector",
    "OutOfDeviceMemory",
    "PersistentTier",
    "PoolExhausted",
    "ProcessFailed",
    "PromotePlan",
    "Promoted",
    "RaceError",
    "RequestId",
    "SidestreamError",
    "StoreAgain",
    "StorePlan",
    "Stream",
    "TierContext",
    "TierCorrupt",
    "TierError",
    "TierFull",
    "TierKind",
    "TierLost",
    "TierStack",
    "TierTimeout",
    "Tracer",
    "TransferEvent",
    "TransferPlan",
    "parse_bytes",
    "register",
]

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sidestream_kv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sidestream_kv.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
