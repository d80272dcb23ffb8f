"""Numbers in memory, read and written by their address."""

from __future__ import annotations

from numba import carray, types

from .intrin.sync import as_pointer
from .jit import inlined


@inlined
def i64(address, index):
    """Element ``index`` of the int64 array at ``address``."""
    return carray(as_pointer(address), (index + 1,), types.int64)[index]


@inlined
def i32(address, index):
    """Element ``index`` of the int32 array at ``address``."""
    return carray(as_pointer(address), (index + 1,), types.int32)[index]


@inlined
def f32(address, index):
    """Element ``index`` of the float32 array at ``address``."""
    return carray(as_pointer(address), (index + 1,), types.float32)[index]


@inlined
def poke_f32(address, value):
    """Sets the float32 at ``address``."""
    carray(as_pointer(address), (1,), types.float32)[0] = value


@inlined
def poke_i64(address, index, value):
    """Sets element ``index`` of the int64 array at ``address``."""
    carray(as_pointer(address), (index + 1,), types.int64)[index] = value


@inlined
def copy_line(to, source):
    """Copies 64 bytes."""
    into = carray(as_pointer(to), (8,), types.int64)
    words = carray(as_pointer(source), (8,), types.int64)
    for i in range(8):
        into[i] = words[i]


@inlined
def copy_line_0213(to, source):
    """Copies 32 values of 16 bits, the two in the middle of each four exchanged."""
    into = carray(as_pointer(to), (8,), types.uint64)
    words = carray(as_pointer(source), (8,), types.uint64)
    middle, by = types.uint64(0xFFFF0000), types.uint64(16)
    for i in range(8):
        four = words[i]
        outer = four & types.uint64(0xFFFF00000000FFFF)
        into[i] = outer | ((four >> by) & middle) | ((four & middle) << by)
