"""What tuning tries and writes, and that launches take it; the timing itself needs a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases import attention as cases
from bench.cases.attention import Size, build
from bench.harness.timer import Ready
from bench.tune import products, search
from bench.tune.__main__ import FORMATS, OPS, asked, main
from bench.tune.attention import SIZES, AttentionJob, jobs
from bench.tune.search import distinct, time_all, tune
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.attention import gqa_decode, mla_decode, prefill
from pykernels.gpu.plans import attention as attention_plans
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.attention_shape import OPS as ATTENTION
from pykernels.gpu.plans.attention_shape import plan_of
from pykernels.gpu.plans.gemm import DequantPlan, GemmPlan
from pykernels.gpu.plans.tuned import EXPERTS_PLANS, LINEAR_PLANS
from pykernels.testing import relative_error

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

CPU = torch.device("cpu")
PRODUCTS = list(products.jobs(set(OPS.split(",")), set(FORMATS.split(","))))
SMALL = [
    Size("mla_decode", 1, 70, heads=4),
    Size("gqa_decode", 2, 70, heads=4, kv_heads=2, head_dim=32, format="fp8"),
    Size("gqa_decode", 1, 70, heads=4, kv_heads=2, head_dim=32, window=40, new=2),
    Size("mla_prefill", 1, 40, heads=2),
    Size("gqa_prefill", 2, 40, heads=4, kv_heads=2, head_dim=32, new=16),
]
DECODE = [DecodePlan(16, 32, 4, 1), DecodePlan(16, 32, 4, 2, per_sm=2)]
PREFILL = [PrefillPlan(16, 32, 4, 1), PrefillPlan(32, 16, 4, 1)]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cases, "sets_for", lambda nbytes, device: 1)
    with env.override(cache_dir=tmp_path):
        yield tmp_path / "gpu-plans.json"


class Clock:
    """A timer for which plans take the time that ``seconds`` says; each is called once."""

    def __init__(self, seconds: Callable[[Any], float]) -> None:
        self.seconds = seconds

    def prepare(self, call: Any, sets: int, seconds: float) -> Ready:
        call()
        return Ready(lambda: self.seconds(call.args[0]), 1, False, 5)

    def check(self) -> None:
        return


def test_every_product_has_plans_of_its_kind() -> None:
    layer = {"gate_up", "down", *EXPERTS_PLANS}
    assert {job.op for job in PRODUCTS} == layer | {"linear", *LINEAR_PLANS}
    for job in PRODUCTS:
        found = job.candidates((9, 0))
        assert len(found) == len(set(found)) > 5
        many = job.op in ("gate_up", "down") and job.path == "int4" and job.rows > 16
        kind = {**LINEAR_PLANS, **EXPERTS_PLANS}.get(job.op, GemmPlan)
        assert {type(plan) for plan in found} == {kind} | ({DequantPlan} if many else set())


def test_attention_has_plans_on_every_gpu_and_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {size.kind for size in SIZES} == set(ATTENTION)
    monkeypatch.setattr(attention_plans, "arch", lambda device: (9, 0))
    for job in jobs(set(ATTENTION), {"bf16", "fp8"}):
        assert job.shipped(CPU) in job.candidates((9, 0)), job
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
            found = job.candidates(capability)
            assert len(found) == len(set(found)) >= 5, (job, capability)
            decode = DecodePlan if job.op.endswith("decode") else PrefillPlan
            assert {type(plan) for plan in found} == {decode}
            assert capability[0] == 9 or not any(plan.warp_specialized for plan in found)
            what = {"op": job.op, "path": job.size.format, **job.shape._asdict()}
            assert all(plan_of({**what, "plan": asdict(plan)}) == plan for plan in found)


def test_a_kernel_is_compiled_once_for_all_sizes() -> None:
    """split_k, batches and CTAs an SM are run-time numbers."""
    plans = [(job, job.candidates((9, 0))) for job in PRODUCTS]
    pairs = distinct(plans)
    assert len(pairs) < sum(len(some) for _, some in plans) / 2
    assert all(plan.split_k == 1 for _, plan in pairs if isinstance(plan, GemmPlan))
    two = [AttentionJob(Size("mla_decode", B, 8192)) for B in (1, 8)]
    decode = [plan for plan in two[0].candidates((9, 0)) if isinstance(plan, DecodePlan)]
    kernels = {replace(plan, per_sm=1, least=1) for plan in decode}
    assert len(distinct([(job, decode) for job in two])) == len(kernels) < len(decode)


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_a_launch_takes_what_was_tuned_for_it(
    size: Size, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(size)
    plans: list[Any] = DECODE if size.kind.endswith("decode") else PREFILL
    best = plans[1]
    clock = Clock(lambda plan: 1e-3 if plan == best else 3e-3)
    monkeypatch.setattr(search, "make_timer", lambda device: clock)
    monkeypatch.setattr(AttentionJob, "candidates", lambda job, capability: plans[:2])
    (row,) = tune([job], CPU)
    assert row["tried"] == row["ran"] == 3 and row["gain"] == 3 and row["us_0"] == 1000
    assert row["plan_0"] == str(best) and row["shipped"] == str(job.shipped(CPU))
    (line,) = json.loads(small.read_text())
    assert line["op"] == size.kind and line["plan"] == asdict(best)

    taken: list[Any] = []

    def spy(choose: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: taken.append(choose(*given, **options)) or taken[-1]

    for module in (mla_decode, gqa_decode, prefill):
        name = "select_prefill" if module is prefill else "select_decode"
        monkeypatch.setattr(module, name, spy(getattr(module, name)))
    run: Any = build(size, CPU, peers=False).run
    tuned = run().clone()
    assert taken == [best]
    shipped = run(plan=job.shipped(CPU))
    assert not tuned.isnan().any() and relative_error(tuned, shipped) < 0.01


def test_the_shipped_plan_stays_unless_another_is_clearly_faster(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(SMALL[0])
    shipped = job.shipped(CPU)
    monkeypatch.setattr(AttentionJob, "candidates", lambda job, capability: DECODE[:1])
    clock = Clock(lambda plan: 1.005e-3 if plan == shipped else 1e-3)
    monkeypatch.setattr(search, "make_timer", lambda device: clock)
    (row,) = tune([job], CPU, save=False)
    assert row["plan_0"] == str(DECODE[0]) and not small.exists()
    list(tune([job], CPU))
    assert json.loads(small.read_text())[0]["plan"] == asdict(shipped)


def test_a_plan_that_fails_is_a_note_and_the_others_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(plan: DecodePlan) -> None:
        if plan == DECODE[0]:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(search, "make_timer", lambda device: Clock(lambda plan: 2e-3))
    found = time_all(AttentionJob(SMALL[0]), call, 1, DECODE[:2], CPU)
    assert found == [(2000, DECODE[1])]
    assert "out of shared memory" in capsys.readouterr().err


def test_what_is_asked_for_is_tuned_or_refused() -> None:
    assert [job for job in asked(OPS, FORMATS, "") if job in PRODUCTS] == PRODUCTS
    some = asked("gate_up,down", "bf16,fp8", "64,512")
    assert {job.params["rows"] for job in some} == {64, 512}
    text = "batch=3,context=100,heads=16,kv_heads=4"
    found = asked("gqa_decode,gqa_prefill,linear", "bf16", "", [text])
    assert [job.params["op"] for job in found] == ["gqa_decode", "gqa_prefill"]
    assert all(job.params["batch"] == 3 and job.params["heads"] == 16 for job in found)
    for op, format, rows, sizes, cause in (
        ("gate", FORMATS, "", (), "the op 'gate'. Use gate_up"),
        (OPS, "fp8,fp9", "", (), "the format 'fp9'. Use bf16"),
        (OPS, "fp8", "64,x", (), "'x' rows. Use some of 1, 64, 128, 512"),
        ("gate_up", "int8-channel", "", (), "no gate_up is tuned in int8-channel"),
        ("gqa_decode", "bf16", "", ("batches=3",), "no flag 'batches'"),
        ("gqa_decode", "bf16", "", ("heads=9,kv_heads=2",), "9 heads on 2 KV heads"),
        ("gqa_decode", "bf16", "", ("kind=mla_decode",), "Give it as --op"),
        ("gqa_prefill", "bf16", "", ("keys=pages",), "tuned with its keys in rows"),
        ("linear", "bf16", "", ("batch=3",), "no linear is tuned in bf16 at batch=3"),
    ):
        with pytest.raises(PykernelsError, match=cause):
            asked(op, format, rows, sizes)
    with pytest.raises(PykernelsError, match="no CUDA GPU"):
        main([])
