"""From a model to what runs: the only place where passes rewrite a program.

A program is lowered for the sizes of a step, rewritten by the stages below from top to bottom, and
cut into one program for each device. Whoever runs a step, counts its bytes, sizes a cache, loads
weights or prints a program asks for the same ``Compiled``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..machine.nodes import ONE_NODE, MemoryNodes
from ..passes.defer import defer
from ..passes.dual_batch import dual_batch
from ..passes.gpu.attend_on_cpu import attend_on_cpu
from ..passes.gpu.metadata import gpu_metadata
from ..passes.gpu.offload_kv import offload_kv
from ..passes.gpu.save_states import save_states
from ..passes.keep_routing import keep_routing
from ..passes.numa import split_over_nodes
from ..passes.on_ref import REF, with_exact_caches
from ..passes.shard import join, shard
from ..passes.stream_dense import stream_dense
from ..program import Program
from ..program.partition import partition
from .execution import ExecutionPlan, Phase, Step
from .lowerable import Lowerable
from .placement import CPU
from .residency import NOWHERE_ELSE, Filled, Residency, residency
from .work import Work, work

Stage = Callable[[Program, ExecutionPlan, Step], Program]


def _keep_routing(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    return keep_routing(program)


def _place(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    placed = plan.placement.place(program)
    return with_exact_caches(placed) if plan.placement.device == REF else placed


def _attend_on_cpu(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    if plan.kv_attention != CPU or step.phase is not Phase.DECODE:
        return program
    return attend_on_cpu(program, plan.placement.kv_in_main)


def _expert_slots(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    """Experts that a GPU has in slots. A streamed step runs while these change, and a split one
    brings those that it takes most."""
    if step.phase is Phase.SPLIT:
        return program
    changing = plan.placement.filled(Filled.BETWEEN_STEPS)
    if changing and step.phase is Phase.STREAMED and plan.streams_all(program):
        return program
    return plan.placement.fill(program)


def _of_the_user(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    for rewrite in plan.passes if step.phase is Phase.DECODE else ():
        program = rewrite(program)
    return program


def _stream(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    if plan.streaming is None:
        return program
    if step.phase is Phase.STREAMED:
        if plan.stream_over:
            return plan.streaming.over(program, plan.stream_over)
        return plan.streaming.apply(program)
    return plan.streaming.split(program, step.share) if step.phase is Phase.SPLIT else program


def _defer(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    """Runs in steps of every phase: a token must not depend on what else is in its step."""
    return defer(program, plan.deferred)


def _dual_batch(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    return dual_batch(program) if plan.dual_batch and step.phase is Phase.DECODE else program


def _stream_dense(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    crossing = plan.placement.filled(Filled.EACH_STEP)
    sizes = {name: record.nbytes for name, record in crossing.items()}
    return stream_dense(program, sizes) if sizes else program


def _tensor(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    """Heads, MLPs and experts of each layer dealt over GPUs."""
    if not plan.tensor:
        return program
    return join(shard(program, len(plan.tensor)), plan.tensor, plan.one_shot)


def _gpu_metadata(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    """Adds what kernels read besides activations, once everything else has its place."""
    if plan.placement.device in (CPU, REF):
        return program
    return gpu_metadata(program, step.phase is Phase.DECODE)


def _save_states(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    """Lets steps with chunks of prompts save states, where a GPU has them."""
    on_gpu = plan.placement.device not in (CPU, REF)
    return save_states(program) if on_gpu and step.phase is not Phase.DECODE else program


def _offload_kv(program: Program, plan: ExecutionPlan, step: Step) -> Program:
    return offload_kv(program, plan.placement.kv_in_main)


STAGES: tuple[Stage, ...] = (
    _keep_routing,
    _place,
    _attend_on_cpu,
    _expert_slots,
    _of_the_user,
    _stream,
    _defer,
    _dual_batch,
    _stream_dense,
    _tensor,
    _save_states,
    _gpu_metadata,
    _offload_kv,
)
"""Stages in the order in which they rewrite a program; ``passes.order`` says why."""


@dataclass(frozen=True)
class Compiled:
    """What a step runs.

    Attributes:
        program: the whole, every node with its device.
        parts: the program of each device, with the submits and waits where they meet; the CPU's in
            slices where its workers are dealt over NUMA nodes.
        step: the step for which it was made; None: a program that somebody wrote.
        decided: the plan's records of weights that are not simply on their device.
    """

    program: Program
    parts: Mapping[str, Program]
    step: Step | None = None
    decided: Mapping[str, Residency] = field(default_factory=dict)

    def work(self, tokens: int = 1, context: int = 0) -> dict[str, Work]:
        """Bytes that a step reads and operations that it computes, by node (``planning.work``)."""
        return {
            name: each
            for part in self.parts.values()
            for name, each in work(part, tokens, context, self.program).items()
        }

    def residency(self, device: str) -> dict[str, Residency]:
        """By name, how a device has the weights that its part reads."""
        return residency(self.parts[device], self.decided)

    @property
    def decodes(self) -> bool:
        """Whether every sequence of the step has one token."""
        return self.step is not None and self.step.phase is Phase.DECODE

    @classmethod
    def of(
        cls,
        program: Program,
        nodes: MemoryNodes = ONE_NODE,
        step: Step | None = None,
        decided: Mapping[str, Residency] = NOWHERE_ELSE,
    ) -> Compiled:
        """A program that its passes have been through, cut for its devices.

        Raises:
            PykernelsError: see ``partition``.
        """
        parts = {
            device: split_over_nodes(part, nodes) if device == CPU else part
            for device, part in partition(program).items()
        }
        return cls(program, MappingProxyType(parts), step, decided)


def rewritten(model: Lowerable, plan: ExecutionPlan, step: Step) -> Program:
    """A model's program of a step, after all passes of a plan; not cut yet.

    Raises:
        PykernelsError: passes that exclude each other; see each of them.
    """
    program = model.lower(plan.sizes.of(step.tokens))
    for stage in STAGES:
        program = stage(program, plan, step)
    return program


def compile(
    model: Lowerable,
    plan: ExecutionPlan,
    phase: Phase = Phase.PROMPT,
    tokens: int = 1,
    share: float = 0.0,
) -> Compiled:
    """What a step of a model runs by a plan. No weight is read, no device is asked.

    Args:
        phase: of the step; ``tokens``: its most.
        share: of each layer's experts, those that cross in a split step.

    Raises:
        PykernelsError: passes that exclude each other; nodes that cannot be on the devices that the
            plan names.
    """
    step = Step(phase, tokens, share)
    program = rewritten(model, plan, step)
    return Compiled.of(program, plan.nodes, step, plan.placement.residency)
