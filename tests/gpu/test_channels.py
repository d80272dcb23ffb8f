"""What one GPU writes and another reads: every step has its own numbers, whoever comes late."""

from __future__ import annotations

import random
import time

import pytest
import torch
import triton
import triton.language as tl

from pykernels.env import env
from runtime.devices.cuda.memory.buffers import dtypes
from runtime.devices.cuda.step.channels import received_bytes
from runtime.devices.cuda.step.executable import CudaExecutable
from runtime.devices.cuda.step.graph import Launch
from runtime.devices.cuda.step.peers import Peers
from runtime.passes.shard.merge import one_shot_sums
from runtime.program.partition import partition

from .two_gpus import bound, sums, two_gpus

LAYERS, H = 4, 128


@triton.jit
def _spin(rounds, place, out):
    total = 0
    for _ in range(tl.load(rounds + place)):
        total += tl.load(out, volatile=True)
    tl.store(out, total)


def lags(executable: CudaExecutable) -> list[torch.Tensor]:
    """A wait in front of each launch, as long as the numbers say that are returned, by GPU."""
    rounds = list[torch.Tensor]()
    for part in executable.gpus:
        launches, device = part.graph.launches, part.device
        rounds.append(torch.zeros(len(launches), dtype=torch.int32, device=device))
        out = torch.zeros(1, dtype=torch.int32, device=device)
        late: list[Launch] = []
        for i, launch in enumerate(launches):
            late += [lambda i=i, r=rounds[-1], out=out: _spin[(1,)](r, i, out), launch]  # type: ignore[misc]
        part.graph.launches = tuple(late)
    return rounds


@pytest.mark.parametrize(
    "way", ["peer memory", "one launch", pytest.param("main memory", marks=pytest.mark.gpu)]
)
def test_no_step_is_lost_whoever_comes_late(way: str) -> None:
    """Memory of a channel, or of a sum in one launch, is used again two layers later, and in the
    next step."""
    gpus, chosen = two_gpus(), random.Random(0)
    program = sums(gpus, LAYERS, H)
    if way == "one launch":
        program = one_shot_sums(program, H)
        assert all(n.op != "submit" for part in partition(program).values() for n in part.nodes)
        if not Peers.of(gpus).atomics:
            pytest.skip("these GPUs have no atomics on each other's memory")
    with env.override(peer_access="off" if way == "main memory" else "auto"):
        made = bound(program, gpus, H)
    if not torch.cuda.is_available():
        assert made.executable.link is not None
        made.executable.link.delay = lambda: time.sleep(chosen.choice((0, 0, 1e-4, 5e-4)))
        for step in range(150):
            made.assert_adds(step % 5, step // 5 % 7, LAYERS)
        return
    rounds = lags(made.executable)
    made.assert_adds(1, 2, LAYERS)
    made.executable.capture(torch.cuda.graph_pool_handle())
    for step in range(10_000):
        for each in rounds:
            each.copy_(torch.randint(0, 40, each.shape) ** 2 // 8)
        made.assert_adds(step % 5, step // 5 % 7, LAYERS)


@pytest.mark.gpu
@pytest.mark.parametrize("peers", ["auto", "off"])
def test_large_values_cross_by_copy_engines(peers: str) -> None:
    """In a captured step, 8 MB each."""
    gpus, wide = two_gpus(), 1 << 22
    with env.override(peer_access=peers):
        made = bound(sums(gpus, 3, wide), gpus, wide)
    made.assert_adds(1, 2, 3)
    made.executable.capture(torch.cuda.graph_pool_handle())
    for step in range(20):
        made.assert_adds(step % 5, step // 5, 3)


def test_both_ends_have_one_dtype_and_memory_is_used_again() -> None:
    gpus = two_gpus()
    parts = partition(sums(gpus, 6, H))
    for rank, part in enumerate(parts.values()):
        kinds = dtypes(part)
        assert kinds["3.part0"] == kinds["3.part1"] == torch.bfloat16
        assert kinds[f"out{rank}"] == torch.float32
        assert received_bytes(part) == 2 * 2 * H  # of two layers, in bfloat16


def test_gpus_that_may_not_reach_each_other_say_so() -> None:
    gpus = two_gpus()
    with env.override(peer_access="off"):
        peers = Peers.of(gpus)
    assert not peers.direct and not peers.atomics
    assert "PYKERNELS_PEER_ACCESS=off" in peers.described
    assert Peers.of(dict([*gpus.items()][:1])).described == ""
