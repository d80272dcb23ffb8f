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
from pykernels.cpu.intrin import amx
gemm = make_gemm(sys.argv[1], amx)
gemm.compile("(" + ", ".join(["int64"] * 10) + ")")
print("\\n".join(gemm.inspect_asm().values()))
"""

FEATURES = (
    "avx,avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,gfni,"
    "amx-tile,amx-bf16,amx-int8"
)


@pytest.mark.skipif(detect().machine != "x86_64", reason="x86 code only")
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int8", "int4", "mxfp4"])
def test_the_gemm_compiles_to_amx(fmt, tmp_path):
    variables = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join("+" + name for name in FEATURES.split(",")),
        "PYKERNELS_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fmt],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    dots = re.findall(r"tdpbf16ps\s+%tmm(\d), %tmm(\d), %tmm(\d)", done.stdout)
    assert len(dots) % 4 == 0 and len(dots) >= 4
    # AT&T order: b, a, c. The four products of two A tiles (4, 5) and two B tiles (6, 7).
    assert set(dots) == {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}
    assert "ldtilecfg" in done.stdout and "tilerelease" in done.stdout
