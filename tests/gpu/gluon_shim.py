"""Runs Gluon kernels in Triton's interpreter: what they compute, not how their threads take turns.

Gluon has no interpreter. Its arithmetic is Triton's with layouts added, so here a kernel's Python
function is given other globals, in which layouts are nothing, shared memory is a box for a value,
copies and products are done when they are begun. Indices, masks, buffer turns and loop bounds are
then checked on any CPU; layouts are for the compiler.

Waits, barriers and fences move nothing, but account is kept of what a GPU needs of them. A box may
be read by a product once its copies have been waited for, a barrier has joined the threads that
made them and a fence has told the tensor cores. It may be written once the products that read it
have been waited for and a barrier has joined the threads that waited.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import triton
import triton.language as tl

WIDE = tl.float32  # the interpreter multiplies bf16 as integers


class Threads:
    """What the threads of a program owe each other; one program runs at a time."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.products: list[list[Box]] = []  # begun and not waited for, the oldest first

    def wait_group(self, outstanding: int) -> None:
        assert outstanding == 0
        for box in self.boxes:
            box.owes.discard("wait")

    def barrier(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes:
                box.owes.discard("barrier")
            box.read = False

    def fence(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes:
                box.owes.discard("fence")

    def mma(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        boxes = [x for x in (a, b) if isinstance(x, Box)]
        for box in boxes:
            assert not box.source.owes, f"a product reads what still owes a {box.source.owes}"
        self.products.append([box.source for box in boxes])
        a, b = (x.value.to(WIDE) if isinstance(x, Box) else x.to(WIDE) for x in (a, b))
        return tl.dot(a, b, acc) if use_acc else tl.dot(a, b)

    def wait_mma(self, outstanding: int, deps: list[Any]) -> Any:
        while len(self.products) > outstanding:
            for box in self.products.pop(0):
                box.read = True
        return deps[0] if len(deps) == 1 else tuple(deps)


class Mbarrier:
    """``mbarrier`` and copies by the tensor memory accelerator, which complete when begun."""

    MBarrierLayout = staticmethod(lambda *args: None)

    @staticmethod
    def init(bar: Box, count: int) -> None:
        bar.phases, bar.missing, bar.copies = 0, 0, []

    @staticmethod
    def expect(bar: Box, nbytes: int) -> None:
        assert bar.missing == 0, "a phase began before the last one ended"
        bar.missing = int(getattr(nbytes, "value", nbytes))

    @staticmethod
    def load(source: Any, place: list[Any], bar: Box, to: Box) -> None:
        value = source.load(place)
        to.copy(value)
        bar.copies.append(to)
        bar.missing -= value.dtype.primitive_bitwidth // 8 * int(np.prod(to.shape))
        assert bar.missing >= 0, "more bytes than were expected"
        bar.phases += bar.missing == 0

    @staticmethod
    def wait(bar: Box, phase: Any) -> None:
        number = int(phase.handle.data.item()) if isinstance(phase, tl.tensor) else int(phase)
        assert bar.phases and (bar.phases - 1) % 2 == number, (
            "waits for ever, or for the last phase"
        )
        for box in bar.copies:
            box.owes.clear()
        bar.copies = []


class Box:
    """Shared memory: one value, or several by ``index``."""

    def __init__(self, threads: Threads, shape: list[int], source: Box | None = None) -> None:
        self.threads, self.source = threads, source or self
        self.shape = [int(getattr(n, "value", n)) for n in shape]
        self.parts: dict[int, Box] = {}
        self.value: Any = None
        self.owes: set[str] = set()
        self.read = False  # by a product that was waited for, and no barrier since
        self.phases = self.missing = 0  # of a barrier
        self.copies: list[Box] = []
        threads.boxes.append(self)

    def index(self, at: Any) -> Box:
        number = int(at.handle.data.item()) if isinstance(at, tl.tensor) else int(at)
        assert 0 <= number < self.shape[0]
        if number not in self.parts:
            self.parts[number] = Box(self.threads, self.shape[1:])
        return self.parts[number]

    def _write(self, value: Any, owes: set[str]) -> None:
        assert [int(n) for n in value.shape] == self.shape
        assert not any(self in boxes for boxes in self.threads.products), "a product still reads it"
        assert not self.read, "another warp's product may still read it"
        self.value, self.owes = value, owes

    def store(self, value: Any) -> None:
        self._write(value, {"barrier", "fence"})

    def copy(self, value: Any) -> None:
        self._write(value, {"wait", "barrier", "fence"})

    def load(self, layout: Any) -> Any:
        assert not self.owes, f"it is read and still owes a {self.owes}"
        self.read = True
        return self.value

    def permute(self, order: tuple[int, int]) -> Box:
        assert tuple(order) == (1, 0)
        turned = Box(self.threads, self.shape[::-1], self)
        turned.value = tl.trans(self.value)
        return turned


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


class _Gluon(types.SimpleNamespace):
    """``gl``: Triton's language where nothing else is said."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def _load(pointers: Any, mask: Any = None, other: Any = None, eviction_policy: str = "") -> Any:
    return tl.load(pointers, mask=mask, other=other)


def _mma_v2(a: Any, b: Any, acc: Any) -> Any:
    return acc + tl.dot(a.to(WIDE), b.to(WIDE))


@triton.jit
def _pair(bits):
    """bfloat16 with which the interpreter can calculate: as float32."""
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)


def _language(threads: Threads) -> _Gluon:
    names = ("BlockedLayout", "SliceLayout", "NVMMASharedLayout", "NVMMADistributedLayout")
    return _Gluon(
        **dict.fromkeys((*names, "DotOperandLayout"), _nothing),
        arange=lambda start, end, layout=None: tl.arange(start, end),
        full=lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Box(threads, shape),
        convert_layout=_same,
        load=_load,
        inline_asm_elementwise=lambda asm, constraints, args, **kwargs: args[0],
    )


def interpreted(kernel: Any, without: str | None = None) -> Any:
    """A Gluon kernel as one of Triton's, for the interpreter; call it with a grid as usual.

    Args:
        without: a name of Gluon's that shall do nothing, to see that it is missed.
    """
    tl.core.block_type.layout = None  # what `x.type.layout` finds
    threads = Threads()
    shared: dict[str, Any] = {
        "tl": tl,
        "gl": _language(threads),
        "async_copy": types.SimpleNamespace(commit_group=_nothing, wait_group=threads.wait_group),
        "async_load": lambda to, pointers: to.copy(tl.load(pointers)),
        "barrier": threads.barrier,
        "fence_async_shared": threads.fence,
        "mbarrier": Mbarrier,
        "tma_load": Mbarrier.load,
        "mma_v2": _mma_v2,
        "pair": _pair,
        "gdc_wait": _nothing,
        "gdc_launch_dependents": _nothing,
        "warpgroup_mma": threads.mma,
        "warpgroup_mma_wait": threads.wait_mma,
    }
    shared |= {} if without is None else {without: _nothing}
    return _triton(kernel.fn, shared, {})


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
