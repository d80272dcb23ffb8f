"""One kernel's result on a tiny MoE layer, against the float32 reference."""

from __future__ import annotations

from pykernels.errors import PykernelsError

from .report import Fact

RESULT_TOLERANCE = 0.01
"""Relative error (norm over norm) of a kernel's result that the self-test accepts."""


def result_fact(fmt: str, kernel: str) -> Fact:
    """One kernel's result on a small layer, against the float32 reference."""
    import torch

    from pykernels import ref
    from pykernels.quant import get_format
    from pykernels.shapes import MoEShape
    from runtime.devices.cpu.routed import CpuExperts

    shape = MoEShape(E=4, H=256, I=256, topk=2)  # expert 3 gets no token
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")

    def matrix(N: int, K: int) -> torch.Tensor:
        return normal(N, K) / K**0.5

    name, hint = f"{fmt} on {kernel}", "Use --kernel generic and report this CPU"
    try:
        quantize = get_format(fmt).quantize
        experts = CpuExperts(shape, fmt, kernel=kernel)
        for expert in range(shape.E):
            gate, up = matrix(shape.I, shape.H), matrix(shape.I, shape.H)
            down = matrix(shape.H, shape.I)
            experts.load_expert(expert, quantize(gate), quantize(up), quantize(down))
        x = normal(3, shape.H).to(torch.bfloat16).float()  # [T, H]
        ids = torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int64, device="cpu")  # [T, topk]
        weights = normal(3, shape.topk).abs()  # [T, topk]
        result = experts(x, ids, weights)
        reference = ref.moe_ffn(x, ids, weights, experts.weights.slices[0])
    except PykernelsError as error:
        return Fact(name, "failed", error.cause, error.hint)
    except Exception as error:  # whatever a kernel raises, the report goes on
        return Fact(name, "failed", f"{name}: {type(error).__name__}: {error}", hint)
    return accuracy_fact(name, float((result - reference).norm() / reference.norm()), hint)


def accuracy_fact(name: str, distance: float, hint: str) -> Fact:
    """A result at this relative distance from the reference, as a fact."""
    # About 0.2 % comes from rounding h to bf16. `not <=`, so that NaN is wrong too.
    wrong = not distance <= RESULT_TOLERANCE
    problem = f"{name} is wrong: its result is {distance:.1%} from the reference" if wrong else ""
    return Fact(name, f"{distance:.2%} from the float32 reference", problem, hint)
