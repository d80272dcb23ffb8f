"""Main memory that a GPU reads and writes by itself: registered where it lies, its pages pinned.

Copies from it are asynchronous, at the link's whole speed, and can be captured in a graph.

Source: CUDA driver API, ``cuMemHostRegister``. The runtime's twin would leave its failure to the
next kernel launch, as the last error.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_PORTABLE, _READ_ONLY = 1, 8
_OUT_OF_MEMORY, _ALREADY = 2, 712
_users: dict[int, int] = {}
"""By address, how often it was registered here."""


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    return library


def register(address: int, nbytes: int) -> str | None:
    """Pins memory for all GPUs of this process, one of whose contexts is this thread's; memory that
    is mapped read-only stays so. It may be registered more than once.

    Returns:
        None if it is pinned now, else why it is not.
    """
    library = _driver()
    if library is None:
        return "there is no CUDA driver"
    if address in _users:
        _users[address] += 1
        return None
    torch.cuda.synchronize()  # any call of the runtime: the driver wants this thread's context
    error = 0
    for flags in (_PORTABLE, _PORTABLE | _READ_ONLY):
        error = library.cuMemHostRegister_v2(address, nbytes, flags)
        if not error:
            _users[address] = 1
            return None
        if error in (_OUT_OF_MEMORY, _ALREADY):
            break
    gib = f"{nbytes / 2**30:.1f} GiB"
    if error == _OUT_OF_MEMORY:
        return f"the system refuses to pin {gib} more"
    if error == _ALREADY:
        return f"a page of {gib} is pinned already, with other memory"
    return f"the driver refuses to pin {gib} (CUDA error {error})"


def unregister(address: int) -> None:
    """Takes one ``register`` back; after the last one the pages may move again."""
    library, left = _driver(), _users.get(address, 0) - 1
    if left > 0:
        _users[address] = left
    elif left == 0 and library is not None:
        del _users[address]
        library.cuMemHostUnregister(address)
