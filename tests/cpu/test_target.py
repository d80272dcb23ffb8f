"""Backends are gated on the target: a CPU that lacks an instruction never meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pykernels import amx_state
from pykernels.cpu.isa import prefers_fma, prefers_int8_slices
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.registry import kernels, resolve
from pykernels.target import ISA_NAMES, Target, _compiled_features, _hardware, cache_sizes, detect

BARE = Target("an old CPU", "x86_64", frozenset({"avx2", "fma"}), 32768, 1 << 20, 1 << 24)


def test_digits_and_multiply_adds_where_bfloat16_products_are_slow():
    newer = frozenset(ISA_NAMES)
    intel, amd = (
        replace(BARE, isa=newer, vendor=vendor) for vendor in ("GenuineIntel", "AuthenticAMD")
    )
    assert prefers_int8_slices(intel) and not prefers_int8_slices(amd)
    assert prefers_int8_slices(replace(amd, isa=newer - {"avx512bf16"}))
    assert not prefers_int8_slices(replace(intel, isa=newer - {"avx512vnni"}))
    assert prefers_fma(intel) and not prefers_fma(amd)
    assert prefers_fma(replace(amd, isa=newer - {"avx512bf16"}))
    assert detect().vendor in Path("/proc/cpuinfo").read_text()


def test_every_backend_names_known_features():
    for backend in kernels():
        assert set(backend.features) <= set(ISA_NAMES)


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("avx512", _AVX512),
        ("amx", (*_AVX512, "avx512bf16", "avx512vbmi", "amx-tile", "amx-bf16", "amx-int8")),
    ],
)
def test_a_backend_is_refused_without_any_one_extension_that_it_emits(name, needed):
    """What else it can use has a stand-in (``instructions``)."""
    (backend,) = (b for b in kernels() if b.name == name)
    for feature in ISA_NAMES:
        target = replace(BARE, isa=frozenset(ISA_NAMES) - {feature})
        refused = f"this CPU lacks {feature}" if feature in needed else None
        assert backend.supports("fp8", target) == refused


def test_auto_falls_to_generic_where_avx512_is_missing():
    assert resolve("auto", "fp8", BARE).name == "generic"
    (avx512,) = (b for b in kernels() if b.name == "avx512")
    assert "avx512bw" in str(avx512.supports("fp8", BARE))


def test_an_explicit_request_never_falls_back():
    with pytest.raises(PykernelsError, match="kernel avx512 cannot run fp8 here.*avx512f"):
        resolve("avx512", "fp8", BARE)
    with env.override(kernel="avx512"), pytest.raises(PykernelsError, match="avx512f"):
        resolve("auto", "fp8", BARE)
    with pytest.raises(PykernelsError, match="no expert kernel 'amx9'"):
        resolve("amx9", "fp8", BARE)


def test_the_hint_of_a_refusal_is_one_that_helps():
    with pytest.raises(PykernelsError, match="Use kernel auto"):
        resolve("avx512", "fp8", BARE)
    for kernel in ("avx512", "auto"):  # auto is what the flag says
        with env.override(kernel="avx512"), pytest.raises(PykernelsError, match="Unset PYKERNELS_"):
            resolve(kernel, "fp8", BARE)
    with pytest.raises(PykernelsError, match="Use bf16 activations"):
        resolve("generic", "fp8", BARE, "int8")


@pytest.mark.parametrize("kernel", ["auto", "avx512", "generic"])
def test_activations_that_there_are_none_of_are_told_before_formats(kernel):
    with pytest.raises(PykernelsError) as refused:
        resolve(kernel, "fp8", BARE, "foo")
    assert str(refused.value) == "there are no 'foo' activations. Use bf16 or int8."


@pytest.mark.parametrize("name", sorted(detect().isa))
def test_a_hidden_feature_is_not_detected(name):
    with env.override(isa=frozenset({name})):
        assert name not in detect().isa


def test_every_cache_of_a_level_is_counted_once(tmp_path):
    """Four cores: two last-level caches of two each; instructions have their own first level."""
    for core in range(4):
        caches = (1, "Data", "48K", core), (1, "Instruction", "32K", core)
        for i, (level, kind, size, shared) in enumerate(
            (*caches, (3, "Unified", "96M", core // 2))
        ):
            index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{i}"
            index.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size)):
                (index / name).write_text(f"{text}\n")
            (index / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_sizes(1, tmp_path, [0, 2]) == [48 << 10] * 2
    assert cache_sizes(3, tmp_path, range(4)) == [96 << 20] * 2
    assert cache_sizes(3, tmp_path, [0, 1]) == [96 << 20]
    assert cache_sizes(2, tmp_path, range(4)) == []
    for core in (2, 3):  # some virtual machines do not say
        (tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index2/size").write_text("\n")
    assert cache_sizes(3, tmp_path, range(4)) == [96 << 20]


def test_the_last_level_is_all_that_the_cores_have_and_the_others_one_cache(monkeypatch):
    sizes = {1: [32, 48], 2: [1024, 2048], 3: [10, 20]}
    monkeypatch.setattr("pykernels.target.cache_sizes", sizes.__getitem__)
    assert _hardware.__wrapped__()[3:] == (48, 2048, 30)


def test_a_misspelt_feature_is_told_and_not_taken_for_hidden():
    with env.override(isa="-avx512_bf16"):  # as /proc/cpuinfo spells it
        with pytest.raises(PykernelsError, match="hides 'avx512_bf16'.*Hide some of .*avx512bf16"):
            detect()


SCRIPT = """
import torch
from pykernels import cpu, ref
from pykernels.quant import get_format
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import assert_close, balanced_routing, random_experts
shape = MoEShape(E=4, H=256, I=256, topk=2)
assert resolve("auto", "fp8", detect()).name == "generic", detect()
from pykernels.cpu.moe.stages import make_stages
from pykernels.cpu.gemv.portable import make_tiles
compiled = [make_stages(None).gate_up]
for name in ("fp8", "bf16", "q4_k"):  # q4_k has fp16 scales, which an old CPU cannot convert
    experts, routing = random_experts(shape, get_format(name)), balanced_routing(5, shape)
    compiled.append(make_tiles(name, "bf16"))
    x = torch.randn(5, 256)
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts)
    assert_close(cpu.moe_ffn(x, routing.ids, routing.weights, experts), truth, 0.006)
