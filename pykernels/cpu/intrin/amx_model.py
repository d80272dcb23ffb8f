"""``intrin.amx`` in plain loops over a memory tile file: to run AMX kernels where there is no AMX.

For tests only, one thread at a time: the tile file is one 8 KiB global of the compiled module.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..jit import inlined
from .registers import I8, I64
from .scalar import f32_from_bits
from .sync import as_pointer

_FILE = "pykernels_amx_model_tiles"


@intrinsic
def _tile_file(typingctx):
    """Address of the 8 tiles."""

    def codegen(context, builder, sig, args):
        array = ir.ArrayType(I8, 8 * 1024)
        variable = builder.module.globals.get(_FILE)
        if variable is None:
            variable = cgutils.add_global_variable(builder.module, array, _FILE)
            variable.linkage = "linkonce_odr"
            variable.initializer = ir.Constant(array, None)
            variable.align = 64
        return builder.ptrtoint(variable, I64)

    return types.int64(), codegen


@inlined
def _f32(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 16), types.float32)


@inlined
def _u32(tile):
    return carray(as_pointer(_tile_file() + 1024 * tile), (16, 16), types.uint32)


@inlined
def load_config(address):
    pass


@inlined
def release():
    pass


@inlined
def zero(tile):
    _f32(tile)[:] = types.float32(0)


@inlined
def load(tile, address, stride):
    rows = _u32(tile)
    for r in range(16):
        rows[r] = carray(as_pointer(address + r * stride), (16,), types.uint32)


@inlined
def store(tile, address, stride):
    rows = _u32(tile)
    for r in range(16):
        carray(as_pointer(address + r * stride), (16,), types.uint32)[:] = rows[r]


@inlined
def dot_bf16(c, a, b):
    sums, left, right = _f32(c), _u32(a), _u32(b)
    for m in range(16):
        for r in range(16):
            low = f32_from_bits(types.uint32(left[m, r] << types.uint32(16)))
            high = f32_from_bits(types.uint32(left[m, r] & types.uint32(0xFFFF0000)))
            for n in range(16):
                word = right[r, n]
                even = f32_from_bits(types.uint32(word << types.uint32(16)))
                odd = f32_from_bits(types.uint32(word & types.uint32(0xFFFF0000)))
                sums[m, n] += low * even + high * odd
