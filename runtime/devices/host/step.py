"""The ``host`` device: a program's nodes as operations of a stream, in float32.

Where a program hands experts to the ``cpu`` device (``passes.offload``), a second stream runs them
with the real kernels; the two meet at flags only, as a GPU and a CPU do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter_ns

import torch

from pykernels.errors import PykernelsError
from pykernels.ref.sampling import Request

from ...program import Node, Program
from ...workers.pool import WorkerPool
from .experts import ExpertCall
from .ops import OPS
from .stream import Flags, Stream


class HostStep:
    """A program that is ready to run.

    Args:
        inputs: by name, int64 tensors of the program's input buffers, in their largest shape.
        caches: by name, tensors of the "cache" buffers.
        pool: runs what is submitted to the ``cpu`` device; needed only for that.
        kernel: its backend.
        sizes: int64 [3]; None for its own.
        requests: how rows are sampled, read anew every step; None or empty: greedily.

    Attributes:
        sizes: T, S and R of the step to come; set it before ``run``.
        outputs: by name, tensors of the "output" buffers.
        times: of the last step, (stream, node, begin, end) in ns.

    Raises:
        PykernelsError: an op that this device does not have, or no pool where one is needed.
    """

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        pool: WorkerPool | None = None,
        kernel: str = "auto",
        sizes: torch.Tensor | None = None,
        requests: list[Request] | None = None,
    ) -> None:
        self.program = program
        self.sizes = torch.zeros(3, dtype=torch.int64, device="cpu") if sizes is None else sizes
        self.requests = [] if requests is None else requests
        self.times: list[tuple[str, str, int, int]] = []
        self._fixed = {**inputs, **caches}
        self._values: dict[str, torch.Tensor] = {}
        self.outputs = {
            name: torch.zeros(program.shape(name), dtype=buffer.dtype, device="cpu")
            for name, buffer in program.buffers.items()
            if buffer.kind == "output"
        }
        self.calls: dict[str, ExpertCall] = {}  # by what the submit node writes
        for node in program.nodes:
            if node.op == "submit":
                if pool is None:
                    raise PykernelsError(
                        f"{node.name} needs the cpu device", "Give it a WorkerPool"
                    )
                self.calls[node.outputs[0]] = ExpertCall(program, node, pool, kernel)
            elif node.op not in (*OPS, "wait"):
                raise PykernelsError(
                    f"the host device has no {node.op!r}", f"It has {', '.join(OPS)}"
                )
        self._flags = Flags(2 * len(self.calls))  # submitted and done of each call
        self._at = {name: 2 * i for i, name in enumerate(self.calls)}
        self._stream = Stream("host")
        self._cpu = Stream("host-cpu") if self.calls else None
        self._count = 0

    def read(self, name: str) -> torch.Tensor:
        """See ``ops.Memory``."""
        tensor = self._fixed[name] if name in self._fixed else self._values[name]
        buffer = self.program.buffers[name]
        if buffer.kind == "cache" or name == "page_table":
            return tensor
        return tensor[: self._length(name)]

    def write(self, name: str, value: torch.Tensor) -> None:
        """See ``ops.Memory``."""
        buffer = self.program.buffers[name]
        shape = (self._length(name), *self.program.shape(name)[1:])
        value = value.reshape(shape)
        if buffer.kind == "output":
            self.outputs[name][: len(value)] = value
        self._values[name] = value.to(buffer.dtype)

    def run(self) -> None:
        """One step.

        Raises:
            what an op raised.
        """
        self._count += 1
        self.times.clear()
        self._values.clear()
        self._flags.mend()
        for name, call in self.calls.items():
            self._serve(call, self._at[name])
        for node in self.program.nodes:
            self._launch(node)
        try:
            self._stream.synchronize()
        except BaseException as error:
            self._flags.fail(error)  # the other stream may wait for what comes no more
            self._drain()
            raise
        if self._cpu is not None:
            self._cpu.synchronize()

    def close(self) -> None:
        """Ends the streams."""
        for stream in (self._stream, self._cpu):
            if stream is not None:
                stream.close()

    def __del__(self) -> None:
        if hasattr(self, "_count"):
            self.close()

    def _length(self, name: str) -> int:
        dim = self.program.buffers[name].shape[0]
        return int(self.sizes["TSR".index(dim)]) if isinstance(dim, str) else dim

    def _launch(self, node: Node) -> None:
        stream, flags = self._stream, self._flags
        if node.op == "submit":
            (ticket,) = node.outputs
            stream.launch(lambda: self._timed("host", node.name, partial(self._submit, node)))
            stream.write_value(flags, self._at[ticket], self._count)
        elif node.op == "wait":
            (ticket,), (out,) = node.inputs, node.outputs
            stream.wait_value(flags, self._at[ticket] + 1, self._count)
            stream.launch(lambda: self.write(out, self.calls[ticket].result(self._length(out))))
        else:
            stream.launch(lambda: self._timed("host", node.name, partial(OPS[node.op], self, node)))

    def _submit(self, node: Node) -> None:
        x, ids, weights = (self.read(name) for name in node.inputs)
        self.calls[node.outputs[0]].take(x, ids, weights)

    def _serve(self, call: ExpertCall, flag: int) -> None:
        """Puts a call on the other stream: it begins when the flag says so."""
        assert self._cpu is not None

        def run() -> None:
            try:
                self._timed("cpu", call.name, call.run)
            except BaseException as error:
                self._flags.fail(error)
                raise

        self._cpu.wait_value(self._flags, flag, self._count)
        self._cpu.launch(run)
        self._cpu.write_value(self._flags, flag + 1, self._count)

    def _timed(self, stream: str, name: str, operation: partial[None] | object) -> None:
        begin = perf_counter_ns()
        operation()  # type: ignore[operator]
        self.times.append((stream, name, begin, perf_counter_ns()))

    def _drain(self) -> None:
        if self._cpu is not None:
            try:
                self._cpu.synchronize()
            except Exception:  # the first error is the one to report
                return