for routine in compiled:
    assembly = routine._library.get_asm_str()
    assert assembly and "zmm" not in assembly, "AVX-512 code for a CPU without it"
print("correct")
"""


@pytest.mark.skipif(detect().machine != "x86_64", reason="names x86 CPUs")
@pytest.mark.parametrize(
    "variables",
    [
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
        {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
        {"NUMBA_ENABLE_AVX": "0"},
    ],
    ids=["haswell", "nehalem", "avx off"],
)
def test_a_cpu_without_avx512_runs_the_generic_kernel(variables, tmp_path):
    """Compiled as for that CPU: no AVX-512 instruction is emitted, and the numbers are right."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables, "PYKERNELS_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "correct"


def test_of_a_feature_that_is_switched_twice_the_last_word_counts(monkeypatch):
    """As LLVM takes them."""
    named = "+avx512f,-avx2,+avx2,-avx512f,+unknown"
    monkeypatch.setattr("pykernels.target.numba_config.CPU_FEATURES", named)
    assert _compiled_features() == {"avx2"}


def test_features_of_another_cpu_than_this_are_not_taken_for_granted(monkeypatch):
    monkeypatch.setattr("pykernels.target.numba_config.CPU_FEATURES", None)
    monkeypatch.setattr("pykernels.target.numba_config.CPU_NAME", "no-such-cpu")
    assert _compiled_features() == frozenset()


def test_a_system_that_refuses_the_tiles_is_one_line(monkeypatch) -> None:
    asked = []

    class Sandbox:
        def syscall(self, *words: int) -> int:
            asked.append(words)
            return -1

    monkeypatch.setattr(amx_state.ctypes, "CDLL", lambda *_, **__: Sandbox())
    with pytest.raises(PykernelsError, match=r"refuses this process the AMX tiles.*kernel avx512"):
        amx_state.request_permission.__wrapped__()
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux, Documentation/arch/x86/xstate.rst
    assert asked == [(158, 0x1023, 18)]


@pytest.mark.skipif("amx-tile" in detect().isa, reason="this CPU has the tiles")
@pytest.mark.skipif(detect().machine != "x86_64", reason="asks as x86 CPUs do")
def test_a_cpu_without_tiles_says_why_they_are_refused() -> None:
    with pytest.raises(PykernelsError, match=r"AMX tiles \(errno [1-9]\d*\)"):
        amx_state.request_permission.__wrapped__()


def test_where_the_tiles_are_refused_auto_takes_the_next_kernel_and_says_why(monkeypatch) -> None:
    here = replace(BARE, isa=frozenset(ISA_NAMES))
    asked = []

    def refuse(*_: int) -> int:
        asked.append(1)
        return -1

    monkeypatch.setattr("pykernels.registry.detect", lambda: here)
    monkeypatch.setattr(amx_state.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=refuse))
    amx_state.request_permission.cache_clear()
    assert resolve("auto", "fp8", here).name == "avx512"
    assert asked
    with pytest.raises(PykernelsError, match="amx cannot run fp8 here: Linux.*Use kernel auto"):
        resolve("amx", "fp8", here)
    (amx, *_) = kernels()
    elsewhere = replace(here, cpu="another")
    assert amx.supports("fp8", elsewhere) is None  # nobody here can ask there
    monkeypatch.setattr(
        amx_state.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=lambda *_: 0)
    )
    assert resolve("auto", "fp8", here).name == "amx"
    amx_state.request_permission.cache_clear()  # what was granted here was made up


def test_kernels_are_compiled_without_counting_gpus(tmp_path):
    """CUDA starts a thread then, and no fork of the process can use it any more."""
    script = (
        "import torch\n"
        "torch.cuda.is_available = torch.cuda.device_count = None  # no call returns\n"
        "import pykernels.cpu, runtime.workers.pool, runtime.experts.routed\n"
        "from runtime.workers import queue as tasks\n"
        "tasks.compile_all()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYKERNELS_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
