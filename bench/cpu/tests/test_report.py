"""What a run shows: the terminal's table, the page, the files, the name of the machine's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.cpu.__main__ import options, write
from bench.cpu.machine import slug
from bench.cpu.report import HEADINGS, markdown, ratio_cell, table_rows, terminal

from .canned import canned


def rendered() -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(terminal(canned()))
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
    assert "took 8.5 minutes" in page
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
    plots = {f"2031-02-03-quick-{plot}.png" for plot in ("roofline", "latency", "threads")}
    assert names == {"2031-02-03-quick.json", "2031-02-03-quick.md"} | plots
    assert all(path.parent == folder and path.stat().st_size > 0 for path in paths)
    assert json.loads((folder / "2031-02-03-quick.json").read_text()) == json.loads(
        json.dumps(canned())
    )
    assert all(f"]({plot})" in (folder / "2031-02-03-quick.md").read_text() for plot in plots)


def test_plots_without_data_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = canned()
    results["latency"], results["threads"] = [], []
    results["table"] = results["table"][-1:]
    assert [path.suffix for path in write(results, tmp_path)] == [".json", ".md"]


def test_options() -> None:
    chosen = options(["--quick", "--formats", "fp8,int4", "--tokens", "1,64/expert", "--no-peers"])
    assert (chosen.quick, chosen.formats, chosen.no_peers) == (True, "fp8,int4", True)
