"""``intrin.amx`` in plain loops over a memory tile file: to run AMX kernels where there is no AMX.

For tests only, one thread at a time: there is one tile file in the process.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from llvmlite.binding import add_symbol
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..jit import inlined, routine
from .registers import I64
from .scalar import f32_from_bits
from .sync import as_pointer

_CONFIG_AT = 8 * 1024
_FILE = np.zeros(_CONFIG_AT // 8 + 8, np.int64)  # 8 tiles, then the configuration
add_symbol("pykernels_amx_model_tiles", _FILE.ctypes.data)


@intrinsic
def _tile_file(typingctx):
    """Address of the tiles and the configuration behind them."""

    def codegen(context, builder, sig, args):
        name = "pykernels_amx_model_tiles"
        variable = builder.module.globals.get(name)
        if variable is None:
            variable = cgutils.add_global_variable(builder.module, I64, name)
        return builder.ptrtoint(variable, I64)

    return types.int64(), codegen


def _by_symbol(arguments: int):
    """Decorator: an operation that kernels call by a symbol, so that LLVM cannot inline it.

    (Sixteen inlined copies of a tile product take half a minute to compile.)
    """

    def decorate(function):
        symbol = f"pykernels_amx_model_{function.__name__}"
        add_symbol(symbol, routine(arguments)(function).address)
        fnty = ir.FunctionType(I64, [I64] * arguments)

        def codegen(context, builder, sig, args):
            called = cgutils.get_or_insert_function(builder.module, fnty, symbol)
            return builder.call(called, args)

        typed = types.int64(*[types.int64] * arguments), codegen
        if arguments == 0:
            return intrinsic(lambda typingctx: typed)
        if arguments == 1:
            return intrinsic(lambda typingctx, a: typed)
        return intrinsic(lambda typingctx, a, b, c: typed)

    return decorate


@inlined
def _f32(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 16), types.float32)


@inlined
def _u32(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 16), types.uint32)


@inlined
def _i32(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 16), types.int32)


@inlined
def _i8(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 64), types.int8)


@inlined
def _shape(tile):
    """(rows, dwords of a row) of a tile, as configured."""
    config = carray(as_pointer(_tile_file() + _CONFIG_AT), (64,), types.uint8)
    return types.int64(config[48 + tile]), types.int64(config[16 + 2 * tile]) // 4


@_by_symbol(1)
def load_config(address):
    config = carray(as_pointer(_tile_file() + _CONFIG_AT), (64,), types.uint8)
    config[:] = carray(as_pointer(address), (64,), types.uint8)
    return 0


@_by_symbol(0)
def release():
    return 0


@_by_symbol(1)
def zero(tile):
    _f32(tile)[:] = types.float32(0)
    return 0


@_by_symbol(3)
def load(tile, address, stride):
    rows, dwords = _shape(tile)
    _f32(tile)[:] = types.float32(0)
    into = _u32(tile)
    for r in range(rows):
        into[r, :dwords] = carray(as_pointer(address + r * stride), (dwords,), types.uint32)
    return 0


@_by_symbol(3)
def store(tile, address, stride):
    rows, dwords = _shape(tile)
    out = _u32(tile)
    for r in range(rows):
        carray(as_pointer(address + r * stride), (dwords,), types.uint32)[:] = out[r, :dwords]
    return 0


@_by_symbol(3)
def dot_bf16(c, a, b):
    sums, left, right = _f32(c), _u32(a), _u32(b)
    for m in range(16):
        for r in range(_shape(b)[0]):
            low = f32_from_bits(types.uint32(left[m, r] << types.uint32(16)))
            high = f32_from_bits(types.uint32(left[m, r] & types.uint32(0xFFFF0000)))
            for n in range(16):
                word = right[r, n]
                even = f32_from_bits(types.uint32(word << types.uint32(16)))
                odd = f32_from_bits(types.uint32(word & types.uint32(0xFFFF0000)))
                sums[m, n] += low * even + high * odd
    return 0


@_by_symbol(3)
def dot_i8(c, a, b):
    sums, left, right = _i32(c), _i8(a), _i8(b)
    for m in range(16):
        for r in range(_shape(b)[0]):
            for n in range(16):
                for i in range(4):
                    x = types.int32(left[m, 4 * r + i])
                    sums[m, n] += x * types.int32(right[r, 4 * n + i])
    return 0
