"""What tuning tries and writes, and that launches take it; the timing itself needs a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.cases import attention as cases
from bench.cases.attention import build
from bench.cases.attention_size import Size
from bench.harness.timing.timer import Ready
from bench.tune import search
from bench.tune.__main__ import FORMATS, OPS, asked
from bench.tune.attention import AttentionJob, jobs
from bench.tune.search import distinct, tune
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.attention import gqa_decode, mla_decode, prefill
from pykernels.gpu.plans import attention as attention_plans
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.attention_lines import OPS as ATTENTION
from pykernels.gpu.plans.attention_lines import plan_of
from pykernels.gpu.plans.tuned import EXPERTS_PLANS, LINEAR_PLANS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

CPU = torch.device("cpu")
SMALL = [
    Size("mla_decode", 1, 70, heads=4),
    Size("gqa_decode", 2, 70, heads=4, kv_heads=2, head_dim=32, format="fp8"),
    Size("mla_prefill", 1, 40, heads=2),
    Size("gqa_prefill", 2, 40, heads=4, kv_heads=2, head_dim=32, new=16),
]
DECODE = [DecodePlan(16, 32, 4, 1), DecodePlan(16, 32, 4, 2, ctas_per_sm=2)]
PREFILL = [PrefillPlan(16, 32, 4, 1), PrefillPlan(32, 16, 4, 1)]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cases, "sets_for", lambda nbytes, device: 1)
    with env.override(cache_dir=tmp_path):
        yield tmp_path / "gpu-plans.json"


def clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any], float]) -> None:
    """A timer for which plans take the time that ``seconds`` says; each is called once."""

    def prepare(call: Any, sets: int, _: float) -> Ready:
        call()
        return Ready(lambda: seconds(call.args[0]), 1, False, 5)

    clock = SimpleNamespace(prepare=prepare)
    monkeypatch.setattr(search, "make_timer", lambda device: clock)


def test_every_job_has_plans_and_a_kernel_is_compiled_once() -> None:
    """split_k is a run-time number."""
    wanted = [(job, job.candidates((9, 0))) for job in asked(OPS, FORMATS, "")]
    assert {*LINEAR_PLANS, *EXPERTS_PLANS} <= {job.op for job, _ in wanted}
    for _, plans in wanted:
        assert len(plans) == len(set(plans)) >= 5
    assert len(distinct(wanted)) < sum(len(plans) for _, plans in wanted) / 2


def test_attention_has_plans_on_every_gpu_and_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_plans, "arch", lambda device: (9, 0))
    for job in jobs(set(ATTENTION), {"bf16", "fp8"}):
        assert job.shipped(CPU) in job.candidates((9, 0)), job
        for capability in ((8, 0), (9, 0), (10, 0)):
            found = job.candidates(capability)
            assert len(found) >= 5
            assert capability[0] == 9 or not any(plan.warp_specialized for plan in found)
            what = {"op": job.op, "path": job.size.format, **job.shape._asdict()}
            assert all(plan_of({**what, "plan": asdict(plan)}) == plan for plan in found)


@pytest.mark.parametrize("size", SMALL, ids=lambda size: size.kind)
def test_a_launch_takes_what_was_tuned_for_it(
    size: Size, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(size)
    plans: list[Any] = DECODE if size.kind.endswith("decode") else PREFILL
    best = plans[1]
    clock(monkeypatch, lambda plan: 1e-3 if plan == best else 3e-3)
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
    result: Any = build(size, CPU, peers=False).run()
    assert taken == [best] and not result.isnan().any()


def test_the_shipped_plan_stays_unless_another_is_clearly_faster(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(SMALL[0])
    shipped = job.shipped(CPU)
    monkeypatch.setattr(AttentionJob, "candidates", lambda job, capability: DECODE[:1])
    clock(monkeypatch, lambda plan: 1.005e-3 if plan == shipped else 1e-3)
    (row,) = tune([job], CPU)
    assert row["plan_0"] == str(DECODE[0])
    assert json.loads(small.read_text())[0]["plan"] == asdict(shipped)


def test_what_is_asked_for_is_tuned_or_refused() -> None:
    some = asked("gate_up,down", "bf16,fp8", "64,512")
    assert {job.params["rows"] for job in some} == {64, 512}
    text = "batch=3,context=100,heads=16,kv_heads=4"
    found = asked("gqa_decode,gqa_prefill,linear", "bf16", "", [text])
    assert [job.params["op"] for job in found] == ["gqa_decode", "gqa_prefill"]
    for op, format, rows, sizes, cause in (
        ("gate", FORMATS, "", (), "the op 'gate'. Use gate_up"),
        (OPS, "fp8", "64,x", (), "'x' rows. Use some of 1, 64, 128, 512"),
        ("gqa_decode", "bf16", "", ("heads=9,kv_heads=2",), "9 heads on 2 KV heads"),
        ("linear", "bf16", "", ("batch=3",), "no linear is tuned in bf16 at batch=3"),
    ):
        with pytest.raises(PykernelsError, match=cause):
            asked(op, format, rows, sizes)
