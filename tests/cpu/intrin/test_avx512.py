"""Each AVX-512 intrinsic by itself against a plain definition of what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numba.extending import _Intrinsic

from pykernels.cpu.intrin import avx512, avx512_base, avx512_bits, avx512_bytes, avx512_words
from pykernels.cpu.intrin.registers import f32x16_array
from pykernels.cpu.isa import EXTENSIONS
from pykernels.cpu.jit import inlined, routine
from pykernels.cpu.words import f32, poke_f32
from pykernels.target import detect

from .plain import e4m3

pytestmark = pytest.mark.skipif(
    bool(detect().lacks(("avx512f", "avx512bw", "avx512vl", "avx512dq"))),
    reason="this CPU has no AVX-512",
)

Array = Any
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, F32 = np.int16, np.int32, np.float32
TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4028235e38]  # of bfloat16
SPECIAL = np.array(
    [0, -0.0, 0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2.5, -2.5, 3.5, 1e38, 2e-38, *TIES], F32
)
SPECIAL.view(U32)[6] = 0x7F800001  # a NaN: infinity, were its lower half cut off


@inlined
def _as_it_is(value):
    return value


@inlined
def _float_at(address):
    return f32(address, 0)


@inlined
def _store_i32(to, value):
    avx512.store_f32(to, avx512_bytes.bits_as_f32(value))


@inlined
def _store_int(to, value):
    avx512.store_f32(to, avx512_bytes.bits_as_f32(avx512_bytes.all_i32(value)))


@inlined
def _store_float(to, value):
    poke_f32(to, value)


LOADS = {
    "u": avx512_bytes.load_u8,
    "f": avx512.load_f32,
    "i": avx512_bytes.load_i32,
    "x": _float_at,  # a float
    "@": _as_it_is,  # an address
    "n": _as_it_is,  # a number
    "e": avx512_bytes.load_u8,  # 255 in each even byte
}
STORES = {
    "u": (avx512_bytes.store_u8, U8, 64),
    "f": (avx512.store_f32, F32, 16),
    "i": (_store_i32, I32, 16),
    "s": (_store_int, I32, 16),
    "x": (_store_float, F32, 1),
}


def _compile(op: Any, name: str, takes: str, gives: str) -> Any:
    """``call(a, b, c, to)``: addresses of operands, or what they are, and where to store."""
    loaded = [f"load_{x}({x})" for x in "abc"[: len(takes)]]
    stores_itself = gives in "-h"
    body = f"op(to, {loaded[0]})" if stores_itself else f"keep(to, op({', '.join(loaded)}))"
    scope = {f"load_{x}": LOADS[kind] for x, kind in zip("abc", takes, strict=False)}
    scope |= {"op": op, "keep": None if stores_itself else STORES[gives][0]}
    exec(f"def call(a, b, c, to):\n    {body}\n    return 0", scope)
    return routine(4, name)(scope["call"])


def _buffer(nbytes: int, offset: int = 0) -> Array:
    """Bytes ``offset`` behind a 64-byte boundary."""
    raw = np.zeros(nbytes + 128, U8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + nbytes]


@dataclass(frozen=True)
class Case:
    """One intrinsic.

    Attributes:
        takes: the kind of each operand (``LOADS``).
        gives: the kind of the result (``STORES``); "-" for none: it stores; "h":
            bfloat16.
        define: the definition, of numpy operands (bytes for "u" and "@").
        offset: of what is at an address: the least aligned that is allowed.
        numbers: values of operands "n".
        ordinary: whether floats are finite and of like size.
        means: which bits of each word mean something, by the operand "n".
    """

    op: Any
    takes: str
    gives: str
    define: Callable[..., Array]
    offset: int = 0
    numbers: Sequence[int] = (0,)
    ordinary: bool = False
    means: Callable[[int], int] = lambda n: 0xFFFF

    @property
    def name(self) -> str:
        function = self.op._defn
        return f"{function.__module__.rsplit('.', 1)[1]}.{function.__name__}"


def _words(a: Array) -> Array:
    return a.view(U16).astype(np.int64)


def _of_words(a: Array) -> Array:
    return (a & 0xFFFF).astype(U16).view(U8)


def _mask(address: Array) -> Array:
    return np.unpackbits(address[:8], bitorder="little").astype(bool)


def _upper(bits: Array) -> Array:
    return (bits.astype(U32) << 16).view(F32)


def _pairs(a: Array) -> tuple[Array, Array]:
    both = _upper(a.view(U16)).reshape(16, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def _interleaved(even: Array, odd: Array) -> Array:
    return np.stack([even, odd], -1).reshape(-1)


def _unpacked(a: Array, b: Array, half: int) -> Array:
    lanes = [x.reshape(4, 2, 8)[:, half].reshape(-1) for x in (a, b)]
    return _interleaved(*lanes)


def _planes(a: Array, address: Array) -> Array:
    return a | _mask(address) * U8(16) | _mask(address[8:]) * U8(32)


def _shifted(a: Array, n: int, which: tuple[int, ...]) -> Array:
    chosen = a.reshape(8, 8)[:, which].reshape(-1).astype(np.int64)
    return chosen << n if n >= 0 else chosen >> -n


def _own_bits(n: int) -> int:
    """What is left of a byte in the low one of a word."""
    return (255 << n if n >= 0 else 255 >> -n) & 255


def _dot(a_type: Any, b_type: Any, acc: Array, a: Array, b: Array) -> Array:
    products = a.view(a_type).astype(np.int64) * b.view(b_type).astype(np.int64)
    return (acc + products.reshape(16, -1).sum(1)).astype(I32)


def _dot_pairs(acc: Array, a: Array, b: Array) -> Array:
    (a0, a1), (b0, b1) = _pairs(a), _pairs(b)
    fused = (acc.astype(np.float64) + a1.astype(np.float64) * b1).astype(F32)
    return (fused.astype(np.float64) + a0.astype(np.float64) * b0).astype(F32)


def _halving(a: Array) -> Array:
    while len(a) > 1:
        a = a[: len(a) // 2] + a[len(a) // 2 :]
    return a


def _neighbours(a: Array, b: Array) -> Array:
    return np.stack([(x[0::2] + x[1::2]).reshape(4, 2) for x in (a, b)], 1).reshape(-1)


def _scaled(a: Array, n: Array) -> Array:
    return np.ldexp(a.astype(np.float64), np.floor(n).astype(int)).astype(F32)


def _round_bf16(a: Array) -> Array:
    return torch.from_numpy(a.copy()).bfloat16().view(torch.int16).numpy().view(U8)


def _power_words(address: Array) -> Array:
    bits = np.clip(address[:32].view(I16).astype(int), 2 << 7, 252 << 7) - (127 << 7)
    return _of_words(np.repeat(bits, 2))


def _parts(address: Array) -> Array:
    rest, parts = address[:32].view(F32), []
    for _ in range(3):
        upper = (rest.view(U32) & U32(0xFFFF0000)).view(F32)
        parts.append(upper.view(U32) >> 16)
        rest = rest - upper
    assert not rest.any()
    return _of_words(np.concatenate([*parts, np.zeros(8, U32)]))


def _low_plane(a: Array) -> Array:
    values = -(128 + (_words(a) & 127)).astype(F32)
    return values.view(U16)[1::2].copy().view(U8)


def _signed(a: Array) -> Array:
    return a.view(I16).astype(np.int64)


A, B, W, P = avx512, avx512_bytes, avx512_words, avx512_bits
EVEN_BYTES = np.tile(np.array([255, 0], U8), 32)


def _twice(name: str, *rest: Any, **more: Any) -> list[Case]:
    """An operation and what stands in for it."""
    module = next(m for m, names in EXTENSIONS.values() if name in names)
    return [Case(getattr(m, name), *rest, **more) for m in (module, avx512_base)]


CASES = [
    Case(A.zero_f32, "", "f", lambda: np.zeros(16, F32)),
    Case(A.load_f32, "@", "f", lambda p: p[:64].view(F32), 4),
    Case(A.load_bf16, "@", "f", lambda p: _upper(p[:32].view(U16)), 2),
    Case(A.first_of_pairs, "u", "f", lambda a: _pairs(a)[0]),
    Case(A.second_of_pairs, "u", "f", lambda a: _pairs(a)[1]),
    Case(A.broadcast_bf16_pair, "@", "f", lambda p: np.tile(_upper(p[:4].view(U16)), 8), 2),
    Case(A.load_f16, "@", "f", lambda p: p[:32].view(np.float16).astype(F32), 2),
    Case(A.load_u8_as_f32, "@", "f", lambda p: p[:16].astype(F32), 1),
    Case(A.load_e4m3_halved, "@", "f", lambda p: e4m3(p[:16]) / 2, 1),
    Case(A.load_i8_as_f32, "@", "f", lambda p: p[:16].view(np.int8).astype(F32), 1),
    Case(A.store_f32, "f", "-", lambda a: a.view(U8), 4),
    Case(A.broadcast_f32, "x", "f", lambda x: np.repeat(x, 16)),
    *_twice("dot_bf16", "fuu", "f", _dot_pairs, ordinary=True),
    Case(A.sum_f32, "f", "x", _halving, ordinary=True),
    Case(A.largest_f32, "f", "x", lambda a: a.max(keepdims=True), ordinary=True),
    Case(A.abs_f32, "f", "f", np.abs),
    Case(A.add_f32, "ff", "f", np.add),
    Case(A.sub_f32, "ff", "f", np.subtract),
    Case(A.add_neighbours, "ff", "f", _neighbours),
    Case(A.even_lanes, "ff", "f", lambda a, b: np.concatenate([a, b])[::2]),
    Case(A.odd_lanes, "ff", "f", lambda a, b: np.concatenate([a, b])[1::2]),
    Case(A.mul_f32, "ff", "f", np.multiply),
    Case(A.div_f32, "ff", "f", np.divide),
    Case(A.fma_f32, "fff", "f", lambda a, b, c: (a.astype(float) * b + c).astype(F32)),
    Case(A.fnma_f32, "fff", "f", lambda a, b, c: (c - a.astype(float) * b).astype(F32)),
    Case(A.min_f32, "ff", "f", lambda a, b: np.where(a < b, a, b)),
    Case(A.max_f32, "ff", "f", lambda a, b: np.where(a > b, a, b)),
    Case(A.round_f32, "f", "f", np.round),
    Case(A.scale_exp2_f32, "ff", "f", _scaled, ordinary=True),
    *_twice("store_bf16", "f", "h", _round_bf16, 2),
    Case(B.load_u8, "@", "u", lambda p: p[:64]),
    Case(B.store_u8, "u", "-", lambda a: a),
    Case(B.broadcast_dword, "@", "u", lambda p: np.tile(p[:4], 16), 2),
    Case(B.broadcast_qword, "@", "u", lambda p: np.tile(p[:8], 8), 2),
    Case(B.broadcast_u8, "n", "u", lambda n: np.full(64, n & 255, U8), numbers=(0, 7, 255, -128)),
    *_twice("lookup_128", "uuu", "u", lambda a, b, i: np.concatenate([a, b])[i & 127]),
    *_twice("lookup_64", "uu", "u", lambda a, i: a[i & 63]),
    Case(
        B.lookup_16,
        "uu",
        "u",
        lambda a, i: np.where(
            i < 128,
            np.take_along_axis(a.reshape(4, 16), (i & 15).reshape(4, 16).astype(int), 1).reshape(
                -1
            ),
            0,
        ),
    ),
    *_twice(
        "first_words",
        "un",
        "u",
        lambda a, n: _of_words(_shifted(a, n, (0, 1, 4, 5))),
        numbers=range(-4, 5),
        means=_own_bits,
    ),
    *_twice(
        "second_words",
        "un",
        "u",
        lambda a, n: _of_words(_shifted(a, n, (2, 3, 6, 7))),
        numbers=range(-4, 5),
        means=_own_bits,
    ),
    Case(
        B.and_xor_words,
        "unn",
        "u",
        lambda a, m, f: _of_words((_words(a) & m) ^ f),
        numbers=(0x1FE0, 0xC340),
    ),
    Case(B.xor_u8, "uu", "u", np.bitwise_xor),
    Case(B.add_u8, "uu", "u", np.add),
    Case(B.where_negative, "uuu", "u", lambda s, a, b: np.where(s > 127, a, b)),
    Case(B.sub_i8, "uu", "u", np.subtract),
    Case(B.abs_i8, "u", "u", lambda a: np.abs(a.view(np.int8)).view(U8)),
    Case(B.or_masked, "uuu", "u", lambda a, b, m: a | (b & m)),
    Case(B.interleave_low, "uu", "u", lambda a, b: _unpacked(a, b, 0)),
    Case(B.interleave_high, "uu", "u", lambda a, b: _unpacked(a, b, 1)),
    *_twice("dot_u8i8", "iuu", "i", partial(_dot, U8, np.int8)),
    *_twice("dot_words", "iii", "i", partial(_dot, I16, I16)),
    Case(B.zero_i32, "", "i", lambda: np.zeros(16, I32)),
    Case(B.all_i32, "n", "i", lambda n: np.full(16, n, I32), numbers=(0, -5, 1 << 30)),
    Case(B.add_i32, "ii", "i", np.add),
    Case(B.load_i32, "@", "i", lambda p: p[:64].view(I32), 4),
    Case(B.to_f32, "i", "f", lambda a: a.astype(F32)),
    Case(B.bits_as_f32, "i", "f", lambda a: a.view(F32)),
    Case(B.to_i32, "f", "i", lambda a: np.round(a).astype(I32), ordinary=True),
    Case(B.store_low_bytes, "i", "-", lambda a: a.view(U8)[::4], 1),
    Case(B.sum_i32, "i", "s", lambda a: np.repeat(a.sum(dtype=I32), 16)),
    Case(B.or_i32, "ii", "i", np.bitwise_or),
    Case(B.low_bytes_i32, "i", "s", lambda a: np.repeat(np.bitwise_or.reduce(a) & 255, 16)),
    Case(B.shift_slice, "i", "i", lambda a: (a + I32(128)) >> 8),
    Case(B.broadcast_i32, "@", "i", lambda p: np.repeat(p[:4].view(I32), 16), 4),
    Case(W.lookup_32_words, "uu", "u", lambda a, i: a.view(U16)[i.view(U16) & 31].view(U8)),
    Case(
        W.lookup_64_words,
        "uuu",
        "u",
        lambda a, b, i: np.concatenate([a, b]).view(U16)[i.view(U16) & 63].view(U8),
    ),
    Case(W.shift_words, "un", "u", lambda a, n: (a.view(U16) >> n).view(U8), numbers=(0, 4, 7, 15)),
    Case(W.even_words, "uue", "u", lambda a, b, e: _interleaved(a[::2], b[::2])),
    Case(W.odd_words, "uue", "u", lambda a, b, e: _interleaved(a[1::2], b[1::2])),
    Case(
        W.load_i8_as_word_pairs,
        "@",
        "u",
        lambda p: _of_words(np.repeat(p[:16].view(np.int8).astype(int), 2)),
        1,
    ),
    Case(W.even_bytes_fma, "uuu", "u", lambda a, b, c: _of_words(a[::2] * _words(b) + _words(c))),
    Case(W.odd_bytes_fma, "uuu", "u", lambda a, b, c: _of_words(a[1::2] * _words(b) + _words(c))),
    Case(
        W.upper_bytes,
        "uu",
        "u",
        lambda a, b: (_interleaved(_signed(a), _signed(b)) >> 6 & 255).astype(U8),
    ),
    Case(
        W.lower_bytes,
        "uu",
        "u",
        lambda a, b: ((_interleaved(_words(a), _words(b)) & 63) - 32 & 255).astype(U8),
    ),
    Case(W.offset_words, "un", "u", lambda a, n: _of_words(32 - _words(a) * n), numbers=(0, 8, 32)),
    Case(W.mul_words, "un", "u", lambda a, n: _of_words(_words(a) * n), numbers=(-1, 0, 32)),
    Case(W.low_plane_bf16, "u", "u", _low_plane),
    Case(W.load_powers, "@", "u", _power_words, 2),
    Case(
        W.bf16_pairs,
        "ff",
        "u",
        lambda a, b: _interleaved(a.view(U16)[1::2], b.view(U16)[1::2]).view(U8),
    ),
    Case(W.load_f32_in_bf16_parts, "@", "u", _parts, 4, ordinary=True),
    Case(
        W.add_where_nonzero,
        "uu",
        "u",
        lambda a, b: _of_words(np.where(_words(a) != 0, _words(a) + _words(b), 0)),
    ),
    Case(P.add_where, "u@u", "u", lambda a, p, m: np.where(_mask(p), a + m, a), 8),
    Case(P.low_nibbles, "u", "u", lambda a: a & 15),
    Case(P.low_crumbs, "u", "u", lambda a: a & 3),
    *_twice("high_nibbles", "u", "u", lambda a: a >> 4),
    *_twice("high_nibbles_flipped", "u", "u", lambda a: (a >> 4) ^ 8),
    *_twice("set_planes", "u@", "u", _planes, 8),
    Case(P.upper_nibbles, "u", "u", lambda a: a & 0xF0),
    Case(P.raised_nibbles, "u", "u", lambda a: a << 4),
]

NEEDS = {name: extension for extension, (_, names) in EXTENSIONS.items() for name in names}


def _operand(kind: str, case: Case, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "e":
        found = EVEN_BYTES
    elif kind in "fx" or (kind == "@" and case.ordinary):
        found = (rng.standard_normal(16) * 2.0 ** rng.integers(-6, 7, 16)).astype(F32)
        if not case.ordinary and seed // 8 % 2:
            found = rng.choice(SPECIAL, 16)
    elif kind == "u" and case.ordinary:  # bfloat16
        found = rng.standard_normal(32).astype(F32).view(U16)[1::2].copy()
    elif kind == "i" and seed // 8 % 2:
        found = rng.choice(np.array([-(2**31), -1, 0, 127, 128, 2**31 - 1], I32), 16)
    else:
        found = rng.integers(0, 256, 64, U8)
        found[rng.permutation(64)[:10]] = 2 * [0, 1, 127, 128, 255]
        found.view(U16)[rng.integers(32)] = 0
    buffer = _buffer(found.nbytes, case.offset if kind == "@" else 0)
    buffer[:] = found.view(U8)
    return buffer


def _same(found: Array, wanted: Array, kind: str) -> bool:
    if kind == "h":
        found, wanted = _upper(found.view(U16)), _upper(wanted.view(U16))
    elif kind not in "fx":
        return np.array_equal(found, wanted)
    nan = np.isnan(found)
    return np.array_equal(nan, np.isnan(wanted)) and np.array_equal(
        found.view(I32)[~nan], wanted.view(I32)[~nan]
    )


def _typed(operand: Array, kind: str) -> Array:
    return operand.view({"f": F32, "x": F32, "i": I32}.get(kind, U8))


def _check(case: Case, call: Any, seed: int, numbers: Sequence[int]) -> None:
    left = iter(numbers)
    given = [
        next(left) if k == "n" else _operand(k, case, 8 * seed + i)
        for i, k in enumerate(case.takes)
    ]
    typed = [x if k == "n" else _typed(x, k) for x, k in zip(given, case.takes, strict=True)]
    if case.takes == "x":
        typed = [typed[0][:1]]
    with np.errstate(all="ignore"):
        wanted = case.define(*typed)
    dtype, count = STORES[case.gives][1:] if case.gives in STORES else (U8, len(wanted))
    to = _buffer(np.dtype(dtype).itemsize * count, case.offset if case.gives in "-h" else 0)
    words = [int(x) if k == "n" else x.ctypes.data for x, k in zip(given, case.takes, strict=True)]
    call.ctypes(*(words + 3 * [0])[:3], to.ctypes.data)
    found = to.view(dtype)
    if "n" in case.takes and case.gives == "u" and len(wanted) == 64:
        means = case.means(numbers[0])
        found, wanted = (_of_words(_words(x) & means) for x in (found, wanted))
    assert _same(found, wanted, case.gives), (numbers, typed, found, wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_intrinsic_against_numpy(case: Case) -> None:
    module, name = case.name.split(".")
    needs = NEEDS.get(name) if module != "avx512_base" else None
    if needs and detect().lacks((needs,)):
        pytest.skip(f"this CPU has no {needs}")
    call = _compile(case.op, case.name, case.takes, case.gives)
    for seed in range(8):
        for numbers in product(case.numbers, repeat=case.takes.count("n")):
            _check(case, call, seed, numbers)


def test_every_intrinsic_has_a_case() -> None:
    checked = {case.name for case in CASES}
    there = {
        f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        for module in (avx512, avx512_base, avx512_bits, avx512_bytes, avx512_words)
        for name, value in vars(module).items()
        if isinstance(value, _Intrinsic) and value._defn.__module__ == module.__name__
    }
    assert checked == there


def test_store_through_an_inlined_address() -> None:
    """LLVM writes ``to`` as an offset from null where row 0 is stored; it must not drop that."""

    @inlined
    def doubled(out, half, times):
        to = out + 64 * half
        totals = f32x16_array(4)
        for t in range(4):
            totals[t] = avx512.load_f32(to + 128 * t)
        for _ in range(times):
            for t in range(4):
                totals[t] = avx512.add_f32(totals[t], totals[t])
        for t in range(4):
            avx512.store_f32(to + 128 * t, totals[t])

    @routine(2, "both-halves")
    def both_halves(out, times):
        for half in range(2):
            doubled(out, half, times)
        return 0

    out = torch.ones(4, 32)
    both_halves.ctypes(out.data_ptr(), 3)
    assert torch.equal(out, torch.full((4, 32), 8.0))
