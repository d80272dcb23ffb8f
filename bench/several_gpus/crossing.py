"""Bytes of a step that cross to each GPU from main memory, and from one GPU to another: those of
its program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bench.harness.timing.rows import Row
from runtime.devices.cuda.memory.buffers import dtypes
from runtime.program import Program
from runtime.program.op_table.collectives import ALL_TOKENS


def crossed(runner: Any, tokens: int, steps: int, seconds: float) -> Row:
    """The columns of a prompt that took so long; rates use 1e9 bytes.

    Args:
        runner: a ``PagedRunner`` that has been bound.
        steps: that read the prompt, about as many tokens each.
    """
    chunk = -(-tokens // max(1, steps))
    known = sorted(_steps(runner), key=tokens_of)
    parts = _parts(next((step for step in known if chunk <= tokens_of(step)), known[-1]))
    links = [count * steps for part in parts if (count := loaded_bytes(part))]
    row: Row = {"steps": steps}
    if not links:
        return row
    between = steps * sum(map(sent_to_gpus, parts))
    row |= {
        "link_bytes": sum(links),
        "link_gbps": round(sum(links) / seconds / 1e9, 2),
        "link_gbps_each": [round(each / seconds / 1e9, 2) for each in links],
        "between_bytes": between,
        "between_gbps": round(between / seconds / 1e9, 2),
    }
    streaming = runner.plan.streaming
    if streaming is not None and streaming.link_bytes_per_s:
        row["link_roof_gbps"] = round(streaming.link_bytes_per_s / 1e9, 2)
    return row


def _steps(runner: Any) -> Sequence[Any]:
    """Executables of prompts that are streamed; where none are, all of prompts."""
    beside = runner.prefill_runner
    steps: Sequence[Any] = runner.steps if beside is None else beside.steps
    return [step for step in steps if any(map(loaded_bytes, _parts(step)))] or steps


def _parts(step: Any) -> Sequence[Program]:
    """The program of each GPU."""
    return [part.memory.program for part in step.gpus]


def tokens_of(step: Any) -> int:
    """Tokens of a step, those of all ranks."""
    return max(max(each.sizes["T"], each.sizes.get(ALL_TOKENS, 0)) for each in _parts(step))


def loaded_bytes(program: Program) -> int:
    """Bytes of experts that a step loads from main memory."""
    total = 0
    for node in program.nodes:
        if node.op == "load_experts":
            count = node.attr("count") - len(node.attr("without"))
            total += count * program.weight(node, "experts").bytes_per_expert
    return total


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
