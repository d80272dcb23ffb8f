"""What a run shows: the terminal's table, the page, the files, the name of the machine's folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cpu.__main__ import options
from bench.cpu.files import partial, write
from bench.cpu.machine import slug
from bench.cpu.plots import _colour as colour
from bench.cpu.plots import compute_roofs
from bench.cpu.report import HEADINGS, markdown, ratio_cell, table_rows, terminal
from pykernels.quant import FORMATS

from .canned import canned


def rendered(results: dict[str, Any] | None = None) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal(results or canned()))
    return console.export_text()


def test_a_row_has_every_figure() -> None:
    cells, *_ = table_rows(canned())
    shown = dict(zip(HEADINGS, cells, strict=True))
    assert shown["engine"] == "pykernels avx512"
    assert shown["ms"] == "9.00"
    assert (shown["GB/s"], shown["read roof"]) == ("40.0", "80%")
    assert (shown["TFLOP/s"], shown["compute roof"]) == ("0.080", "8%")
    assert shown["× kt-kernel"] == "2.50 fp8"
    assert shown["× torch bf16"] == "1.25"
    assert shown["× numpy fp32"] == ""


def test_a_peer_on_other_threads_than_ours_says_so() -> None:
    ours, torch = (cells[2] for cells in table_rows(canned()))
    assert (ours, torch) == ("pykernels avx512", "torch bf16 (1 thread)")


HEADS = {"table": "| format | tokens |", "threads": "## One token", "skew": "## Scheduling under"}


@pytest.mark.parametrize("section", ["table", "skew", "latency", "threads"])
def test_a_page_of_one_section_has_no_empty_ones(section: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = canned()
    results = whole | {name: [] for name in ("table", "skew", "latency", "threads")}
    results |= {section: whole[section], "settings": whole["settings"] | {"sections": [section]}}
    paths = {path.name for path in write(results, tmp_path)}
    name = f"2031-02-03-quick-{section}"
    plot = "roofline" if section == "table" else section
    assert paths == {f"{name}.json", f"{name}.md", f"{name}-{plot}.png"}
    page = markdown(results, [])
    assert {name for name, head in HEADS.items() if head in page} == {section} & set(HEADS)
    shown = rendered(results)
    assert "Some CPU (arch9), 2 of 4 cores" in shown
    assert ("kt-kernel" in shown) == (section == "table")


def test_missing_parts_are_named_by_what_they_are() -> None:
    parts = ["fp8: latency", "bf16: latency", "scheduling under skew"]
    results = canned() | {"missing": {"why": "interrupted", "parts": parts}}
    line = "Missing, interrupted: latency (fp8, bf16); scheduling under skew."
    assert f"\n{line}\n" in markdown(results, [])
    assert line in rendered(results)
    assert "Missing" not in markdown(canned(), [])


def test_what_is_kept_of_a_run_leaves_earlier_runs_alone(tmp_path: Path) -> None:
    first, second = partial(tmp_path), partial(tmp_path)
    for minutes in (1.0, 2.0):  # one run: the later rows take the place of the earlier
        first.keep(canned() | {"machine": canned()["machine"] | {"minutes": minutes}})
    second.keep(canned())
    folder = tmp_path / "some-cpu-arch9-4-cores"
    stems = ("2031-02-03-quick-partial", "2031-02-03-quick-partial-2")
    assert {path.name for path in folder.iterdir()} == {
        f"{stem}.{ending}" for stem in stems for ending in ("json", "md")
    }
    assert json.loads((folder / f"{stems[0]}.json").read_text())["machine"]["minutes"] == 2.0
    (folder / f"{stems[1]}.md").unlink()  # by somebody who has looked at it
    second.drop()
    assert {path.stem for path in folder.iterdir()} == {stems[0]}


def test_a_roof_that_does_not_apply_is_blank() -> None:
    _, cells = table_rows(canned())
    assert dict(zip(HEADINGS, cells, strict=True))["compute roof"] == ""


def test_many_tokens_are_also_told_per_expert() -> None:
    results = canned()
    results["table"][0]["tokens"] = 128
    assert table_rows(results)[0][1] == "128 (64/expert)"


def test_terminal_names_machine_missing_peer_and_untimed_backend() -> None:
    text = rendered()
    assert "Some CPU (arch9), 2 of 4 cores: 16 experts of 7168 x 2048, top-8" in text
    assert "Not timed: kt-kernel bf16: not installed [at all] (fp8 x 1)." in text
    assert "Not timed: amx: this CPU lacks amx-tile." in text


def test_page_has_versions_rows_and_plots() -> None:
    page = markdown(canned(), ["plot.png"])
    assert "numba 0.1, kt-kernel (peer) 0.7.2" in page
    assert "\nNot timed: kt-kernel bf16: not installed [at all] (fp8 x 1).\n" in page
    assert "| 512 | zipf | static | 15.5 | 3.9 | 150.0 | 1.31 |  |" in page
    assert "| 8 | zipf | dynamic | 10.0 | 2.0 | 9.0 | 0.70 | 1.02 |" in page
    assert "\n16 experts: 32 are 18.4 GiB.\n" in page
    assert "experts:" not in markdown(canned() | {"fewer_experts": ""}, [])
    assert "took 8.5 minutes" in page
    assert "L3 32 MiB, memory 24 GiB" in page
    assert "| fp8 | pykernels | 2 | 40.0 | 25.0 |" in page
    assert "during fp8: threads (25%)" in page
    assert page.endswith("![plot.png](plot.png)\n")
    widths = {line.count(" | ") for line in page.splitlines() if line.startswith("| fp8 | 1 |")}
    assert widths == {len(HEADINGS) - 1}


def test_several_modes_of_a_peer_are_told_apart() -> None:
    ratios = {"kt-kernel rawint4": 2.0, "kt-kernel amxint4": 1.5, "torch bf16": 3.0}
    assert ratio_cell(ratios, "kt-kernel") == "2.00 rawint4, 1.50 amxint4"
    assert ratio_cell({}, "kt-kernel") == ""


@pytest.mark.parametrize(
    ("cpu", "cores", "name"),
    [
        ("AMD EPYC (znver5)", 2, "amd-epyc-znver5-2-cores"),
        ("INTEL(R) XEON(R) PLATINUM 8582C (emeraldrapids)", 16,
         "intel-xeon-platinum-8582c-emeraldrapids-16-cores"),
        ("INTEL(R) XEON(R) PLATINUM 8592+", 64, "intel-xeon-platinum-8592+-64-cores"),
        ("a/../b: c", 1, "a-..-b-c-1-cores"),
    ],
)  # fmt: skip
def test_slug(cpu: str, cores: int, name: str) -> None:
    assert slug(cpu, cores) == name
    assert "/" not in slug(cpu, cores)


def test_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write(canned(), tmp_path)
    folder = tmp_path / "some-cpu-arch9-4-cores"
    names = {path.name for path in paths}
    plots = {f"2031-02-03-quick-{plot}.png" for plot in ("roofline", "latency", "threads", "skew")}
    assert names == {"2031-02-03-quick.json", "2031-02-03-quick.md"} | plots
    assert all(path.parent == folder and path.stat().st_size > 0 for path in paths)
    assert json.loads((folder / "2031-02-03-quick.json").read_text()) == json.loads(
        json.dumps(canned())
    )
    assert all(f"]({plot})" in (folder / "2031-02-03-quick.md").read_text() for plot in plots)


def test_a_run_never_takes_the_place_of_another(tmp_path: Path) -> None:
    results = canned() | {"latency": [], "threads": [], "table": [], "skew": []}
    names = [write(results, tmp_path)[0].name for _ in range(3)]
    assert names == [f"2031-02-03-quick{number}.json" for number in ("", "-2", "-3")]


def test_a_bar_in_a_cell_ends_no_cell() -> None:
    results = canned()
    results["table"] = [{**results["table"][0], "backend": "this|that"}]
    assert r"| pykernels this\|that |" in markdown(results, [])


def test_a_plot_has_a_colour_for_every_format() -> None:
    formats = list(FORMATS)
    assert len({colour({"settings": {"formats": formats}}, fmt) for fmt in formats}) == len(formats)


def test_a_plot_tells_the_roofs_of_bf16_and_int8_apart() -> None:
    first = canned()["table"][0]
    rows = [
        first | {"backend": backend, "compute_roof": roof}
        for backend, roof in (("amx", 40.0), ("amx/int8", 80.0), ("avx512", 1.5), ("generic", None))
    ]
    assert compute_roofs(rows) == {"bf16": 40.0, "int8": 80.0}


def test_plots_without_data_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = canned()
    results["latency"], results["threads"], results["skew"] = [], [], []
    results["table"] = results["table"][-1:]
    assert [path.suffix for path in write(results, tmp_path)] == [".json", ".md"]


def test_options() -> None:
    chosen = options(["--quick", "--formats", "fp8,int4", "--tokens", "1,64/expert", "--no-peers"])
    assert (chosen.quick, chosen.formats, chosen.no_peers) == (True, "fp8,int4", True)
    assert options(["--peers", "torch,numpy"]).peers == "torch,numpy"
    with pytest.raises(SystemExit):
        options(["--peers", "torch", "--no-peers"])
