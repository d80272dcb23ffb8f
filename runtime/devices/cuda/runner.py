"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.launch import supports
from pykernels.ref.sampling import Sampled

from ...engine.batch import DeviceLost, StepBatch, StepResult
from ...passes import defer
from ...passes.gpu_experts import slot_tables
from ...placement import CPU, Placement, place
from ...program import Program
from ...weights import LayoutOf
from ...workers.pool import WorkerPool
from ...workers.threads import spin_budget
from ..runner import Lowerable, PagedRunner, Pass
from .deferral import measured_deferral
from .dense import Launch
from .executable import CudaExecutable
from .handshake import PinnedSlots
from .inputs import KEY_LENGTHS, StepInputs
from .memory import dtypes
from .outputs import StepOutputs
from .weights import gpu_bytes, layouts

GRAPH_TOKENS = 64
"""Most tokens of a bucket that is captured; larger steps are bound by what they compute."""
HEADROOM = 1 << 30
"""Bytes of GPU memory that stay free for what launches allocate."""


class CudaRunner(PagedRunner):
    """See ``engine.batch.Runner``.

    Args:
        device: "cuda:N"; "cpu" in Triton's interpreter.
        pool: runs what is on the CPU: experts.
        experts: where routed experts are: "cpu", "gpu", or "auto": on the GPU if all fit.
        auto_defer: whether to defer as many experts as keep the CPU busy, found by measuring.
        gpu_experts: by layer, experts that are on the GPU besides, where the others are not.

    Attributes:
        deferred: experts of a token that ``auto_defer`` found.

    Raises:
        PykernelsError: no such GPU, too little of its memory, a kernel that cannot run there.
    """

    buckets = (1, 2, 4, 8, 16, 32, 64)
    pool: WorkerPool

    def __init__(
        self,
        model: Lowerable,
        device: str,
        pool: WorkerPool,
        max_model_len: int,
        num_pages: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        kernel: str = "auto",
        passes: Sequence[Pass] = (),
        max_num_logits: int | None = None,
        experts: str = "auto",
        auto_defer: bool = False,
        gpu_experts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(
            model,
            max_model_len,
            num_pages,
            max_num_batched_tokens,
            max_num_seqs,
            passes,
            max_num_logits,
        )
        self.device, self.pool, self.kernel = torch.device(device), pool, kernel
        check_device(device)
        placement = place_on(device, model, self.num_pages, experts)
        self.placement = replace(placement, cached=gpu_experts or {})
        self._auto_defer, self.deferred = auto_defer, 0
        if self._real:  # a layer of the GPU is shorter than waking a sleeper
            pool.spin_for(spin_budget(driver_works=False))
        self.caches: dict[str, torch.Tensor] = {}
        self._inputs: StepInputs | None = None
        self._sampled: StepOutputs | None = None
        self._host_inputs: Mapping[str, torch.Tensor] = {}
        self._slots = PinnedSlots(self._real)
        self._pool_handle = torch.cuda.graph_pool_handle() if self._real else None

    @property
    def _real(self) -> bool:
        return self.device.type == "cuda"

    def lowered(self, *sizes: int) -> Program:
        """The model's program: routed experts on the CPU or the GPU, all else on the GPU."""
        return self.placement.apply(super().lowered(*sizes))

    def layouts(self, program: Program) -> LayoutOf:
        return layouts(program, self.device, dtypes(program))

    def decode_passes(self) -> Sequence[Pass]:
        """The passes, with the deferral that pays here."""
        cpu = self.steps[0].cpu if isinstance(self.steps[0], CudaExecutable) else None
        if not self._auto_defer or cpu is None or self.placement.experts != CPU:
            return self.passes
        inputs = self._host_inputs
        self.sizes[0], self.sizes[1], self.sizes[2] = 1, 1, 0  # a token that is written nowhere
        inputs["slot_mapping"][0] = -1
        self.deferred = measured_deferral(self.steps[0].program, cpu.jobs.jobs, self.steps[0].run)
        inputs["slot_mapping"][0] = 0
        if not self.deferred:
            return self.passes
        return (partial(defer, N=self.deferred), *self.passes)

    def step(self, batch: StepBatch) -> StepResult:
        try:
            return super().step(batch)
        except torch.AcceleratorError as error:  # no later call on this device works either
            raise DeviceLost(
                f"{self.device} failed: {str(error).splitlines()[0]}", "Load the model again"
            ) from error

    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        try:
            return self._make_step(program, inputs)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise PykernelsError(
                f"{self.device} has too little memory: {free >> 20} of {total >> 20} MiB are free,"
                f" the weights on it and a KV cache of {self.num_pages * self.page_size} tokens"
                " need more",
                "Keep the experts on the CPU (experts cpu), or ask for fewer kv_tokens",
            ) from error

    def _make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        if self._inputs is None:
            self._inputs = StepInputs(inputs, self._sampling, self.device)
            self._host_inputs = dict(inputs)
            self._allocate_caches(program)
        given, T = self._inputs.tensors, program.sizes["T"]
        table = torch.zeros(T, given["page_table"].shape[1], dtype=torch.int32, device=self.device)
        sequences = given["sequences"][:T]

        def prelude() -> None:
            torch.index_select(given["page_table"], 0, sequences, out=table)

        executable = CudaExecutable(
            program,
            self.weights,
            self.device,
            self.pool,
            self.kernel,
            given,
            self._host_inputs,
            self.caches,
            table,
            given[KEY_LENGTHS][:T],
            prelude,
            self.sizes,
            self._slots,
            self._results_of(program),
        )
        executable.before = self._send(executable)
        if self._real:
            self._warm(executable)
        return executable

    def _results_of(self, program: Program) -> StepOutputs:
        """Where all programs put what they sample."""
        if self._sampled is None:
            rows = self.max_num_logits
            node = next(node for node in program.nodes if node.op == "sample_requests")
            buffers = [program.buffers[node.outputs[name]] for name in Sampled._fields]
            shapes = {b.name: ((rows, *program.shape(b.name)[1:]), b.dtype) for b in buffers}
            self._sampled = StepOutputs(shapes, self.device)
        return self._sampled

    def _send(self, executable: CudaExecutable) -> Launch:
        bucket = executable.program.sizes["T"]

        def send() -> None:
            assert self._inputs is not None
            T, S, R = self.sizes.tolist()
            self._inputs.send(T, S, R, bucket)

        return send

    def _warm(self, executable: CudaExecutable) -> None:
        """Runs a step of padding, which compiles everything, then captures it."""
        self.sizes[0], self.sizes[1], self.sizes[2] = 0, 0, 0
        executable.run()
        with torch.cuda.device(self.device):
            if executable.program.sizes["T"] <= GRAPH_TOKENS:
                assert self._pool_handle is not None
                executable.capture(self._pool_handle)

    def _allocate_caches(self, program: Program) -> None:
        for name, part in self.model.caches(self.num_pages).items():
            self.caches[name] = torch.zeros(part.shape, dtype=part.dtype, device=self.device)
        for name, table in slot_tables(program).items():
            self.caches[name] = table.to(self.device)
        for node in program.nodes:  # bfloat16 latents and their rotated parts, apart
            name = node.inputs.get("latent", "")
            if node.op == "mla_rope_cache_write" and "rope" not in node.inputs:
                whole, L = self.caches.pop(name), program.weight(node, "kv_norm").shape[0]
                self.caches[name] = whole[..., :L].contiguous()
                self.caches[f"{name}.rope"] = whole[..., L:].contiguous()


def room_for_experts(device: str, model: Lowerable, num_pages: int) -> int:
    """Bytes of a GPU that experts may take beside all else of a model and a cache of so many pages;
    below 0 where that alone is too much.

    Args:
        device: "cuda:N"; "cpu" in Triton's interpreter, where any number fit.
    """
    if torch.device(device).type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    cache = sum(part.nbytes for part in model.caches(num_pages).values())
    name = str(torch.device(device))
    rest = Placement(name, CPU).nbytes(model.lower(1, 1, 1, 1, 1), name, gpu_bytes)
    return free - cache - rest - HEADROOM


def place_on(device: str, model: Lowerable, num_pages: int, experts: str) -> Placement:
    """Where a model's nodes run beside a cache of so many pages: unless they fit, routed experts on
    the CPU, all else on the GPU.

    Args:
        device: "cuda:N"; "cpu" in Triton's interpreter.
        experts: see ``placement.place``.
    """
    cache = sum(part.nbytes for part in model.caches(num_pages).values())
    program = model.lower(1, 1, 1, 1, 1)
    if torch.device(device).type != "cuda":
        return place(program, "cuda:interpreted", experts, 1 << 62, gpu_bytes)
    free, _ = torch.cuda.mem_get_info(device)
    name = str(torch.device(device))
    return place(program, name, experts, free - cache - HEADROOM, gpu_bytes)


def check_device(name: str) -> None:
    """Raises PykernelsError if there is no such GPU, or it runs no kernel of ours."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PykernelsError(
            f"no device {name!r}", "Use cpu, or cuda:0 for the first GPU"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise PykernelsError(
                f"no {device}: torch finds no CUDA GPU",
                "Use --device cpu, or install a driver and torch's CUDA build",
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise PykernelsError(
                f"no {device}: there are {torch.cuda.device_count()} GPUs", "Give a lower number"
            )
    if reason := supports(device):
        raise PykernelsError(f"no GPU kernel runs on {device}: {reason}", "Use --device cpu")
