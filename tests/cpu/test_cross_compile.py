"""AMX kernels compiled on any machine for a CPU that has it: missing instructions show here."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pykernels.target import detect

SCRIPT = """
import sys
from pykernels.cpu.gemm_amx import make_gemm
from pykernels.cpu.instructions import instructions
from pykernels.cpu.intrin import amx
from pykernels.target import detect
gemm = make_gemm(sys.argv[1], instructions(detect()), sys.argv[2], amx)
print(gemm._library.get_asm_str())
"""

FEATURES = (
    "avx,avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,"
    "avx512vnni,gfni,amx-tile,amx-bf16,amx-int8"
)

# AT&T order: b, a, c. A tiles are 4 and 5, B tiles 6 and 7.
WIDE = {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}  # 2 x 2
NARROW = {("6", "4", "0"), ("7", "5", "1"), ("6", "4", "2"), ("7", "5", "3")}  # one after another


@pytest.mark.skipif(detect().machine != "x86_64", reason="x86 code only")
@pytest.mark.parametrize(
    ("fmt", "activations", "product", "tiles"),
    [
        *((fmt, "bf16", "tdpbf16ps", WIDE) for fmt in ("bf16", "fp8", "q6_k")),
        *((fmt, "bf16", "tdpbf16ps", NARROW) for fmt in ("int4", "q4_k")),
        *((fmt, "int8", "tdpbssd", WIDE) for fmt in ("int8", "q5_k", "q6_k")),
        ("int4", "int8", "tdpbssd", NARROW),
    ],
)
def test_the_gemm_compiles_to_amx(fmt, activations, product, tiles, tmp_path):
    variables = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join("+" + name for name in FEATURES.split(",")),
        "PYKERNELS_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fmt, activations],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    dots = re.findall(product + r"\s+%tmm(\d), %tmm(\d), %tmm(\d)", done.stdout)
    assert set(dots) == tiles
    assert "ldtilecfg" in done.stdout and "tilerelease" in done.stdout
