"""Makes programs ready to run: those that never run at the same time share inputs, results and
memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from pykernels.ref.sampling import Sampled

from ....planning.compile import Compiled
from ....program import Program
from ....runner.sampling import SamplingInputs
from ..memory.buffers import Arena
from .executable import CudaExecutable, GpuMemory
from .handshake import PinnedSlots
from .inputs import NEVER, PIECE, Bucket, StepInputs
from .outputs import ProgramOutputs, StepOutputs, kept_bytes, kept_routing
from .owner import Owner


class StepMaker:
    """Makes the steps of one lane: none of them runs while another one does.

    Args:
        owner: whose weights and caches they read; the caches are there.
        inputs: by name, CPU tensors that are written before each step; ``sampling``: how its rows
            are sampled; ``sizes``: see ``PagedRunner``.
        urgent: whether kernels of these steps go before those of others on a GPU.

    Attributes:
        host_inputs: ``inputs``, for nodes of the CPU.
    """

    def __init__(
        self,
        owner: Owner,
        inputs: Mapping[str, torch.Tensor],
        sampling: SamplingInputs,
        sizes: torch.Tensor,
        urgent: bool,
    ) -> None:
        self._owner, self._sizes, self._urgent = owner, sizes, urgent
        self._arenas = {name: Arena(device) for name, device in owner.gpus.items()}
        self._slots = PinnedSlots(owner.real)
        self._pool = torch.cuda.graph_pool_handle() if owner.real else None
        # E4M3 becomes rows of bfloat16 before a prefill: once a sequence, not once a piece.
        coded = any(part.dtype == torch.float8_e4m3fn for part in owner.caches.values())
        whole = coded or expansion(owner.compiled().program) is not None
        self._inputs = StepInputs(inputs, sampling, owner.gpus, None if whole else PIECE)
        self._results: dict[str, StepOutputs] = {}
        self.host_inputs = dict(inputs)

    def make(self, compiled: Compiled) -> CudaExecutable:
        """What was compiled, bound and captured.

        Raises:
            PykernelsError: too little memory of a GPU.
        """
        with self._owner.enough_memory():
            return self._made(compiled)

    def _made(self, compiled: Compiled) -> CudaExecutable:
        owner, program, decode = self._owner, compiled.program, compiled.decodes
        T, R, expand_from = program.sizes["T"], program.sizes["R"], expansion(program)
        bucket = self._inputs.bucket(T, R, decode, expand_from, has_lanes(program))
        executable = CudaExecutable(
            compiled,
            owner.weights,
            {
                name: GpuMemory(device, *bucket.on[name], self._arenas[name], self._urgent)
                for name, device in owner.gpus.items()
            },
            owner.pool,
            owner.kernel,
            self.host_inputs,
            owner.caches,
            self._sizes,
            self._slots,
            self._results_of(program),
        )
        executable.before = partial(self._send, bucket)
        if owner.real:
            # What is launched for expanded sequences depends on how many keys they have.
            self._warm(executable, bucket, captured=decode or (expand_from or NEVER) == NEVER)
        return executable

    def _send(self, bucket: Bucket) -> None:
        T, S, R, *_ = self._sizes.tolist()
        bucket.send(T, S, R)

    def _results_of(self, program: Program) -> dict[str, ProgramOutputs]:
        """By GPU, where all programs put what they sample, and a program the choices of its
        routers."""
        self._results = self._results or self._allocated(program)
        return {
            gpu: results.of(kept_routing(program, gpu)) for gpu, results in self._results.items()
        }

    def _allocated(self, program: Program) -> dict[str, StepOutputs]:
        owner = self._owner
        largest = owner.compiled(tokens=owner.max_num_batched_tokens).program
        found: dict[str, StepOutputs] = {}
        for gpu, device in owner.gpus.items():
            own = [node for node in program.nodes if node.device == gpu]
            buffers = [
                program.buffers[node.outputs[name]]
                for node in own
                if node.op == "sample_requests"
                for name in Sampled._fields
            ]
            rows = owner.max_num_logits
            shapes = {b.name: ((rows, *program.shape(b.name)[1:]), b.dtype) for b in buffers}
            found[gpu] = StepOutputs(shapes, device, kept_bytes(largest, gpu))
        return found

    def _warm(self, executable: CudaExecutable, bucket: Bucket, captured: bool) -> None:
        """Runs a step that writes nothing, which compiles everything, then captures it."""
        self._sizes[:] = 0
        before, executable.before = executable.before, bucket.pretend
        executable.compile()
        executable.run()
        if captured:
            assert self._pool is not None
            executable.capture(self._pool)
        executable.before = before


def expansion(program: Program) -> int | None:
    """Tokens of a sequence in a step from which its keys and values are expanded, ``NEVER`` if none
    are; None where there are no latents."""
    for node in program.nodes:
        if node.op == "attention" and "latent" in node.inputs:
            return node.attr("expand_from") or NEVER
    return None


def has_lanes(program: Program) -> bool:
    """Whether a program has two lanes."""
    return any(node.lane for node in program.nodes)
