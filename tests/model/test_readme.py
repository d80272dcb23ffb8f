"""What the README shows is true: commands, Python, the kernel in five minutes, the table."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykernels import registry
from pykernels.env import env
from pykernels.quant import FORMATS
from pykernels.registry import Backend, get_backend, kernels

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands(program: str) -> list[str]:
    """The console lines of `program`, without prompt and comment."""
    lines = "".join(blocks("console")).splitlines()
    assert all(line.startswith("$ ") for line in lines)
    found = [line[2:].split("  #")[0].strip() for line in lines]
    return [line for line in found if line.split()[0] == program]


@pytest.mark.parametrize("command", [c for c in commands("pykernels") if "mine" not in c])
def test_command_runs(
    command: str, run: Run, short_timing: None, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "doctor" in command:
        request.getfixturevalue("few_formats")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    result = run(*shlex.split(command)[1:])
    assert result.code == 0, result.err
    assert result.out.strip() or "chat" in command  # chat was told nothing


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands("make"):
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_a_kernel_in_five_minutes(
    tmp_path: Path, run: Run, short_timing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pykernels", "runtime", "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for command in commands("cp"):
        _, source, target = command.split()
        shutil.copy(tmp_path / source, tmp_path / target)
    for name, old, new in edits(blocks("diff")[0]):
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1, f"the README's edit of {name} no longer fits"
        (tmp_path / name).write_text(text.replace(old, new))

    (test,) = commands("python")
    # What these tests do of the portable tiles is not done again: they would be compiled anew.
    args = shlex.split(f"{test} -p no:cacheprovider --collect-only -q")[1:]
    chosen = subprocess.run(
        [sys.executable, *args], cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    found = chosen.stdout.count("::test_matches_the_reference[")
    assert found >= len(FORMATS) and "mine-fp8-bf16" in chosen.stdout, chosen.stdout
    # The same row in this process, whose kernels are compiled already.
    portable = get_backend("generic").build
    mine = Backend("mine", "my first kernel", (), build=portable)
    monkeypatch.setattr(registry, "BACKENDS", [*kernels(), mine])
    (bench,) = [c for c in commands("pykernels") if "mine" in c]
    timed = run(*shlex.split(bench)[1:])
    assert re.search(r"kernel +fp8 on mine", timed.out), timed.err


def edits(diff: str) -> list[tuple[str, str, str]]:
    """(file, old text, new text) of each run of minus lines and the plus lines after it."""
    found: list[tuple[str, str, str]] = []
    name = ""
    for line in diff.splitlines(keepends=True):
        if line.startswith("--- "):
            name = line[4:].strip()
        elif line.startswith("-"):
            found.append((name, line[1:], ""))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + line.removeprefix("+"))
    return found


def test_flags_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| `(PYKERNELS_\w+)` \| `?(.*?)`? ?\| (.*) \|$", README, re.MULTILINE)
    assert rows == [(flag.name, flag.default, flag.doc) for flag in env.table()]


def test_files_it_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    (house,) = [block for block in blocks("") if block.startswith("pykernels/")]
    parents, named = list[str](), 0
    for line in house.splitlines():
        if part := re.match(r"( *)(\w+(?:\.py|/)) ", line):
            depth = len(part[1]) // 2
            parents = [*parents[:depth], part[2]]
            assert ROOT.joinpath(*parents).exists(), parents
            named += 1
    assert named > 40


RESULTS = sorted(ROOT.glob("bench/results/*/*.md"))
DOCS = [ROOT / "bench/results/README.md", *sorted(ROOT.glob("bench/notes/*.md")), *RESULTS]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_files_that_other_pages_name_exist(page: Path) -> None:
    """And plots are the page's own: one that was renamed with its page shows another's table."""
    for shown, name, link in re.findall(r"(!?)\[([^\]]*)\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
        if shown and page in RESULTS:
            assert name == link and link.startswith(page.stem), link
