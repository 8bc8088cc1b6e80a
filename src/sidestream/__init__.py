"""Sidestream: an LLM's KV cache that outlives the device pool and the process, moved on side streams.

Names are imported when first used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sidestream.version import VERSION

if TYPE_CHECKING:
    from sidestream.async_llm import AsyncLLM
    from sidestream.config import EngineConfig, OffloadConfig, SamplingParams, SpeculativeConfig
    from sidestream.errors import (
        ConfigError,
        ContextTooLong,
        DeviceError,
        DeviceLost,
        EngineStopped,
        InvariantError,
        ModelError,
        OutOfDeviceMemory,
        ProcessFailed,
        QueueFull,
        RaceError,
        RequestError,
        RequestRejected,
        SidestreamError,
        TierCorrupt,
        TierError,
        TierFull,
        TierTimeout,
    )
    from sidestream.llm import LLM, Completion, RequestOutput
    from sidestream.types import CachedTokens, Delta, TokenLogprob

_HOME = {
    "AsyncLLM": "async_llm",
    "CachedTokens": "types",
    "Completion": "llm",
    "ConfigError": "errors",
    "ContextTooLong": "errors",
    "Delta": "types",
    "DeviceError": "errors",
    "DeviceLost": "errors",
    "EngineConfig": "config",
    "EngineStopped": "errors",
    "InvariantError": "errors",
    "LLM": "llm",
    "ModelError": "errors",
    "OffloadConfig": "config",
    "OutOfDeviceMemory": "errors",
    "ProcessFailed": "errors",
    "QueueFull": "errors",
    "RaceError": "errors",
    "RequestError": "errors",
    "RequestOutput": "llm",
    "RequestRejected": "errors",
    "SamplingParams": "config",
    "SidestreamError": "errors",
    "SpeculativeConfig": "config",
    "TierCorrupt": "errors",
    "TierError": "errors",
    "TierFull": "errors",
    "TierTimeout": "errors",
    "TokenLogprob": "types",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CachedTokens",
    "Completion",
    "ConfigError",
    "ContextTooLong",
    "Delta",
    "DeviceError",
    "DeviceLost",
    "EngineConfig",
    "EngineStopped",
    "InvariantError",
    "ModelError",
    "OffloadConfig",
    "OutOfDeviceMemory",
    "ProcessFailed",
    "QueueFull",
    "RaceError",
    "RequestError",
    "RequestOutput",
    "RequestRejected",
    "SamplingParams",
    "SidestreamError",
    "SpeculativeConfig",
    "TierCorrupt",
    "TierError",
    "TierFull",
    "TierTimeout",
    "TokenLogprob",
]

__version__ = VERSION


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sidestream.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
