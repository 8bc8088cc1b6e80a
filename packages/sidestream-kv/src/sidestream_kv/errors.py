"""All errors that the transfer engine raises, as a tree. A message gives the wrong value, the bound and the remedy.

SidestreamError
├── ConfigError          an option or a tier directory is unusable
├── TierError            an offload tier (host memory, disk) failed: the engine counts it and recomputes the KV
│   ├── TierFull         the tier has no space, even after eviction
│   ├── TierCorrupt      the checksum, length or header of stored KV is wrong
│   ├── TierLost         the medium of a tier was removed or replaced, and with it every entry
│   └── TierTimeout      the engine closed before a transfer began
├── DeviceError          a call to the device failed: the caller's operation fails, the device still works
│   ├── OutOfDeviceMemory    the device has too little free memory
│   └── DeviceLost       the device stopped working: the engine ends
├── ProcessFailed        a child process ended unexpectedly, or the engine of this one hangs in its close
├── RaceError            the order checker found unordered accesses to the same bytes
└── InvariantError       an internal invariant is broken: a bug in Sidestream
"""

from __future__ import annotations


class SidestreamError(Exception):
    """Root of every error that Sidestream raises on purpose."""


class ConfigError(SidestreamError):
    """An option, a model directory or a tier directory is unusable."""


class TierError(SidestreamError):
    """An offload tier (host memory, disk) failed. The engine counts the failure and recomputes the KV."""


class TierFull(TierError):
    """The tier has no space, even after eviction. Nothing was written."""


class TierCorrupt(TierError):
    """The checksum, length or header of stored KV is wrong. The engine treats the block as a cache miss."""


class TierLost(TierError):
    """The medium of a tier was removed or replaced, and with it every entry. The engine forgets the entries."""


class TierTimeout(TierError):
    """The engine closed before a transfer began."""


class DeviceError(SidestreamError):
    """A call to the device failed. The caller's operation fails; the device still works."""


class OutOfDeviceMemory(DeviceError):
    """The device has too little free memory."""


class DeviceLost(DeviceError):
    """The device stopped working, and the results of running work are undefined: the engine ends."""


class ProcessFailed(SidestreamError):
    """A child process ended unexpectedly: the message gives its exit status or signal. Or the engine of this process
    does not close, because one of its threads hangs.
    """


class RaceError(SidestreamError):
    """The order checker (`sidestream_order.checker`) found unordered accesses to the same bytes."""


class InvariantError(SidestreamError):
    """An internal invariant is broken: a bug in Sidestream, never a user's fault."""
