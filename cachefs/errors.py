"""Every error gpufeed raises on purpose, in one tree.

The class says who has to act:

- ``UsageError``: the caller. The arguments, the configuration or the order of calls are wrong;
  repeating the call cannot help.
- ``OperatorError``: whoever runs the machine or owns the bucket. Credentials, a missing bucket, a
  full or read-only disk, a port in use.
- ``RetryableError``: nobody yet. The same call may succeed later; the layer that raised it has
  already spent its own retries.
- ``IntegrityError``: the bytes are wrong. They were not handed out, and nothing was committed.

Each message says what happened, the numbers, and what to do. Foreign exceptions are translated
into this tree once, at the adapter that met them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class GpufeedError(Exception):
    """Root of the tree. `exit_status` is what a command line ends with."""

    exit_status = 1


class UsageError(GpufeedError):
    """The caller must change the call."""

    exit_status = 2


class PastEndError(UsageError):
    """An extent was asked for that lies past the shard's end. The message has both numbers."""


class ConfigError(UsageError):
    """A setting is unknown, malformed or out of range."""


class ProtocolError(GpufeedError):
    """A peer sent bytes that are not of the protocol, or of a version that we do not speak."""


class OperatorError(GpufeedError):
    """The machine, the network or the bucket needs a person."""

    exit_status = 3


class AccessDeniedError(OperatorError):
    """The origin refused the credentials."""


class NotFoundError(OperatorError):
    """A bucket, an object or a path does not exist."""


class CapacityError(OperatorError):
    """A configured size can never hold what was asked for. The message has both numbers."""


class StorageError(OperatorError):
    """The cache disk refused: full, read-only, or failing."""


class DiskLateError(StorageError):
    """The cache disk does not answer in time. It still uses the memory it was lent.

    `over` is done when it has let go of it, however that call ended.
    """

    def __init__(self, message: str, over: asyncio.Future[Any]) -> None:
        super().__init__(message)
        self.over = over


class DeviceError(OperatorError):
    """The accelerator's runtime refused a call, or an earlier call of it had failed."""


class AlreadyRegisteredError(DeviceError):
    """Memory is page-locked for the accelerator already, by somebody else in this process."""


class RetryableError(GpufeedError):
    """It may work later."""

    exit_status = 4


class OriginUnavailableError(RetryableError):
    """The origin throttled, timed out or broke the connection more often than the limit allows."""


class DaemonUnavailableError(RetryableError):
    """No daemon answers on the socket, or it went away."""


class IntegrityError(GpufeedError):
    """Bytes did not match their checksum, length or version."""

    exit_status = 5


class ShardChangedError(IntegrityError):
    """The object behind a shard key was overwritten. The message has both etags."""


class CorruptSampleError(IntegrityError):
    """A shard's own format is broken. The message has shard, offset and, where known, key."""


class WorkerError(GpufeedError):
    """A decode worker died or raised; the message carries its traceback."""


def again(error: BaseException | None) -> GpufeedError:
    """A fresh copy of an error that several are told, so that they do not grow one traceback."""
    assert isinstance(error, GpufeedError), error
    # Lent memory is the business of the one who lent it.
    kind = StorageError if isinstance(error, DiskLateError) else type(error)
    return kind(*error.args)
