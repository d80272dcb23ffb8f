"""The Gluon kernels: interpreted where there is no GPU, the real ones on one that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pykernels.gpu.attention import gqa_decode_fp8, select
from pykernels.gpu.attention.hopper import gqa_decode, mla_decode, mla_split_kv, prefill
from pykernels.gpu.common import launch

from ..gluon_shim import interpret

KERNELS = (
    (gqa_decode_fp8, "gqa_decode_fp8"),
    (gqa_decode, "gqa_decode_ring"),
    (mla_decode, "mla_decode_hopper"),
    (mla_split_kv, "mla_combine"),
    (prefill, "prefill_hopper"),
)


@pytest.fixture
def gluon(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with a name of Gluon's that shall do nothing, in the interpreter."""

    def put(without: str | None = None) -> None:
        interpret(monkeypatch, *KERNELS, without=without)

    if launch.interpreted():
        monkeypatch.setattr(select, "decode_kernel_runs", lambda *given: True)
        monkeypatch.setattr(select, "prefill_kernel_runs", lambda *given: True)
        put()
    return put


@pytest.fixture
def hopper(device: torch.device, gluon: Callable[..., None]) -> Callable[..., None]:
    """The same; on a GPU Hopper alone."""
    if not launch.interpreted() and launch.arch(device)[0] != 9:
        pytest.skip("the kernel is for Hopper")
    return gluon
