"""A model's workers: NUMA nodes from `--numa` to the logits, and the pool with a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import model
from model import pretrained
from model.checkpoint import memory
from model.modules.moe import routed_experts
from pykernels.quant.split import SplitExperts
from runtime.machine.nodes import MemoryNodes
from runtime.machine.topology import NumaNode, Topology
from runtime.workers.pool import configure_default_pool

from .checks import Checkpoints, refused

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256}

pytestmark = pytest.mark.skipif(
    len(Topology.detect().physical) < 2, reason="two made-up NUMA nodes need two cores"
)


@pytest.fixture(autouse=True)
def two_made_up_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYKERNELS_FAKE_NUMA", "2")
    yield
    monkeypatch.undo()
    configure_default_pool()


def test_a_model_split_across_nodes_has_the_same_logits(
    checkpoint: Checkpoints, ids: torch.Tensor
) -> None:
    path = checkpoint("qwen3_moe", **WIDE).path
    logits, slices = {}, {}
    for numa in ("off", "auto", "2"):
        lm = model.from_pretrained(path, dtype="float32", numa=numa)
        logits[numa] = lm(ids).logits
        slices[numa] = {len(routed.weights.slices) for routed in routed_experts(lm)}
    assert slices == {"off": {1}, "auto": {2}, "2": {2}}
    assert torch.equal(logits["auto"], logits["2"])
    # A float32 sum in another order now and then rounds a later layer's input the other way.
    assert (logits["auto"] - logits["off"]).norm() < 1e-3 * logits["off"].norm()


def test_a_narrow_layer_is_not_split_unless_asked_for(checkpoint: Checkpoints) -> None:
    path = checkpoint("deepseek_v3").path  # 32 wide
    lm = model.from_pretrained(path, numa="auto")
    assert {len(routed.weights.slices) for routed in routed_experts(lm)} == {1}
    refused("cannot be split across 2 NUMA nodes", path, numa="2")


def test_a_node_without_room_is_found_before_loading(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux ends a process that touches more memory than the bound node has."""
    path = checkpoint("qwen3_moe", **WIDE).path
    layers = routed_experts(model.from_pretrained(path, numa="off"))
    whole = sum(routed.nbytes for routed in layers)
    first = layers[0]
    half = SplitExperts.slice_bytes(first.shape, first.weights.fmt, 2)[1] * len(layers)
    assert 0.4 * whole < half < 0.6 * whole
    nodes = [NumaNode(0, (0,), whole, whole), NumaNode(7, (1,), whole, half)]
    pool = SimpleNamespace(memory=MemoryNodes((0, 7), narrow=False))
    monkeypatch.setattr(pretrained, "default_pool", lambda: pool)
    monkeypatch.setattr(pretrained, "_configure_workers", lambda *_: None)
    monkeypatch.setattr(memory, "available", lambda: 1 << 40)
    topology = SimpleNamespace(detect=lambda: SimpleNamespace(nodes=nodes))
    monkeypatch.setattr(memory, "Topology", topology)
    model.from_pretrained(path)
    nodes[1] = NumaNode(7, (1,), whole, half - 1)
    refused(r"NUMA node 7 gets [\d.]+ MiB of the weights", path)
