"""`pykernels generate` and `chat`: text on stdout, all else on stderr, bad input as one line."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import model
from model.engine_stream import EngineStream, engine_stream
from model.llm import LLM
from model.text.generate import generate_stream
from pykernels import __version__
from pykernels.env import env
from pykernels.target import detect
from runtime.machine.topology import Topology
from runtime.profiling import roofline

from ..conftest import Result, Run, failed

PROMPT = "def quicksort(xs):"


@pytest.fixture(autouse=True)
def quick_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "kept_read_roof", lambda *_: 40.0)


@pytest.fixture
def without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come from memory, however few they are."""
    here = replace(detect(), l3=0)
    monkeypatch.setattr("pykernels.target.detect", lambda: here)


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.pretrained.from_pretrained", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("model.load.load_engine", lambda *_, **__: 1 / 0)


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"pykernels {__version__}\n", "")


WRONGLY_TYPED = [
    (("generate", "--temprature", 1, PROMPT), "--temprature. Did you mean --temperature?"),
    (("genrate", PROMPT), "'genrate'. Did you mean 'generate'?"),
    (("profile", "stp"), "'stp'. Did you mean 'step'?"),
    (("generate",), "Missing argument 'PROMPT'. pykernels generate --help"),
    (("generate", PROMPT, "--threads", 0), r"'--threads': .*\b1\b.*\. pykernels generate --help"),
    (("bench", "moe", "--tokens", "few"), "'--tokens': .*. pykernels bench moe --help"),
    (("generate", PROMPT, "--model"), "'--model' requires an argument"),
]


@pytest.mark.parametrize(("words", "told"), WRONGLY_TYPED)
def test_what_is_typed_wrongly_is_one_line(run: Run, words: tuple[object, ...], told: str) -> None:
    failed(run(*words), told)


def test_text_on_stdout_and_summary_on_stderr(run: Run, writer: Path, without_caches: None) -> None:
    options = ("--max-new-tokens", 12, "--temperature", 0, "--draft", "off")
    result = run("generate", "--model", writer, *options, PROMPT)
    with model.load_engine(writer) as llm:
        text = llm.generate(PROMPT, max_tokens=12, temperature=0).text
    assert (result.code, result.out) == (0, PROMPT + text + "\n")
    assert re.fullmatch(
        r"note: cpu: decode is predicted at [\d.]+ tok/s at a context of \d+, by 40 GB/s .*\n"
        rf"{len(PROMPT)} prompt tokens · prefill \d+ tok/s · decode [\d.]+ tok/s · "
        r"weights [\d.]+ GB/s \(\d+ % of the 40 GB/s read roof\)\n",
        result.err,
    )


