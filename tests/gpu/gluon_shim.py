"""Runs Gluon kernels in Triton's interpreter: what they compute, not how their threads take turns.

A kernel's Python function is given other globals: layouts are nothing, shared memory is a box for a
value, copies and products are done when they are begun. Waits, barriers and fences move nothing,
but account is kept of what a GPU needs of them. A box may be read by a product once its copies have
been waited for, a barrier has joined the threads that made them and a fence has told the tensor
cores. It may be written once the products that read it have been waited for and a barrier has
joined the threads that waited.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from pykernels.gpu.common.bf16 import to_bf16
from pykernels.gpu.common.dequant import float_to_e4m3

from . import gluon_roles

WIDE = tl.float32  # the interpreter multiplies bf16 as integers


class Threads:
    """What the threads of a program owe each other; one program runs at a time."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.products: list[tuple[str, list[Box]]] = []  # begun and not waited for, oldest first
        self.role = ""  # which part of a program's warps is running

    def wait_group(self, outstanding: int) -> None:
        assert outstanding == 0
        for box in self.boxes:
            box.owes.discard("wait")

    def barrier(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes and box.writer == self.role:
                box.owes.discard("barrier")
            box.readers.discard(self.role)

    def fence(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes and box.writer == self.role:
                box.owes.discard("fence")

    def mma(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        boxes = [x for x in (a, b) if isinstance(x, Box)]
        for box in boxes:
            owes = box.source.owes
            assert not owes, f"a product reads what still owes a {owes}"
        self.products.append((self.role, [box.source for box in boxes]))
        a, b = (x.value.to(WIDE) if isinstance(x, Box) else x.to(WIDE) for x in (a, b))
        return tl.dot(a, b, acc) if use_acc else tl.dot(a, b)

    def wait_mma(self, outstanding: int, deps: list[Any]) -> Any:
        mine = [product for product in self.products if product[0] == self.role]
        for product in mine[: len(mine) - outstanding]:
            self.products.remove(product)
            for box in product[1]:
                box.readers.add(self.role)
        return deps[0] if len(deps) == 1 else tuple(deps)


class Box:
    """Shared memory: an array, of which ``index``, ``slice`` and ``permute`` are views.

    Account is kept of whole boxes, and of the parts of one by ``index``.
    """

    def __init__(
        self, threads: Threads, dtype: Any, data: np.ndarray, source: Box | None = None
    ) -> None:
        self.threads, self.dtype, self.data, self.source = threads, dtype, data, source or self
        self.parts: dict[int, Box] = {}
        self.owes = {"wait"}  # until somebody writes
        self.fresh = True
        self.writer = ""
        self.readers: set[str] = set()  # waited for their products, had no barrier since
        if source is None:
            threads.boxes.append(self)

    @property
    def value(self) -> Any:
        kind = tl.block_type(self.dtype, list(self.data.shape))
        return tl.tensor(TensorHandle(self.data.copy(), self.dtype), kind)

    @property
    def shape(self) -> list[Any]:
        return [tl.constexpr(n) for n in self.data.shape]

    def index(self, at: Any) -> Box:
        number = whole(at)
        assert 0 <= number < len(self.data)
        if number not in self.parts:
            self.parts[number] = Box(self.threads, self.dtype, self.data[number])
        return self.parts[number]

    def slice(self, start: Any, length: Any, dim: int = 0) -> Box:
        at = [slice(None)] * self.data.ndim
        at[dim] = slice(whole(start), whole(start) + whole(length))
        return Box(self.threads, self.dtype, self.data[tuple(at)], self.source)

    def _unread(self) -> None:
        reading = [boxes for _, boxes in self.threads.products]
        assert not any(self in boxes for boxes in reading), "a product still reads it"
        assert not self.readers, "another warp's product may still read it: no barrier since"

    def reinterpret(self, dtype: Any, shape: list[Any], layout: None) -> Box:
        """The same memory for something else, once no product reads it."""
        for part in (self, *self.parts.values()):
            part._unread()
        bare = allocated(self.threads, dtype, shape).data
        data = self.data.reshape(-1).view(bare.dtype).reshape(bare.shape)
        return Box(self.threads, dtype, data)

    def permute(self, order: tuple[int, int]) -> Box:
        return Box(self.threads, self.dtype, self.data.transpose(order), self.source)

    def _write(self, value: Any, owes: set[str]) -> None:
        box = self.source
        box._unread()
        assert list(value.shape) == list(self.data.shape)
        self.data[...] = value.handle.data
        before = set() if box.fresh else box.owes
        box.owes, box.writer, box.fresh = before | owes, self.threads.role, False

    def load(self, layout: Any = None) -> Any:
        box = self.source  # what nobody has written may be loaded: it is poison
        assert box.fresh or "wait" not in box.owes, "a load before what it waits for"
        return self.value

    def store(self, value: Any) -> None:
        self._write(value, {"barrier", "fence"})

    def copy(self, value: Any) -> None:
        self._write(value, {"wait", "barrier", "fence"})

    def arrives(self, value: Any) -> None:
        """From the tensor memory accelerator, which is on the tensor cores' own path."""
        self._write(value, {"wait"})


def whole(x: Any) -> int:
    """A number of the interpreter's, or of Python's."""
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(getattr(x, "value", x))


def allocated(threads: Threads, dtype: Any, shape: list[Any]) -> Box:
    """A new box, of NaN or the like."""
    kind: Any = {
        tl.bfloat16: np.uint16,
        tl.float16: np.float16,
        tl.float32: np.float32,
        tl.float8e4nv: np.uint8,
        tl.uint8: np.uint8,
        tl.int32: np.int32,
        tl.int64: np.int64,
    }[dtype]
    poison = np.nan if np.issubdtype(kind, np.floating) else np.iinfo(kind).max  # bf16's too
    return Box(threads, dtype, np.full([whole(n) for n in shape], poison, kind))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _load(pointers: Any, mask: Any = None, other: Any = None, **hints: str) -> Any:
    return tl.load(pointers, mask=mask, other=other)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    """A constant; the interpreter of Triton 3.7 cannot make one of bfloat16."""
    if dtype == tl.bfloat16:
        return tl.full(shape, value, tl.float32).to(dtype)
    return tl.full(shape, value, dtype)


@triton.jit
def _pair(bits):
    """bfloat16 with which the interpreter can calculate: as float32."""
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _half(byte):
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _packed(low, high):
    """Two of 16 bits as the halves of an int32."""
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _e4m3_pairs(word):
    low = _packed(_half(word), _half(word >> 8))
    return low, _packed(_half(word >> 16), _half(word >> 24))


@triton.jit
def _e4m3_pairs_interleaved(even, odd):
    a = _packed(_half(even), _half(odd))
    b = _packed(_half(even >> 8), _half(odd >> 8))
    c = _packed(_half(even >> 16), _half(odd >> 16))
    return a, b, c, _packed(_half(even >> 24), _half(odd >> 24))


@triton.jit
def _transposed_pairs(even, odd):
    W: tl.constexpr = even.shape[0]
    N: tl.constexpr = even.shape[1]
    R: tl.constexpr = even.shape[2] // 4
    x = tl.join(even, odd).reshape([W, N // 8, 8, R, 8]).permute([0, 1, 4, 3, 2])
    low, high = tl.split(x.reshape([W, N, 4 * R, 2]))
    return _packed(low.to(tl.float16), high.to(tl.float16))


def _assembly(asm: str, constraints: str, args: list[Any], **kwargs: Any) -> Any:
    """What is written so: a conversion from E4M3, or nothing that the interpreter sees."""
    if "lg2" in asm:
        return tl.log2(args[0])
    if "e4m3" in asm:
        return args[0].to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return args[0]


class _Gluon(types.SimpleNamespace):
    """``gl``: Triton's language where nothing else is said."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def _language(threads: Threads) -> _Gluon:
    kinds = ("Blocked", "Slice", "NVMMAShared", "NVMMADistributed", "SwizzledShared", "DotOperand")
    roles = gluon_roles.Roles(threads)
    return _Gluon(
        **dict.fromkeys((f"{kind}Layout" for kind in kinds), _nothing),
        arange=lambda start, end, layout=None: tl.arange(start, end),
        full=_full,
        allocate_shared_memory=lambda dtype, shape, layout: allocated(threads, dtype, shape),
        warp_specialize=roles.run,
        convert_layout=lambda x, *given, **how: x,
        load=_load,
        inline_asm_elementwise=_assembly,
    )


def interpreted(kernel: Any, without: str | None = None) -> Any:
    """A Gluon kernel as one of Triton's; ``without`` a name of Gluon's, or ``wait`` or ``arrive``
    of its memory barriers, that shall do nothing, to see that it is missed."""
    tl.core.block_type.layout = None  # what `x.type.layout` finds
    threads = Threads()
    barriers = gluon_roles.MBarriers(threads, without)
    shared: dict[str, Any] = {
        "tl": tl,
        "gl": _language(threads),
        "async_copy": types.SimpleNamespace(commit_group=_nothing, wait_group=threads.wait_group),
        "async_load": lambda to, pointers: to.copy(tl.load(pointers)),
        "barrier": threads.barrier,
        "fence_async_shared": threads.fence,
        "mbarrier": barriers,
        "reinterpret": Box.reinterpret,
        "tma_load": gluon_roles.load,
        "mma_v2": lambda a, b, acc: acc + tl.dot(a.to(WIDE), b.to(WIDE)),
        "pair": _pair,
        "e4m3_pairs": _e4m3_pairs,
        "e4m3_pairs_interleaved": _e4m3_pairs_interleaved,
        "transposed_pairs": _transposed_pairs,
        "to_e4m3": float_to_e4m3,  # the interpreter's own conversions do not round
        "to_bf16": to_bf16,
        **dict.fromkeys(("gdc_wait", "gdc_launch_dependents"), _nothing),
        "warpgroup_mma": threads.mma,
        "warpgroup_mma_wait": threads.wait_mma,
    }
    shared |= {without: _nothing} if without in shared else {}
    return _Launcher(kernel, shared)


class _Launcher:
    """A kernel that takes Gluon's descriptors for Triton's; it is made when it is launched, which
    takes half a second."""

    def __init__(self, kernel: Any, shared: dict[str, Any]) -> None:
        self.kernel = kernel
        self.make = functools.cache(lambda: _triton(kernel.fn, shared, {}))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.make()[grid](*map(_host, args), **kwargs)


def interpret(monkeypatch: Any, *kernels: tuple[Any, str], without: str | None = None) -> None:
    """These kernels, each a module and a name in it, are the interpreter's versions of them."""
    for module, name in kernels:
        kernel = getattr(module, name)
        kernel = kernel.kernel if isinstance(kernel, _Launcher) else kernel
        monkeypatch.setattr(module, name, interpreted(kernel, without))


def _host(arg: Any) -> Any:
    if not hasattr(arg, "block_shape"):
        return arg
    return TensorDescriptor(arg.base, list(arg.shape), list(arg.strides), list(arg.block_shape))


def _triton(function: Any, shared: dict[str, Any], done: dict[str, Any]) -> Any:
    """The function with other globals, and so all Gluon functions that it names."""
    names = dict(function.__globals__)
    names.update(shared)
    for name in function.__code__.co_names:
        found = names.get(name)
        if hasattr(found, "fn") and name not in shared:
            if name not in done:
                done[name] = _triton(found.fn, shared, done)
            names[name] = done[name]
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    made = triton.jit(copy)
    rewritten = made.rewrite()
    rewritten.__annotations__ = {  # the interpreter knows no other constexpr than Triton's
        name: tl.constexpr if "constexpr" in str(kind) else kind
        for name, kind in function.__annotations__.items()
    }
    return made
