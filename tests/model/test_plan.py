"""`pykernels plan`: memory as the checkpoint has it, a line that serve takes, what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from model.cli.app import app
from model.inspection.examine import examine
from model.inspection.subject import open_subject
from model.named import ARCHS
from model.planner.machines import shipped

from . import tiny

ROOT = Path(__file__).resolve().parents[2]
LONGER = ["--defer", "auto:50000"]
H200 = ["--machine", "h200-16-cores", "--context", "64", "--prompt", "64", "--answer", "16"]


def planned(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    decoder = open_subject(str(tmp_path)).decoder
    ours = sum(spec.nbytes for spec in decoder.lower().weights.values())
    assert ours == pytest.approx(sum(e.bytes for e in examine(tmp_path).entries), rel=0.02)
    found = planned(str(tmp_path), *H200, "--device", "cpu")
    assert found["source"] == "its headers"
    drafts = " --draft auto"
    assert found["serve"] == f"pykernels serve --model {tmp_path} --device cpu{drafts}"


def test_the_line_is_one_that_serve_takes(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    options = ["--experts", "cpu", "--defer", "1", "--kv-dtype", "fp8", "--threads", "8"]
    options += ["--gpu-gib", "40", "--kv-gpu-gib", "0", "--kv-attention", "cpu"]
    found = planned(str(tmp_path), *H200, "--device", "cuda:0", *options)
    words = shlex.split(str(found["serve"]))
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", words[2:], resilient_parsing=False)
    given = context.params
    assert given["device"] == "cuda:0" and given["experts"] == "cpu"
    assert given["defer"] == "1" and given["kv_dtype"] == "fp8" and given["threads"] == 8
    assert given["gpu_gib"] == 40 and given["kv_gpu_gib"] == "0" and given["kv_attention"] == "cpu"
    memory: dict[str, dict[str, float]] = found["memory_gib"]  # type: ignore[assignment]
    assert memory["cuda:0"]["has"] == 39 and memory["cuda:0"]["cache"] == 0


@pytest.mark.parametrize(("gpus", "experts"), [("tensor", "gpu"), ("dslp", "cpu")])
def test_several_gpus_share_a_model_as_they_are_told(gpus: str, experts: str) -> None:
    """Parts of each layer on both, or a prompt whose experts come over both links at once."""
    shape = ["qwen3-30b", "--format", "q4_k", "--layers", "4", "--prompt", "4096"]
    words = [*shape, "--machine", "h200-x2-32-cores", "--experts", experts, "--prefill"]
    words += ["stream" if experts == "cpu" else "auto"]
    one = planned(*words, "--device", "cuda:0")
    two = planned(*words, "--device", "cuda:0,cuda:1", "--gpus", gpus)
    assert f"--gpus {gpus}" in str(two["serve"])
    faster = float(str(two["prompt_tok_s"])) / float(str(one["prompt_tok_s"]))
    assert 1.1 < faster < 2.0
    alone, shared = (found["memory_gib"]["cuda:0"]["weights"] for found in (one, two))  # type: ignore[index]
    table = 151936 * 2048 * 2 / 2**30  # of the vocabulary, which both have
    parted = table + (alone - table) / 2
    assert shared == pytest.approx(parted if gpus == "tensor" else alone, rel=0.02)


def test_a_context_that_fits_no_card_lies_in_main_memory() -> None:
    many = ["--context", "32768", "--batch", "2", "--layers", "8", "--format", "q4_k"]
    there = ["--machine", "h200-16-cores", "--device", "cuda:0", "--gpu-gib", "4"]
    found = planned("qwen3-30b", *many, *there)
    memory: dict[str, dict[str, float]] = found["memory_gib"]  # type: ignore[assignment]
    cache = 2 * 8 * 2 * 4 * 128 * 2 * 32768 / 2**30  # sequences, layers, keys and values, heads
    assert memory["cpu"]["cache"] + memory["cuda:0"]["cache"] >= cache
    assert memory["cuda:0"]["has"] == 3
    bound: dict[str, float] = found["decode_us_by_bound"]  # type: ignore[assignment]
    assert max(bound, key=lambda name: bound[name]) == "the link"


def test_the_cache_has_room_for_all_sequences() -> None:
    """More than a server takes by default, which its line then says."""
    words = ["qwen3.6-35b", "--layers", "8", "--machine", "h200-16-cores", "--gpu-gib", "16"]
    found = planned(*words, "--device", "cuda:0", "--context", "131072", "--batch", "8")
    memory: dict[str, dict[str, float]] = found["memory_gib"]  # type: ignore[assignment]
    cache = 8 * 2 * 2 * 2 * 256 * 2 * 131072 / 2**30  # sequences, layers, keys and values, heads
    assert memory["cpu"]["cache"] + memory["cuda:0"]["cache"] >= cache
    assert f"--kv-tokens {8 * 131072 + 64}" in str(found["serve"])


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_machine_that_is_shipped_can_be_planned_for(name: str) -> None:
    found = planned("qwen3-30b", "--layers", "2", "--format", "q4_k", "--machine", name)
    assert found["decode_tok_s"] > 0  # type: ignore[operator]


NO_TRITON = """
import sys
sys.modules["triton"] = None
from model.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "deepseek-v3", "--layers", "4", "--machine", "h200-x2-32-cores"),
        ("inspect", "--program", "--device", "cuda:0"),
    ],
)
def test_a_machine_without_triton_plans_for_gpus(words: tuple[str, ...]) -> None:
    """As one with torch's build for the CPU, which brings none."""
    command = [sys.executable, "-c", NO_TRITON, *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "cuda:0" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "arch",
    [pytest.param(each, marks=pytest.mark.all) if each != "gemma4-26b" else each for each in ARCHS],
)
def test_every_known_shape_has_a_prediction(arch: str) -> None:
    """With experts on the CPU, some of which cross for prompts."""
    there = ["--machine", "osdi26-5090", "--device", "cuda:0", "--experts", "cpu"]
    found = planned(arch, "--layers", "8", "--format", "q4_k", *there, "--prompt", "700")
    assert found["decode_tok_s"] > 0 and found["prompt_tok_s"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["deepseek-v3", *H200], "does not fit"),
        (["qwen3-30b", *H200[:2], "--context", "50000"], "made for 40960"),
        (["qwen3-30b", *H200, "--device", "cuda:1"], "has no cuda:1"),
        (["qwen3-30b", "--machine", "h900"], "no machine 'h900'"),
        (["qwen9", *H200], "no known shape"),
        (
            ["qwen3-30b", *H200, "--device", "cuda:0", "--experts", "cpu", *LONGER],
            "than there can be",
        ),
        (["qwen3-30b", *H200, "--routing", "zipf"], "no law of routing"),
        (["qwen3-30b", *H200, "--sweep", "heads"], "a sweep of 'heads'"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], cause: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 2
    assert cause in " ".join(result.stderr.split())


