"""python -m bench.gpu_profile: what the steps of a prompt, and a decode step, do on the GPU.

One JSON object a line: first how long the engine takes to start, then of each prompt the tokens a
second and of decode the steps a second; with it, from one more run under CUPTI, the microseconds
and launches of each kernel a layer, the largest first, and how much of the time the GPU is busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.harness.keeping.provenance import provenance
from model.named import ARCHS
from pykernels.errors import PykernelsError
from runtime.devices.gpus import check_device
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import EngineTimer, Load

from .e2e.ours import Ours, Shape

_DECODE_STEPS = 32


def kernels(run: Callable[[], object], layers: int, most: int) -> dict[str, Any]:
    """Kernels of ``run``: by name, microseconds and launches a layer; ``busy`` of its time."""
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    wall_us = (time.perf_counter() - start) * 1e6
    rows = [
        (event.key, event.self_device_time_total, event.count)
        for event in profiled.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    rows.sort(key=lambda row: -row[1])
    total = sum(us for _, us, _ in rows)
    return {
        "busy": round(total / wall_us, 3),
        "us_per_layer": round(total / layers, 2),
        "launches_per_layer": round(sum(count for *_, count in rows) / layers, 2),
        "kernels": {
            name[:60]: [round(us / layers, 2), round(count / layers, 2)]
            for name, us, count in rows[:most]
        },
    }


def profiled(
    ours: Ours, timer: EngineTimer, load: Load, prompts: list[int], top: int
) -> Iterator[dict[str, Any]]:
    """A row for each prompt, then one for decode."""
    for tokens in prompts:
        timer.prefill(tokens)
        seconds = median(timer.prefill(tokens) for _ in range(5))
        row = {"op": "prompt", "tokens": tokens, "tok_s": round(tokens / seconds, 1)}
        yield row | kernels(lambda n=tokens: timer.prefill(n), ours.layers, top)  # type: ignore[misc]
    steps = timer.decode(load.batch, load.context, load.tokens)
    seconds = median(step.seconds for step in steps)
    row = {"op": "decode", "batch": load.batch, "context": load.context}
    row |= {"us_per_step": round(seconds * 1e6, 1), "tok_s": round(load.batch / seconds, 1)}
    # Of one sequence from its first token on: prompts of a step would be mixed in otherwise.
    alone = kernels(lambda: timer.decode(1, 1, _DECODE_STEPS), ours.layers * _DECODE_STEPS, top)
    yield row | {"batch_1_context_1": alone}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu_profile", description=__doc__)
    parser.add_argument("--arch", choices=ARCHS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="q4_k")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--expert-device", default="gpu")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 512, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--top", type=int, default=14)
    given = parser.parse_args(argv)
    try:
        check_device(given.device)
        shape = Shape(given.arch, given.layers, None, None)
        execution = ExecutionConfig(
            device=given.device, experts=given.expert_device, kv_dtype=given.kv_dtype
        )
        ours = Ours.random(shape, given.format, execution)
        try:
            load = Load(max(given.prompt), 64, given.batch, 512)
            start = time.perf_counter()
            timer = ours.timer(load, execution, given.step_tokens)
            row = {"op": "start", "seconds": round(time.perf_counter() - start, 1)}
            row |= {"step_tokens": timer.runner.max_num_batched_tokens}
            row |= {"gib": round(torch.cuda.memory_reserved() / 2**30, 2)}
            print(json.dumps(provenance() | row), flush=True)
            for row in profiled(ours, timer, load, given.prompt, given.top):
                print(json.dumps(row), flush=True)
            timer.close()
        finally:
            ours.close()
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
