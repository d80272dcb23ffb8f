"""Makes programs ready to run: those that never run at the same time share inputs, results and
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from pykernels.ref.sampling import Sampled

from ...planning.compile import Compiled
from ...program import Program
from ...runner.sampling import SamplingBatch
from .memory.blocks import Shape
from .memory.buffers import Arena, ProgramOutputs, StepOutputs, kept_bytes, kept_routing
from .resources import CudaResources
from .step.channels import ChannelBuffers
from .step.executable import CudaExecutable, GpuMemory
from .step.gate import Gate
from .step.inputs import Bucket, StepInputs
from .striped import StripedBucket, StripedExecutable, StripedInputs


class StepBuilder:
    """Makes the steps of one step runner: none of them runs while another one does.

    Args:
        largest: program of the largest step; its caches are there.
        inputs: by name, CPU tensors that are written before each step; ``sampling``: how its rows
            are sampled; ``sizes``: see ``PagedRunner``.
        high_priority: whether kernels of these steps go before those of others on a GPU.
        gate: at which they may be parked.
        whole: makes the program of a whole step of so many tokens, where tokens are dealt over the
            GPUs; None: they are not.

    Attributes:
        host_inputs: ``inputs``, for nodes of the CPU.
    """

    def __init__(
        self,
        resources: CudaResources,
        largest: Program,
        inputs: Mapping[str, torch.Tensor],
        sampling: SamplingBatch,
        sizes: torch.Tensor,
        high_priority: bool,
        gate: Gate | None = None,
        whole: Callable[[int], Program] | None = None,
    ) -> None:
        self._resources, self._largest = resources, largest
        self._sizes, self._high_priority, self._gate = sizes, high_priority, gate
        self._arenas = {name: Arena(device) for name, device in resources.gpus.items()}
        self._channel_buffers = ChannelBuffers(resources.gpus, resources.peers)
        self._pool = torch.cuda.graph_pool_handle() if resources.real else None
        self._whole = whole
        self._inputs: StepInputs | StripedInputs
        if whole is not None:
            self._inputs = StripedInputs(inputs, sampling, resources.gpus)
        else:
            gpus, sampler = resources.gpus, resources.sampler
            self._inputs = StepInputs(inputs, sampling, gpus, sampler=sampler)
        self._results: dict[str, StepOutputs] = {}
        self.host_inputs = dict(inputs)

    def make(self, compiled: Compiled) -> CudaExecutable:
        """What was compiled, bound and captured.

        Raises:
            PykernelsError: too little memory of a GPU.
        """
        with self._resources.enough_memory():
            return self._made(compiled)

    def _made(self, compiled: Compiled) -> CudaExecutable:
        resources, program = self._resources, compiled.program
        bucket = self._inputs.bucket(compiled)
        executable = (CudaExecutable if self._whole is None else StripedExecutable)(
            compiled,
            resources.model.store,
            {
                name: GpuMemory(
                    device, bucket.on[name], self._arenas[name], self._high_priority, self._gate
                )
                for name, device in self._resources.gpus.items()
            },
            resources.pool,
            resources.kernel,
            self.host_inputs,
            resources.caches,
            self._sizes,
            self._channel_buffers,
            self._results_of(program),
        )
        if isinstance(executable, StripedExecutable) and self._whole and compiled.step:
            executable.deal_back(self._whole(compiled.step.tokens), self._sizes)
        executable.before = partial(self._send, bucket)
        if resources.real:
            # What is launched for expanded sequences depends on how many keys they have.
            expands = any(node.op == "attention_expanded" for node in program.nodes)
            self._warm(executable, bucket, captured=not expands)
        return executable

    def _send(self, bucket: Bucket | StripedBucket) -> None:
        T, S, R, *_ = self._sizes.tolist()
        bucket.send(T, S, R)

    def _results_of(self, program: Program) -> dict[str, ProgramOutputs]:
        """Memory, by GPU, for what all programs sample and for the choices of this one's
        routers."""
        self._results = self._results or self._allocated(program)
        return {
            gpu: results.of(kept_routing(program, gpu)) for gpu, results in self._results.items()
        }

    def _allocated(self, program: Program) -> dict[str, StepOutputs]:
        step_outputs: dict[str, StepOutputs] = {}
        for gpu, device in self._resources.gpus.items():
            gpu_nodes = [node for node in program.nodes if node.device == gpu]
            buffers = [
                program.buffers[node.outputs[name]]
                for node in gpu_nodes
                if node.op == "sample_requests"
                for name in Sampled._fields
            ]
            rows = self._resources.sizes.logits
            shapes: dict[str, Shape] = {
                b.name: ((rows, *program.shape(b.name)[1:]), b.dtype) for b in buffers
            }
            step_outputs[gpu] = StepOutputs(shapes, device, kept_bytes(self._largest, gpu))
        return step_outputs

    def _warm(
        self, executable: CudaExecutable, bucket: Bucket | StripedBucket, captured: bool
    ) -> None:
        """Runs a step that writes nothing, which compiles everything, then captures it."""
        self._sizes[:] = 0
        before, executable.before = executable.before, bucket.pretend
        executable.compile()
        executable.run_first()
        if captured:
            assert self._pool is not None
            executable.capture(self._pool)
        executable.before = before
