"""Tiny checkpoints, each written once a session; the command line in this process."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from model.cli.app import app
from model.cli.shared.common import State
from pykernels.quant import FORMATS
from runtime.profiling import measure

from . import tiny
from .checks import byte_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny.Tiny]:
    """`checkpoint(model_type, **options of tiny.make)`, made once for the same arguments."""
    made: dict[str, tiny.Tiny] = {}

    def get(model_type: str = "deepseek_v3", **options: Any) -> tiny.Tiny:
        key = f"{model_type} {sorted(options.items())}"
        if key not in made:
            made[key] = tiny.make(tmp_path_factory.mktemp("tiny"), model_type, **options)
        return made[key]

    return get


@pytest.fixture
def own(checkpoint: Callable[..., tiny.Tiny], tmp_path: Path) -> Callable[..., Path]:
    """Like `checkpoint`, but the folder of a private copy, to be spoilt."""

    def get(model_type: str = "deepseek_v3", **options: Any) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(checkpoint(model_type, **options).path, folder)
        return folder

    return get


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny deepseek_v3 checkpoint with a tokenizer, for the command line."""
    folder = tmp_path_factory.mktemp("writer")
    tiny.make(folder, "deepseek_v3", max_position_embeddings=512)
    byte_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")  # no eos: the text has a known length
    return folder


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """int64 [2, 17]: token ids for the tiny vocabularies, without their special tokens."""
    return torch.randint(2, 96, (2, 17), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def failed(result: Result, cause: str) -> None:
    """One line, `error: cause. hint.`, nothing on stdout, exit code 2."""
    lines = result.err.splitlines()
    assert (result.code, result.out, len(lines)) == (2, "", 1), result
    assert re.search(cause, lines[0]), lines[0]
    assert re.fullmatch(r"error: .+\. .+\.", lines[0]), lines[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run("generate", ...)` -> exit code and both streams; the environment is put back."""
    before = dict(os.environ)
    monkeypatch.setattr(State, "debug", False)
    monkeypatch.setenv("COLUMNS", "200")

    def run_once(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(arg) for arg in args], prog_name="pykernels")
        streams = capsys.readouterr()
        return Result(int(ended.value.code or 0), streams.out, streams.err)

    yield run_once
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def few_formats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`doctor` tries one weight format; kernels are tested in all of them elsewhere."""
    few = {name: FORMATS[name] for name in ("bf16",)}
    monkeypatch.setattr("pykernels.quant.FORMATS", few)
    return list(few)


@pytest.fixture
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench moe` times for half a second instead of four."""
    timed = functools.partial(measure.measure_moe, seconds=0.5)
    monkeypatch.setattr(measure, "measure_moe", timed)
