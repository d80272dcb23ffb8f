"""Each AVX2 intrinsic by itself against a plain definition of what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba.extending import _Intrinsic

from pykernels.cpu.intrin import avx2
from pykernels.cpu.jit import inlined, routine
from pykernels.cpu.words import f32, i32
from pykernels.target import detect

from .plain import e4m3

pytestmark = pytest.mark.skipif(bool(detect().lacks(("avx2", "fma"))), reason="no AVX2 and FMA")

U8, I8, I16, U16, I32, U32, F32 = (
    np.uint8,
    np.int8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.float32,
)


@inlined
def _address(address):
    return address


@inlined
def _float_at(address):
    return f32(address, 0)


@inlined
def _int_at(address):
    return i32(address, 0)


@inlined
def _store_float(to, value):
    avx2.store_f32(to, avx2.broadcast_f32(value))


@inlined
def _store_int(to, value):
    avx2.store_i32(to, avx2.broadcast_i32(value))


LOADS = {"f": avx2.load_f32, "i": avx2.load_i32, "@": _address, "x": _float_at, "n": _int_at}
STORES = {"f": avx2.store_f32, "i": avx2.store_i32, "x": _store_float, "s": _store_int}


def _words(a: Any) -> Any:
    return a.view(I16).astype(I32)


def _upper(a: Any, first: int) -> Any:
    """8 bytes of each 16-byte lane as the upper halves of words."""
    return (a.view(U8).reshape(2, 16)[:, first : first + 8].astype(U16) << 8).ravel()


def _dot_bytes(a: Any, b: Any) -> Any:
    products = a.view(U8).astype(I32) * b.view(I8).astype(I32)
    return products.reshape(-1, 2).sum(1).clip(-(2**15), 2**15 - 1).astype(I16)


def _add_fours(total: Any, a: Any, b: Any) -> Any:
    products = a.view(U8).astype(I32) * b.view(I8).astype(I32)
    return total.view(I32) + products.reshape(-1, 4).sum(1, dtype=I32)


def _sign(a: Any, b: Any) -> Any:
    return (a.view(I8).astype(I32) * np.sign(b.view(I8)).astype(I32)).astype(I8)


def _lookup(table: Any, index: Any) -> Any:
    lanes, index = table.view(U8).reshape(2, 16), index.view(U8).reshape(2, 16)
    found = np.take_along_axis(lanes, (index & 15).astype(np.int64), 1)
    return np.where(index < 128, found, 0).astype(U8)


def _bf16(pairs: Any) -> Any:
    return (pairs.astype(U32) << 16).view(F32)


TABLE: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "zero_f32": ("", "f", lambda: np.zeros(8, F32)),
    "zero_i32": ("", "i", lambda: np.zeros(8, I32)),
    "load_f32": ("@", "f", lambda a: a.view(F32)),
    "load_i32": ("@", "i", lambda a: a),
    "load_bf16": ("@", "f", lambda a: _bf16(a.view(U16)[:8])),
    "load_f16": ("@", "f", lambda a: a.view(np.float16)[:8].astype(F32)),
    "load_u8_as_f32": ("@", "f", lambda a: a.view(U8)[:8].astype(F32)),
    "load_i8_as_f32": ("@", "f", lambda a: a.view(I8)[:8].astype(F32)),
    "load_e4m3_halved": ("@", "f", lambda a: e4m3(a.view(U8)[:8]) / 2),
    "load_i8_as_word_pairs": ("@", "i", lambda a: np.repeat(a.view(I8)[:8].astype(I16), 2)),
    "load_u8_as_i32": ("@", "i", lambda a: a.view(U8)[:8].astype(I32)),
    "load_i8_as_i32": ("@", "i", lambda a: a.view(I8)[:8].astype(I32)),
    "broadcast_f32": ("x", "f", lambda a: np.repeat(a[0], 8)),
    "broadcast_f32_at": ("@", "f", lambda a: np.repeat(a.view(F32)[0], 8)),
    "broadcast_pair_at": ("@", "f", lambda a: np.tile(a.view(F32)[:2], 4)),
    "broadcast_i32": ("n", "i", lambda a: np.repeat(a.view(I32)[0], 8)),
    "broadcast_i32_at": ("@", "i", lambda a: np.repeat(a.view(I32)[0], 8)),
    "add_f32": ("ff", "f", lambda a, b: a + b),
    "sub_f32": ("ff", "f", lambda a, b: a - b),
    "mul_f32": ("ff", "f", lambda a, b: a * b),
    "div_f32": ("ff", "f", lambda a, b: a / b),
    "fma_f32": ("fff", "f", lambda a, b, c: (a.astype(float) * b + c).astype(F32)),
    "fnma_f32": ("fff", "f", lambda a, b, c: (c - a.astype(float) * b).astype(F32)),
    "min_f32": ("ff", "f", np.minimum),
    "max_f32": ("ff", "f", np.maximum),
    "abs_f32": ("f", "f", np.abs),
    "round_f32": ("f", "f", np.round),
    "sum_f32": ("f", "x", lambda a: np.repeat((a[:4] + a[4:]).reshape(2, 2).sum(0).sum(), 8)),
    "largest_f32": ("f", "x", lambda a: np.repeat(a.max(), 8)),
    "scale_exp2_f32": ("ff", "f", lambda a, b: np.ldexp(a, np.round(b).astype(I32))),
    "even_lanes": ("ff", "f", lambda a, b: np.concatenate([a, b])[::2]),
    "odd_lanes": ("ff", "f", lambda a, b: np.concatenate([a, b])[1::2]),
    "first_of_pairs": ("i", "f", lambda a: _bf16(a.view(U16)[::2])),
    "second_of_pairs": ("i", "f", lambda a: _bf16(a.view(U16)[1::2])),
    "to_f32": ("i", "f", lambda a: a.view(I32).astype(F32)),
    "to_i32": ("f", "i", lambda a: np.round(a).astype(I32)),
    "bits_as_f32": ("i", "f", lambda a: a.view(F32)),
    "bits_as_i32": ("f", "i", lambda a: a.view(I32)),
    "add_i32": ("ii", "i", lambda a, b: a + b),
    "mul_i32": ("ii", "i", lambda a, b: a * b),
    "and_i32": ("ii", "i", lambda a, b: a & b),
    "or_i32": ("ii", "i", lambda a, b: a | b),
    "xor_i32": ("ii", "i", lambda a, b: a ^ b),
    "sub_i8": ("ii", "i", lambda a, b: a.view(U8) - b.view(U8)),
    "add_words": ("ii", "i", lambda a, b: a.view(U16) + b.view(U16)),
    "shift_left_i32": ("i5", "i", lambda a: a.view(U32) << 5),
    "shift_right_i32": ("i5", "i", lambda a: a.view(I32) >> 5),
    "shift_right_u32": ("i5", "i", lambda a: a.view(U32) >> 5),
    "shift_left_words": ("i5", "i", lambda a: a.view(U16) << 5),
    "shift_right_words": ("i5", "i", lambda a: a.view(I16) >> 5),
    "shift_right_u16": ("i5", "i", lambda a: a.view(U16) >> 5),
    "shift_right_u16_by": ("i5", "i", lambda a: a.view(U16) >> 5),
    "dot_u8i8": ("ii", "i", _dot_bytes),
    "dpbusd": ("iii", "i", _add_fours),
    "dpwssd": (
        "iii",
        "i",
        lambda c, a, b: c + (_words(a) * _words(b)).reshape(-1, 2).sum(1, dtype=I32),
    ),
    "dot_words": ("ii", "i", lambda a, b: (_words(a) * _words(b)).reshape(-1, 2).sum(1, dtype=I32)),
    "sign_i8": ("ii", "i", _sign),
    "abs_i8": ("i", "i", lambda a: np.abs(a.view(I8))),
    "lookup_16": ("ii", "i", _lookup),
    "shift_slice": ("i", "i", lambda a: (a.view(I32) + 128) >> 8),
    "expand_bits": ("@", "i", lambda a: np.unpackbits(a.view(U8)[:4], bitorder="little") * U8(255)),
    "low_bytes_i32": (
        "i",
        "s",
        lambda a: np.repeat(np.bitwise_or.reduce(a.view(U8)[::4]).astype(I32), 8),
    ),
    "low_bytes_to_words": ("i", "i", lambda a: _upper(a, 0)),
    "high_bytes_to_words": ("i", "i", lambda a: _upper(a, 8)),
    "sum_i32": ("i", "s", lambda a: np.repeat(a.view(I32).sum(dtype=I32), 8)),
}
"""name -> operands ("5": the literal), result, definition. Stores are tested by all."""

NARROW_STORES = {"store_bf16", "store_low_bytes"}
"""Tested by SiLU and by the rows of codes."""


def _compiled(name: str, takes: str, gives: str) -> Any:
    op, keep = getattr(avx2, name), STORES[gives]
    load = [LOADS[kind] for kind in takes if kind != "5"]
    if takes.endswith("5"):

        @routine(4, name)
        def call(a, b, c, to):
            keep(to, op(avx2.load_i32(a), 5))
            return 0
    elif not load:

        @routine(4, name)
        def call(a, b, c, to):
            keep(to, op())
            return 0
    elif len(load) == 1:
        (one,) = load

        @routine(4, name)
        def call(a, b, c, to):
            keep(to, op(one(a)))
            return 0
    elif len(load) == 2:
        one, two = load

        @routine(4, name)
        def call(a, b, c, to):
            keep(to, op(one(a), two(b)))
            return 0
    else:
        one, two, three = load

        @routine(4, name)
        def call(a, b, c, to):
            keep(to, op(one(a), two(b), three(c)))
            return 0

    return call


@pytest.mark.parametrize("name", TABLE)
def test_an_instruction_is_its_definition(name: str) -> None:
    if name in ("dpbusd", "dpwssd") and detect().lacks(("avxvnni",)):
        pytest.skip("no AVX-VNNI")
    takes, gives, definition = TABLE[name]
    rng, kinds = np.random.default_rng(0), takes.rstrip("5")
    floats = "f" in takes or "x" in takes
    operands = [
        (rng.standard_normal(8) * 9).astype(F32) if floats else rng.integers(0, 256, 32, U8)
        for _ in range(3)
    ]
    if name == "load_f16":
        operands[0] = rng.standard_normal(16).astype(np.float16).view(U8)
    used = [x if floats else x.view(I32) for x in operands[: len(kinds)]]
    result = np.full(32, 255, U8)
    addresses = [x.ctypes.data for x in (*operands, result)]
    _compiled(name, takes, gives).ctypes(*addresses)
    with np.errstate(over="ignore"):
        expected = np.ascontiguousarray(definition(*used))
    assert result.tobytes() == expected.astype(expected.dtype).tobytes()[:32]


def test_every_intrinsic_is_in_the_table() -> None:
    every = {name for name, value in vars(avx2).items() if isinstance(value, _Intrinsic)}
    assert every - set(TABLE) == {"store_f32", "store_i32", *NARROW_STORES}
