"""Binding a program to memory: what the ops' binders ask for.

A step is then one call: no line of Python runs between its nodes. Where buffers lie, and which jobs
wait for which, follows from the program (``analysis``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pykernels.cpu import MoECall, MoEWorkspace
from pykernels.cpu.moe.kernel import Routines
from pykernels.cpu.norm import ADD, LAYOUT, NORM, make_norm
from pykernels.errors import PykernelsError
from pykernels.quant.layout import ceil_to

from ...machine.memory import allocate, allocate_side_by_side, zeros
from ...program import Node, Program
from ...program.analysis import ALIGN, buffer_bytes, dependencies, ordered, plan_memory
from ...program.node import STEP_SIZES
from ...program.ops import OPS
from ...program.weights import WeightStore
from ...workers.job import Job, float_bits
from ...workers.pool import WorkerPool
from ..link import Link
from .activations import (
    ActivationLayout,
    ActivationLayouts,
    LayoutKey,
    packed_only,
    sizes_with_layouts,
)
from .weights import layouts

_LINE = 64
_FEW_ROWS, _PIECE = 8, 1024
"""Up to so many rows are converted in pieces of so many numbers, a task each."""


Binder = Callable[["Context", Node], list[Job]]
"""Makes the jobs of a node."""


@dataclass(frozen=True)
class LazyJob:
    """A job compiled on first use, by the first step with at least ``tokens`` tokens.

    Attributes:
        job: has no tasks until then.
        compile: returns its setup and its task.
    """

    job: Job
    tokens: int
    compile: Callable[[], tuple[Any, Any]]

    def prepare(self) -> None:
        """Compiles the job, or loads it from the kernel cache."""
        setup, run = self.compile()
        self.job.set_task(run.address, setup.address)


@dataclass(frozen=True)
class ActivationRows:
    """A buffer as rows in one activation layout.

    Attributes:
        address: where token 0's row begins.
        stride: bytes from one row to the next.
        a_tiles: address of the GEMM's A tiles of it, 0 for none.
    """

    address: int
    stride: int
    a_tiles: int


class Context:
    """A program being bound: memory, weights and layouts for its binders.

    Args:
        weights: the weights of the program's model.
        inputs, caches: by name, tensors of the buffers of these kinds.
        in_order: whether each node waits for the whole of the one before, whatever it reads.
        link: to the device that has the other half of the program.
        gemm_from, workspaces: see ``CpuExecutable``.

    Attributes:
        sizes: the sizes of a step (``Program.step_sizes``).
        outputs: by name, tensors of the "output" buffers.
        uncompiled: jobs that are compiled when a step needs them.

    Raises:
        PykernelsError: a buffer of another dtype than this device reads; an input that is missing.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightStore,
        pool: WorkerPool,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        kernel: str,
        sizes: torch.Tensor,
        in_order: bool = False,
        link: Link | None = None,
        gemm_from: int | None = None,
        workspaces: dict[str, MoEWorkspace] | None = None,
    ) -> None:
        self.program, self.pool, self.sizes, self.link = program, pool, sizes, link
        self._weights, self._layout_of = weights, layouts(program)
        self.calls = list[MoECall]()
        self.outputs: dict[str, torch.Tensor] = {}
        self.uncompiled: list[LazyJob] = []
        self._retained: list[Any] = [sizes, inputs, caches, link]
        self._layouts = ActivationLayouts(program, kernel, gemm_from)
        self._packed_only = packed_only(program)
        self._in_order = in_order
        self._order = dependencies(program, in_order)
        self._scratch: dict[int, int] = {}
        self._shared: dict[str, int] = {}
        self._workspaces = {} if workspaces is None else workspaces
        self._node = 0  # the one that is being bound
        self._waits: list[list[int]] = [list(direct) for direct in self._order.direct]
        self._users: dict[str, int] = {}  # of shared memory: the node that used it last
        self._makers: dict[tuple[str, LayoutKey], int] = {}  # of rows: the node that writes them
        # Or a job of a node that reads them.
        self._conversions: dict[tuple[str, LayoutKey], Job] = {}
        self._converted: dict[int, list[Job]] = {}  # by node, those that it waits for
        self._tensors: dict[str, torch.Tensor] = {}
        self._take({**inputs, **caches})
        self._lay_out()

    def bind(self, binders: Mapping[str, Binder]) -> list[Job]:
        """The jobs of all nodes.

        Raises:
            PykernelsError: an op that there is no binder for; one that reads floats where there
                are none.
        """
        jobs: list[Job] = []
        spans: list[tuple[int, int]] = []  # first and last job of each node
        for number, node in enumerate(self.program.nodes):
            self._node = number
            if node.op == "submit" and self._tell(jobs, spans):
                spans.append((len(jobs), len(jobs) - 1))
                continue
            if node.op not in binders:
                raise PykernelsError(
                    f"the cpu device has no {node.op!r}", f"It has {', '.join(binders)}"
                )
            first = len(jobs)
            jobs += binders[node.op](self, node)
            spans.append((first, len(jobs) - 1))
        self._wait(jobs, spans)
        return jobs

    def _wait(self, jobs: list[Job], spans: list[tuple[int, int]]) -> None:
        """Tells each job which ones before it must be complete."""
        indices = [i for i, (first, end) in enumerate(spans) if first <= end]
        for i in indices:  # behind a submit that has no job of its own: what that waits for
            self._waits[i] = sorted({k for j in self._waits[i] for k in self._with_jobs(j, spans)})
        waited = {j for i in indices for j in self._waits[i]}
        last = indices[-1]
        self._waits[last] += [
            i for i in indices if i < last and i not in waited
        ]  # a step ends with all
        places = {id(job): place for place, job in enumerate(jobs)}
        direct = ordered(self._waits).direct
        for i in indices:
            first, end = spans[i]
            for job in jobs[first + 1 : end + 1]:
                job.after = (1,)
            ends = [spans[j][1] for j in direct[i]]
            ends += [places[id(job)] for job in self._converted.get(i, [])]
            jobs[first].after = tuple(first - end for end in dict.fromkeys(ends))

    def _with_jobs(self, node: int, spans: list[tuple[int, int]]) -> list[int]:
        if spans[node][0] <= spans[node][1]:
            return [node]
        return [k for j in self._waits[node] for k in self._with_jobs(j, spans)]

    def _tell(self, jobs: list[Job], spans: list[tuple[int, int]]) -> bool:
        """Makes the jobs that a submit waits for signal its flag themselves; False if one of them
        already signals another one."""
        ends = {spans[k][1] for j in self._waits[self._node] for k in self._with_jobs(j, spans)}
        if not ends or any(jobs[end].signal for end in ends):
            return False
        node, link = self.program.nodes[self._node], self._link()
        for end in ends:
            jobs[end].signal = link.address(node)
        link.set_signals(node, len(ends))
        return True

    def flag_job(self, node: Node) -> Job:
        """A job without tasks that stands for a wait or a submit."""
        job = Job(node.name, 0, 0, tasks=0)
        if node.op == "wait":
            job.wait_for = self._link().address(node)
        else:
            job.signal = self._link().address(node)
        return job

    def _link(self) -> Link:
        if self.link is None:
            raise PykernelsError(
                f"{self.program.name!r} is half of a program", "Run it with the other half"
            )
        return self.link

    # Buffers.

    def at(self, name: str) -> int:
        """Address of a buffer's floats or ints."""
        return int(self.tensor(name).data_ptr())

    def stride(self, name: str) -> int:
        """Bytes from one token to the next."""
        tensor = self.tensor(name)
        return int(tensor.stride(0) * tensor.element_size())

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer.

        Raises:
            PykernelsError: it exists as packed activations only.
        """
        if name in self._packed_only:
            raise PykernelsError(
                f"{self.program.nodes[self._node].name} reads {name!r} as floats; a norm writes it "
                "only as packed activations here",
                "Let a linear or experts read it, or take the norm to another device",
            )
        return self._tensors[name]

    def count_at(self, name: str) -> int:
        """Address of the size that a buffer's first dimension has in a step."""
        dim = self.program.buffers[name].shape[0]
        return int(self.sizes.data_ptr()) + 8 * STEP_SIZES.index(str(dim))

    def most(self, name: str) -> int:
        """The largest size of a buffer's first dimension."""
        return self.program.shape(name)[0]

    # Weights.

    def weight(self, node: Node, port: str) -> Any:
        """A weight in this device's layout."""
        return self._weights.get(self.program.weight(node, port), *self._layout_of(node, port))

    def optional(self, node: Node, port: str) -> Any | None:
        """A weight that a node may have or not."""
        return self.weight(node, port) if port in node.weights else None

    # Memory of other kinds.

    def record(self, dtype: np.dtype, **fields: int) -> int:
        """A record of int64 words that stays where it is; returns its address."""
        record = np.zeros(1, dtype)
        for field, value in fields.items():
            record[field] = value
        return self.retain(record)

    def retain(self, what: Any) -> int:
        """Keeps an array or a tensor alive as long as the program; returns its address."""
        self._retained.append(what)
        if isinstance(what, torch.Tensor):
            return int(what.data_ptr())
        return int(what.ctypes.data)

    def allocate(self, nbytes: int) -> int:
        """Allocates memory that lives as long as the program; returns its address."""
        return self.retain(allocate(max(nbytes, _LINE)))

    def shared(self, what: str, nbytes: int) -> int:
        """Memory that nodes of one kind use in turn, each after the one before; its address."""
        key = f"{what} {ceil_to(max(nbytes, _LINE), _LINE)}"
        if key not in self._shared:
            self._shared[key] = self.allocate(nbytes)
        self._take_turns(key)
        return self._shared[key]

    def workspace(self, node: Node) -> MoEWorkspace:
        """Scratch of the experts of one role (of one microbatch, on one NUMA node), which run one
        after the other; those of other roles may run in parallel."""
        key = f"workspace {node.microbatch} {node.role} {node.numa}"
        self._take_turns(key)
        return self._workspaces.setdefault(key, MoEWorkspace())

    def workers(self, node: Node) -> int:
        """The workers that share a node's tasks."""
        return self.pool.threads if node.numa is None else self.pool.nodes[node.numa].count

    def _take_turns(self, key: str) -> None:
        """The node that is being bound waits for the one that uses this memory before it."""
        if key in self._users and self._users[key] != self._node:
            self._waits[self._node].append(self._users[key])
        self._users[key] = self._node

    def scratch(self, nbytes: int) -> tuple[int, int]:
        """(address, stride) of per-worker scratch, which any task may use while it runs."""
        stride = ceil_to(max(nbytes, _LINE), _LINE)
        if stride not in self._scratch:
            sizes = [stride * node.count for node in self.pool.nodes]  # each near its workers
            scratch = allocate_side_by_side(sizes, self.pool.memory.numbers)
            self._scratch[stride] = self.retain(scratch)
        return self._scratch[stride], stride

    # Kernels.

    def uncompiled_for(self, tokens: int) -> bool:
        """Whether a step of so many tokens needs a job that is not compiled."""
        return any(lazy.tokens <= tokens for lazy in self.uncompiled)

    def compile_lazily(
        self, name: str, record: int, tokens: int, compile: Callable[[], tuple[Any, Any]]
    ) -> Job:
        """A job whose kernel is slow to compile and needed only by steps of many tokens."""
        job = Job(name, 0, record, tasks=0)
        self.uncompiled.append(LazyJob(job, tokens, compile))
        return job

    def kernel_of(self, fmt: str, activations: str) -> Routines:
        """The compiled routines of a weight format."""
        return self._layouts.kernel_of(fmt, activations)

    def gemm_from(self, kernel: Routines) -> int:
        """Number of tokens from which a linear uses the GEMM."""
        return self._layouts.gemm_from(kernel)

    def bits(self, value: float) -> int:
        """A float32 as records hold it."""
        return float_bits(value)

    # Packed activations.

    def rows(
        self, node: Node, name: str, kernel: Routines, tiles: bool
    ) -> tuple[ActivationRows, list[Job]]:
        """A buffer's rows for a kernel, and the jobs that make them, if no node has made them.

        Args:
            tiles: whether the GEMM's A tiles are needed too.
        """
        key = self._layouts.key(name, kernel, tiles)
        rows = self._rows[name, key]
        maker, conversion = self._makers.get((name, key)), self._conversions.get((name, key))
        if maker is None:
            jobs = self.norm(node.name, name, None, {}, [key], source=name)
            (self._conversions[name, key],) = jobs
            return rows, jobs
        if maker == self._node:
            return rows, []
        if conversion is None:
            self._waits[self._node].append(maker)
        else:  # not for what the other node does with them
            self._converted.setdefault(self._node, []).append(conversion)
        return rows, []

    def norm(
        self,
        label: str,
        out: str,
        total: str | None,
        fields: Mapping[str, int],
        keys: list[LayoutKey],
        source: str,
        adds: tuple[str, ...] = (),
        K: int = 0,
    ) -> list[Job]:
        """The job that makes some layouts of ``out`` from ``source`` and what is added to it."""
        setup, run = make_norm()
        H = K or int(np.prod(self.program.shape(source)[1:]))
        records, addends = np.zeros(max(1, len(keys)), LAYOUT), np.zeros(max(1, len(adds)), ADD)
        for record, key in zip(records, keys, strict=False):
            rows, layout = self._rows[out, key], self._layouts.of[out][key]
            kernel = layout.kernel
            record["rows"], record["stride"], record["K"] = rows.address, rows.stride, layout.padded
            record["quantize_row"], record["tiles"] = kernel.quantize_row, rows.a_tiles
            record["tile_steps"], record["int8"] = layout.tile_steps, kernel.int8
            record["interleave_a"] = kernel.interleave_a
            self._makers[out, key] = self._node
        for addend, name in zip(addends, adds, strict=False):
            addend["x"], addend["stride"] = self.at(name), self.stride(name)
        converts = not (adds or total or fields or any(record["tiles"] for record in records))
        scratch, stride = self.scratch(4 * H)
        summed = {"sum": self.at(total), "sum_stride": self.stride(total)} if total else {}
        address = self.record(
            NORM,
            **{
                "count_at": self.count_at(out),
                "x": self.at(source),
                "x_stride": self.stride(source),
                "adds": self.retain(addends),
                "add_count": len(adds),
                "H": H,
                "chunk": 1 if self.most(out) <= 64 else 4,
                "piece": _PIECE if self.most(out) <= _FEW_ROWS and converts else 0,
                "scratch": scratch,
                "scratch_stride": stride,
                "layouts": self.retain(records),
                "layout_count": len(keys),
                **summed,
                **fields,
            },
        )
        return [Job(label, run.address, address, setup.address)]

    def layouts_of(self, name: str) -> list[LayoutKey]:
        """The activation layouts that a buffer's readers need."""
        return list(self._layouts.of.get(name, {}))

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inputs and caches, which the caller has."""
        for node in self.program.nodes:
            op = OPS[node.op]
            for name, buffer in {**node.inputs, **node.outputs}.items():
                port = op.inputs.get(name) or op.outputs.get(name)
                dtype = self.program.buffers[buffer].dtype
                wanted = {"activation": torch.float32, "index": torch.int64}
                if port is not None and wanted.get(port.kind, dtype) != dtype:
                    raise PykernelsError(
                        f"{node.name} has {buffer!r} in {dtype}",
                        "The cpu device takes activations in float32 and indices in int64",
                    )
        for name, declared in self.program.buffers.items():
            if declared.kind not in ("input", "cache"):
                continue
            if name not in tensors:
                raise PykernelsError(
                    f"the {declared.kind} {name!r} of {self.program.name!r} is not given",
                    "See runtime.program.step_inputs.allocate_inputs",
                )
            if tensors[name].dtype != declared.dtype:
                raise PykernelsError(
                    f"{name!r} is {tensors[name].dtype}, not {declared.dtype}", "Convert it"
                )
            self._tensors[name] = tensors[name]

    def _lay_out(self) -> None:
        """Memory for what nodes write, and for the layouts of what they read."""
        program, layouts = self.program, self._layouts.of
        for name in self._packed_only:
            if program.buffers[name].kind == "output":
                raise PykernelsError(
                    f"the output {name!r} of {program.name!r} is what a norm writes, which the cpu "
                    "device has only as packed activations",
                    "Let another node write it",
                )
        sizes = buffer_bytes(program)
        plan = plan_memory(
            program, self._order, sizes_with_layouts(sizes, layouts, tuple(self._packed_only))
        )
        arena = allocate(max(plan.nbytes, ALIGN))
        self.retain(arena)
        self._rows: dict[tuple[str, LayoutKey], ActivationRows] = {}
        for name, buffer in program.buffers.items():
            shape, offset = program.shape(name), plan.offsets.get(name, 0)
            if buffer.kind == "output":
                self._tensors[name] = self.outputs[name] = zeros(shape, buffer.dtype)
            elif self.link is not None and name in self.link.buffers:
                self._tensors[name] = self.link.buffers[name]
            elif buffer.kind == "scratch" and name not in self._packed_only:
                raw = arena[offset : offset + sizes[name]]
                self._tensors[name] = raw.view(buffer.dtype).view(shape)
                offset += ceil_to(sizes[name], ALIGN)
            for key, layout in layouts.get(name, {}).items():
                self._rows[name, key] = _rows_at(int(arena.data_ptr()) + offset, layout)
                offset += ceil_to(layout.nbytes, ALIGN)


def _rows_at(address: int, layout: ActivationLayout) -> ActivationRows:
    return ActivationRows(
        address, layout.stride, address + layout.tiles_at if layout.tile_bytes else 0
    )
