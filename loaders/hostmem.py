"""Page-locking memory for the accelerator: the call, its errors, and how much a process may lock.

`HostMemory` registers memory that exists already, so that the accelerator copies from it by DMA
without a staging copy. Only batch slots are registered. The arena never is: a training process maps
it read-only, and the memory that it would lock is the daemon's.

Rules: only the process that registered may unregister, before it unmaps; a forked child must do
neither. Nothing here initialises CUDA: who calls `register` has made sure that somebody else did.

`CudaHostMemory` has not yet been verified on hardware.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from gpufeed.cachefs.errors import AlreadyRegisteredError, DeviceError
from gpufeed.cachefs.units import GIB, format_bytes

# Of all loaders of a process together: locked pages can neither be moved nor be swapped.
PINNED_BYTES_MAX = 4 * GIB

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process, not for one
_SUCCESS = 0
_UNLOADING = 4
_NOT_REGISTERED = 713
_ALREADY_REGISTERED = 712
_REASONS = {
    1: "invalid value",
    2: "out of memory: the system has no room for more locked pages; use smaller batches",
    3: "the driver could not be initialised",
    35: "the driver is older than this CUDA runtime; update the driver",
    100: "no device",
    304: "an operating system call failed; see dmesg, and the limits of the container",
    800: "not permitted in this process",
    801: "not supported by this system; leave register_slots out",
    900: "a graph is being captured",
}


class HostMemory(Protocol):
    """What registers memory with the accelerator. Called by one thread at a time."""

    def register(self, address: int, size_bytes: int) -> None:
        """Lock ``[address, address + size_bytes)``, which is mapped and whole pages.

        Raises:
            AlreadyRegisteredError: some of it is registered already.
            DeviceError: refused for any other reason; nothing was locked.
        """

    def unregister(self, address: int) -> None:
        """Undo a `register` of exactly this address. No copy from it may be under way.

        Raises:
            DeviceError: it stays locked, so it may not be unmapped.
        """


class CudaHostMemory:
    """`HostMemory` by ``cudaHostRegister``, through torch's binding of the runtime."""

    def register(self, address: int, size_bytes: int) -> None:
        """As `HostMemory.register`."""
        code = int(_torch().cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
        if code == _SUCCESS:
            return
        _clear_last_error()
        what = f"registering {format_bytes(size_bytes)} at {address:#x} failed"
        if code == _ALREADY_REGISTERED:
            raise AlreadyRegisteredError(f"{what}: it is registered already (CUDA error {code})")
        raise DeviceError(f"{what}: {_reason(code)}")

    def unregister(self, address: int) -> None:
        """As `HostMemory.unregister`."""
        code = int(_torch().cuda.cudart().cudaHostUnregister(address))
        if code in (_SUCCESS, _UNLOADING):  # the runtime takes everything along when it goes
            return
        _clear_last_error()
        if code != _NOT_REGISTERED:
            raise DeviceError(f"unregistering {address:#x} failed: {_reason(code)}")


class PinnedBudget:
    """Bytes that the loaders of one process hold registered, under one limit. Thread-safe."""

    def __init__(self, limit_bytes: int = PINNED_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Count `size_bytes` more; False, and nothing is counted, where they do not fit."""
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                return False
            self.used_bytes += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """Count `size_bytes` less."""
        with self._lock:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0, self.used_bytes


PROCESS_BUDGET = PinnedBudget()


def _torch() -> Any:
    import torch  # noqa: PLC0415 light import

    return torch


def _reason(code: int) -> str:
    known = _REASONS.get(code)
    return f"{known} (CUDA error {code})" if known else f"CUDA error {code}"


def _clear_last_error() -> None:
    """Take a failed call's error out of the runtime.

    The runtime keeps it for the thread, and torch would raise it after its next kernel, blaming
    that. The binding has no call for it; but a kernel of ours can take the blame as well.
    """
    torch = _torch()
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError:
        return
