"""`pykernels kv`: what is kept on disk."""

from __future__ import annotations

from pathlib import Path

import model
from runtime.engine import SamplingParams

from ..conftest import Run, failed


def test_blocks_of_a_model_are_listed_checked_and_removed(run: Run, tmp_path: Path) -> None:
    with model.load_engine(model.EMBEDDED, threads=1, kv_disk=tmp_path) as llm:
        llm.engine.generate([list(range(2, 150))], SamplingParams(max_tokens=1))
    shown = run("kv", "ls", tmp_path)
    assert shown.code == 0 and shown.out.splitlines()[1].split()[0] == "embedded"
    assert run("kv", "verify", tmp_path).out == "2 of 2 blocks are whole\n"
    block = next(tmp_path.rglob("*.page"))
    block.write_bytes(block.read_bytes()[:-1])
    result = run("kv", "verify", tmp_path, "--remove")
    assert result.code == 0 and f"{block}: it has another size" in result.out.replace("\n", " ")
    assert run("kv", "verify", tmp_path).out == "1 of 1 blocks are whole\n"
    assert run("kv", "clear", tmp_path).out == "0.1 MiB removed\n"
    failed(run("kv", "ls", tmp_path), "holds no blocks of the KV cache. Give the directory")
