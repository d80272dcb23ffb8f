"""A checkpoint is loaded and runs the same whatever torch makes by default, set before imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import model

from .tiny import FP8_SIZES, Tiny

NARROW, WIDE = (f"torch.set_default_dtype(torch.{kind})" for kind in ("bfloat16", "float64"))
DEFAULTS = {
    "narrower than float32": NARROW,
    "wider, and elsewhere": f"{WIDE}; torch.set_default_device('meta')",
}
TEXTS = """
import importlib, pkgutil, sys
import model

for module in pkgutil.walk_packages(model.__path__, "model."):
    importlib.import_module(module.name)
for folder in sys.argv[1:]:
    lm = model.from_pretrained(folder)
    ids = torch.arange(2, 9, dtype=torch.int64, device="cpu")[None]
    with torch.no_grad():
        logits = lm(ids).logits
    print(logits.dtype, logits.double().sum().item(), logits.double().square().sum().item())
    print(lm.generate(ids, max_new_tokens=4, do_sample=False).tolist())
"""


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Tiny]) -> list[str]:
    made = checkpoint("qwen2_moe"), checkpoint("deepseek_v3", compressed="int4", **FP8_SIZES)
    return [str(each.path) for each in made]


def texts(default: str, folders: list[str]) -> list[str]:
    program = f"import torch\n{default}\n{TEXTS}"
    done = subprocess.run(
        [sys.executable, "-c", program, *folders],
        capture_output=True,
        text=True,
        cwd=Path(model.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def usual(folders: list[str]) -> list[str]:
    return texts("", folders)


@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_logits_and_texts(default: str, folders: list[str], usual: list[str]) -> None:
    assert len(usual) == 4
    assert texts(default, folders) == usual
