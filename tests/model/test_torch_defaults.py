"""A checkpoint loads and runs the same whatever torch makes by default, set before imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import model

from .checks import logits
from .tiny import FP8_SIZES, Tiny

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")

import importlib, importlib.util, pkgutil, sys
import model

optional = set()
if importlib.util.find_spec("lm_eval") is None:  # the extra "eval"
    optional = {"model.evaluation.harness", "model.evaluation.lm_eval_model"}
for module in pkgutil.walk_packages(model.__path__, "model."):
    if module.name not in optional:
        importlib.import_module(module.name)
for folder in sys.argv[1:]:
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        lm = model.from_pretrained(folder)
        ids = torch.arange(2, 9, dtype=torch.int64, device="cpu")[None]
        with torch.no_grad():
            logits = lm(ids).logits
        print(logits.dtype, logits.double().flatten().tolist())
"""


def test_logits(checkpoint: Callable[..., Tiny]) -> None:
    made = checkpoint("qwen2_moe"), checkpoint("deepseek_v3", compressed="int4", **FP8_SIZES)
    folders = [str(each.path) for each in made]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    usual = [logits(model.from_pretrained(f), torch.arange(2, 9)[None]) for f in folders]
    want = [f"torch.bfloat16 {each.double().flatten().tolist()}" for each in usual]
    assert done.stdout.splitlines() == [want[0], want[0], want[1], want[1]]
