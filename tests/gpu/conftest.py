"""Every test here runs twice in the project's life: interpreted on any CPU, compiled on a GPU.

``device`` is "cuda" where there is a GPU; elsewhere "cpu", and Triton interprets (see the conftest
above). Tests marked ``gpu`` (large sizes, graphs, FP8 tensor cores) need the real thing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(x, stack, bias, plan) -> bfloat16 [M, N], by the plan's own kernel."""
    from pykernels.gpu.common import launch
    from pykernels.gpu.gemm.hopper import dequant
    from pykernels.gpu.gemm.linear import linear
    from pykernels.gpu.gemm.skinny import gemv_mma
    from pykernels.gpu.gemm.skinny import linear as skinny_linear
    from pykernels.gpu.plans.gemm import GemvMmaPlan, SkinnyPlan

    if launch.interpreted():
        from triton.tools.tensor_descriptor import TensorDescriptor

        from .gluon_shim import interpret

        class Descriptor:
            @staticmethod
            def from_tensor(tensor: torch.Tensor, block: list[int], layout: object) -> Any:
                return TensorDescriptor.from_tensor(tensor, block)

        kernels = (
            (skinny_linear, "skinny_linear"),
            (gemv_mma, "gemv_mma"),
            (dequant, "dequant_gemm"),
        )
        interpret(monkeypatch, *kernels)
        monkeypatch.setattr(dequant, "TensorDescriptor", Descriptor)

        poisoned = lambda *shape, **how: torch.full(shape, float("nan"), **how)  # noqa: E731
        monkeypatch.setattr(dequant, "_scratch", poisoned)
    elif torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("Hopper's")

    def call(x: torch.Tensor, stack: Any, bias: Any, plan: Any) -> torch.Tensor:
        x, stack = x.to(device), stack.to(device)
        bias = None if bias is None else bias.to(device)
        out = torch.full((x.shape[0], stack.N), float("nan"), dtype=torch.bfloat16, device=device)
        if not launch.interpreted():
            return linear(x, stack, bias, plan=plan, out=out)
        multiply = {
            GemvMmaPlan: gemv_mma.multiply_gemv_mma,
            SkinnyPlan: skinny_linear.multiply_skinny,
        }.get(type(plan), dequant.multiply_dequant)
        multiply(x, stack, out, bias, plan)
        return out

    return call
