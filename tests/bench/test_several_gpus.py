"""`pykernels bench dslp|disagg|tensor`, at tiny sizes; what their figures mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import model.pinning.hybrid
from bench.harness.budget import Budget
from bench.report import main as report
from bench.several_gpus.crossing import sent_to_gpus
from bench.several_gpus.disagg.client import Heard
from bench.several_gpus.dslp.depth import Depth
from bench.several_gpus.dslp.volume import volumes
from bench.several_gpus.unsteady import unsteady
from model.cli.app import app
from model.named import make_config
from model.random_model import random_decoder
from runtime.devices import gpus
from runtime.devices.cuda import resources
from runtime.program import Builder
from runtime.program.partition import partition
from runtime.program.weight_spec import WeightSpec

from ..model import tiny

QUICK = ("--threads", "1", "--kernel", "generic")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter plays as many GPUs as are named, where there are none."""
    if torch.cuda.is_available():
        pytest.skip("for the interpreter")
    found = gpus.gpus_of

    def interpreted(devices: str) -> Any:
        return found(",".join("cpu" if "cuda" in name else name for name in devices.split(",")))

    for module in (gpus, resources, model.pinning.hybrid):
        monkeypatch.setattr(module, "gpus_of", interpreted)
    for module in (gpus, resources):
        monkeypatch.setattr(module, "check_device", lambda devices: None)


