"""The command line in this process: options, output, errors as one line with exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model
from model.checkpoint import memory
from model.text.generate import generate_stream
from pykernels import __version__
from pykernels.cpu.isa import prefers_fma
from pykernels.quant import FORMATS
from pykernels.target import detect
from runtime.machine.topology import Topology
from runtime.profiling.measure import MoEMeasurement

from .conftest import Result, Run

PROMPT = "def quicksort(xs):"


def failed(result: Result, cause: str) -> None:
    """One line, `error: cause. hint.`, nothing on stdout, exit code 2."""
    lines = result.err.splitlines()
    assert (result.code, result.out, len(lines)) == (2, "", 1), result
    assert re.search(cause, lines[0]), lines[0]
    assert re.fullmatch(r"error: .+\. .+\.", lines[0]), lines[0]


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"pykernels {__version__}\n", "")


def test_help_names_every_default(run: Run) -> None:
    text = " ".join(run("generate", "--help").out.replace("│", " ").split())
    for default in ("128", "0.8", "(the embedded model)", "(one on each physical core)"):
        assert f"[default: {default}]" in text


def test_generate_writes_the_text_to_stdout_and_the_summary_to_stderr(run: Run) -> None:
    result = run("generate", "--max-new-tokens", 12, "--temperature", 0, PROMPT)
    assert result.code == 0
    stream = generate_stream(
        model.from_pretrained(model.EMBEDDED),
        model.load_tokenizer(model.EMBEDDED),
        PROMPT,
        max_new_tokens=12,
    )
    assert result.out == PROMPT + "".join(stream) + "\n"
    assert re.fullmatch(
        rf"{stream.stats.prompt_tokens} prompt tokens · prefill \d+ tok/s · decode [\d.]+ tok/s · "
        r"experts [\d.]+ GB/s \(\d+ % of the \d+ GB/s read roof\)\n",
        result.err,
    )


def test_without_memory_for_the_roof_the_text_ends_without_its_share(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.profiling.roofline.roof_bytes", lambda: 1 << 50)
    result = run("generate", "--max-new-tokens", 2, PROMPT)
    assert result.code == 0
    noted, figures = result.err.splitlines()
    assert re.match(
        r"note: no share of the read roof: .* takes 1048576.0 GiB.*, .* are free", noted
    )
    assert re.search(r"experts [\d.]+ GB/s$", figures)


def test_sampling_follows_its_seed(run: Run) -> None:
    options = ("generate", "--max-new-tokens", 24, "--temperature", 1.2, "--no-echo")
    same = [run(*options, "--seed", 3, PROMPT).out for _ in range(2)]
    assert same[0] == same[1]
    assert not same[0].startswith(PROMPT)
    assert run(*options, "--seed", 4, PROMPT).out != same[0]


def test_both_kernels_and_one_thread_write_text(run: Run) -> None:
    for kernel in ("generic", "auto"):
        options = ("--max-new-tokens", 4, "--threads", 1, "--kernel", kernel)
        result = run("generate", *options, "--temperature", 0, PROMPT)
        assert (result.code, result.out[: len(PROMPT)]) == (0, PROMPT)


def test_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    result = run("generate", "--max-new-tokens", 2, "-")
    assert (result.code, result.out[:10]) == (0, "import os\n")


def test_a_stdin_that_is_closed_is_told_before_loading(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.pretrained.from_pretrained", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("sys.stdin", None)
    for command in (("generate", "-"), ("chat",)):
        failed(run(*command), "stdin is closed")


def test_stdin_in_another_encoding_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    failed(run("generate", "-"), "stdin is no utf-8 text. Give it as UTF-8")


def test_chat_keeps_the_conversation_until_reset(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    said: list[str] = []

    def spy(lm: object, tokenizer: object, prompt: str, **options: object) -> object:
        said.append(prompt)
        return generate_stream(lm, tokenizer, prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("model.text.generate.generate_stream", spy)
    lines = "first\nsecond\n/reset\nthird\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = run("chat", "--max-new-tokens", 3, "--system", "Be brief.")
    assert result.code == 0
    assert len(said) == 3
    assert "Be brief." in said[0] and "first" in said[0]
    assert "first" in said[1] and "second" in said[1]
    assert "first" not in said[2] and "third" in said[2] and "Be brief." in said[2]
    assert "prompt tokens" in result.err and "prompt tokens" not in result.out


def test_chat_goes_on_after_a_turn_that_does_not_fit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1; " * 3000 + "\nhello\n"))
    result = run("chat", "--max-new-tokens", 2)
    assert result.code == 0  # Ctrl-D, the end of the input, leaves
    assert len([line for line in result.err.splitlines() if line.startswith("error: ")]) == 1
    assert "decode" in result.err.splitlines()[-1]


def test_bench_moe_json_is_one_flat_object(run: Run, short_timing: None) -> None:
    shape = ("--hidden", 256, "--inter", 128, "--experts", 4, "--topk", 2, "--tokens", 3)
    result = run("bench", "moe", "--format", "bf16", *shape, "--threads", 1, "--json")
    assert (result.code, result.err) == (0, "")
    measured = json.loads(result.out)
    assert all(isinstance(value, (str, int, float)) for value in measured.values())
    assert measured["format"] == "bf16"
    assert [measured[k] for k in ("tokens", "hidden", "inter", "experts", "topk", "threads")] == [
        *(3, 256, 128, 4, 2, 1)
    ]
    assert 0 < measured["us_p10"] <= measured["us_median"] <= measured["us_p90"]
    assert measured["gbps"] > 0 and measured["tflops"] > 0 and measured["roof_gbps"] > 0
    assert (measured["routing"], measured["distinct_experts"]) == ("balanced", 4)
    if measured["kernel"] == "generic":
        assert (measured["compute_roof_instruction"], measured["compute_roof_tflops"]) == ("", 0)
    else:
        products = "vfmadd231ps" if prefers_fma(detect()) else "vdpbf16ps"
        products = "tdpbf16ps" if measured["kernel"] == "amx" else products
        assert measured["compute_roof_instruction"] == products
        assert measured["compute_roof_tflops"] > measured["tflops"] > 0


MEASURED = MoEMeasurement(
    format="fp8",
    kernel="avx512",
    activations="bf16",
    routing="zipf",
    tokens=1,
    hidden=256,
    inter=128,
    experts=8,
    topk=2,
    threads=2,
    numa_nodes=1,
    cpu="a CPU",
    calls=100,
    distinct_experts=2.0,
    busiest_over_mean=4.0,
    us_median=12.5,
    us_p10=11.0,
    us_p90=20.0,
    mbytes_per_call=0.2,
    gbps=16.0,
    tflops=0.03,
    roof_gbps=32.0,
    roof_share=0.5,
    compute_roof_instruction="vdpbf16ps",
    compute_roof_tflops=1.0,
    compute_roof_share=0.03,
)


def test_bench_moe_table_has_units(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.profiling.measure.measure_moe", lambda *_, **__: MEASURED)
    lines = [" ".join(line.split()) for line in run("bench", "moe").out.splitlines()]
    assert lines == [
        "CPU a CPU, 2 threads",
        "kernel fp8 on avx512, bf16 activations",
        "layer 8 experts of 256 x 128, top-2",
        "routing zipf: 2 experts active, the busiest has 4.0 x mean",
        "call 1 token, 0.2 MB of distinct experts",
        "time 12.5 µs median, p10 11.0, p90 20.0, of 100 calls",
        "speed 16.00 GB/s, 0.030 TFLOP/s",
        "read roof 32.00 GB/s, timed in turns; share of it 50%",
        "compute roof 1.00 TFLOP/s on registers alone (vdpbf16ps); share of it 3%",
    ]


def test_bench_moe_without_a_compute_roof_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = replace(
        MEASURED, kernel="generic", compute_roof_instruction="", compute_roof_tflops=0.0
    )
    monkeypatch.setattr("runtime.profiling.measure.measure_moe", lambda *_, **__: measured)
    last = run("bench", "moe").out.splitlines()[-1]
    assert " ".join(last.split()) == "compute roof not measured: no loop for kernel generic"


def test_an_unknown_routing_is_one_line(run: Run) -> None:
    failed(run("bench", "moe", "--routing", "skewed"), "no routing 'skewed'. Use one of balanced")


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
BENCH = [
    pytest.param(
        ["router"], "bench router times a GPU's kernels.* sees no CUDA GPU. Install a CUDA build",
        id="no GPU, and no CPU to fall back to", marks=NO_CUDA,
    ),
    pytest.param(["moe", "--device", "cuda:0"], "sees no CUDA GPU", id="moe", marks=NO_CUDA),
    pytest.param(["attention", "--device", "cpu"], "attention has no kernel for cpu", id="cpu"),
    pytest.param(["linear", "--device", "tpu9"], "no device 'tpu9'", id="no such device"),
    pytest.param(["moe", "--device", "cuda:0", "--numa", 2], "--numa .* are the CPU's", id="numa"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "cause"), BENCH)
def test_bench_on_a_gpu_that_cannot_be_is_one_line(
    run: Run, options: list[object], cause: str
) -> None:
    failed(run("bench", *options), cause)


def test_bench_on_a_gpu_runs_one_case_of_the_benchmark(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def spy(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.append(command[1:])
        return subprocess.CompletedProcess(command, len(seen) - 1)

    monkeypatch.setattr("model.pretrained.check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("subprocess.run", spy)
    assert run("bench", "moe", "--device", "cuda:1", "--tokens", 3, "--json").code == 0
    assert seen[0][:8] == ["-P", "-m", "bench.gpu", "--op", "moe", "--device", "cuda:1", "--json"]
    assert {"--case", "tokens=3", "format=fp8", "hidden=7168"} <= set(seen[0])
    assert run("bench", "attention", "--kind", "gqa_decode").code == 1  # as the program ended
    assert "--debug" not in seen[1]
    run("bench", "attention", "--debug")
    assert "--debug" in seen[2][: seen[2].index("--case")]


def test_bench_on_a_gpu_says_what_killed_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.pretrained.check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    killed = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr("subprocess.run", lambda command, env: killed)
    failed(run("bench", "linear"), "bench linear ended with signal 9. Look into .* take smaller")


def test_bench_passes_the_activations_of_a_gpu_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, object]] = []
    for module in ("cli_bench", "cli_bench_gpu"):
        monkeypatch.setattr(f"model.{module}.run_case", lambda *given: seen.append(given[-1]))
    moe = ("bench", "moe", "--device", "cuda:0")
    for call in (moe, (*moe, "--activations", "fp8"), (*moe, "--activations", "bf16")):
        assert run(*call).code == 0
    assert run("bench", "linear", "--activations", "fp8").code == 0
    assert [flags["activations"] for flags in seen] == ["auto", "fp8", "bf16", "fp8"]
    failed(run(*moe, "--activations", "int8"), "--activations int8 are the CPU's")
    failed(run(*moe, "--kernel", ""), "--kernel, .* are the CPU's")
    failed(run("bench", "moe", "--activations", "fp8"), "fp8 are a GPU's. Add --device cuda:0")


def test_what_is_given_empty_is_not_taken_for_left_out(run: Run) -> None:
    failed(run("bench", "moe", "--kernel", ""), "no kernel ''. Use one of auto, ")
    failed(run("bench", "moe", "--activations", ""), "''")


def test_too_many_threads_name_the_flag_that_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKERNELS_THREADS", "9999")
    failed(run("bench", "moe"), "9999 threads .*Give PYKERNELS_THREADS [0-9]+ or fewer")
    failed(run("bench", "moe", "--threads", 9998), "9998 threads .*Give --threads [0-9]+ or fewer")


def test_bench_moe_help_names_every_format(run: Run) -> None:
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", run("bench", "moe", "--help").out).split())
    assert f"Weight format: {', '.join(FORMATS)}." in shown


USABLE = Topology.detect().usable
GENERATE = [
    pytest.param(["--device", "cuda:0"], "sees no CUDA GPU", id="no GPU", marks=NO_CUDA),
    pytest.param(["--device", "tpu9"], "no device 'tpu9'", id="no such device"),
    pytest.param(["--kernel", "amx9"], "no kernel 'amx9'", id="no such kernel"),
    pytest.param(["--kernel", ""], "no kernel ''", id="an empty kernel"),
    pytest.param(["--dtype", "int3"], "int3", id="no such dtype"),
    pytest.param(["--threads", USABLE + 1], f"{USABLE + 1} threads", id="too many threads"),
    pytest.param(["--numa", "both"], "'both' is not known", id="no NUMA setting"),
    pytest.param(["--numa", 99], r"--numa 99 .* NUMA node\(s\) have cores", id="not its nodes"),
    pytest.param(["--model", "/nowhere"], "no folder /nowhere", id="no folder"),
    pytest.param(["--rules", "/nowhere.yaml"], "/nowhere.yaml", id="no rules file"),
    pytest.param(["--max-new-tokens", 5000], "5000 new ones", id="more than the context"),
    pytest.param(["--temperature", "inf"], "temperature is inf", id="temperature inf"),
    pytest.param(["--top-p", 0], "top_p is 0", id="top-p 0"),
    pytest.param(["--seed", 2**64], "seed is 1844", id="seed of 65 bits"),
]


@pytest.mark.parametrize(("options", "cause"), GENERATE)
def test_bad_option_is_one_line(run: Run, options: list[object], cause: str) -> None:
    failed(run("generate", *options, PROMPT), cause)


def test_options_of_the_text_are_told_before_loading(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.pretrained.from_pretrained", lambda *_, **__: 1 / 0)
    for command in ("generate", "chat"):
        prompt = [PROMPT] if command == "generate" else []
        failed(run(command, "--top-p", 0, *prompt), "top_p is 0")


def test_prompt_longer_than_the_context_is_told_before_loading(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.pretrained.from_pretrained", lambda *_, **__: 1 / 0)
    failed(run("generate", "x = 1\n" * 4000), r"prompt has \d+ tokens, the model's context is \d+")


RULES = [
    ("- match: {class: NoSuchMoE}\n  replace: {class: model.modules.moe.FusedMoE}", "matches no"),
    ("- match: {name: mlp}\n  replace: {class: model.modules.moe.NoSuch}", "NoSuch"),
    ("- match: [", "rules.yaml"),
]


@pytest.mark.parametrize(("text", "cause"), RULES)
def test_bad_rules_are_one_line(run: Run, tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    failed(run("generate", "--rules", path, PROMPT), cause)


def _truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


def _lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def _set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


CHECKPOINTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("truncated shard", _truncate, r"model-\d+-of-\d+\.safetensors"),
    ("missing shard", _lose_a_shard, r"model-\d+-of-\d+\.safetensors"),
    ("unknown architecture", lambda f: _set_config(f, model_type="warp_drive"), "warp_drive"),
    ("other shapes", lambda f: _set_config(f, moe_intermediate_size=64), "shape"),
    ("more layers", lambda f: _set_config(f, num_hidden_layers=9), "missing"),
    ("fewer layers", lambda f: _set_config(f, num_hidden_layers=3), "no place for"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json"),
]


@pytest.mark.parametrize(("why", "spoil", "cause"), CHECKPOINTS, ids=[c[0] for c in CHECKPOINTS])
def test_spoilt_checkpoint_is_one_line(
    run: Run, tmp_path: Path, why: str, spoil: Callable[[Path], object], cause: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in model.EMBEDDED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spoil(folder)
    failed(run("generate", "--model", folder, PROMPT), cause)


def test_too_little_memory_names_both_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    failed(run("generate", PROMPT), r"needs [\d.]+ [GM]iB of main memory, 1\.0 MiB are free")


def test_bad_flag_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERNELS_SPIN_US", "soon")
    failed(run("generate", PROMPT), "PYKERNELS_SPIN_US='soon'")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_debug_shows_the_traceback(run: Run, where: str) -> None:
    command = ["generate", "--model", "/nowhere", PROMPT]
    command.insert(0 if where == "before" else 1, "--debug")
    result = run(*command)
    assert result.code == 2
    assert "Traceback" in result.err and "error: There is no folder /nowhere" in result.err


@pytest.mark.parametrize("end", ["", ".", ".."])
def test_a_bug_is_one_line_with_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"a bug\nin two lines{end}")

    monkeypatch.setattr("runtime.profiling.measure.measure_moe", broken)
    result = run("bench", "moe")
    assert (result.code, result.err) == (
        1,
        "error: unexpected ZeroDivisionError: a bug in two lines. "
        "Run it again with --debug for the traceback\n",
    )


STDOUT = [
    (OSError(28, "No space left on device"), "cannot be written: No space left on device. Free"),
    (
        UnicodeEncodeError("ascii", "a\xe9", 1, 2, "no"),
        "'\xe9' cannot be written as ascii. Use a UTF",
    ),
]


@pytest.mark.parametrize(("error", "cause"), STDOUT, ids=["full", "ascii"])
def test_a_stdout_that_takes_no_text_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("runtime.profiling.measure.measure_moe", broken)
    failed(run("bench", "moe"), cause)


def test_our_warnings_become_notes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def warns(*_: object, **__: object) -> None:
        warnings.warn_explicit(
            "rounded to bf16", UserWarning, "f.py", 1, module="model.checkpoint.load"
        )
        warnings.warn_explicit("noise", UserWarning, "g.py", 1, module="torch.nn")
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.profiling.measure.measure_moe", warns)
    result = run("bench", "moe")
    assert (result.code, result.err) == (130, "note: rounded to bf16\n\n")


def test_one_core_is_singular(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    failed(run("bench", "moe", "--threads", 2), "more than the 1 core that this process may use")


def test_usage_errors_are_exit_code_2(run: Run) -> None:
    for args in (["generate"], ["generate", "--seed", "x", PROMPT], ["dance"], ["bench", "-q"]):
        assert run(*args).code == 2
