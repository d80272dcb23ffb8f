"""AMX and AVX-VNNI kernels compiled on any machine for a CPU that has them: missing instructions
show here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pykernels.target import detect

from .kernels import only_with_all

SCRIPT = """
import json, sys
from numba import types
from pykernels.cpu import jit
from pykernels.cpu.gemv import amx as gemv_amx
from pykernels.cpu.gemm.amx import make_gemm
from pykernels.cpu.isa import instructions
from pykernels.cpu.intrin import amx
from pykernels.target import detect
ops, (gemms, few) = instructions(detect()), json.loads(sys.argv[1])
for fmt, activations in gemms:
    gemm = make_gemm(fmt, ops, activations, amx)
    print(json.dumps([fmt, activations, gemm._library.get_asm_str()]))
for fmt, M in few:
    tile = gemv_amx.make_tile(fmt, M, ops, amx)
    tile.compile((types.int64,) * 9)
    (compiled,) = tile.overloads.values()
    # Its products are a routine that is linked by name: the last one that was made.
    products = next(made for made in reversed(jit._linked) if "multiply" in made.__name__)
    text = compiled.library.get_asm_str() + products._library.get_asm_str()
    print(json.dumps([fmt, M, text]))
"""

VNNI = """
from numba import types
from pykernels.cpu.gemv import avx2
for fmt in "q4_k", "q8_0":
    tile = avx2.make_tile(fmt, avx2.tile_row_format(fmt, "int8"), 4, True)
    tile.compile((types.int64,) * 9)
    (compiled,) = tile.overloads.values()
    print(compiled.library.get_asm_str())
"""

FEATURES = (
    "avx,avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,"
    "avx512vnni,gfni,amx-tile,amx-bf16,amx-int8"
)

# AT&T order: b, a, c. A tiles are 4 and 5, B tiles 6 and 7.
WIDE = {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}  # 2 x 2
NARROW = {("6", "4", "0"), ("7", "5", "1"), ("6", "4", "2"), ("7", "5", "3")}  # one after another


CASES = [
    ("fp8", "bf16", "tdpbf16ps", WIDE),
    ("q4_k", "bf16", "tdpbf16ps", NARROW),
    ("int8", "int8", "tdpbssd", WIDE),
    pytest.param("q6_k", "bf16", "tdpbf16ps", WIDE, marks=only_with_all),
    pytest.param("q5_k", "int8", "tdpbssd", WIDE, marks=only_with_all),
    pytest.param("int4", "int8", "tdpbssd", NARROW, marks=only_with_all),
]

FOUR = {("6", "4", "0"), ("6", "5", "1"), ("7", "4", "2"), ("7", "5", "3")}
FEW = [
    ("q8_0", 4, "tdpbssd", WIDE),  # two groups at a time
    pytest.param("int4-g128", 8, "tdpbssd", FOUR, marks=only_with_all),  # two A tiles
    pytest.param(  # a group is a block
        "fp8", 8, "tdpbf16ps", {("6", "4", "0"), ("7", "4", "1")}, marks=only_with_all
    ),
]
"""Tiles of few tokens."""

pytestmark = pytest.mark.skipif(detect().machine != "x86_64", reason="x86 code only")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory, pytestconfig) -> dict[tuple[str, str | int], str]:
    """Of each case's GEMM or tile, by one process for all."""

    def chosen(cases: list) -> list:
        """Format and activations or tokens of those that this run has."""
        if not pytestconfig.getoption("--all"):
            cases = [case for case in cases if not hasattr(case, "marks")]
        return [getattr(case, "values", case)[:2] for case in cases]

    made = [chosen(cases) for cases in (CASES, FEW)]
    where = tmp_path_factory.mktemp("sapphirerapids")
    out = _run_as("sapphirerapids", FEATURES, where, SCRIPT, json.dumps(made))
    return {(fmt, which): text for fmt, which, text in map(json.loads, out.splitlines())}


def _run_as(cpu: str, features: str, cache: Path, *script: str) -> str:
    """What a script prints whose kernels are compiled for another CPU."""
    variables = {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join("+" + name for name in features.split(",")),
        "PYKERNELS_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", *script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_avx2_tiles_of_integers_compile_to_avx_vnni(tmp_path):
    text = _run_as("alderlake", "avx,avx2,fma,bmi,bmi2,f16c,avxvnni", tmp_path, VNNI)
    assert len(re.findall(r"\{vex\}\s+vpdpbusd\s.*%ymm", text)) >= 64
    assert "vpmaddubsw" not in text and "zmm" not in text


@pytest.mark.parametrize(("fmt", "activations", "product", "tiles"), CASES)
def test_the_gemm_compiles_to_amx(fmt, activations, product, tiles, assembly):
    _check(assembly[fmt, activations], product, tiles)


@pytest.mark.parametrize(("fmt", "M", "product", "tiles"), FEW)
def test_tiles_of_few_tokens_compile_to_amx(fmt, M, product, tiles, assembly):
    _check(assembly[fmt, M], product, tiles)


def _check(text: str, product: str, tiles: set[tuple[str, str, str]]) -> None:
    dots = re.findall(product + r"\s+%tmm(\d), %tmm(\d), %tmm(\d)", text)
    assert set(dots) == tiles
    assert "ldtilecfg" in text and "tilerelease" in text
