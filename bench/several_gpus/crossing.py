"""Bytes of a step that cross to each GPU from main memory, and from one GPU to another: those of
its program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    programs = sorted(_programs(runner), key=tokens_of)
    found = Crossing()
    for chunk in [most] * whole + ([rest] if rest else []):
        program = next((each for each in programs if chunk <= tokens_of(each)), programs[-1])
        loads = loaded_by_gpu(program)
        found.steps += 1
        found.streamed += bool(loads)
        found.between += between_gpus(program)
        for gpu, nbytes in loads.items():
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


def _programs(runner: Any) -> Iterator[Program]:
    """Those of prompts that are streamed; where none are, all of prompts."""
    beside = runner.prefill_runner
    programs = [step.program for step in (runner.steps if beside is None else beside.steps)]
    yield from [each for each in programs if loaded_by_gpu(each)] or programs


def tokens_of(program: Program) -> int:
    """Tokens of a step, those of all ranks."""
    return max(program.sizes["T"], program.sizes.get(ALL_TOKENS, 0))


def loaded_by_gpu(program: Program) -> dict[str, int]:
    """Bytes of experts that each GPU loads from main memory in a step."""
    found: dict[str, int] = {}
    for node in program.nodes:
        if node.op == "load_experts":
            count = node.attr("count") - len(node.attr("without"))
            nbytes = count * program.weight(node, "experts").bytes_per_expert
            found[node.device] = found.get(node.device, 0) + nbytes
    return found


def between_gpus(program: Program) -> int:
    """Bytes that a GPU reads of what another one wrote, in the largest step: each buffer once for
    each GPU that reads it."""
    kinds = dtypes(program)
    writers: dict[str, str] = {}
    sent: set[tuple[str, str]] = set()
    total = 0
    for node in program.nodes:
        for name in node.reads:
            ends = writers.get(name, node.device), node.device
            if ends[0] != ends[1] and _on_gpus(ends) and (name, node.device) not in sent:
                sent.add((name, node.device))
                item = kinds.get(name, program.buffers[name].dtype).itemsize
                total += math.prod(program.shape(name)) * item
        for name in node.writes:
            writers[name] = node.device
            sent = {pair for pair in sent if pair[0] != name}
    return total


def _on_gpus(devices: Sequence[str]) -> bool:
    return all(device.startswith("cuda") for device in devices)
