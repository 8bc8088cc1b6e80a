"""The tree of errors. Every message gives value, bound and remedy.

SidestreamError
├── ConfigError          an option, a model directory or a tier directory is unusable
│   └── ModelError       a model cannot be read, or cannot be served correctly
├── RequestError         one request's fault: it becomes that client's reply and affects no other request
│   ├── RequestRejected  the request asks for something impossible or unsupported
│   ├── ContextTooLong   the prompt does not fit the pool or the model
│   └── QueueFull        too many requests are waiting; the client may try again later
├── TierError            a tier's fault: the engine counts it and recomputes
│   ├── TierFull         no room, even after eviction
│   ├── TierCorrupt      checksum, length or header is wrong
│   └── TierTimeout      a deadline passed; the late completion is quarantined
├── DeviceError          a call of the device failed: the caller's operation fails, the device still works
│   ├── OutOfDeviceMemory    the device has too little free memory
│   └── DeviceLost       the device stopped working: the engine ends
├── EngineStopped        the engine is draining or gone
├── ProcessFailed        a child process ended unexpectedly
├── RaceError            two unordered accesses to the same bytes (raised by the checker)
└── InvariantError       a rule of the ledger is broken: a bug in Sidestream
"""


class SidestreamError(Exception):
    """Root of every error that Sidestream raises on purpose."""


class ConfigError(SidestreamError):
    """An option, a model directory or a tier directory is unusable."""


class ModelError(ConfigError):
    """A model cannot be read, or cannot be served correctly."""


class RequestError(SidestreamError):
    """One request's fault; it becomes that client's reply.

    param   name of the faulty field of the request, if one field is at fault
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestRejected(RequestError):
    """The request asks for something impossible or unsupported."""


class ContextTooLong(RequestError):
    """The prompt does not fit the pool or the model."""


class QueueFull(RequestError):
    """Too many requests are waiting; the client may try again later."""


class TierError(SidestreamError):
    """A tier's fault; the engine counts it and recomputes."""


class TierFull(TierError):
    """No room, even after eviction; nothing was written."""


class TierCorrupt(TierError):
    """A checksum, length or header is wrong; the entry is a miss."""


class TierTimeout(TierError):
    """A deadline passed; the late completion is quarantined."""


class DeviceError(SidestreamError):
    """A call of the device failed. The caller's operation fails; the device still works."""


class OutOfDeviceMemory(DeviceError):
    """The device has too little free memory."""


class DeviceLost(DeviceError):
    """The device stopped working, and the results of running work are undefined: the engine ends."""


class EngineStopped(SidestreamError):
    """The engine is draining or gone."""


class ProcessFailed(SidestreamError):
    """A child process ended unexpectedly; the message says how."""


class RaceError(SidestreamError):
    """Two unordered accesses to the same bytes; raised by the checker."""


class InvariantError(SidestreamError):
    """A rule of the ledger is broken: a bug in Sidestream, never a user's fault."""
