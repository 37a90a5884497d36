"""The tree of errors as programs that open files know it.

Whoever reads through fsspec catches `FileNotFoundError`, `PermissionError` and `OSError`; whoever
knows gpufeed catches its own classes. Each error of this door is both. The text is the one that the
daemon gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpufeed.cachefs import errors
from gpufeed.cachefs.errors import GpufeedError


class FileMissingError(errors.NotFoundError, FileNotFoundError):
    """The bucket or the object does not exist."""


class FileForbiddenError(errors.AccessDeniedError, PermissionError):
    """The credentials, or the daemon's list of what it serves, do not allow it."""


class FileChangedError(errors.ShardChangedError, OSError):
    """The object was overwritten while it was open; what was read before is of the old version."""


class FileCorruptError(errors.IntegrityError, OSError):
    """The bytes that came are wrong; they were not handed out."""


class FileUnavailableError(errors.OriginUnavailableError, OSError):
    """The origin does not answer for now."""


class NoDaemonError(errors.DaemonUnavailableError, ConnectionError):
    """No daemon answers, or it went away and did not come back."""


class FileUsageError(errors.UsageError, ValueError):
    """The address, the options or the call are wrong."""


class FileFailedError(GpufeedError, OSError):
    """Whatever else went wrong."""


_BY_CLASS: tuple[tuple[type[GpufeedError], type[GpufeedError]], ...] = (
    (errors.NotFoundError, FileMissingError),
    (errors.AccessDeniedError, FileForbiddenError),
    (errors.ShardChangedError, FileChangedError),
    (errors.IntegrityError, FileCorruptError),
    (errors.OriginUnavailableError, FileUnavailableError),
    (errors.DaemonUnavailableError, NoDaemonError),
    (errors.UsageError, FileUsageError),
)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise our errors as their counterparts of this module."""
    try:
        yield
    except OSError:
        raise
    except GpufeedError as error:
        for ours, known in _BY_CLASS:
            if isinstance(error, ours):
                raise known(str(error)) from None
        raise FileFailedError(str(error)) from None
