"""One op, one name: the truth takes all that the fast op takes, in the same places."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels import gpu, ref
from pykernels.gpu.moe import fused_moe
from pykernels.quant import get_format
from pykernels.shapes import MoEShape
from pykernels.testing import relative_error, skewed_routing

from ..moe.test_moe_ffn import random_experts

HOST = {"rope_frequencies", "yarn_frequencies", "yarn_scale"}
"""Made once, on the host."""
FUSED = {"kv_write", "mla_write", "rope"}
"""On a GPU in one launch with norms: ``rope_cache_write``."""
LAUNCH = {"out", "order", "plan", "plans", "max_length", "kernel", "moe_plan"}
"""What only a fast op takes: where its result goes, and how it is launched."""
TRUTH = {"dtype", "h_dtype", "nudge", "fmt"}
"""What only the truth takes: what it computes in, and what a packed weight knows by itself."""
CPU_LEAVES = {
    "moe_ffn": {"add"},  # the model adds the shared experts' output
    **dict.fromkeys(("gqa_decode", "gqa_prefill", "mla_decode"), {"softcap"}),
}
"""What the CPU's ops do not take."""


def on_the_gpu(name: str) -> tuple[str, Callable[..., Any]]:
    """The one module that defines this op, and the op."""
    found: dict[str, Callable[..., Any]] = {}
    root = Path(gpu.__file__).parent
    for path in root.rglob("*.py"):
        if f"\ndef {name}(" in path.read_text():
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            op = getattr(import_module(f"pykernels.gpu.{module}"), name)
            found |= {module: op} if inspect.isfunction(op) else {}  # no part of a kernel
    assert len(found) == 1, found
    return found.popitem()


OPS = sorted({name for name in ref.__all__ if callable(getattr(ref, name))} - HOST - FUSED)


def assert_twins(fast: Callable[..., Any], truth: Callable[..., Any], left_out: set[str]) -> None:
    ours, truths = (inspect.signature(op).parameters for op in (fast, truth))
    assert set(ours) - set(truths) <= LAUNCH
    assert set(truths) - set(ours) <= left_out
    shared = [parameter for parameter in ours.values() if parameter.name in truths]
    for parameter in shared:
        twin = truths[parameter.name]
        assert (parameter.kind, parameter.default) == (twin.kind, twin.default), parameter.name
    places = [p.name for p in shared if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for parameters in (ours, truths):  # what only one of them takes stands behind
        assert list(parameters)[: len(places)] == places


@pytest.mark.parametrize("name", OPS)
def test_signatures(name: str) -> None:
    assert_twins(on_the_gpu(name)[1], getattr(ref, name), TRUTH)


def test_signatures_on_the_cpu() -> None:
    pytest.importorskip("numba")
    from pykernels import cpu

    names = set(cpu.__all__) & set(ref.__all__)
    assert names >= {"embed", "gqa_decode", "gqa_prefill", "linear", "mla_decode", "moe_ffn"}
    for name in names:
        assert_twins(getattr(cpu, name), getattr(ref, name), TRUTH | CPU_LEAVES.get(name, set()))


def test_the_package_is_imported_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import pykernels.gpu"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_joins_the_sum_of_experts(device: torch.device) -> None:
    shape = MoEShape(E=3, H=128, I=64, topk=2)
    experts = random_experts(shape, get_format("bf16"), device)
    x, add = (torch.randn(4, shape.H).bfloat16() for _ in "xa")
    routing, kept = skewed_routing(4, shape), add.clone()
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts, add=add, dtype=torch.float64)
    assert torch.equal(add, kept)
    given = (tensor.to(device) for tensor in (x, routing.ids, routing.weights))
    y = fused_moe.moe_ffn(*given, experts, add=add.to(device))
    assert relative_error(y.cpu(), truth) < 6e-3
