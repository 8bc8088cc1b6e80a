"""The one tree of errors; every message gives value, bound and remedy.

SidestreamError
├── ConfigError          an option, a model directory or a tier directory that cannot be used as asked
│   └── ModelError       a model that cannot be read, or cannot be served right
├── RequestError         one request's fault: it becomes that client's reply, nothing else notices
│   ├── RequestRejected  the request asks for something impossible or unsupported
│   ├── ContextTooLong   the prompt does not fit the pool or the model
│   └── QueueFull        too many requests wait already; try again later
├── TierError            a tier's fault: the engine recomputes and counts it
│   ├── TierFull         no room, even after eviction
│   ├── TierCorrupt      checksum, length or header is wrong
│   └── TierTimeout      a deadline passed; the late completion is quarantined
├── DeviceError          a call of the device failed: whatever asked for it failed, the device goes on
│   ├── OutOfDeviceMemory    the device has not enough memory left
│   └── DeviceLost       the device does nothing any more: the engine ends
├── EngineStopped        the engine is draining or gone
├── ProcessFailed        a process that this one started ended by itself
├── RaceError            two accesses that nothing orders (raised by the checker)
└── InvariantError       a rule of the ledger was broken: a bug in Sidestream
"""


class SidestreamError(Exception):
    """Root of every error that Sidestream raises on purpose."""


class ConfigError(SidestreamError):
    """An option, a model directory or a tier directory that cannot be used as asked."""


class ModelError(ConfigError):
    """A model that cannot be read, or cannot be served right."""


class RequestError(SidestreamError):
    """One request's fault; it becomes that client's reply.

    `param` names the request's field at fault, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestRejected(RequestError):
    """The request asks for something impossible or unsupported."""


class ContextTooLong(RequestError):
    """The prompt does not fit the pool or the model."""


class QueueFull(RequestError):
    """Too many requests wait already; the client may try again later."""


class TierError(SidestreamError):
    """A tier's fault; the engine recomputes and counts it."""


class TierFull(TierError):
    """No room, even after eviction; nothing was written."""


class TierCorrupt(TierError):
    """A checksum, length or header is wrong; the entry is a miss."""


class TierTimeout(TierError):
    """A deadline passed; the late completion is quarantined."""


class DeviceError(SidestreamError):
    """A call of the device failed: whatever asked for it failed, the device goes on."""


class OutOfDeviceMemory(DeviceError):
    """The device has not enough memory left for what was asked."""


class DeviceLost(DeviceError):
    """The device does nothing any more, and nothing that is on its way can be believed: the engine ends."""


class EngineStopped(SidestreamError):
    """The engine is draining or gone."""


class ProcessFailed(SidestreamError):
    """A process that this one started ended by itself; the message says how."""


class RaceError(SidestreamError):
    """Two accesses that nothing orders; raised by the checker."""


class InvariantError(SidestreamError):
    """A rule of the ledger was broken: a bug in Sidestream, never a user's fault."""
