"""Sidestream runs language models and keeps their KV cache on the device, in host memory and on disk. So KV survives
eviction from the device and the end of the process. Copies run on separate streams, beside the compute stream.

The classes that need torch are imported on first use, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING

from sidestream import moved
from sidestream.config import (
    CacheOptions,
    EngineConfig,
    KVEventsConfig,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
)
from sidestream.errors import (
    CallTimeout,
    ConfigError,
    ContextTooLong,
    DeviceError,
    DeviceLost,
    EngineStopped,
    InvariantError,
    ModelError,
    ModelNotFound,
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
    TierLost,
    TierTimeout,
)
from sidestream.processes.progress import start_lines
from sidestream.types import CachedPrefix, CachedTokens, Delta, Flushed, TokenLogprob
from sidestream.version import VERSION
from sidestream_kv.config import OffloadConfig

if TYPE_CHECKING:
    from sidestream.async_llm import AsyncLLM
    from sidestream.client.beam_search import BeamSequence
    from sidestream.llm import LLM, Completion, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSequence",
    "CacheOptions",
    "CachedPrefix",
    "CachedTokens",
    "CallTimeout",
    "Completion",
    "ConfigError",
    "ContextTooLong",
    "Delta",
    "DeviceError",
    "DeviceLost",
    "EngineConfig",
    "EngineStopped",
    "Flushed",
    "InvariantError",
    "KVEventsConfig",
    "ModelError",
    "ModelNotFound",
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
    "StructuredOutputs",
    "TierCorrupt",
    "TierError",
    "TierFull",
    "TierLost",
    "TierTimeout",
    "TokenLogprob",
]

__version__ = VERSION

# The level of Sidestream's log is that of the transfer engine's, too.
logging.getLogger("sidestream_kv").parent = logging.getLogger("sidestream")
sys.meta_path.insert(0, moved.MovedModules())  # before the finder of files, which would load a module twice

_LAZY = {
    "AsyncLLM": "async_llm",
    "BeamSequence": "client.beam_search",
    "Completion": "llm",
    "LLM": "llm",
    "RequestOutput": "llm",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    module = f"sidestream.{_LAZY[name]}"
    if module not in sys.modules:
        with start_lines() as lines:  # torch and transformers take seconds
            lines.update(f"importing {module}")
            importlib.import_module(module)
    return getattr(sys.modules[module], name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
