"""How experts are streamed to GPUs: through which buffers, and in steps of how many tokens."""

from __future__ import annotations

import warnings
from dataclasses import replace

from pykernels.errors import PykernelsError

from ...kv_cache.layout import PAGE
from ...machine.nodes import MemoryNodes
from ...passes.layers import check_routed, moe_layers
from ...passes.stream_weights import CHUNKS, StreamRing
from ...program import Program
from ..compile import compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..placement import CPU
from ..streaming import Streaming
from .capacity import free_for_steps, short_step_bytes, step_bytes
from .machine import Machine

STREAM_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
"""What a step may have, if nobody says: all experts cross once a step, so ``most_tokens``, or as
many of these as fit."""
OPS_PER_BYTE = 8192
"""More than any GPU computes while a byte crosses its link: 450 TFLOP/s beside 55 GB/s. A step that
is shorter than need be waits for the link, and a longer one takes only memory that is free."""
RESERVED = 2048
"""Tokens of a streamed step for which an expert cache leaves room."""
RINGS = (StreamRing(CHUNKS, CHUNKS + 1), StreamRing(CHUNKS, 2))
"""A layer loaded beside another one that is computed; where memory is short, a quarter of one."""


def wanted_streaming(
    prefill: str,
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    tokens: int | None = None,
) -> Streaming | None:
    """``plan_streaming`` as far as ``ExecutionConfig.prefill`` asks for it; None: nothing is
    streamed, with a warning where it could not be.

    Raises:
        PykernelsError: what is asked for cannot be.
    """
    if prefill == "cpu" or plan.placement.experts != CPU:
        if prefill in ("stream", "split"):
            check_routed(model.lower(), f"prefill {prefill}")
            raise PykernelsError(
                f"prefill {prefill} with the experts on the GPU: nothing has to cross",
                "Keep the experts on the CPU (experts cpu), or leave prefill at auto",
            )
        return None
    if prefill == "auto" and not machine.real:  # no link whose rate there is to measure
        return None
    try:
        return plan_streaming(model, machine, plan, tokens)
    except PykernelsError as error:
        if prefill != "auto":
            raise
        warnings.warn(f"{error.cause}; the CPU computes those of prompts", stacklevel=4)
        return None


def plan_streaming(
    model: Lowerable, machine: Machine, plan: ExecutionPlan, tokens: int | None = None
) -> Streaming:
    """How a model's experts are streamed from main memory to the GPUs of their layers.

    Args:
        machine: in Triton's interpreter there is always room.
        plan: of the model, experts on the CPU.
        tokens: budget of a step; None: as many of ``STREAM_TOKENS`` as fit.

    Raises:
        PykernelsError: experts that cannot be streamed, and why.
    """
    program = compile(model, plan).program
    if reason := _why_not(machine, program):
        raise PykernelsError(f"experts cannot be streamed: {reason}", "Leave prefill at cpu")
    nodes = model.store.nodes
    if not machine.bounded:
        return _through(machine, RINGS[0], tokens or STREAM_TOKENS[-1], nodes)
    others = short_step_bytes(model, machine, plan)
    free = {gpu: n - others[gpu] for gpu, n in free_for_steps(model, machine, plan).items()}
    short, most = "", most_tokens(*_crossing(program), plan.sizes.table_pages * PAGE)
    fewer = [T for T in STREAM_TOKENS if most > T]
    for ring in RINGS:
        for T in (tokens,) if tokens else (most, *fewer):
            streaming = _through(machine, ring, T, nodes)
            needed = _streamed_bytes(model, machine, plan, streaming)
            full = [gpu for gpu in free if needed[gpu] > free[gpu]]
            if not full:
                return streaming
            has, need = (max(0, of[full[0]]) / 2**30 for of in (free, needed))
            short = f"{full[0]} has {has:.1f} GiB for them, and they need {need:.1f}"
    raise PykernelsError(
        f"experts cannot be streamed: {short} with two layers of experts on their way",
        "Ask for fewer max_num_batched_tokens or kv_tokens, or leave prefill at cpu",
    )


def streaming_bytes(
    model: Lowerable, machine: Machine, plan: ExecutionPlan, tokens: int | None = None
) -> dict[str, int]:
    """Bytes of each GPU that streamed steps take beside the others, where there is room.

    Args:
        tokens: budget of a step; None: ``RESERVED`` of them.
    """
    streaming = _through(machine, RINGS[0], tokens or RESERVED, model.store.nodes)
    return _streamed_bytes(model, machine, plan, streaming)


def most_tokens(nbytes: int, numbers: int, positions: int) -> int:
    """Tokens of a step after which no GPU would wait for its link; no more than the longest
    sequence has, in whole 1,024s, or 4,096.

    Args:
        nbytes: of all experts; ``numbers``: of the experts that a token takes.
        positions: of the longest sequence.
    """
    balanced = OPS_PER_BYTE * nbytes // (2 * numbers)
    return max(4096, min(STREAM_TOKENS[0], balanced, -(-positions // 1024) * 1024))


def _through(machine: Machine, ring: StreamRing, tokens: int, nodes: MemoryNodes) -> Streaming:
    return Streaming(ring, tokens, nodes, resident_bytes=machine.layouts.resident_bytes)


def _streamed_bytes(
    model: Lowerable, machine: Machine, plan: ExecutionPlan, streaming: Streaming
) -> dict[str, int]:
    """Bytes of each GPU that streamed steps take beside what the others have."""
    streamed = replace(plan, streaming=streaming)
    compiled = compile(model, streamed, Phase.STREAMED, streaming.tokens)
    nbytes = step_bytes(machine, compiled)
    if streamed.streams_apart(compiled.program, model):
        return nbytes
    others = short_step_bytes(model, machine, plan)  # one step at a time, in the same memory
    return {gpu: max(0, nbytes[gpu] - others[gpu]) for gpu in nbytes}


def _crossing(program: Program) -> tuple[int, int]:
    """Bytes of a program's experts, and numbers of those that a token takes."""
    nbytes = numbers = 0
    for layer in moe_layers(program):
        spec = program.weight(layer.experts, "experts")
        _, H, I = spec.shape  # noqa: E741
        nbytes, numbers = nbytes + spec.nbytes, numbers + 3 * layer.topk * H * I
    return nbytes, numbers


def _why_not(machine: Machine, program: Program) -> str | None:
    """Why a model's experts cannot cross, as a clause."""
    for layer in moe_layers(program):
        node = layer.experts
        if (activations := node.attr("activations")) != "bf16":
            return f"{node.name} has {activations} activations, which no kernel of the GPU takes"
        if reason := machine.layouts.why_not_streamed(program.weight(node, "experts")):
            return reason
    return None