def test_weights_in_the_caches_have_no_share_of_the_roof(
    run: Run, writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(detect(), l3=1 << 40)
    monkeypatch.setattr("pykernels.target.detect", lambda: here)
    result = run("generate", "--model", writer, "--max-new-tokens", 2, PROMPT)
    assert re.search(r"weights [\d.]+ GB/s$", result.err)


def test_without_memory_for_the_roof_there_is_no_share(
    run: Run, writer: Path, without_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = lambda threads, pool, least=0.0: roofline.read_roof(pool())  # noqa: E731
    monkeypatch.setattr(roofline, "kept_read_roof", measured)
    monkeypatch.setattr(roofline, "roof_bytes", lambda: 1 << 50)
    result = run("generate", "--model", writer, "--max-new-tokens", 2, PROMPT)
    assert result.code == 0
    note, figures = result.err.splitlines()[-2:]
    assert re.match(r"note: no share of the read roof: .* takes 1048576.0 GiB.*, .* are free", note)
    assert re.search(r"weights [\d.]+ GB/s$", figures)


def test_a_prompt_from_stdin(run: Run, writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "import os\n")
    result = run("generate", "--model", writer, "--max-new-tokens", 2, "-")
    assert (result.code, result.out[:10]) == (0, "import os\n")


def test_a_prompt_that_the_locale_cannot_decode(run: Run, writer: Path) -> None:
    """Its bytes as Python passes them under a locale of ASCII: as lone surrogates."""
    options = ("--model", writer, "--max-new-tokens", 2, "--temperature", 0)
    text = "na\xefve \u65e5"
    as_bytes = text.encode().decode("ascii", "surrogateescape")
    result = run("generate", *options, as_bytes)
    assert (result.code, result.out) == (0, run("generate", *options, text).out)
    failed(run("generate", *options, "na\udcefve"), "bytes that are no UTF-8 text")


STREAMS = {
    "stderr full": ("2>/dev/full", "", 0),
    "stdout full": (">/dev/full", "error: the output cannot be written: No space", 2),
}


@pytest.mark.parametrize("case", STREAMS)
def test_streams_that_take_nothing(case: str, writer: Path) -> None:
    """What is said about the work does not end it; what was asked for is lost in no silence. A
    locale of ASCII, with Python's UTF-8 mode off, changes no text."""
    redirected, told, code = STREAMS[case]
    given = ["generate", "--model", str(writer), "--max-new-tokens", "2", "\xe9"]
    command = shlex.join([sys.executable, "-m", "model.cli.main", *given])
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    ended = subprocess.run(
        ["sh", "-c", f"{command} {redirected}"], env={**os.environ, **locale}, capture_output=True
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.decode().startswith("" if told else "\xe9")
    lines = [line for line in ended.stderr.decode().splitlines() if line]
    assert len(lines) == bool(told) and "".join(lines).startswith(told)


def test_a_stdin_that_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, no_load: None
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for command in (("generate", "-"), ("chat",)):
        failed(run(*command), "stdin is closed")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    failed(run("generate", "-"), "stdin is no utf-8 text. Give it as UTF-8")


def test_chat_keeps_the_conversation_until_reset(
    run: Run, writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def spy(llm: LLM, prompt: list[int], **options: Any) -> EngineStream:
        assert llm.tokenizer is not None
        prompts.append(llm.tokenizer.decode(prompt))
        return engine_stream(llm, prompt, **options)

    monkeypatch.setattr("model.engine_stream.engine_stream", spy)
    stdin(monkeypatch, f"first\nsecond\n/reset\n{'x' * 600}\nthird\n/exit\nnever\n")
    result = run("chat", "--model", writer, "--max-new-tokens", 3, "--system", "Be brief.")
    assert result.code == 0
    first, second, third = prompts
    assert "Be brief." in first and "first" in first
    assert "first" in second and "second" in second
    assert "first" not in third and "third" in third and "Be brief." in third
    assert "x" * 600 not in third  # the turn that did not fit the context is forgotten
    assert "tokens and 3 of an answer do not fit the context of" in result.err
    assert result.err.count("prompt tokens") == 3 and "prompt tokens" not in result.out


def test_options_reach_the_model(run: Run, writer: Path) -> None:
    options = ("--temperature", 1.2, "--seed", 4, "--kernel", "generic", "--threads", 1)
    result = run("generate", "--model", writer, "--no-echo", "--max-new-tokens", 12, *options, "x")
    with model.load_engine(writer, kernel="generic") as llm:
        text = llm.generate("x", max_tokens=12, temperature=1.2, top_p=0.95, seed=4).text
    assert result.out == text + "\n"


def test_drafts_leave_the_text_as_it_is(run: Run) -> None:
    options = ("generate", PROMPT, "--max-new-tokens", 40, "--temperature", 0)
    plain, drafted = run(*options), run(*options, "--draft", "ngram")
    assert drafted.out == plain.out
    assert re.search(r"[1-9]\d* of \d+ drafts were right", drafted.err)


def test_eagerly_it_is_hugging_faces_own_forward(run: Run, writer: Path) -> None:
    options = ("--max-new-tokens", 12, "--temperature", 1.2, "--seed", 4, "--eager")
    result = run("generate", "--model", writer, "--no-echo", *options, "x")
    lm, tokenizer = model.from_pretrained(writer), model.load_tokenizer(writer)
    sampling = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.95, "seed": 4}
    assert result.out == "".join(generate_stream(lm, tokenizer, "x", **sampling)) + "\n"
    assert re.search(r"experts [\d.]+ GB/s", result.err)


USABLE = Topology.detect().usable
OPTIONS = [
    (["--kernel", ""], "no expert kernel ''"),
    (["--threads", USABLE + 1], f"{USABLE + 1} threads"),
]


@pytest.mark.parametrize(("options", "cause"), OPTIONS)
def test_bad_options(run: Run, writer: Path, options: list[object], cause: str) -> None:
    failed(run("generate", "--model", writer, *options, PROMPT), cause)


EARLY = [
    (["--top-p", 0, PROMPT], "top_p is 0"),
    (["x = 1\n" * 99], r"prompt has \d+ tokens, the model's context is \d+"),
]


@pytest.mark.parametrize(("args", "cause"), EARLY, ids=["sampling", "prompt"])
def test_what_is_found_before_loading(
    run: Run, writer: Path, no_load: None, args: list[object], cause: str
) -> None:
    failed(run("generate", "--model", writer, *args), cause)


def test_a_bad_flag(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERNELS_SPIN_US", "soon")
    failed(run("generate", PROMPT), "PYKERNELS_SPIN_US='soon'")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_debug_shows_the_traceback(run: Run, where: str) -> None:
    command = ["generate", "--model", "/nowhere", PROMPT]
    command.insert(0 if where == "before" else 1, "--debug")
    result = run(*command)
    assert result.code == 2
    assert "Traceback" in result.err and "error: There is no folder /nowhere" in result.err


def test_usage_errors_are_exit_code_2(run: Run) -> None:
    for args in (["generate"], ["generate", "--seed", "x", PROMPT], ["dance"], ["bench", "-q"]):
        assert run(*args).code == 2


@pytest.mark.parametrize(
    "command", [("generate", PROMPT), ("generate", PROMPT, "--eager"), ("chat",)]
)
def test_a_numa_setting_that_is_none(run: Run, no_load: None, command: tuple[str, ...]) -> None:
    for wrong in ("banana", "0", "-1", ""):
        failed(run(*command, "--numa", wrong), f"NUMA setting '{wrong}' is not known")


def test_more_made_up_nodes_than_cores(run: Run, no_load: None, writer: Path) -> None:
    with env.override(fake_numa=4096):
        command = ("generate", "--model", writer, PROMPT)
        failed(run(*command), "4096 made-up NUMA nodes of 1 core are more than the")
