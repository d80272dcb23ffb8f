"""`pykernels convert`: a table or JSON, a cache that generates, --verify, errors as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import Run, failed

PARTS = ["ends", *(f"layer-{i:05d}" for i in range(3))]


@pytest.fixture
def packed(run: Run, writer: Path, tmp_path: Path) -> Path:
    target = tmp_path / "cache"
    result = run("convert", writer, target, "--threads", 1)
    assert result.code == 0, result.err
    return target


def test_the_table_has_errors_of_what_was_converted(run: Run, writer: Path, tmp_path: Path) -> None:
    result = run("convert", writer, tmp_path / "cache", "--format", "int8", "--threads", 1)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == ["part", "formats", "size", "error", "of", "experts"]
    assert [line.split()[0] for line in lines[1:]] == PARTS
    assert lines[-1].rstrip().endswith("%") and "%" not in lines[1]


def test_a_cache_writes_text(run: Run, packed: Path) -> None:
    options = ("--max-new-tokens", 4, "--temperature", 0, "--threads", 1)
    result = run("generate", "--model", packed, *options, "ab")
    assert result.code == 0 and result.out, result.err
    failed(run("generate", "--model", packed, "--eager", *options, "ab"), "which the engine alone")
    assert "moe_ffn" in run("inspect", "--program", packed).out
    assert "as they were written" in run("convert", "--verify", packed).out


def test_bad_input_is_one_line(run: Run, writer: Path, packed: Path, tmp_path: Path) -> None:
    failed(run("convert", writer), "there is no DST")
    failed(run("convert", writer, tmp_path / "new", "--format", "int3"), "no weight format 'int3'")
    failed(run("convert", writer, packed, "--format", "int4"), "cache with another --format")
    failed(run("convert", "--verify", writer), "no packed cache")


def test_json_has_every_part(run: Run, writer: Path, packed: Path) -> None:
    result = run("convert", writer, packed, "--threads", 1, "--json")
    assert result.code == 0, result.err
    parts = json.loads(result.out)["parts"]
    assert [part["name"] for part in parts] == PARTS
    assert parts[-1]["errors"] == {} and list(parts[-1]["formats"]) == ["bf16"]
