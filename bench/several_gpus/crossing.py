"""Bytes of a step that cross to each GPU from main memory, and from one GPU to another: those of
its program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.timing.rows import Row
from runtime.devices.cuda.memory.buffers import dtypes
from runtime.program import Program
from runtime.program.op_table.collectives import ALL_TOKENS


@dataclass
class Crossing:
    """What of a prompt crosses.

    Attributes:
        steps: that it takes; ``streamed``: of them, those whose experts cross.
        links: by GPU, bytes of experts that come from main memory.
        between: bytes that a GPU has from another one.
    """

    steps: int = 0
    streamed: int = 0
    links: dict[str, int] = field(default_factory=dict)
    between: int = 0


def crossing(runner: Any, tokens: int) -> Crossing:
    """What of a prompt of so many tokens crosses, in steps of as many as the runner takes.

    Args:
        runner: a ``PagedRunner`` that has been bound.
    """
    most = runner.max_num_batched_tokens
    whole, rest = divmod(tokens, most)
    steps = sorted(_steps(runner), key=tokens_of)
    found = Crossing()
    for chunk in [most] * whole + ([rest] if rest else []):
        parts = _parts(next((step for step in steps if chunk <= tokens_of(step)), steps[-1]))
        loads = [loaded_by_gpu(part) for part in parts]
        found.steps += 1
        found.streamed += any(loads)
        found.between += sum(map(sent_to_gpus, parts))
        for gpu, nbytes in (pair for each in loads for pair in each.items()):
            found.links[gpu] = found.links.get(gpu, 0) + nbytes
    return found


def crossed(runner: Any, tokens: int, seconds: float) -> Row:
    """The columns of a prompt that took so long; rates use 1e9 bytes."""
    found = crossing(runner, tokens)
    row: Row = {"steps": found.steps, "streamed_steps": found.streamed}
    if not found.links:
        return row
    total = sum(found.links.values())
    row |= {
        "link_bytes": total,
        "link_gbps": round(total / seconds / 1e9, 2),
        "link_gbps_each": [round(each / seconds / 1e9, 2) for each in found.links.values()],
        "between_bytes": found.between,
        "between_gbps": round(found.between / seconds / 1e9, 2),
    }
    streaming = runner.plan.streaming
    if streaming is not None and streaming.link_bytes_per_s:
        row["link_roof_gbps"] = round(streaming.link_bytes_per_s / 1e9, 2)
    return row


def _steps(runner: Any) -> Sequence[Any]:
    """Executables of prompts that are streamed; where none are, all of prompts."""
    beside = runner.prefill_runner
    steps: Sequence[Any] = runner.steps if beside is None else beside.steps
    return [step for step in steps if any(map(loaded_by_gpu, _parts(step)))] or steps


def _parts(step: Any) -> Sequence[Program]:
    """The program of each GPU."""
    return [part.memory.program for part in step.gpus]


def tokens_of(step: Any) -> int:
    """Tokens of a step, those of all ranks."""
    return max(max(each.sizes["T"], each.sizes.get(ALL_TOKENS, 0)) for each in _parts(step))


def loaded_by_gpu(program: Program) -> dict[str, int]:
    """Bytes of experts that each GPU loads from main memory in a step."""
    found: dict[str, int] = {}
    for node in program.nodes:
        if node.op == "load_experts":
            count = node.attr("count") - len(node.attr("without"))
            nbytes = count * program.weight(node, "experts").bytes_per_expert
            found[node.device] = found.get(node.device, 0) + nbytes
    return found


def sent_to_gpus(part: Program) -> int:
    """Bytes that a GPU's part of a program (``partition``) sends to other GPUs, in the largest
    step."""
    kinds = dtypes(part)
    total = 0
    for node in part.nodes:
        if node.op == "submit" and node.attr("to").startswith("cuda"):
            for name in node.reads:
                item = kinds.get(name, part.buffers[name].dtype).itemsize
                total += math.prod(part.shape(name)) * item
    return total