def test_a_configuration_without_sizes_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    result = CliRunner().invoke(app, ["plan", str(file), *H200])
    assert result.exit_code == 2
    assert "no hidden_size and no num_hidden_layers" in " ".join(result.stderr.split())


def test_some_layers_have_as_many_of_each_kind_as_all() -> None:
    """Every fourth layer of Qwen3-Next has keys and values, the others states."""
    some = open_subject("qwen3-next-80b").thinned(8).decoder.layers
    assert Counter(type(layer.attention).__name__ for layer in some) == {
        "GatedDeltaNet": 6,
        "GQA": 2,
    }


def test_a_sweep_of_contexts_ends_where_the_model_does() -> None:
    words = ["--layers", "2", "--vocab", "1024", "--device", "cuda:0", "--sweep", "context"]
    found = planned("qwen3-30b", *H200[:2], *words)
    rows: list[dict[str, float]] = found["sweep"]  # type: ignore[assignment]
    assert [row["value"] for row in rows] == [1024 << i for i in range(6)]
    assert "40960" in str(found["sweep_ended"])
    # Keys and values of 2 layers, 4 heads of 128 numbers: what 16,384 more of them take to read.
    added = 2 * 2 * 4 * 128 * 2 * 16384 / 4578e3
    assert rows[-1]["us_per_step"] - rows[-2]["us_per_step"] == pytest.approx(added, rel=0.1)


def test_a_change_gains_what_planning_it_would() -> None:
    """Gains are told by some of the layers: the others count as these do."""
    words = ["qwen3-30b", *H200, "--vocab", "1024", "--layers", "20"]
    now, smaller = planned(*words), planned(*words, "--format", "fp8")
    told = next(each for each in now["changes"] if each["change"].startswith("fp8"))  # type: ignore
    gain = smaller["decode_tok_s"] / now["decode_tok_s"]  # type: ignore[operator]
    assert told["decode"] == pytest.approx(gain, rel=0.02)