def ran(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of a command, all of which are there; its page and plot can be made of its file."""
    file, page = folder / "rows.json", folder / "page.md"
    result = CliRunner().invoke(app, ["bench", *words, "--save", str(file), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(file.read_text())
    assert (found["complete"], found["missing"]) == (True, [])
    assert report([str(file), "--page", str(page)]) == 0
    assert page.with_suffix(".png").stat().st_size > 1000
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_prompts_on_two_gpus(tmp_path: Path, played: None) -> None:
    pytest.importorskip("matplotlib")
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1)
    options = "--lengths", "16", "--budget", "8", "--rounds", "1", *QUICK
    one, two = ran(tmp_path, "dslp", "--model", str(tmp_path), *options)
    assert [(row["way"], row["gpus"]) for row in (one, two)] == [("1 GPU", 1), ("2 GPUs", 2)]
    assert one["link_bytes"] == two["link_bytes"]  # each expert crosses once a step
    assert two["x_first"] == pytest.approx(one["seconds"] / two["seconds"], rel=0.01)
    assert (one["routes"], two["routes"]) == ({"streamed": 2}, {"dslp": 2})
    assert one["between_bytes"] == 0 < two["between_bytes"]
    assert len(two["link_gbps_each"]) == 2


def test_a_whole_model_on_two_gpus(tmp_path: Path, played: None) -> None:
    pytest.importorskip("matplotlib")
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1)
    sizes = "--prompts", "4", "--batches", "1", "--tokens", "2", "--context", "4", "--rounds", "1"
    options = *sizes, *QUICK
    rows = ran(tmp_path, "tensor", "--model", str(tmp_path), *options)
    assert [row["op"] for row in rows] == ["prompt", "prompt", "decode", "decode"]
    assert all(row["x_first"] > 0 for row in rows[1::2])


def test_requests_beside_prompts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = "--prompt", "256", "--prompts", "1", "--behind", "512", "--short", "8"
    more = "--batches", "1,2", "--answer", "128", "--decode", "8", "--repeats", "1"
    rows = ran(tmp_path, "disagg", "--device", "cpu", *sizes, *more)
    streams, behind = rows[:2], rows[-1]
    assert [row["batch"] for row in streams] == [1, 2]
    assert all(row["beside_itl_max_ms"] >= row["beside_itl_p50_ms"] > 0 for row in streams)
    assert [row["load"] for row in rows[2:-1]] == ["1P", "1D", "1P+1D", "2D", "1P+2D"]
    assert behind["stall_s"] > 0 and behind["short_s"] >= behind["short_alone_s"] / 10


def test_nothing_is_begun_that_would_end_too_late() -> None:
    now = [0.0]
    budget = Budget(1.0, clock=lambda: now[0])
    assert budget.fits(59) and not budget.fits(61)
    now[0] = 30.0
    assert budget.fits(29) and not budget.fits(31)
    assert Budget(None).fits(1e9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dslp", "--device", "cuda:0"], "compares several GPUs with one"),
        (["dslp", "--lengths", "64,x"], "--lengths 64,x"),
        (["dslp", "--peer-access", "maybe"], "--peer-access maybe: 'maybe'"),
        (["dslp", "--exchange", "none"], "--exchange none: 'none'"),
        (["disagg", "--parts", "none"], "--parts none: 'none'"),
        (["disagg", "--device", "cpu", "--yields", "off"], "--yields off is for a GPU"),
        (["disagg", "--device", "cpu", "--parts", "behind"], "Give a smaller --behind"),
        (["tensor", "--gpus", "dslp"], "--gpus dslp: 'dslp'"),
    ],
)
def test_bad_options_are_one_line(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


def test_what_a_gpu_reads_of_another_is_sent_once() -> None:
    """[4, 8] in bfloat16, which two nodes of the other GPU read."""
    b = Builder("hand-made", {"T": 4, "S": 1, "R": 1}, "cuda:0")
    ids = b.buffer("ids", "T", dtype=torch.int64, kind="input")
    x = b.buffer("x", "T", 8)
    a, c, d = (b.buffer(name, "T", 8) for name in "acd")
    table = {"table": WeightSpec("table", "tensor", "f32", (16, 8))}
    b.node("embed", "embed", {"ids": ids}, {"out": x}, table, scale=1.0)
    for name, read, written in (("own", x, a), ("other", a, c), ("another", a, d)):
        b.node("add", name, {"x0": read}, {"out": written})
    program = b.build()
    nodes = [
        n if n.name in ("embed", "own") else replace(n, device="cuda:1") for n in program.nodes
    ]
    parts = partition(replace(program, nodes=tuple(nodes)))
    assert {gpu: sent_to_gpus(part) for gpu, part in parts.items()} == {
        "cuda:0": 4 * 8 * 2,
        "cuda:1": 0,
    }


def test_a_deeper_model_from_two_depths() -> None:
    """61 layers of which 3 are dense: 8 took 10 s and 4 took 4 s, so a layer more takes 1.5 s."""
    depth = Depth({8: 5, 4: 1}, 61, 58)
    rows = [
        {"way": "1 GPU", "layers": layers, "tokens": 64, "seconds": seconds}
        for layers, seconds in ((8, 10.0), (4, 4.0))
    ]
    assert depth.seconds(rows, "1 GPU", 64) == pytest.approx(10 + 53 * 1.5)
    assert Depth({8: 5}, 61, 58).seconds(rows, "1 GPU", 64) == pytest.approx(10 * 58 / 5)
    assert depth.seconds(rows, "2 GPUs", 64) is None


def test_bytes_of_a_layer_by_form() -> None:
    """OSDI'26 3.2: N D for the tokens and N D for their sums, against N A D / S for each way."""
    decoder = random_decoder(make_config("qwen3-30b", num_hidden_layers=1), "bf16", None)  # type: ignore[arg-type]
    small, standard = volumes(decoder, 1024, 2)
    N, D, A, S = 1024, 2048, 8, 2
    assert small["bytes"] == 2 * 4 * N * D // S  # float32; of the N / S tokens of a GPU
    assert standard["by_op"]["combine"] == 4 * N * A * D // S // S


def test_tokens_that_come_together_came_evenly() -> None:
    heard = Heard(1.0)
    for tokens, now in ((1, 2.0), (2, 3.0)):
        heard.hear(tokens, now)
    assert heard.times == [2.0, 2.5, 3.0]
    assert (heard.first_s, heard.token_s) == (1.0, 0.5)


def test_a_median_of_rounds_that_are_far_apart_is_said_to_be_one() -> None:
    steady = {"way": "1 GPU", "seconds_least": 0.158, "seconds_most": 0.163}
    rows = [steady, {"way": "2 GPUs", "seconds_least": 0.09, "seconds_most": 0.201}]
    [said] = unsteady(rows, lambda row: row["way"])
    assert said.startswith("2 GPUs")
