"""The decode kernel written out for Hopper, on any CPU: its arithmetic, and who waits for whom.

On a GPU test_attention_decode.py runs the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import pykernels.gpu.common.launch as launch
from pykernels import ref
from pykernels.gpu.plans.attention import DecodePlan

from .test_attention_decode import check, mla, mla_inputs

DECODE = DecodePlan(rows=64, keys=64, warps=8, stages=1, warp_specialized=True)


@pytest.fixture
def warp_specialized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the interpreter's versions in the kernels' places; ``warp_specialized(without=...)``
    anew."""
    if not launch.interpreted():
        pytest.skip("for the interpreter: the GPU runs the real ones")
    from pykernels.gpu.attention import mla_decode
    from pykernels.gpu.attention.hopper import mla_decode as hopper_mla_decode
    from pykernels.gpu.attention.hopper import mla_split_kv

    from .gluon_shim import interpreted

    decode = hopper_mla_decode.mla_decode_hopper
    monkeypatch.setattr(mla_decode, "warp_specialized_takes", lambda *sizes: True)

    def rows_of(pages: torch.Tensor, width: int) -> TensorDescriptor:
        P, page, N = pages.shape
        return TensorDescriptor(pages, [P * page, N], [N, 1], [min(page, 64), width])

    monkeypatch.setattr(hopper_mla_decode, "rows_of", rows_of)
    monkeypatch.setattr(mla_split_kv, "mla_combine", interpreted(mla_split_kv.mla_combine))

    def put(without: str | None = None) -> None:
        made = interpreted(decode, without)
        monkeypatch.setattr(hopper_mla_decode, "mla_decode_hopper", made)

    put()
    return put


MLA = [
    ({"lengths": [150, 0, 64, 65]}, 1, "ragged: an empty sequence, whole blocks and one more"),
    ({"lengths": [333, 65]}, 0, "one program a sequence: no combining"),
    ({"lengths": [333]}, 9, "a part for each block"),
    ({"lengths": [500, 3, 70]}, 3, "a long sequence beside short ones"),
    ({"lengths": [130, 1], "NH": 20, "S": 4}, 1, "new tokens and heads over two tiles"),
    ({"lengths": [200, 72], "page": 8}, 1, "small pages"),
    ({"lengths": [300], "page": 256}, 1, "large pages"),
    ({"lengths": [140, 0, 64], "page": 64, "fp8": True}, 1, "E4M3, ragged"),
    ({"lengths": [200], "page": 128, "fp8": True}, 0, "E4M3, large pages, no combining"),
]


@pytest.mark.parametrize(("sizes", "per_sm", "why"), MLA, ids=[row[2] for row in MLA])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_mla_decode(
    sizes: dict[str, Any], per_sm: int, why: str, softcap: float | None, device, warp_specialized
) -> None:
    inputs, options = mla_inputs(device=device, L=512, R=64, **sizes)
    plan = DecodePlan(64, 64, 8, 1, per_sm, warp_specialized=True)
    check(mla, ref.mla_decode, inputs, options | {"softcap": softcap}, plan=plan)


@pytest.mark.parametrize("without", ["barrier", "fence_async_shared"])
def test_what_threads_owe_each_other_is_missed(without: str, device, warp_specialized) -> None:
    warp_specialized(without)
    inputs, options = mla_inputs([200], device, L=512, R=64)
    with pytest.raises(Exception, match=without.split("_")[0]):
        mla(*inputs, **options, plan=DECODE)


def test_ptxas_keeps_the_order() -> None:
    """Products run on while others are begun, exponentials are taken beside them, and the next
    step's weights asked for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hopper_sass"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    attention = ["prefill_hopper"] * 3 + ["mla_decode_hopper"] * 2
    linears = ["dequant_gemm"] * 4 + ["gemm_fp8_hopper"]
    decoded = ["dequant_gemm"] * 2
    experts = ["gemm_bf16_hopper", *decoded, *["gemm_fp8_hopper"] * 2, *decoded]
    products = linears + experts
    assert [row["kernel"] for row in rows] == attention + ["gemv_mma"] * 2 + products
    for row in rows:
        if row["kernel"] == "gemv_mma":
            assert row["late"] < 0.5, f"weights are asked for behind products: {row}"
            continue
        # Registers are decoded into every two products; 128 values of E4M3 are four products, a
        # scaled sum after each; 64 of bfloat16 are four, with a wait for those before them.
        least = 2 if row["kernel"] in products else 4
        assert row["waits"] <= row["products"] / least, f"products are serialized: {row}"
        summed = row["kernel"] in ("gemm_bf16_hopper", "gemm_fp8_hopper")
        assert not summed or row["spills"] == 0, f"the sums do not stay in registers: {row}"
        assert row["loose"] == 0, f"a thread arrives for warps that it was not joined with: {row}"
        if row["kernel"] == "prefill_hopper":
            assert row["beside"] >= 64, f"exponentials wait for the products: {row}"


def test_a_loose_arrival_is_seen() -> None:
    from .hopper_sass import loose_arrivals

    arrival, used = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "ld.shared.b32 %r2, [%r3];"
    assert loose_arrivals("\n".join([used, "bar.sync 3, 128;", arrival])) == 0
    assert loose_arrivals("\n".join(["bar.sync 3, 128;", used, arrival])) == 1
