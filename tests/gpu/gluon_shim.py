"""Runs Gluon kernels in Triton's interpreter: what they compute, not how their threads take turns.

Gluon has no interpreter. Its arithmetic is Triton's with layouts added, so here a kernel's Python
function is given other globals, in which layouts are nothing, shared memory is a box for a value,
copies and products are done when they are begun. Indices, masks, buffer turns and loop bounds are
then checked on any CPU; layouts are for the compiler.

Waits, barriers and fences move nothing, but account is kept of what a GPU needs of them. A box may
be read by a product once its copies have been waited for, a barrier has joined the threads that
made them and a fence has told the tensor cores. It may be written once the products that read it
have been waited for and a barrier has joined the threads that waited.

Warps that do different work take turns at their waits for memory barriers, which count arrivals
and bytes as a GPU's do; if all wait, that is a deadlock. A box that was copied into is read by
those who waited for its barrier, and written again when those who read it have arrived at one.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pykernels.gpu.decode import float_to_e4m3

WIDE = tl.float32  # the interpreter multiplies bf16 as integers


class Threads:
    """What the threads of a program owe each other; one program runs at a time."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.boxes: list[Box] = []
        # Begun and not waited for, the oldest first, by who began them.
        self.products: dict[int, list[list[Box]]] = defaultdict(list)

    def wait_group(self, outstanding: int) -> None:
        assert outstanding == 0
        for box in self.boxes:
            box.owes.discard("wait")

    def barrier(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes:
                box.owes.discard("barrier")
            box.read.clear()

    def fence(self) -> None:
        for box in self.boxes:
            if "wait" not in box.owes:
                box.owes.discard("fence")

    def mma(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        boxes = [x for x in (a, b) if isinstance(x, Box)]
        for box in boxes:
            assert not box.source.owes, f"a product reads what still owes a {box.source.owes}"
            waited = box.source.by is None or self.turns.now in box.source.seen
            assert waited and box.value is not None, "a product reads what was not waited for"
        self.products[self.turns.now].append([box.source for box in boxes])
        a, b = (x.value.to(WIDE) if isinstance(x, Box) else x.to(WIDE) for x in (a, b))
        return tl.dot(a, b, acc) if use_acc else tl.dot(a, b)

    def wait_mma(self, outstanding: int, deps: list[Any]) -> Any:
        begun = self.products[self.turns.now]
        while len(begun) > outstanding:
            for box in begun.pop(0):
                box.read.add(self.turns.now)
        return deps[0] if len(deps) == 1 else tuple(deps)


class Box:
    """Shared memory: one value, or several by ``index``."""

    def __init__(self, threads: Threads, shape: list[int], source: Box | None = None) -> None:
        self.threads, self.source = threads, source or self
        self.shape = [int(getattr(n, "value", n)) for n in shape]
        self.parts: dict[int, Box] = {}
        self.value: Any = None
        self.owes: set[str] = set()
        self.read: set[int] = set()  # by whose product that was waited for, and no barrier since
        self.by: Box | None = None  # the memory barrier of the last copy
        self.seen: set[int] = set()  # who waited for it
        if source is None:
            threads.boxes.append(self)

    def index(self, at: Any) -> Box:
        number = int(at.handle.data.item()) if isinstance(at, tl.tensor) else int(at)
        assert 0 <= number < self.shape[0]
        if number not in self.parts:
            self.parts[number] = Box(self.threads, self.shape[1:])
        return self.parts[number]

    def _write(self, value: Any, owes: set[str]) -> None:
        assert [int(n) for n in value.shape] == self.shape
        begun = [boxes for products in self.threads.products.values() for boxes in products]
        assert not any(self in boxes for boxes in begun), "a product still reads it"
        assert not self.read, "another warp's product may still read it"
        self.value, self.owes, self.by = value, owes, None

    def store(self, value: Any) -> None:
        self._write(value, {"barrier", "fence"})

    def copy(self, value: Any) -> None:
        self._write(value, {"wait", "barrier", "fence"})

    def permute(self, order: tuple[int, int]) -> Box:
        assert tuple(order) == (1, 0)
        turned = Box(self.threads, self.shape[::-1], self)
        turned.value = None if self.value is None else tl.trans(self.value)
        return turned


class Turns:
    """Functions that run by turns, each until it waits."""

    def __init__(self) -> None:
        self.now = 0
        self.ready: list[Callable[[], bool] | None] = []  # None: it has ended
        self.failure: BaseException | None = None

    def run(self, functions: list[Callable[[], None]]) -> None:
        self.ready, self.failure = [lambda: True for _ in functions], None
        self.go = [threading.Semaphore(0) for _ in functions]
        self.back = threading.Semaphore(0)
        threads = [
            threading.Thread(target=self._one, args=(i, function), daemon=True)
            for i, function in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        while any(self.ready) and self.failure is None:
            able = [i for i, ready in enumerate(self.ready) if ready is not None and ready()]
            if not able:
                self.failure = AssertionError("deadlock: all wait")
                break
            self.now = next((i for i in able if i > self.now), able[0])
            self.go[self.now].release()
            self.back.acquire()
        for go in self.go:
            go.release()  # what still waits sees the failure and ends
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _one(self, i: int, function: Callable[[], None]) -> None:
        self.go[i].acquire()
        if self.failure is None:
            try:
                function()
            except BaseException as error:
                self.failure = self.failure or error
        self.ready[i] = None
        self.back.release()

    def until(self, ready: Callable[[], bool]) -> None:
        if ready():
            return
        me, self.ready[self.now] = self.now, ready
        self.back.release()
        self.go[me].acquire()
        if self.failure is not None:
            raise self.failure


class MemoryBarriers:
    """``mbarrier``, and copies that report to one: counts of arrivals and bytes to come."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self, threads: Threads, without: str | None) -> None:
        self.threads = threads
        if without in ("wait", "arrive"):
            setattr(self, without, _nothing)

    def init(self, bar: Box, count: int) -> None:
        bar.value = {"count": count, "arrivals": count, "bytes": 0, "phase": 0}

    def _change(self, bar: Box, arrivals: int, nbytes: int) -> None:
        state = bar.value
        state["arrivals"] -= arrivals
        state["bytes"] += nbytes
        assert state["arrivals"] >= 0, "more arrivals than were agreed upon"
        if state["arrivals"] == 0 and state["bytes"] == 0:
            state["arrivals"], state["phase"] = state["count"], state["phase"] + 1

    def expect(self, bar: Box, nbytes: int) -> None:
        self._change(bar, 1, int(nbytes))

    def arrive(self, bar: Box, count: int = 1) -> None:
        for box in self.threads.boxes:
            box.read.discard(self.threads.turns.now)
        self._change(bar, count, 0)

    def wait(self, bar: Box, phase: int) -> None:
        self.threads.turns.until(lambda: bar.value["phase"] & 1 != int(phase))
        for box in self.threads.boxes:
            if box.by is bar:
                box.seen.add(self.threads.turns.now)

    def load(self, descriptor: Any, at: list[Any], bar: Box, to: Box) -> None:
        value = descriptor.load(at)
        to._write(value, set())
        to.by, to.seen = bar, set()
        self._change(bar, 0, -value.numel.value * value.dtype.primitive_bitwidth // 8)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


class _Gluon(types.SimpleNamespace):
    """``gl``: Triton's language where nothing else is said."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def _language(threads: Threads) -> _Gluon:
    names = ("BlockedLayout", "SliceLayout", "NVMMASharedLayout", "NVMMADistributedLayout")
    return _Gluon(
        **dict.fromkeys((*names, "DotOperandLayout"), _nothing),
        arange=lambda start, end, layout=None: tl.arange(start, end),
        full=lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Box(threads, shape),
        convert_layout=_same,
        warp_specialize=lambda parts, warps, registers: _specialize(threads, parts),
        inline_asm_elementwise=lambda asm, constraints, args, **kwargs: args[0],
    )


def _specialize(threads: Threads, parts: list[tuple[Any, tuple[Any, ...]]]) -> None:
    threads.turns.run([functools.partial(function, *args) for function, args in parts])
    threads.boxes.clear()  # the program ends here
    threads.products.clear()


def _host(arg: Any) -> Any:
    """Gluon's descriptors as Triton's."""
    if not hasattr(arg, "block_shape"):
        return arg
    return TensorDescriptor(arg.base, list(arg.shape), list(arg.strides), list(arg.block_shape))


class _Launcher:
    def __init__(self, made: Any) -> None:
        self.made = made

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.made[grid](*map(_host, args), **kwargs)

        return launch


def interpreted(kernel: Any, without: str | None = None) -> Any:
    """A Gluon kernel as one of Triton's, for the interpreter; call it with a grid as usual.

    Args:
        without: a name of Gluon's that shall do nothing, to see that it is missed.
    """
    tl.core.block_type.layout = None  # what `x.type.layout` finds
    threads = Threads()
    barriers = MemoryBarriers(threads, without)
    shared: dict[str, Any] = {
        "tl": tl,
        "gl": _language(threads),
        "async_copy": types.SimpleNamespace(commit_group=_nothing, wait_group=threads.wait_group),
        "async_load": lambda to, pointers: to.copy(tl.load(pointers)),
        "barrier": threads.barrier,
        "fence_async_shared": threads.fence,
        "mbarrier": barriers,
        "tma_load": barriers.load,
        "to_e4m3": float_to_e4m3,  # the interpreter's own conversion does not round
        "warpgroup_mma": threads.mma,
        "warpgroup_mma_wait": threads.wait_mma,
    }
    shared |= {without: _nothing} if without in shared else {}
    return _Launcher(_triton(kernel.fn, shared, {}))


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
