"""Routers and embeddings by a call, against the reference; what a kernel raises comes through."""

from __future__ import annotations

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.jit import task
from pykernels.cpu.ops.serial import run_tasks
from pykernels.errors import PykernelsError
from pykernels.quant import PackedMatrix, get_format
from pykernels.shapes import RouterSpec

SPECS = [
    RouterSpec(3),
    RouterSpec(4, "sigmoid", groups=4, group_topk=2, group_score="top2", scale=2.5),
]


@pytest.mark.parametrize("spec", SPECS)
def test_router(spec: RouterSpec) -> None:
    logits, bias = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    slot_mapping = torch.arange(9) - 2
    for biased, factors in ((None, None), (bias[0], bias[1].exp())):
        given = logits, spec, biased, slot_mapping, factors
        found, truth = (op(*given) for op in (cpu.router, ref.router))
        assert torch.equal(found.ids, truth.ids)
        torch.testing.assert_close(found.weights, truth.weights)
    assert cpu.router(logits[:0], spec).ids.shape == (0, spec.topk)


def test_router_refuses_what_does_not_fit() -> None:
    with pytest.raises(PykernelsError, match="a router of 1025 experts"):
        cpu.router(torch.zeros(1, 1025), SPECS[0])
    with pytest.raises(PykernelsError, match=r"bias is torch.float32 \[3\]"):
        cpu.router(torch.zeros(1, 16), SPECS[0], torch.zeros(3))


def test_embed() -> None:
    fmt = get_format("bf16")
    weight = fmt.quantize(torch.randn(70, 48, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor([[69, 0], [31, 32]])
    for table in (weight.data, PackedMatrix.of(fmt, [weight])):
        assert torch.equal(cpu.embed(ids, table), ref.embed(ids, weight.data).float())
        assert torch.equal(cpu.embed(ids, table, 1.5), 1.5 * weight.data[ids].float())
        assert cpu.embed(ids[:0].int(), table).shape == (0, 2, 48)
        for wrong in (-1, 70):
            with pytest.raises(PykernelsError, match="for a table of 70 rows"):
                cpu.embed(torch.tensor([3, wrong]), table)


def test_what_a_kernel_raises_comes_through() -> None:
    @task("ops-raises")
    def setup(address, index, worker):
        return 2

    @task("ops-raises")
    def run(address, index, worker):
        if index == 1:
            raise ValueError("of the second task")
        return 0

    with pytest.raises(ValueError, match="of the second task"):
        run_tasks((setup, run), 0)
