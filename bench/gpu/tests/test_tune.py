"""What tuning tries; the timing itself needs a GPU."""

from __future__ import annotations

import pytest

from bench.gpu.candidates import candidates
from bench.gpu.tune import FORMATS, OPS, asked, distinct, main
from bench.gpu.tune_products import jobs
from pykernels.errors import PykernelsError
from pykernels.gpu.plans.gemm import DequantPlan, GemmPlan
from pykernels.gpu.plans.tuned import EXPERTS_PLANS, LINEAR_PLANS

EVERY = list(jobs(set(OPS.split(",")), set(FORMATS.split(","))))  # of products


def test_every_job_has_plans_of_its_kind() -> None:
    layer = {"gate_up", "down", *EXPERTS_PLANS}
    assert {job.op for job in EVERY} == layer | {
        "linear",
        "gemv",
        "gemv_mma",
        "skinny",
        "skinny_k_quants",
        "dequant",
    }
    for job in EVERY:
        found = job.candidates((9, 0))
        assert len(found) == len(set(found)) > 5
        many = job.op in ("gate_up", "down") and job.path == "int4" and job.rows > 16
        kind = {**LINEAR_PLANS, **EXPERTS_PLANS}.get(job.op, GemmPlan)
        assert {type(plan) for plan in found} == {kind} | ({DequantPlan} if many else set())


def test_e4m3_tiles_lie_in_one_scale_block() -> None:
    plans = list(candidates("down", "fp8", 512))
    assert all(isinstance(plan, GemmPlan) and plan.block_n <= 128 for plan in plans)


def test_a_kernel_is_compiled_once() -> None:
    plans = [(job, job.candidates((9, 0))) for job in EVERY]
    pairs = distinct(plans)
    assert len(pairs) < sum(len(some) for _, some in plans) / 2
    assert all(plan.split_k == 1 for _, plan in pairs if isinstance(plan, GemmPlan))


def test_what_is_asked_for_is_tuned_or_refused() -> None:
    assert [job for job in asked(OPS, FORMATS, "") if job in EVERY] == EVERY
    some = asked("gate_up,down", "bf16,fp8", "64,512")
    assert {job.params["rows"] for job in some} == {64, 512}
    for wrong, cause in (
        (("gate", FORMATS, ""), "the op 'gate'. Use gate_up"),
        ((OPS, "fp8,fp9", ""), "the format 'fp9'. Use bf16"),
        ((OPS, "", ""), "the format ''"),
        ((OPS, "fp8", "64,x"), "'x' rows. Use some of 1, 64, 128, 512"),
        (("linear", "fp8", "64"), "'64' rows"),
        (("gate_up", "int8-channel", ""), "no gate_up is tuned in int8-channel"),
    ):
        with pytest.raises(PykernelsError, match=cause):
            asked(*wrong)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(PykernelsError, match="no CUDA GPU"):
        main([])
