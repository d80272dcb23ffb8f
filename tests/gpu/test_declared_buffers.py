"""Launches of the cuda device take the buffers that their nodes declare, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.devices.cuda.binders import BINDERS
from runtime.devices.cuda.memory.buffers import Arena, GpuBuffers
from runtime.devices.cuda.step import executable
from runtime.engine import Engine, SamplingParams
from runtime.program import Builder, Node, repeated
from runtime.program.weights import WeightStore
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner

TAKEN = {"read", "written", "optional", "in_slot", "program", "device"}
TAKEN |= {"weight", "optional_weight", "whole_weight"}


class Declared:
    """A program's memory as one node may see it."""

    def __init__(self, memory: GpuBuffers, node: Node) -> None:
        self._memory, self._node = memory, node

    def __getattr__(self, name: str) -> Any:
        assert name in TAKEN, f"{self._node.name} takes {name!r} of the program's memory"
        return getattr(self._memory, name)

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer of the node."""
        assert name in {*self._node.reads, *self._node.writes}, f"{self._node.name} takes {name}"
        return self._memory.tensor(name)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", CudaOptions(experts="gpu")),
        ("qwen3_moe", CudaOptions(experts="cpu", dual_batch=True, deferred=1)),
    ],
)
def test_a_launch_takes_the_buffers_of_its_node(
    family: str,
    options: CudaOptions,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def declared(bind: Any) -> Any:
        return lambda memory, node: bind(Declared(memory, node), node)

    monkeypatch.setattr(executable, "BINDERS", {op: declared(bind) for op, bind in BINDERS.items()})
    tiny.make(tmp_path, family)
    where, threads = ("cuda:0", 2) if device.type == "cuda" else ("cpu", 1)
    with WorkerPool(threads, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            runner = cuda_runner(decoder, where, pool, 64, None, 8, 2, "generic", options=options)
            runner.load()
        with Engine(runner, threaded=False) as engine:
            outputs = engine.generate([[5, 7, 2], [3]], SamplingParams(max_tokens=2))
    assert [len(out.token_ids) for out in outputs] == [2, 2]


def test_add_is_the_sum_in_order(device: torch.device) -> None:
    b = Builder("add", {"T": 3, "S": 1, "R": 1}, device="cuda")
    names = [b.buffer(f"x{i}", "T", 8, kind="input") for i in range(6)]
    b.node("add", "add", repeated("x", names), {"out": b.buffer("out", "T", 8, kind="output")})
    inputs = {name: torch.randn(3, 8, device=device) for name in names}
    out = {"out": torch.zeros(3, 8, device=device)}
    memory = GpuBuffers(b.build(), WeightStore(), device, inputs, {}, out, Arena(device))
    BINDERS["add"](memory, memory.program.nodes[0])()
    torch.testing.assert_close(out["out"], torch.stack([*inputs.values()]).sum(0))
