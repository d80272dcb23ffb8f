"""Which device has which layer, and what crosses where two GPUs and the CPU have parts."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

import model
from model.checkpoint.config import read_config
from model.llm import meta_decoder
from model.opened import engine_device, open_weights
from model.pinning.hybrid import place_hybrid
from model.rules import default_rules
from pykernels.errors import PykernelsError
from runtime.planning.placement import Placement, deal, place
from runtime.program.partition import partition
from runtime.program.sizes import StepSizes

from ...model import tiny


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_layers_are_dealt_so_that_no_gpu_is_fuller_than_needed(gpus: int) -> None:
    random = np.random.default_rng(gpus)
    sizes, free_bytes = random.integers(1, 50, 7), random.integers(50, 150, gpus)

    def fullest(cuts: list[int]) -> float:
        parts = pairwise([0, *cuts, len(sizes)])
        return max(sizes[a:b].sum() / each for (a, b), each in zip(parts, free_bytes, strict=True))

    found = deal(sizes.tolist(), free_bytes.tolist())
    assert found == sorted(found) and set(found) == set(range(gpus))
    cuts = [found.index(gpu) for gpu in range(1, gpus)]
    assert fullest(cuts) == min(fullest(list(c)) for c in combinations(range(1, 7), gpus - 1))


@pytest.mark.parametrize("experts", ["cpu", "auto"])
def test_a_model_without_experts_has_none_on_the_cpu(experts: str, tmp_path: Path) -> None:
    """Whether its weights fit or not: no GPU then waits for the CPU, and nothing is streamed."""
    tiny.make(tmp_path, "llama", num_hidden_layers=2)
    program = meta_decoder(tmp_path).lower(StepSizes(8, 8, 8, 1, 1))
    for free in {"cuda:0": 0}, {"cuda:0": 0, "cuda:1": 0}:
        found = place(program, experts, free, lambda spec: spec.nbytes)
        assert found.experts != "cpu" and set(partition(found.place(program))) == set(free)
    with pytest.raises(PykernelsError, match="no routed experts. Leave out gpu_experts"):
        place_hybrid(2, meta_decoder(tmp_path), "cuda:0", StepSizes(8, 8, 8, 1, 1), experts)


def test_three_devices_meet_where_one_reads_what_another_wrote() -> None:
    program = meta_decoder(model.EMBEDDED).lower(StepSizes(8, 8, 8, 1, 1))
    two = Placement("cuda:0", by_layer=dict.fromkeys((3, 4, 5), "cuda:1"))
    parts = partition(two.place(program))
    assert set(parts) == {"cuda:0", "cpu", "cuda:1"}
    for device, part in parts.items():
        layers = {node.layer for node in part.nodes if node.op not in ("submit", "wait")} - {None}
        own = {"cuda:0": {0, 1, 2}, "cuda:1": {3, 4, 5}, "cpu": {1, 2, 3, 4, 5}}
        assert layers == own[device]
    assert parts["cuda:0"].nodes[0].name == "embed" and parts["cuda:1"].nodes[-1].name == "sample"
    ends = {
        (node.attr("channel"), node.op): (device, set(node.reads or node.writes))
        for device, part in parts.items()
        for node in part.nodes
        if node.op in ("submit", "wait")
    }
    over = set[str]()
    for (channel, op), (device, names) in ends.items():
        if op == "submit":
            there, taken = ends[channel, "wait"]
            assert taken == names and there != device
            over |= names if (device, there) == ("cuda:0", "cuda:1") else set()
    assert over == {"angles", "layer2.post_norm.sum", "layer2.shared_out"}


def test_rules_say_which_gpu_has_a_layer() -> None:
    config = read_config(model.EMBEDDED)
    both = engine_device("cpu", "embedding-on-cpu,2-gpus", config.model_type)
    assert both == "cuda:0,cuda:1"
    with open_weights(model.EMBEDDED, config, "embedding-on-cpu,2-gpus", device=both) as weights:
        assert weights.placed.weights == {"model.embed_tokens.weight": "cpu"}
        assert weights.placed.by_layer == dict.fromkeys((3, 4, 5), "cuda:1")
    with pytest.raises(PykernelsError, match="modules on cuda:1, and the engine is on cuda:0"):
        with open_weights(model.EMBEDDED, config, "2-gpus", device="cuda:0"):
            pass
    rule = {"match": {"name": r"layers\.2\.mlp\.gate$"}, "replace": {"device": "cuda:1"}}
    with pytest.raises(PykernelsError, match="gate.* on cuda:1, and attention .* on cuda:0"):
        rules = [rule, *default_rules("deepseek_v3")]
        with open_weights(model.EMBEDDED, config, rules, device=both):
            pass


@pytest.mark.parametrize(
    ("by_layer", "message"),
    [
        ({1: "cuda:1"}, "layer 2 is on cuda:0, behind layers of cuda:1"),
        ({}, "no layer is on cuda:1"),
    ],
)
def test_layers_that_gpus_cannot_have(by_layer: dict[int, str], message: str) -> None:
    program = meta_decoder(model.EMBEDDED).lower()
    free = {"cuda:0": 1, "cuda:1": 1}
    with pytest.raises(PykernelsError, match=message):
        place(program, "cpu", free, lambda spec: spec.nbytes, by_layer=by_layer)
