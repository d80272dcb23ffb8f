"""transformers without torch's compiler, and with a list of its classes that is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from model.startup.lean_import import import_transformers
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

INDEX = """
from model.startup.transformers_index import kept_index
with kept_index():
    import transformers
from transformers.utils import import_utils
folder = f"{transformers.__path__[0]}/models"
made = import_utils.create_import_structure_from_path(folder)  # which is not kept
theirs = import_utils.spread_import_structure(made)
assert len(theirs) > 1
assert import_utils.define_import_structure(folder) == theirs
for needed, modules in import_utils.define_import_structure(folder, prefix="models").items():
    assert modules == {f"models.{name}": names for name, names in theirs[needed].items()}
"""


def run(program: str, **flags: str) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, env=os.environ | flags)


def test_models_are_made_without_the_compiler() -> None:
    run(PROGRAM)


def test_the_kept_list_of_classes_is_that_of_transformers(tmp_path: Path) -> None:
    for _ in ("made", "read"):
        run(INDEX, PYKERNELS_CACHE_DIR=str(tmp_path))
    assert (tmp_path / "transformers-modules.json").is_file()
