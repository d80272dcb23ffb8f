"""`pykernels bench`: figures, a GPU's cases, and what a command raises as one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.load import child as load_child
from bench.load import run as load_run
from pykernels.cpu.roofline import instruction_of
from pykernels.target import detect

from ..conftest import Run, failed

MEASURE = "runtime.profiling.measure.measure_moe"


def test_moe_as_json_is_one_flat_object(run: Run, short_timing: None) -> None:
    shape = ("--hidden", 256, "--inter", 128, "--experts", 4, "--topk", 2, "--tokens", 3)
    result = run("bench", "moe", "--format", "bf16", *shape, "--threads", 1, "--check", "--json")
    assert (result.code, result.err) == (0, "")
    measured = json.loads(result.out)
    assert all(isinstance(value, (str, int, float)) for value in measured.values())
    assert measured["format"] == "bf16"
    sizes = ("tokens", "hidden", "inter", "experts", "topk", "threads")
    assert [measured[name] for name in sizes] == [3, 256, 128, 4, 2, 1]
    assert 0 < measured["us_p10"] <= measured["us_median"] <= measured["us_p90"]
    assert 0 < measured["error"] <= measured["error_bound"]
    assert measured["gbps"] > 0 and measured["tflops"] > 0 and measured["roof_gbps"] > 0
    assert (measured["routing"], measured["distinct_experts"]) == ("balanced", 4)
    if measured["compute_roof_instruction"]:
        products = instruction_of(measured["kernel"], "bf16", detect())
        assert measured["compute_roof_instruction"] == products
        assert measured["compute_roof_tflops"] > 0


def test_e2e_as_json_is_one_flat_object(run: Run) -> None:
    sizes = ("--prompt", 16, "--tokens", 3, "--batch", 2, "--context", 70)
    result = run("bench", "e2e", *sizes, "--threads", 1, "--eager", "--json")
    assert (result.code, result.err) == (0, "")
    m = json.loads(result.out)
    assert all(isinstance(value, (str, int, float)) for value in m.values())
    found = {"model": "embedded", "format": "fp8", "layers": 6, "threads": 1, "cpu": detect().cpu}
    asked = {"prompt": 16, "tokens": 3, "batch": 2, "context": 70}
    assert m.items() >= (found | asked).items()
    assert m["decode_tok_s"] == pytest.approx(2e6 / m["us_per_step"], rel=1e-3)
    assert m["gbps"] == pytest.approx(m["bytes_per_step"] / m["us_per_step"] / 1e3, rel=1e-2)
    assert m["roof_share"] == pytest.approx(m["gbps"] / m["roof_gbps"], rel=1e-2)
    assert 0 <= m["python_us_per_step"] < m["us_per_step"]
    assert m["bytes_per_token"] == m["bytes_per_step"] // 2
    assert 0 < m["cpu_busy"] <= 1
    beyond = m["us_per_step"] - m["bytes_per_step"] / m["roof_gbps"] / 1e3
    assert m["us_per_layer"] == pytest.approx(beyond / 6, rel=1e-2, abs=1)
    positive = ("prefill_tok_s", "eager_prefill_tok_s", "eager_decode_tok_s", "load_seconds")
    assert all(m[name] > 0 for name in positive) and m["warmup_seconds"] >= 0


def test_a_prompt_beside_streams_with_a_cap_and_without(run: Run) -> None:
    sizes = ("--prompt", 300, "--streams", 2, "--context", 9, "--target-itl-ms", 5)
    result = run("bench", "mixed", *sizes, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    free, capped = found["rows"]
    assert (found["complete"], found["streams"]) == (True, 2)
    assert (free["target_itl_ms"], capped["target_itl_ms"]) == ("", 5)
    for row in (free, capped):
        assert 0 < row["itl_mixed_p50_ms"] <= row["itl_mixed_p99_ms"] <= row["itl_mixed_max_ms"]
    # Each token of a stream is a step: a step with a cap has fewer tokens of the prompt.
    assert capped["itl_mixed_count"] > 2 * free["itl_mixed_count"] > 0


def test_a_conversation_is_taken_up_after_a_restart(run: Run, tmp_path: Path) -> None:
    where = ("--threads", 1, "--kv-disk", tmp_path)
    result = run("bench", "restart", "--tokens", 300, "--conversations", 1, *where, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["tokens"] == 4 * 64 + 17 and found["page_bytes"] == 64 * 6 * 160 * 2
    for of in ("disk", "memory"):
        assert found[f"{of}_over_cold"] == pytest.approx(
            found[f"{of}_s"] / found["cold_s"], rel=0.1
        )
    # What its answer has behind its last full page, the last token, and the message of 64.
    assert found["turn_computed_tokens"] <= 64 + 64 < found["tokens"]
    assert not list(tmp_path.iterdir())


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
GPU = ["moe", "--device", "cuda:0"]
BAD = [
    (["moe", "--routing", "skewed"], "no routing 'skewed'. Use one of balanced"),
    (["moe", "--kernel", ""], "no expert kernel ''. Use auto or one of "),
    (["moe", "--activations", "fp8"], "fp8 are a GPU's. Add --device cuda:0"),
    (["moe", "--threads", 9998], "9998 threads .*Give --threads [0-9]+ or fewer"),
    ([*GPU, "--numa", 2], "--numa .* are the CPU's"),
    pytest.param(GPU, "has no CUDA GPU", marks=NO_CUDA),
    (["attention", "--device", "cpu"], "attention has no kernel for cpu"),
    (["e2e", "--prefill", "gpu"], "--prefill gpu. Give auto, cpu, split, stream"),
    (["e2e", "--expert-cache-swaps", "2"], "swaps 2 without an expert cache. Add --expert-cache"),
    (["e2e", "--prefill", "stream"], "--prefill stream without a GPU. Add --device cuda:0"),
    (["prefill", "--device", "cpu"], "is about a GPU. Give --device cuda:0"),
    (["prefill", "--lengths", "64,0"], "--lengths 64,0. Give tokens"),
    (["contexts", "--plot", "x.foo"], "x.foo is no picture's name. End it with .png"),
    (["contexts", "--plot", "no/such/x.png"], "There is no folder no/such"),
    (["contexts", "--contexts", "4096"], "a context of 4096 tokens; embedded has 2048 positions"),
    (["mixed", "--defer", "some"], "--defer some. Give a number"),
    (["mixed", "--prompt", 10**6], "has [0-9]+ positions. Give a smaller"),
    (["e2e", "--layers", 2], "--layers is for random weights"),
    (["e2e", "--arch", "qwen3-30b", "--model", "."], "--model and --arch are both given"),
    (["e2e", "--arch", "deepseek-v3", "--layers", 99], "99 layers needs .* are free"),
    (["e2e", "--context", 10**9], "has [0-9]+ positions. Give a smaller --context"),
]


@pytest.mark.parametrize(("options", "cause"), BAD)
def test_bad_options(run: Run, options: list[object], cause: str) -> None:
    failed(run("bench", *options), cause)


def test_options_are_flags_of_a_gpus_case(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr("bench.cli.run_case", lambda *call: given.append(call))
    assert run("bench", "moe", "--device", "cuda:1", "--tokens", 3, "--json").code == 0
    op, device, as_json, flags = given.pop()
    assert (op, device, as_json) == ("moe", "cuda:1", True)
    assert (flags["tokens"], flags["hidden"], flags["activations"]) == (3, 7168, "auto")
    assert run("bench", *GPU, "--activations", "bf16").code == 0
    assert given.pop()[-1]["activations"] == "bf16"


def test_a_gpus_case_is_one_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"op": "router", "name": "v3", "us_median": 1.5}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("bench.harness.machine.check_gpu", torch.device)
    monkeypatch.setattr("bench.cases.gpu_run.one_case", lambda op, flags, device, seconds: row)
    result = run("bench", "router", "--json")
    assert result.code == 0 and json.loads(result.out).items() >= row.items()


def raising(error: BaseException) -> Any:
    def broken(*_: object, **__: object) -> None:
        warnings.warn_explicit("rounded", UserWarning, "f.py", 1, module="model.checkpoint.load")
        warnings.warn_explicit("noise", UserWarning, "g.py", 1, module="torch.nn")
        raise error

    return broken


RAISED = [
    (
        ZeroDivisionError("a bug\nin two lines."),
        1,
        "error: unexpected ZeroDivisionError: a bug in two lines. Run it again with --debug",
    ),
    (
        OSError(28, "No space left on device"),
        2,
        "error: the output cannot be written: No space left on device. Free some space, or",
    ),
    (
        UnicodeEncodeError("ascii", "a\xe9", 1, 2, "no"),
        2,
        "error: '\xe9' cannot be written as ascii. Use a UTF-8 locale, or set PYTHONIOENCODING",
    ),
    (KeyboardInterrupt(), 130, ""),
]


@pytest.mark.parametrize(("error", "code", "line"), RAISED, ids=lambda v: type(v).__name__)
def test_what_a_command_raises(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    """One line and an exit code; our own warnings are notes, those of libraries are not shown."""
    monkeypatch.setattr(MEASURE, raising(error))
    result = run("bench", "moe")
    note, last = result.err.splitlines()
    assert (result.code, note, last[: len(line)]) == (code, "note: rounded", line)


def in_this_process(_: object, kind: str, folder: Path, options: list[str]) -> dict[str, Any]:
    """What is timed in a process of its own, whose start takes longer than the rest."""
    if kind == "load":
        return load_child.load(folder, 1, *options or [None])
    return load_child.read(folder, kind == "keep")


def test_load_has_a_row_for_each_way(
    run: Run, writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_run, "CACHES", ("warm",))
    monkeypatch.setattr(load_run.Loads, "_child", in_this_process)
    monkeypatch.setattr("pykernels.cpu.make_pack", lambda name: None)  # of all formats, beforehand
    result = run("bench", "load", "--model", writer, "--threads", 1, "--json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    kinds = [row["what"].split()[0] for row in rows]
    assert kinds == ["convert,", "read", "read", "load", "read", "load"]
    for row in rows[1:]:
        assert row["warm_s"] > 0 and row["bytes"] > 0
    assert rows[3]["peak_bytes"] >= rows[3]["final_bytes"]  # how many, a process of its own knows
