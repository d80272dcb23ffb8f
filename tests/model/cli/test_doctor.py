"""The doctor: what it finds on this machine, and each thing that it must find wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from model.cli.doctor import doctor as command
from model.doctor import examine
from pykernels.env import Env, env
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.registry import kernels
from pykernels.target import detect

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def report() -> examine.Report:
    return examine.examine()


def test_this_machine_has_every_section(report: examine.Report) -> None:
    facts = report.as_dict()
    assert facts["machine"]["CPU"] == detect().cpu
    assert re.fullmatch(r"[\d.]+ GiB free of [\d.]+ GiB", facts["memory"]["main memory"])
    assert float(facts["speed"]["read roof"].split()[0]) > 0.1
    assert set(facts["versions"]) == {"pykernels", "python", *examine.NEEDED_VERSIONS}
    assert list(facts["flags"]) == [flag.name for flag in Env.flags()]


def test_every_kernel_of_this_machine_is_right(report: examine.Report) -> None:
    tested = report.sections["self-test"]
    assert {fact.name for fact in tested} == {
        f"{fmt} on {backend.name}"
        for fmt in FORMATS
        for backend in kernels()
        if backend.supports(fmt, detect()) is None
    }
    assert len(tested) >= len(FORMATS)  # the generic kernel runs anywhere
    assert not [fact.problem for fact in tested if fact.problem]


def test_every_kernel_that_is_not_used_has_its_reason() -> None:
    with env.override(isa="-avx512vl", kernel="auto"):
        facts = {fact.name: fact.value for fact in examine.look_at_kernels()}
    assert set(facts) == set(FORMATS)
    for value in facts.values():
        assert value.startswith("generic (")
        assert re.search(r"not avx512: this CPU lacks .*avx512vl", value)
    with env.override(kernel="generic"):
        reasons = [fact.value for fact in examine.look_at_kernels()]
    if not detect().lacks(kernels()[0].features):
        assert all("not avx512: PYKERNELS_KERNEL is generic" in reason for reason in reasons)


def test_a_kernel_asked_for_that_cannot_run_is_a_problem() -> None:
    with env.override(isa="-avx512f", kernel="avx512"):
        facts = list(examine.look_at_kernels())
    assert all("lacks avx512f" in fact.problem and fact.hint for fact in facts)


@pytest.mark.parametrize(
    ("mode", "wanted", "wrong"),
    [
        ("always", True, False),
        ("madvise", True, False),
        ("never", True, True),
        ("never", False, False),
        ("unknown", True, False),
    ],
)
def test_huge_pages(mode: str, wanted: bool, wrong: bool) -> None:
    fact = examine.huge_pages(mode, wanted)
    assert bool(fact.problem) == wrong
    assert "madvise" in fact.hint and "PYKERNELS_HUGEPAGES=0" in fact.hint


@pytest.mark.parametrize(
    ("found", "oldest", "wrong"),
    [
        ("2.13.0+cpu", "2.11", False),
        ("2.11.0a0+git1234", "2.11", False),
        ("2.9.1", "2.11", True),
        ("5.17", "5.17", False),
        ("4.57.6", "5.17", True),
        ("10.0", "9.9", False),
    ],
)
def test_versions_compare_as_numbers(found: str, oldest: str, wrong: bool) -> None:
    assert bool(examine.version_fact("torch", found, oldest).problem) == wrong


def test_needed_versions_are_those_of_the_package() -> None:
    requirements = dict(re.findall(r'"(\w+)>=([\d.]+)[^"]*"', PYPROJECT.read_text()))
    for name, oldest in examine.NEEDED_VERSIONS.items():
        assert requirements[name] == oldest


@pytest.mark.parametrize("distance", [0.5, math.nan, math.inf])
def test_a_wrong_result_is_a_problem(distance: float) -> None:
    assert examine.judge("fp8 on avx512", distance, "hint").problem
    assert not examine.judge("fp8 on avx512", 0.002, "hint").problem


def test_a_kernel_that_raises_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.experts.routed.RoutedExperts.__call__", lambda *_: 1 / 0)
    fact = examine.result_fact("fp8", "generic")
    assert "ZeroDivisionError" in fact.problem and fact.hint


def test_one_problem_of_many_kernels_is_told_once_with_its_own_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(cpu: str) -> dict[str, object]:
        raise PykernelsError("the calibration cannot be read", "Delete it")

    monkeypatch.setattr("runtime.machine.tuning.read", broken)
    monkeypatch.setattr("runtime.machine.tuning.GEMM_FROM", {"generic": 5})  # as if it had a choice
    facts = [examine.result_fact(fmt, "generic") for fmt in ("fp8", "bf16")]
    assert {(f.problem, f.hint) for f in facts} == {("the calibration cannot be read", "Delete it")}
    monkeypatch.setattr(examine, "examine", lambda progress: examine.Report({"self-test": facts}))
    with pytest.raises(typer.Exit):
        command(as_json=False)
    assert capsys.readouterr().out.count("✗ the calibration cannot be read. Delete it.") == 1


def test_too_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "NEEDED_MEMORY", 1 << 60)
    assert "are free" in next(examine.look_at_memory()).problem


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(examine.NEEDED_VERSIONS, "not_installed", "1.0")
    (fact,) = [fact for fact in examine.look_at_versions() if fact.name == "not_installed"]
    assert "cannot be imported" in fact.problem and "pip install" in fact.hint


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PykernelsError("no luck", "Try again"), "no luck"),
        (ImportError("No module named 'x'"), "No module named 'x'"),
        (OSError("broken\nsensor"), "OSError: broken sensor"),
    ],
)
def test_the_report_goes_on_after_a_section_that_fails(
    error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Iterator[examine.Fact]:
        raise error

    for name in ("machine", "gpu", "kernels", "results", "speed"):
        monkeypatch.setattr(examine, f"look_at_{name}", fails)
    report = examine.examine()
    assert [fact.problem for fact in report.problems] == [problem] * 5
    assert all(fact.hint for fact in report.problems)
    assert report.sections["flags"]


@pytest.mark.parametrize("wrong", [False, True])
def test_exit_code_and_hints(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fact = examine.Fact("torch", "1.0", "torch 1.0 is old" if wrong else "", "Install a newer one")
    report = examine.Report({"versions": [fact]})
    monkeypatch.setattr(examine, "examine", lambda progress: report)
    for as_json in (False, True):
        try:
            command(as_json=as_json)
            code = 0
        except Exception as ended:  # typer.Exit
            code = ended.exit_code  # type: ignore[attr-defined]
        out = capsys.readouterr().out
        assert code == int(wrong)
        assert ("torch 1.0 is old" in out) == wrong
        if as_json:
            assert json.loads(out)["versions"] == {"torch": "1.0"}
            assert [p["hint"] for p in json.loads(out)["problems"]] == [fact.hint] * wrong
        else:
            assert ("nothing is missing" in out) != wrong


@pytest.mark.parametrize(("names", "alike"), [(("a", "b"), False), (("a", "b", "c"), True)])
def test_three_neighbours_of_which_the_same_is_said_share_a_line(
    names: tuple[str, ...],
    alike: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = examine.Report({"versions": [examine.Fact(name, "1.0") for name in names]})
    monkeypatch.setattr(examine, "examine", lambda progress: report)
    command()
    out = capsys.readouterr().out
    assert (f"{len(names)} alike" in out) == alike
    assert out.count("1.0") == (1 if alike else len(names))
