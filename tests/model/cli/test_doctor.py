"""The doctor: what it finds on this machine, and each thing that it must find wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from model.doctor import examine
from model.doctor.report import Fact, Report
from model.doctor.result import accuracy_fact, result_fact
from model.doctor.side_by_side import tried_side_by_side
from model.doctor.topology import topology_facts
from pykernels.env import Env, env
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.registry import resolve
from pykernels.target import detect
from runtime.machine.topology import NumaNode, Topology

from ..conftest import Run

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_this_machine(run: Run, few_formats: list[str]) -> None:
    """All sections; every kernel that runs here is right. One format: all are tested elsewhere."""
    result = run("doctor", "--json")
    facts = json.loads(result.out)
    assert (result.code, facts.pop("problems")) == (0, [])
    assert facts["machine"]["CPU"] == detect().cpu
    assert re.fullmatch(r"[\d.]+ GiB free of [\d.]+ GiB", facts["memory"]["main memory"])
    assert float(facts["speed"]["read roof"].split()[0]) > 0
    assert set(facts["versions"]) == {"pykernels", "python", *examine.NEEDED_VERSIONS}
    assert list(facts["flags"]) == [flag.name for flag in Env.flags()]
    used = {f"{fmt} on {resolve('auto', fmt, detect()).name}" for fmt in few_formats}
    assert set(facts["self-test"]) == used


def test_every_kernel_that_is_not_used_has_its_reason() -> None:
    with env.override(isa="-avx512vl", kernel="auto"):
        facts = {fact.name: fact.value for fact in examine.look_at_kernels()}
    assert set(facts) == set(FORMATS)
    assert all("not avx512: this CPU lacks" in value for value in facts.values())
    with env.override(isa="-avx512f", kernel="avx512"):  # asked for, and cannot run
        bad = list(examine.look_at_kernels())
    assert all("lacks avx512f" in fact.problem and fact.hint for fact in bad)


def test_huge_pages_that_are_off_are_a_problem() -> None:
    wrong = [examine.huge_pages(mode, True) for mode in ("always", "madvise", "never", "unknown")]
    assert [bool(fact.problem) for fact in wrong] == [False, False, True, False]
    assert not examine.huge_pages("never", False).problem


def test_versions_compare_as_numbers() -> None:
    pairs = (("2.13.0+cpu", "2.11"), ("2.11.0a0+git1234", "2.11"), ("10.0", "9.9"))
    assert not any(examine.version_fact("torch", *pair).problem for pair in pairs)
    assert examine.version_fact("torch", "2.9.1", "2.11").problem


def test_needed_versions_are_those_of_the_package() -> None:
    requirements = dict(re.findall(r'"(\w+)>=([\d.]+)[^"]*"', PYPROJECT.read_text()))
    for name, oldest in examine.NEEDED_VERSIONS.items():
        assert requirements[name] == oldest


def test_kernels_are_tried_in_processes() -> None:
    cases = [("bf16", "generic"), ("bf17", "generic")]
    facts = dict(tried_side_by_side(cases, progress=lambda what: None))
    assert facts.keys() == set(cases)
    assert "from the float32 reference" in facts[cases[0]].value and not facts[cases[0]].problem
    assert "there is no weight format 'bf17'" in facts[cases[1]].problem


def test_a_wrong_result_is_a_problem() -> None:
    assert all(accuracy_fact("fp8 on avx512", wrong, "hint").problem for wrong in (0.5, math.nan))


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PykernelsError("no luck", "Try again"), "no luck"),
        (ImportError("No module named 'x'"), "No module named 'x'"),
        (OSError("broken\nsensor"), "OSError: broken sensor"),
    ],
)
def test_the_report_goes_on_after_an_error(
    error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Iterator[Fact]:
        raise error

    monkeypatch.setattr("runtime.devices.cpu.routed.CpuExperts.__call__", fails)
    assert "failed" in result_fact("fp8", "generic").value
    for name in ("machine", "gpu", "kernels", "results", "speed"):
        monkeypatch.setattr(examine, f"look_at_{name}", fails)
    report = examine.examine()
    assert [fact.problem for fact in report.problems] == [problem] * 5
    assert all(fact.hint for fact in report.problems)
    assert report.sections["flags"]


def test_what_lacks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "NEEDED_MEMORY", 1 << 60)
    assert "are free" in next(examine.look_at_memory()).problem
    monkeypatch.setitem(examine.NEEDED_VERSIONS, "not_installed", "1.0")
    (fact,) = [fact for fact in examine.look_at_versions() if fact.name == "not_installed"]
    assert "cannot be imported" in fact.problem and "pip install" in fact.hint


def test_exit_code_and_hints(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Fact("torch", "1.0")
    bad = replace(good, problem="torch 1.0 is old", hint="Install a newer one")
    report = Report({"versions": [good] * 3})

    def examined(progress: object, known: Callable[[str, Fact], None], every: bool) -> Report:
        for section, facts in report.sections.items():
            for fact in facts:
                known(section, fact)
        return report

    monkeypatch.setattr(examine, "examine", examined)
    assert run("doctor").code == 0
    report = Report({"versions": [bad, replace(bad, name="numpy")]})
    result = run("doctor")
    assert result.code == 1
    assert result.out.count("torch 1.0 is old. Install a newer one.") == 1
    result = run("doctor", "--json")
    assert result.code == 1
    assert json.loads(result.out)["versions"] == {"torch": "1.0", "numpy": "1.0"}
    assert [p["hint"] for p in json.loads(result.out)["problems"]] == [bad.hint] * 2


def test_cores_and_nodes() -> None:
    nodes = tuple(NumaNode(None, (i,), 4 << 30, 1 << 30) for i in (0, 1))
    topology = Topology((0, 1), ((0,), (1,)), 1.5, nodes, 8 << 30, 4 << 30, "madvise")
    found = {fact.name: fact.value for fact in topology_facts(topology)}
    assert "1.5 CPUs" in found["CPU quota"]
    assert "1.0 GiB free of 4.0 GiB" in found["made-up node 1"]
    assert "1 thread(s) are fewer than 2 nodes" in found["NUMA"]
