"""`--check --against` of `pykernels bench`: a wrong kernel is told, an edit is timed as such."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.against import run as against
from bench.against.check import check, check_moe
from pykernels import cpu
from pykernels.errors import PykernelsError

TREE = {
    "pykernels/__init__.py": "",
    "pykernels/errors.py": "class PykernelsError(Exception): pass\n",
    "pykernels/shapes.py": "class MoEShape:\n    def __init__(self, **sizes): pass\n",
    "runtime/__init__.py": "",
    "runtime/profiling/__init__.py": "",
    "runtime/profiling/measure.py": """
from types import SimpleNamespace
MEGABYTES = 100
class MoECase:
    flops = 10**9
    layers = [SimpleNamespace(backend=SimpleNamespace(name="a kernel"))]
    def __init__(self, *case): pass
    def call(self): return 0.01, MEGABYTES * 10**6
""",
    "runtime/workers/__init__.py": "",
    "runtime/workers/pool.py": """
from contextlib import nullcontext
from types import SimpleNamespace
def make_pool(threads, numa): return nullcontext(SimpleNamespace(threads=threads))
""",
}
CASE = {
    "op": "moe",
    "fmt": "bf16",
    "tokens": 1,
    "shape": {"E": 4},
    "threads": 2,
    "kernel": "auto",
    "routing": "balanced",
    "activations": "bf16",
    "numa": "off",
}


@pytest.mark.skipif(not shutil.which("git"), reason="git is not here")
def test_the_ratio_is_that_of_the_edited_tree_over_the_commit(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *me, *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    measure = tmp_path / "runtime/profiling/measure.py"
    measure.write_text(measure.read_text().replace("= 100", "= 150"))
    monkeypatch.setattr(against, "ROOT", tmp_path)
    monkeypatch.setattr(against, "TURN", 0.001)
    both = against.run("HEAD", CASE)
    assert (both.gbps_before, both.gbps, both.ratio, both.tflops) == (10, 15, 1.5, 0.1)
    assert (both.kernel, both.threads) == ("a kernel", 2)
    with pytest.raises(PykernelsError, match="--against: .*Name a commit"):
        against.run("no-such-branch", CASE)


def test_a_kernel_that_is_a_little_off_is_wrong(monkeypatch) -> None:
    assert check_moe("bf16", "generic").right
    exact = cpu.moe_ffn
    monkeypatch.setattr(cpu, "moe_ffn", lambda *given, **how: 1.001 * exact(*given, **how))
    assert not check_moe("bf16", "generic").right


CASES = {
    "linear": {"format": "q8_0", "tokens": 1, "inputs": 512, "outputs": 70, "kernel": "generic"},
    "gqa_decode": {
        "kind": "gqa_decode",
        "batch": 1,
        "context": 700,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "format": "bf16",
    },
    "router": {"kind": "v3", "tokens": 1, "experts": 16, "topk": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_other_operations_are_checked_as_the_experts_are(name: str, monkeypatch) -> None:
    op = "attention" if name == "gqa_decode" else name
    case = {"op": op, **CASES[name]}
    assert check(case).right
    exact = getattr(cpu, name)

    def off(*given: Any, **how: Any) -> Any:
        found = exact(*given, **how)
        if name == "router":
            return replace(found, weights=1.001 * found.weights)
        return 1.001 * found

    monkeypatch.setattr(cpu, name, off)
    assert not check(case).right
