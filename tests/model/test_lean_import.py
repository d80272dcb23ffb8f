"""transformers without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from model.lean_import import import_transformers
import_transformers()
import torch
from model import EMBEDDED
from model.checkpoint.config import read_config
from model.pretrained import build_meta
config = read_config(EMBEDDED)
build_meta(config, torch.bfloat16)
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
from transformers import AutoModelForCausalLM
config.num_hidden_layers = 1
model = AutoModelForCausalLM.from_config(config)
model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(1)).item() == 2
"""


def test_models_are_made_without_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)
