"""Binding a program to memory: what the ops' binders ask for.

A step is then one call: no line of Python runs between its nodes. Buffers share memory where their
lives do not overlap. What follows a norm reads *rows* in the form of its weight format, so a norm's
output exists in those forms only (``pykernels.cpu.norm``); an input of a linear that is no norm's
output is converted first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pykernels.cpu import MoECall, Workspace, make_routines
from pykernels.cpu.activations.row_layout import row_bytes
from pykernels.cpu.gemm.common import TILE
from pykernels.cpu.moe.kernel import NEVER, Routines
from pykernels.cpu.moe.plan import gemm_from_here
from pykernels.cpu.norm import FORM, NORM, make_norm
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.quant.layout import K_BLOCK, ceil_to
from pykernels.registry import resolve
from pykernels.target import detect

from ...machine import tuning
from ...machine.memory import allocate
from ...program import Node, Program
from ...workers.job import Job, float_bits
from ...workers.pool import WorkerPool
from .sampling import SamplingBlock

_LINE = 64
_SIZES = ("T", "S", "R")


Binder = Callable[["Context", Node], list[Job]]
"""Makes the jobs of a node."""


@dataclass(frozen=True)
class Later:
    """A job that has no tasks until it is compiled.

    Attributes:
        tokens: of a step that needs it, at least.
        compile: returns what opens it, and its task.
    """

    job: Job
    tokens: int
    compile: Callable[[], tuple[Any, Any]]

    def prepare(self) -> None:
        """Compiles it, or loads it from the cache."""
        opening, run = self.compile()
        self.job.become(run.address, opening.address)


@dataclass(frozen=True)
class Rows:
    """A buffer as rows of one form.

    Attributes:
        address, stride: of token 0's row, and bytes to the next.
        a_tiles: address of the GEMM's A tiles of it, 0 for none.
    """

    address: int
    stride: int
    a_tiles: int


class Context:
    """A program being bound: what binders ask for, and what they leave to be kept.

    Args:
        inputs, caches: by name, tensors of the buffers of these kinds.

    Attributes:
        sizes: int64 [3]: T, S and R of a step.
        outputs: by name, tensors of the "output" buffers.
        uncompiled: jobs that are to be compiled before a step of so many tokens.
    """

    def __init__(
        self,
        program: Program,
        pool: WorkerPool,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        kernel: str,
        sizes: torch.Tensor,
        parameters: SamplingBlock,
    ) -> None:
        self.program, self.pool, self.kernel = program, pool, kernel
        self.sizes, self.parameters = sizes, parameters
        self.workspace, self.calls = Workspace(), list[MoECall]()
        self._kept: list[Any] = [sizes, inputs, caches, parameters]
        self._memory = _Memory()
        self._tensors: dict[str, torch.Tensor] = {**inputs, **caches}
        self._rows: dict[tuple[str, str, bool], Rows] = {}
        self._scratch: dict[int, int] = {}
        self._shared: dict[str, int] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.uncompiled: list[Later] = []
        self._last = {name: at for at, node in enumerate(program.nodes) for name in node.inputs}

    def bind(self, binders: Mapping[str, Binder]) -> list[Job]:
        """The jobs of all nodes.

        Raises:
            PykernelsError: an op that there is no binder for.
        """
        jobs: list[Job] = []
        for at, node in enumerate(self.program.nodes):
            if node.op not in binders:
                raise PykernelsError(
                    f"the cpu device has no {node.op!r}", f"It has {', '.join(binders)}"
                )
            for name in node.outputs:
                self._make(name)
            jobs += binders[node.op](self, node)
            for name in (*node.inputs, *node.outputs):
                if self._last.get(name, at) <= at:
                    self._free(name)
        return jobs

    def at(self, name: str) -> int:
        """Address of a buffer."""
        return int(self._tensors[name].data_ptr())

    def stride(self, name: str) -> int:
        """Bytes from one token to the next."""
        tensor = self._tensors[name]
        return int(tensor.stride(0) * tensor.element_size())

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer."""
        return self._tensors[name]

    def count_at(self, name: str) -> int:
        """Address of the size that a buffer's first dimension has in a step."""
        dim = self.program.buffers[name].shape[0]
        return int(self.sizes.data_ptr()) + 8 * _SIZES.index(str(dim))

    def most(self, name: str) -> int:
        """Its largest value."""
        return self.program.shape(name)[0]

    def record(self, dtype: np.dtype, **fields: int) -> int:
        """A record of int64 words that stays where it is; returns its address."""
        record = np.zeros(1, dtype)
        for field, value in fields.items():
            record[field] = value
        return self.keep(record)

    def keep(self, what: Any) -> int:
        """Keeps an array or a tensor alive with the step; returns its address."""
        self._kept.append(what)
        if isinstance(what, torch.Tensor):
            return int(what.data_ptr())
        return int(what.ctypes.data)

    def room(self, nbytes: int) -> int:
        """Memory that lasts; returns its address."""
        return self.keep(allocate(max(nbytes, _LINE)))

    def shared(self, what: str, nbytes: int) -> int:
        """Memory that nodes of one kind use in turn; returns its address."""
        key = f"{what} {ceil_to(max(nbytes, _LINE), _LINE)}"
        if key not in self._shared:
            self._shared[key] = self.room(nbytes)
        return self._shared[key]

    def scratch(self, nbytes: int) -> tuple[int, int]:
        """(address, stride) of scratch of each worker, which any task may use while it runs."""
        stride = ceil_to(max(nbytes, _LINE), _LINE)
        if stride not in self._scratch:
            self._scratch[stride] = self.room(stride * self.pool.threads)
        return self._scratch[stride], stride

    def later(
        self, name: str, record: int, tokens: int, compile: Callable[[], tuple[Any, Any]]
    ) -> Job:
        """A job whose kernel takes long to compile and that only steps of so many tokens need."""
        job = Job(name, 0, record, tasks=0)
        self.uncompiled.append(Later(job, tokens, compile))
        return job

    def kernel_of(self, fmt: str, activations: str) -> Routines:
        """The compiled routines of a weight format."""
        backend = resolve(self.kernel, fmt, detect(), activations)
        return make_routines(backend.name, fmt, activations)

    def gemm_from(self, kernel: Routines) -> int:
        """Tokens from which a matrix goes through the GEMM."""
        if not kernel.has_gemm:
            return NEVER
        tuned = tuning.gemm_from(kernel.backend, kernel.fmt, kernel.activations)
        return tuned or gemm_from_here(kernel.backend, kernel.fmt, kernel.activations) or NEVER

    def rows(self, node: Node, name: str, kernel: Routines, tiles: bool) -> tuple[Rows, list[Job]]:
        """A buffer's rows for a kernel, and the jobs that make them, if they are not there.

        Args:
            tiles: whether the GEMM's A tiles are wanted too.
        """
        key = (name, _form_name(kernel), tiles and self.gemm_from(kernel) <= self.most(name))
        if key in self._rows:
            return self._rows[key], []
        jobs = self.norm(node.name, name, None, {}, [key[1:]], [kernel], source=name)
        return self._rows[key], jobs

    def norm(
        self,
        label: str,
        out: str,
        total: str | None,
        fields: Mapping[str, int],
        forms: list[tuple[str, bool]],
        kernels: list[Routines],
        source: str,
        K: int = 0,
    ) -> list[Job]:
        """The job that makes ``out``'s rows in all forms from ``source``."""
        opening, run = make_norm()
        H = K or self.program.shape(source)[1]
        records = np.zeros(max(1, len(forms)), FORM)
        most = self.most(out)
        for record, (form, tiles), kernel in zip(records, forms, kernels, strict=False):
            padded = ceil_to(H, get_format(kernel.fmt).k_block)
            stride = row_bytes(padded, kernel.row_formats[0])
            rows, handle = self._memory.take(stride * most)
            self._lives(out, handle)
            a_tiles, steps = 0, 2 if kernel.int8 else 4
            if tiles:
                groups = ceil_to(most, 32) // 16
                a_tiles, handle = self._memory.take(groups * steps * padded // K_BLOCK * TILE)
                self._lives(out, handle)
            record["rows"], record["stride"], record["K"] = rows, stride, padded
            record["quantize_row"], record["tiles"] = kernel.quantize_row, a_tiles
            record["tile_steps"], record["int8"] = steps, kernel.int8
            record["interleave_a"] = kernel.interleave_a
            self._rows[out, form, tiles] = Rows(rows, stride, a_tiles)
        scratch, stride = self.scratch(4 * H)
        summed = {"sum": self.at(total), "sum_stride": self.stride(total)} if total else {}
        address = self.record(
            NORM,
            **{
                "count_at": self.count_at(out),
                "x": self.at(source),
                "x_stride": self.stride(source),
                "H": H,
                "chunk": 1 if most <= 64 else 4,
                "scratch": scratch,
                "scratch_stride": stride,
                "forms": self.keep(records),
                "form_count": len(forms),
                **summed,
                **fields,
            },
        )
        return [Job(label, run.address, address, opening.address)]

    def forms_of(self, name: str) -> tuple[list[tuple[str, bool]], list[Routines]]:
        """The forms in which a buffer's readers want its rows."""
        forms: dict[tuple[str, bool], Routines] = {}
        for reader in self.program.readers(name):
            wanted = self.row_kernel(reader, name)
            if wanted is not None:
                kernel, gemm = wanted
                tiles = gemm and self.gemm_from(kernel) <= self.most(name)
                forms[_form_name(kernel), tiles] = kernel
        return list(forms), list(forms.values())

    def row_kernel(self, node: Node, name: str) -> tuple[Routines, bool] | None:
        """The kernel for whose rows a node reads a buffer, and whether A tiles of the GEMM are
        wanted; None if it reads floats."""
        if node.op == "linear" and name == node.inputs[0]:
            matrix = node.weights["weight"]
            return self.kernel_of(matrix.fmt.name, node.attrs.get("activations", "bf16")), True
        if node.op == "moe_ffn" and name == node.inputs[0]:
            experts = node.weights["experts"]
            return self.kernel_of(experts.fmt.name, node.attrs.get("activations", "bf16")), False
        return None

    def bits(self, value: float) -> int:
        """A float32 as records hold it."""
        return float_bits(value)

    # Memory.

    def _make(self, name: str) -> None:
        """Memory for a node's output."""
        if name in self._tensors:
            return
        buffer, shape = self.program.buffers[name], self.program.shape(name)
        nbytes = int(np.prod(shape)) * buffer.dtype.itemsize
        if buffer.kind == "output":
            tensor = torch.zeros(shape, dtype=buffer.dtype, device="cpu")
            self.outputs[name] = tensor
        else:
            address, handle = self._memory.take(nbytes)
            self._lives(name, handle)
            tensor = self._memory.view(handle, nbytes).view(buffer.dtype).view(shape)
        self._tensors[name] = tensor

    def _lives(self, name: str, handle: int) -> None:
        self._memory.owners.setdefault(name, []).append(handle)

    def _free(self, name: str) -> None:
        for handle in self._memory.owners.pop(name, []):
            self._memory.give(handle)


class _Memory:
    """Chunks that buffers take in turn: the smallest free one that is large enough, or a new one.

    Taking and giving in the order of nodes is what running them does.
    """

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        self.owners: dict[str, list[int]] = {}
        self._free: set[int] = set()

    def take(self, nbytes: int) -> tuple[int, int]:
        """(address, handle) of at least so many bytes, 64-byte aligned."""
        fits = [h for h in self._free if nbytes <= self.chunks[h].numel() <= 2 * nbytes + 4096]
        if fits:
            handle = min(fits, key=lambda h: self.chunks[h].numel())
            self._free.discard(handle)
        else:
            handle = len(self.chunks)
            room = ceil_to(max(nbytes, 1), _LINE)
            raw = torch.zeros(room + _LINE, dtype=torch.uint8, device="cpu")
            skip = -raw.data_ptr() % _LINE
            self.chunks.append(raw[skip : skip + room])
        return int(self.chunks[handle].data_ptr()), handle

    def view(self, handle: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of a chunk."""
        return self.chunks[handle][:nbytes]

    def give(self, handle: int) -> None:
        """The chunk is free again."""
        self._free.add(handle)


def _form_name(kernel: Routines) -> str:
    """Tells apart the rows of kernels that want different ones."""
    how = kernel.row_formats[0]
    return f"{'bf16' if how is None else how.name}-{kernel.interleave_a:d}-{kernel.int8:d}"
