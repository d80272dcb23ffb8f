"""The order of a few instructions, on which Hopper's kernels depend: ptxas may change it."""

from __future__ import annotations

import json

import pytest

from .hopper_sass import KERNELS, loose_arrivals
from .uninterpreted import run_module


@pytest.mark.all  # ptxas takes twenty seconds
@pytest.mark.parametrize("which", [[], pytest.param(["--all"], marks=pytest.mark.gpu)])
def test_ptxas_keeps_the_order(which: list[str]) -> None:
    """Products run on while others are begun, exponentials are taken beside them, and the next
    step's weights are loaded."""
    rows = [json.loads(line) for line in run_module("hopper_sass", *which).splitlines()]
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        if row["kernel"] == "gemv_mma":
            assert row["late"] < 0.5, f"weights are loaded behind products: {row}"
            continue
        # GEMMs dequantize into registers for every two products; 128 values of E4M3 are four
        # products, a scaled sum after each; 64 of bfloat16 are four, with a wait for those before.
        attention = row["kernel"] in ("prefill_hopper", "mla_decode_hopper")
        assert row["waits"] <= row["products"] / (4 if attention else 2), f"serialized: {row}"
        summed = row["kernel"] in ("gemm_bf16_hopper", "gemm_fp8_hopper")
        assert not summed or row["spills"] == 0, f"the sums do not stay in registers: {row}"
        assert row["loose"] == 0, f"a thread arrives for warps that it was not joined with: {row}"
        if row["kernel"] == "prefill_hopper":
            assert row["beside"] >= 64, f"exponentials wait for the products: {row}"


def test_a_loose_arrival_is_found() -> None:
    arrival, used = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "ld.shared.b32 %r2, [%r3];"
    assert loose_arrivals("\n".join([used, "bar.sync 3, 128;", arrival])) == 0
    assert loose_arrivals("\n".join(["bar.sync 3, 128;", used, arrival])) == 1
