"""`pykernels profile`: what it writes and prints, and options that it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ..conftest import Run, failed


def test_step_writes_a_trace_a_picture_and_figures(run: Run, writer: Path, tmp_path: Path) -> None:
    trace = tmp_path / "step.json.gz"
    size = ("--context", 8, "--prefill", 8, "--steps", 2, "--batch", 2, "--threads", 1)
    result = run("profile", "step", "--model", writer, *size, "--defer", 1, "--out", trace)
    assert result.code == 0, result.err
    for what in (
        "experts deferred: 1",
        "prefill  decode",
        "a CPU worker computes",
        "moe_ffn deferred",
    ):
        assert what in result.out
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "step"] == ["prefill", "decode", "decode"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_step_of_random_weights_as_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.named import ARCHS

    small = {"num_experts": 8, "vocab_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    family, settings = ARCHS["qwen3-30b"]
    small |= {"hidden_size": 256, "num_attention_heads": 4}
    monkeypatch.setitem(ARCHS, "qwen3-30b", (family, {**settings, **small}))
    options = ("--arch", "qwen3-30b", "--layers", 1, "--format", "bf16", "--device", "ref")
    files = ("--out", tmp_path / "a.json", "--plot", tmp_path / "b.svg")
    own = tmp_path / "own.py"
    lines = "from runtime.passes import skip", "def fewer(program):", "    return skip(program, 1)"
    own.write_text("\n".join(lines))
    options += ("--pass", f"{own}:fewer")
    result = run("profile", "step", *options, "--context", 4, "--steps", 1, *files, "--json")
    assert result.code == 0, result.err
    assert "pass fewer" in json.loads(result.out)["title"]
    decode = json.loads(result.out)["decode"]
    assert 0 < decode["streams"]["ref"] <= 1
    assert decode["streams"]["ref"] + decode["neither"] == pytest.approx(1)
    assert {op["op"] for op in decode["ops"]} >= {"attention", "moe_ffn routed", "sample_requests"}
    assert "<svg" in (tmp_path / "b.svg").read_text()


BAD = [
    (["--layers", 2], "--layers is for random weights"),
    (["--arch", "qwen3-30b", "--model", "."], "--model and --arch are both given"),
    (["--arch", "unheard-of"], "no architecture 'unheard-of'"),
    (["--arch", "qwen3-30b", "--context", 10**6], "Give a smaller --context"),
    (["--context", 10**6], "positions. Give a smaller --context"),
    (["--experts", "cpu"], "--experts cpu without a GPU"),
    (["--device", "tpu"], "--device tpu is no device"),
    (["--out", "no/such/step.json"], "no/such is no folder"),
]


@pytest.mark.parametrize(("options", "cause"), BAD)
def test_bad_options_of_step(run: Run, options: list[object], cause: str) -> None:
    failed(run("profile", "step", *options), cause)
