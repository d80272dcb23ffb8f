"""A run over whole models: turns, missing peers, its files; what a decode step reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.e2e import run as e2e_run
from bench.e2e import turns
from bench.e2e.ours import Ours, Shape
from bench.e2e.places import Place
from bench.e2e.players import Case, Played, Turn
from bench.e2e.run import E2ERun
from bench.e2e.settings import Settings
from bench.harness.budget import Bar
from bench.harness.session import measure_and_keep
from bench.peers.client import PeerMissing
from pykernels.errors import PykernelsError
from pykernels.target import detect
from runtime.planning.config import ExecutionConfig
from runtime.planning.work import expected_experts, weight_bytes
from runtime.profiling.engine_speed import Load

pytest.importorskip("matplotlib")


class FakePeer:
    """Half as fast as nothing in particular; fails from the second turn on if asked to."""

    names = ("llama.cpp",)

    def __init__(self, fails: bool = False, error: BaseException | None = None) -> None:
        self.fails, self.turns = fails, 0
        self.error = error or PeerMissing("out of luck")

    def turn(self, cases: Sequence[Case], seconds: float) -> Turn:
        self.turns += 1
        if self.fails and self.turns > 1:
            raise self.error
        return {"llama.cpp": dict.fromkeys(cases, Played(10.0))}


def settings(tmp_path: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "archs": ("qwen3-30b",),
        "formats": ("q8_0",),
        "layers": 1,
        "experts": 8,
        "vocab": 256,
        "threads": 1,
        "kernel": "auto",
        "prompt": 16,
        "tokens": 2,
        "batches": (1, 2),
        "contexts": (8,),
        "rounds": 2,
        "peers": ("llama.cpp",),
        "quick": True,
        "keep": False,
        "folder": tmp_path / "gguf",
    }
    return Settings(**(values | changes))


@pytest.fixture(autouse=True)
def quick_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "roof", lambda threads: 10.0)


@pytest.mark.all  # it compiles a model's kernels
def test_rows_have_our_figures_and_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e_run, "find", lambda name, tools: Path(name))
    monkeypatch.setattr(e2e_run, "llama_players", lambda *_: [FakePeer()])
    run = E2ERun(settings(tmp_path), detect())
    results = measure_and_keep(run, tmp_path / "out", lambda row: None)
    prefill, one, two = results["rows"]
    assert [row["op"] for row in results["rows"]] == ["e2e prefill", "e2e decode", "e2e decode"]
    assert prefill["tok_s_llama.cpp"] == 10
    assert prefill["x_llama.cpp"] == pytest.approx(prefill["tok_s"] / 10, rel=0.01)
    assert (one["batch"], two["batch"]) == (1, 2)
    assert two["bytes_per_step"] > one["bytes_per_step"] > 0
    assert one["roof_share"] == pytest.approx(one["gbps"] / 10, rel=0.01, abs=1e-3)
    page = next((tmp_path / "out").rglob("*-e2e.md")).read_text()
    assert "## e2e decode" in page and "× llama.cpp" in page
    assert list((tmp_path / "out").rglob("*.png"))
    assert not list((tmp_path / "gguf").iterdir())


@pytest.mark.all
def test_a_peer_that_fails_later_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_run, "find", lambda name, tools: Path(name))
    monkeypatch.setattr(e2e_run, "llama_players", lambda *_: [FakePeer(fails=True)])
    run = E2ERun(settings(tmp_path, batches=(1,)), detect())
    results = measure_and_keep(run, None, lambda row: None)
    assert all(row["why_llama.cpp"] == "out of luck" for row in results["rows"])
    assert all(row["tok_s"] > 0 and "x_llama.cpp" not in row for row in results["rows"])


@pytest.mark.all
def test_turns_of_a_model_that_is_interrupted_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = FakePeer(fails=True, error=KeyboardInterrupt())
    monkeypatch.setattr(e2e_run, "find", lambda name, tools: Path(name))
    monkeypatch.setattr(e2e_run, "llama_players", lambda *_: [peer])
    run = E2ERun(settings(tmp_path, batches=(1,), rounds=3), detect())
    with pytest.raises(KeyboardInterrupt):
        measure_and_keep(run, tmp_path, lambda row: None)
    (file,) = tmp_path.rglob("*-e2e-partial.json")
    found = json.loads(file.read_text())
    assert (found["complete"], found["missing"]) == (False, ["qwen3-30b q8_0"])
    assert [(row["op"], row["rounds"]) for row in found["rows"]] == [
        ("e2e prefill", 2),  # of the second round ours has had its turn
        ("e2e decode", 2),
    ]
    assert all(row["x_llama.cpp"] > 0 for row in found["rows"])
    assert report.main([str(file)]) == 0
    assert "it was interrupted" in file.with_suffix(".md").read_text()
    assert list(file.parent.glob("*-partial-speeds.png"))


@pytest.mark.all
def test_ours_in_several_places_is_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferring = Place("deferring", {"defer": "2", "experts": "cpu"})
    broken = Place("too many", {"defer": "9"})
    monkeypatch.setattr(e2e_run, "places", lambda device: (Place("plain"), deferring, broken))
    run, said = E2ERun(settings(tmp_path, layers=2, batches=(1,), peers=()), detect()), list[str]()
    run.bar = Bar(said.append, lambda work: None)
    results = measure_and_keep(run, tmp_path, lambda row: None)
    played = [what.split(": ", 1)[1] for what in said if "round" in what]
    assert played[:2] == ["round 1: deferring", "round 2: deferring"]  # experts on the CPU first
    decodes = [row for row in results["rows"] if row["op"] == "e2e decode"]
    assert [row["place"] for row in decodes] == ["plain", "deferring", "too many"]
    assert decodes[1]["tok_s"] > 0 and "why" in decodes[2]
    page = next(tmp_path.rglob("*-e2e.md")).read_text()
    assert "context 8, deferring |" in page and "Not timed: " in page


@pytest.mark.all
def test_turns_beyond_the_limit_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e_run, "find", lambda name, tools: Path(name))
    monkeypatch.setattr(e2e_run, "llama_players", lambda *_: [FakePeer()])
    run = E2ERun(settings(tmp_path, batches=(1,), minutes=1e-9), detect())
    results = measure_and_keep(run, tmp_path, lambda row: None)
    assert not results["complete"] and "--minutes 1e-09 were too few" in results["why"]
    assert all("too few" in row["why"] for row in results["rows"])


def test_transformers_has_no_place_beside_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(PykernelsError, match="--peers llama.cpp"):
        settings(tmp_path, device="cuda:0", peers=("transformers",)).check()


def test_what_cannot_be_made_is_a_row_with_its_reason(tmp_path: Path) -> None:
    run = E2ERun(settings(tmp_path, layers=9999, peers=(), experts=None), detect())
    results = measure_and_keep(run, tmp_path, lambda row: None)
    assert all("9999 layers needs" in row["why"] for row in results["rows"])
    assert "Not timed: " in next(tmp_path.rglob("*.md")).read_text()


@pytest.mark.all
def test_every_decode_step_has_the_whole_batch() -> None:
    """Prompts come in over several steps, while the first sequences decode already."""
    execution = ExecutionConfig(threads=1)
    ours = Ours.random(Shape("qwen3-30b", 1, 8, 256), "q8_0", execution)
    try:
        load = Load(prompt=16, tokens=4, batch=6, context=130)
        timer = ours.timer(load, execution, max_num_batched_tokens=64)
        for _ in range(2):
            steps = timer.decode(load.batch, load.context, load.tokens)
            assert [step.tokens for step in steps] == [6] * 4
            assert all(130 < step.context <= load.positions(64) for step in steps)
            assert all(0 < step.jobs < step.seconds for step in steps)
        program = timer.runner.decode_steps[0].program
        one = weight_bytes(program, 1) - weight_bytes(program, 0)  # of 8 experts 8, each once
        assert all(step.expert_bytes == one for step in steps)
        timer.close()
    finally:
        ours.close()


def test_experts_of_a_batch_are_those_of_random_choices() -> None:
    assert expected_experts(128, 8, 1) == pytest.approx(8)
    assert expected_experts(4, 2, 2) == pytest.approx(3)
    assert expected_experts(8, 2, 1000) == pytest.approx(8)
