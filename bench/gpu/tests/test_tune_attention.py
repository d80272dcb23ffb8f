"""Attention is tuned by the same command: what it tries, what it writes, that launches take it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import attention, tune
from bench.gpu.attention import Size, build
from bench.gpu.timer import Ready
from bench.gpu.tune import asked, distinct
from bench.gpu.tune_attention import SIZES, AttentionJob, jobs
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.attention import gqa_decode, mla_decode, prefill
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.attention_lines import OPS, plan_of
from pykernels.testing import relative_error

CPU = torch.device("cpu")
SMALL = [
    Size("mla_decode", 1, 70, heads=4),
    Size("gqa_decode", 2, 70, heads=4, kv_heads=2, head_dim=32, format="fp8"),
    Size("gqa_decode", 1, 70, heads=4, kv_heads=2, head_dim=32, window=40),
    Size("gqa_decode", 1, 70, heads=4, kv_heads=2, head_dim=32, window=40, new=2),
    Size("mla_prefill", 1, 40, heads=2),
    Size("gqa_prefill", 2, 40, heads=4, kv_heads=2, head_dim=32, new=16),
]
DECODE = [DecodePlan(16, 32, 4, 1), DecodePlan(16, 32, 4, 2, ctas_per_sm=2)]
PREFILL = [PrefillPlan(16, 32, 4, 1), PrefillPlan(32, 16, 4, 1)]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(attention, "sets_for", lambda nbytes, device: 1)
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


def test_every_kind_has_plans_of_its_own_on_every_gpu() -> None:
    assert {size.kind for size in SIZES} == set(OPS)
    for job in jobs(set(OPS), {"bf16", "fp8"}):
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
            found = job.candidates(capability)
            assert len(found) == len(set(found)) >= 5, (job, capability)
            decode = DecodePlan if job.op.endswith("decode") else PrefillPlan
            assert {type(plan) for plan in found} == {decode}
            warp_specialized = [
                p for p in found if p.warp_specialized or getattr(p, "ring_buffer", False)
            ]
            assert not warp_specialized or capability[0] == 9
            what = {"op": job.op, "path": job.size.format, **job.shape._asdict()}
            assert all(plan_of({**what, "plan": asdict(plan)}) == plan for plan in found)


def test_what_the_shipped_table_holds_for_hopper_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pykernels.gpu.plans import attention as plans_attention

    monkeypatch.setattr(plans_attention, "arch", lambda device: (9, 0))
    for job in jobs(set(OPS), {"bf16", "fp8"}):
        assert job.shipped(CPU) in job.candidates((9, 0)), job


def test_a_kernel_is_compiled_once_for_all_batches() -> None:
    two = [AttentionJob(Size("mla_decode", B, 8192)) for B in (1, 8)]
    plans = two[0].candidates((9, 0))
    pairs = distinct([(job, plans) for job in two])
    kernels = {
        replace(plan, ctas_per_sm=1, min_blocks=1) for plan in plans if isinstance(plan, DecodePlan)
    }
    assert len(pairs) == len(kernels) < len(plans)
    other = AttentionJob(Size("gqa_decode", 8, 8192, heads=32))
    window = AttentionJob(Size("gqa_decode", 8, 8192, heads=32, window=99))
    assert len(distinct([(job, [DECODE[0]]) for job in (other, window)])) == 2


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="interpreted")
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_a_launch_takes_what_was_tuned_for_it(
    size: Size, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(size)
    plans: list[Any] = DECODE if size.kind.endswith("decode") else PREFILL
    best = plans[1]
    clock = Clock(lambda plan: 1e-3 if plan == best else 3e-3)
    monkeypatch.setattr(tune, "make_timer", lambda device: clock)
    monkeypatch.setattr(AttentionJob, "candidates", lambda job, capability: plans[:2])
    (row,) = tune.tune([job], CPU)
    assert row["tried"] == row["ran"] == 3 and row["gain"] == 3 and row["us_0"] == 1000
    assert row["plan_0"] == str(best) and row["shipped"] == str(job.shipped(CPU))
    (line,) = json.loads(small.read_text())
    assert line["op"] == size.kind and line["plan"] == asdict(best)

    taken: list[Any] = []
    for module in (mla_decode, gqa_decode, prefill):
        name = "select_prefill" if module is prefill else "select_decode"
        choose = getattr(module, name)
        spy = _spy(choose, taken)
        monkeypatch.setattr(module, name, spy)
    torch.manual_seed(3)
    run: Any = build(size, CPU, peers=False).run
    tuned = run().clone()
    assert taken == [best]
    shipped = run(plan=job.shipped(CPU))
    assert not tuned.isnan().any() and relative_error(tuned, shipped) < 0.01


def _spy(choose: Callable[..., Any], taken: list[Any]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        taken.append(choose(*given, **options))
        return taken[-1]

    return call


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="interpreted")
def test_the_shipped_plan_stays_unless_another_is_clearly_faster(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AttentionJob(SMALL[0])
    shipped = job.shipped(CPU)
    monkeypatch.setattr(AttentionJob, "candidates", lambda job, capability: DECODE[:1])
    clock = Clock(lambda plan: 1.005e-3 if plan == shipped else 1e-3)
    monkeypatch.setattr(tune, "make_timer", lambda device: clock)
    (row,) = tune.tune([job], CPU, save=False)
    assert row["plan_0"] == str(DECODE[0]) and not small.exists()
    list(tune.tune([job], CPU))
    assert json.loads(small.read_text())[0]["plan"] == asdict(shipped)


def test_a_plan_that_fails_is_a_note_and_the_others_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(plan: DecodePlan) -> None:
        if plan == DECODE[0]:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tune, "make_timer", lambda device: Clock(lambda plan: plan.stages * 1e-3))
    found = tune.time_all(AttentionJob(SMALL[0]), call, 1, DECODE[:2], CPU)
    assert found == [(2000, DECODE[1])]
    assert "note: " in (said := capsys.readouterr().err) and "out of shared memory" in said


def test_sizes_are_asked_for_or_refused() -> None:
    text = "batch=3,context=100,heads=16,kv_heads=4"
    found = asked("gqa_decode,gqa_prefill,linear", "bf16", "", [text])
    assert [job.params["op"] for job in found] == ["gqa_decode", "gqa_prefill"]
    assert all(job.params["batch"] == 3 and job.params["heads"] == 16 for job in found)
    for op, size, why in (
        ("gqa_decode", "batches=3", "no flag 'batches'"),
        ("gqa_decode", "batch=few", "batch=few is no count"),
        ("gqa_decode", "heads=9,kv_heads=2", "9 heads on 2 KV heads"),
        ("gqa_decode", "kind=mla_decode", "Give it as --op"),
        ("gqa_prefill", "format=fp8", "keys in rows are bf16"),
        ("gqa_prefill", "keys=pages", "tuned with its keys in rows"),
        ("linear", "batch=3", "no linear is tuned in bf16 at batch=3"),
        ("mla_decode", "format=fp8", "no mla_decode is tuned in bf16 at format=fp8"),
    ):
        with pytest.raises(PykernelsError, match=why):
            asked(op, "bf16", "", [size])
