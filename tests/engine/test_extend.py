"""Ops and passes that are registered from outside, against transformers' modules changed alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import model
from model import EMBEDDED
from model.llm import meta_decoder
from pykernels.errors import PykernelsError
from runtime.devices.ref.ops import OPS as REF_OPS
from runtime.extend import checked, read_pass, register_op
from runtime.machine.nodes import MemoryNodes
from runtime.passes import defer
from runtime.passes.gpu_experts import gpu_experts
from runtime.passes.layers import moe_layers
from runtime.passes.numa import split_over_nodes
from runtime.program import Program
from runtime.program.node import Node
from runtime.program.op_table.op import Op, Port
from runtime.program.ops import OPS
from runtime.program.weight_spec import WeightSpec

from ..model import tiny

WEIGHTS = Port("float32", ("T", "topk"))


def on_ref(memory: Any, node: Node) -> None:
    memory.write(node.outputs["out"], memory.read(node.inputs["weights"]) / 2)


def halved(program: Program) -> Program:
    """Every layer's routed experts count half."""
    nodes, buffers = [], dict(program.buffers)
    routed = {layer.experts.name for layer in moe_layers(program)}
    for node in program.nodes:
        if node.name in routed:
            given, out = node.inputs["weights"], f"{node.name}.halved"
            buffers[out] = replace(buffers[given], name=out)
            halve = Node("halve in a test", {"weights": given}, {"out": out}, name=out)
            nodes.append(replace(halve, device=node.device, layer=node.layer))
            node = replace(node, inputs={**node.inputs, "weights": out})
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=buffers)


@pytest.fixture
def own_ops() -> Iterator[None]:
    """What a test registers is there in that test only."""
    with patch.dict(OPS), patch.dict(REF_OPS):
        yield


def test_a_pass_with_an_op_of_its_own(tmp_path: Path, own_ops: None) -> None:
    lm = tiny.make(tmp_path, "qwen3_moe").reference.float()
    lm.set_experts_implementation("eager")

    def truth() -> torch.Tensor:
        with torch.no_grad():  # one token: a step that decodes
            return lm(torch.tensor([[20]])).logits[0, -1].log_softmax(-1)

    plain = truth()
    for layer in lm.model.layers:
        layer.mlp.experts.register_forward_hook(lambda module, args, out: out / 2)
    wanted = truth()
    register_op("halve in a test", Op({"weights": WEIGHTS}, {"out": WEIGHTS}), ref=on_ref)
    settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logprobs": 5}
    with model.load_engine(
        tmp_path, device="ref", passes=[halved], max_model_len=64, max_num_seqs=1, threads=1
    ) as llm:
        (drawn,) = llm.generate([20], **settings).completions[0].logprobs
    for token, logprob in drawn.top:
        assert abs(logprob - wanted[token]) < 1e-3 * (wanted - plain).abs().max()


def scaled(dims: str) -> Program:
    """The embedded model with routed experts in an op of one's own, which has a second weight."""
    moe, width = OPS["moe_ffn"], {"H": 256, "E": 32}[dims]
    scale = Port("", (dims,), optional=True)
    register_op("scaled in a test", replace(moe, weights={**moe.weights, "scale": scale}))
    program, spec = meta_decoder(EMBEDDED).lower(), WeightSpec.tensor("scale", width)
    routed = {layer.experts.name for layer in moe_layers(program)}
    nodes = [
        replace(node, op="scaled in a test", weights={**node.weights, "scale": spec.name})
        if node.name in routed
        else node
        for node in program.nodes
    ]
    weights = {**program.weights, spec.name: spec}
    return replace(program, nodes=tuple(nodes), weights=weights).check()


def test_passes_keep_a_weight_that_they_do_not_know_or_refuse_it(own_ops: None) -> None:
    parted = gpu_experts(scaled("H"), {1: [3, 5]}, {1: "cuda:0"})
    one, other = [n for n in parted.nodes if n.layer == 1 and n.role in ("routed", "cached")]
    assert one.weights["scale"] == other.weights["scale"] == "scale"
    assert all("scale" in layer.experts.weights for layer in moe_layers(defer(scaled("H"), 2)))
    with pytest.raises(PykernelsError, match=r"weight scale is \[32\], not \[2\]"):
        gpu_experts(scaled("E"), {1: [3, 5]}, {1: "cuda:0"})


def test_what_numa_nodes_cannot_slice_is_refused(own_ops: None) -> None:
    scale = replace(OPS["moe_ffn"].weights["experts"], dims=("H",), optional=True)
    OPS["moe_ffn"] = replace(OPS["moe_ffn"], weights={**OPS["moe_ffn"].weights, "scale": scale})
    program, spec = meta_decoder(EMBEDDED).lower(), WeightSpec.tensor("scale", 256)
    nodes = [
        replace(n, weights={**n.weights, "scale": "scale"}) if n.role == "dense" else n
        for n in program.nodes
    ]
    whole = replace(program, nodes=tuple(nodes), weights={**program.weights, "scale": spec})
    with pytest.raises(PykernelsError, match="not sliced with its experts: scale"):
        split_over_nodes(whole, MemoryNodes((0, 1)))


def test_what_a_pass_may_not_return() -> None:
    program = Program("empty", (), {}, {})

    def nothing(program: Program) -> Any:
        return None

    with pytest.raises(PykernelsError, match="the pass nothing returned NoneType"):
        checked(nothing)(program)
    with pytest.raises(PykernelsError, match="there is an op 'linear' already"):
        register_op("linear", Op({}, {}))


def test_a_pass_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def one(program):\n    return program\n\ndef two(program):\n    return None\n")
    assert read_pass(f"{file}:two")(Program("empty", (), {}, {})) is None
    with pytest.raises(PykernelsError, match="has 2 functions"):
        read_pass(str(file))
    with pytest.raises(PykernelsError, match="no Python file"):
        read_pass(str(tmp_path / "none.py"))
