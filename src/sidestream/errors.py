"""All errors that Sidestream raises, as a tree. A message gives the wrong value, the bound and the remedy.

SidestreamError
├── ConfigError          an option, a model directory or a tier directory is unusable
│   └── ModelError       a model cannot be read, or cannot be served correctly
├── RequestError         one request is at fault: the error becomes its reply and affects no other request
│   ├── RequestRejected  the request asks for something impossible or unsupported
│   ├── ContextTooLong   the prompt does not fit the device's block pool or the model
│   └── QueueFull        too many requests are waiting; the client may try again later
├── TierError            an offload tier (host memory, disk) failed: the engine counts it and recomputes the KV
│   ├── TierFull         the tier has no space, even after eviction
│   ├── TierCorrupt      the checksum, length or header of stored KV is wrong
│   ├── TierLost         the medium of a tier was removed or replaced, and with it every entry
│   └── TierTimeout      the engine closed before a transfer began
├── DeviceError          a call to the device failed: the caller's operation fails, the device still works
│   ├── OutOfDeviceMemory    the device has too little free memory
│   └── DeviceLost       the device stopped working: the engine ends
├── EngineStopped        the engine is draining or has ended
├── CallTimeout          the engine did not carry out an operation in time, and may still do so
├── ProcessFailed        a child process ended unexpectedly, or the engine of this one hangs in its close
├── RaceError            the order checker (`sidestream_order.checker`) found unordered accesses to the same bytes
└── InvariantError       an internal invariant is broken: a bug in Sidestream
"""

from __future__ import annotations

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

__all__ = [
    "CallTimeout",
    "ConfigError",
    "ContextTooLong",
    "DeviceError",
    "DeviceLost",
    "EngineStopped",
    "InvariantError",
    "ModelError",
    "OutOfDeviceMemory",
    "ProcessFailed",
    "QueueFull",
    "RaceError",
    "RequestError",
    "RequestRejected",
    "SidestreamError",
    "TierCorrupt",
    "TierError",
    "TierFull",
    "TierLost",
    "TierTimeout",
]


class ModelError(ConfigError):
    """A model cannot be read, or cannot be served correctly."""


class RequestError(SidestreamError):
    """One request is at fault. The error becomes its reply.

    param   name of the faulty field of the request, if one field is at fault
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestRejected(RequestError):
    """The request asks for something impossible or unsupported."""


class ModelNotFound(RequestRejected):
    """The request names a model or an adapter that is not loaded."""


class ContextTooLong(RequestError):
    """The prompt does not fit the device's block pool or the model."""


class QueueFull(RequestError):
    """Too many requests are waiting; the client may try again later."""


class EngineStopped(SidestreamError):
    """The engine is draining or has ended."""


class CallTimeout(SidestreamError):
    """The engine did not carry out an operation in time, and may still do so."""
