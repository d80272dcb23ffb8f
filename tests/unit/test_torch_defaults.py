"""Torch's default dtype and device change nothing, even if set before the first import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pykernels

PACKAGE = Path(pykernels.__file__).parent
RESULTS = """
import hashlib, importlib, pkgutil, pykernels, runtime
from pykernels import quant, ref
from pykernels.quant import activations
from pykernels.ref.sampling import perturbed
from pykernels.shapes import MoEShape

for package in (pykernels, runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("pykernels.gpu."):  # which needs Triton
            importlib.import_module(module.name)

def tell(*tensors):
    for tensor in tensors:
        if tensor is not None:
            held = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            print(tensor.dtype, tensor.device, hashlib.sha256(held).hexdigest())

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
matrix = torch.randn(64, 256, generator=g, dtype=torch.float32, device="cpu")
one = torch.ones(3, 1, dtype=torch.int64, device="cpu")
for fmt in quant.FORMATS.values():
    packed = quant.PackedExperts(MoEShape(E=2, H=256, I=256, topk=1), fmt)
    packed.pack(1, *3 * [fmt.quantize(matrix.repeat(4, 1))])
    back = packed.unpack(1)[2]
    y = ref.moe_ffn(matrix[:3], one, one.float(), packed)
    tell(back.data, back.scale, fmt.dequantize(back), y)
for kind in activations.GROUPS:
    codes = activations.quantize(matrix, kind)
    tell(codes.q, codes.scale, activations.dequantize(codes), activations.sums(codes.q, 16))
tell(*activations.int8_slices(matrix.bfloat16()), perturbed(matrix, one[:2, 0], matrix[:, 0].abs()))
tell(ref.rope_frequencies(64), ref.yarn_frequencies(64, 1e4, 4.0, 32))
tell(pykernels.cpu.weights.lookup.TABLES)
"""


def test_imports_and_numbers_are_the_same_under_other_defaults(capsys) -> None:
    """In a process of its own, where tables that are made at import are made under them."""
    threads = torch.get_num_threads()
    exec(RESULTS, {"torch": torch})
    torch.set_num_threads(threads)
    defaults = "torch.set_default_dtype(torch.bfloat16); torch.set_default_device('meta')"
    command = [sys.executable, "-c", f"import torch\n{defaults}\n{RESULTS}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == capsys.readouterr().out != ""


MAKERS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}


@pytest.mark.parametrize("folder", ["pykernels", "runtime", "model"])
def test_every_tensor_that_is_made_names_its_dtype_and_device(folder):
    """On any machine, also for the default "cuda", which only some have."""
    silent = []
    for file in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            named = {keyword.arg for keyword in node.keywords}
            if of_torch and node.func.attr in MAKERS and not {"dtype", "device"} <= named:
                silent.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert not silent
