"""The registry: which kernel a request gets; a CPU that lacks an instruction never meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pykernels import amx_state, cpu, ref, registry
from pykernels.cpu.gemv import portable
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, get_format
from pykernels.registry import Backend, get_backend, kernels, register, resolve
from pykernels.shapes import MoEShape
from pykernels.target import ISA_NAMES, Target, detect
from pykernels.testing import assert_close, balanced_routing, random_experts

BARE = Target("an old CPU", "x86_64", frozenset({"avx2", "fma", "f16c"}), 32768, 1 << 20, 1 << 24)
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")


def test_auto_is_the_fastest_that_can():
    assert resolve("auto", "fp8", BARE).name == "avx2"
    assert resolve("auto", "fp8", replace(BARE, isa=frozenset({"avx2"}))).name == "generic"
    assert resolve("auto", "fp8", replace(BARE, isa=frozenset(_AVX512))).name == "avx512"
    with env.override(isa=frozenset({"avx512bw", "fma"})):
        assert resolve("auto", "fp8", detect()).name == "generic"


def test_a_format_with_portable_tiles_alone_runs_on_them(monkeypatch):
    """As while a format is being added: no kernel without tiles of it is chosen."""
    monkeypatch.setitem(FORMATS, "mine", get_format("fp8"))
    for isa in (BARE.isa, frozenset(ISA_NAMES)):
        assert resolve("auto", "mine", replace(BARE, isa=isa)).name == "generic"
    with pytest.raises(PykernelsError, match="avx2 cannot run mine here: it has no tiles of mine"):
        resolve("avx2", "mine", BARE)


REFUSED = [
    ("avx512", "auto", "bf16", "kernel avx512 cannot run fp8 here: .*avx512f.*Use kernel auto"),
    ("auto", "avx512", "bf16", "kernel avx512 cannot run fp8 here.*Unset PYKERNELS_KERNEL"),
    ("avx2", "auto", "int8", "fp8 weights are not multiplied .*Use bf16 activations"),
    ("generic", "auto", "int8", "fp8 weights are not multiplied .*Use bf16 activations"),
    ("auto", "auto", "foo", "^there are no 'foo' activations. Use bf16 or int8.$"),
    (
        "amx9",
        "auto",
        "bf16",
        "no expert kernel 'amx9'. Use auto or one of amx, avx512, avx2, generic",
    ),
    ("auto", "amx9", "bf16", "PYKERNELS_KERNEL='amx9' cannot be used.*Set it to one of auto, amx"),
]


@pytest.mark.parametrize(("kernel", "flag", "activations", "told"), REFUSED)
def test_a_request_is_refused_with_a_hint(kernel, flag, activations, told):
    """A name asked for never falls back to another kernel."""
    with env.override(kernel=flag), pytest.raises(PykernelsError, match=told):
        resolve(kernel, "fp8", BARE, activations)


def test_a_module_of_tiles_is_a_backend(monkeypatch):
    """As in the README, or in a notebook, where it is a function."""
    monkeypatch.setattr(registry, "BACKENDS", list(registry.BACKENDS))
    shape = MoEShape(E=2, H=128, I=128, topk=1)
    experts, routing = random_experts(shape, get_format("fp8")), balanced_routing(3, shape)
    args = torch.randn(3, 128), routing.ids, routing.weights, experts
    for build in ("pykernels.cpu.gemv.portable:make_tiles", portable.make_tiles):
        mine = register(Backend("mine", "my first kernel", (), build=build))
        assert kernels()[-1] == mine == get_backend("mine") and len(kernels()) == 5
        assert resolve("auto", "fp8", BARE).name == "avx2"
        assert_close(cpu.moe_ffn(*args, kernel="mine"), ref.moe_ffn(*args), 0.01)


def test_the_system_may_refuse_amx(monkeypatch) -> None:
    """Then auto takes the next kernel, and a request for AMX says why."""
    here, answer = replace(BARE, isa=frozenset(ISA_NAMES)), -1
    libc = SimpleNamespace(syscall=lambda *_: answer)
    monkeypatch.setattr("pykernels.target.detect", lambda: here)
    monkeypatch.setattr(amx_state.ctypes, "CDLL", lambda *_, **__: libc)
    amx_state.request_permission.cache_clear()
    assert resolve("auto", "fp8", here).name == "avx512"
    refused = "amx cannot run fp8 here: Linux refuses this process the AMX.*Use kernel auto"
    with pytest.raises(PykernelsError, match=refused):
        resolve("amx", "fp8", here)
    assert get_backend("amx").supports("fp8", replace(here, cpu="another")) is None  # cannot ask
    answer = 0
    assert resolve("auto", "fp8", here).name == "amx"
    amx_state.request_permission.cache_clear()  # what was granted here was made up


SCRIPT = """
import torch
torch.cuda.is_available = torch.cuda.device_count = None  # CUDA would start a thread: nobody calls
from pykernels import cpu, ref
from pykernels.cpu.gemv.portable import make_tiles
from pykernels.cpu.moe.epilogue_portable import make_epilogue
from pykernels.cpu.moe.stages import make_stages
from pykernels.quant import FORMATS, get_format
from pykernels.registry import resolve
from pykernels.shapes import SWIGLU, MoEShape
from pykernels.target import detect
from pykernels.testing import assert_close, balanced_routing, random_experts
shape = MoEShape(E=2, H=256, I=256, topk=1)
assert resolve("auto", "fp8", detect()).name == "generic", detect()
compiled = [make_tiles("q4_k", "bf16"), make_stages(make_epilogue(SWIGLU)).gate_up]
experts, routing = random_experts(shape, get_format("q4_k")), balanced_routing(5, shape)
x = torch.randn(5, 256)
truth = ref.moe_ffn(x, routing.ids, routing.weights, experts)
assert_close(cpu.moe_ffn(x, routing.ids, routing.weights, experts), truth, 0.006)
for routine in compiled:
    assembly = routine._library.get_asm_str()
    assert assembly and "zmm" not in assembly and "ymm" not in assembly
print("correct")
"""


@pytest.mark.skipif(detect().machine != "x86_64", reason="names x86 CPUs")
def test_a_cpu_without_avx_runs_the_generic_kernel(tmp_path):
    """Compiled as for a Nehalem, which cannot even convert the fp16 scales of q4_k."""
    variables = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables, "PYKERNELS_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "correct"
