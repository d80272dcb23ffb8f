"""Stream memory operations: a CUDA stream writes a 32-bit flag, or waits until it has a value.
And copies, between any two memories, that only the stream waits for.

Captured in a graph, value and address are constants. So the flags of a graph's hops are numbered:
hop i writes i + 1 and waits for i + 1 *with equality*, and nobody resets anything between replays,
as long as a graph has two hops or more: the only one would find the answer to its last replay.
A wait has no time limit: the side that answers needs a watchdog, which writes every flag that is
still open.

Source: CUDA driver API, "Stream Memory Operations" and "Memory Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from ...errors import PykernelsError
from .precompile import only_compiles

_EQUAL, _DEFAULT = 1, 0
"""CU_STREAM_WAIT_VALUE_EQ, and CU_STREAM_WRITE_VALUE_DEFAULT: what the stream did before the flag
can be seen wherever the flag can."""


@functools.cache
def _driver() -> ctypes.CDLL | str:
    """The driver's library, or why there is none with these operations."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no CUDA driver: {error}"
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        if not hasattr(library, name):
            return f"the CUDA driver has no {name}"
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    library.cuMemcpyAsync.argtypes = [
        *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    ]
    return library


def supports() -> str | None:
    """None if streams of this machine's driver write and wait, or the reason why not."""
    library = _driver()
    return library if isinstance(library, str) else None


def write_value(address: int, value: int) -> None:
    """The current stream, when it gets here, writes ``value`` to a flag.

    Args:
        address: of 4 bytes in pinned or device memory, a multiple of 4.
        value: 0 to 2**32 - 1.

    Raises:
        PykernelsError: the driver has no such operation, or refuses this one.
    """
    _operate("cuStreamWriteValue32_v2", address, value, _DEFAULT)


def wait_value(address: int, value: int) -> None:
    """The current stream goes on when the flag is ``value``; arguments and errors as above."""
    _operate("cuStreamWaitValue32_v2", address, value, _EQUAL)


def copy_memory(target: torch.Tensor, source: torch.Tensor) -> None:
    """The current stream copies a buffer by a copy engine; no other GPU's stream waits for it, as
    it would for ``Tensor.copy_``.

    Args:
        target, source: contiguous, of as many bytes; on this GPU, a peer of it, or pinned.

    Raises:
        PykernelsError: the driver refuses it.
    """
    assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
    addresses = target.data_ptr(), source.data_ptr()
    _call("cuMemcpyAsync", lambda stream: (*addresses, source.nbytes, stream))


def _operate(name: str, address: int, value: int, flags: int) -> None:
    _call(name, lambda stream: (stream, address, value, flags))


def _call(name: str, arguments: Callable[[int], tuple[int, ...]]) -> None:
    """Calls the driver with what is made of the current stream."""
    if only_compiles():
        return
    library = _driver()
    if isinstance(library, str):
        raise PykernelsError(library, "Update the driver")
    if error := getattr(library, name)(*arguments(torch.cuda.current_stream().cuda_stream)):
        raise PykernelsError(f"{name} failed with CUDA error {error}", "Update the driver")
