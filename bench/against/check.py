"""Whether a kernel of the CPU computes what the reference does."""

from __future__ import annotations

import functools

import torch

from pykernels import cpu, ref
from pykernels.quant import PackedExperts, get_format
from pykernels.shapes import MoEShape
from pykernels.testing import balanced_routing, fit, flips, random_experts, relative_error

from .calls import OPS, Case
from .checked import TOKENS, Checked

FLOAT32_SUMS = 1e-6
"""Relative error that sums in float32 may have, as in ``tests/cpu/moe``."""

SUMS = 2e-6
"""Error that longer sums in float32 may have, as in ``tests/cpu/ops``."""

QUANTIZED = 0.02
"""What 127 steps of a token's inputs are off by."""

SMALL: dict[str, Case] = {
    "linear": {"inputs": 512, "outputs": 70},
    "attention": {"batch": 2, "context": 700},
    "router": {},
}
NEW = {"linear": "tokens", "attention": "new", "router": "tokens"}
"""The argument that takes ``TOKENS``."""

SHAPE = MoEShape(E=4, H=640, I=384, topk=2)
"""Ragged in blocks, and with several scales a row."""


def check_moe(fmt: str, kernel: str = "auto", activations: str = "bf16") -> Checked:
    """Calls of a small layer of random experts against ``pykernels.ref.moe_ffn`` in float64.

    Raises:
        PykernelsError: the kernel cannot run this format here.
    """
    experts = random_experts(fit(SHAPE, get_format(fmt)), get_format(fmt))
    calls = [_check(experts, T, kernel, activations) for T in TOKENS]
    return _worst(calls)


def _worst(calls: list[Checked]) -> Checked:
    wrong = [call for call in calls if not call.right]
    return wrong[0] if wrong else max(calls, key=lambda call: call.error / call.bound)


def check(case: Case) -> Checked:
    """The kernel of a case on small inputs (``calls``).

    Raises:
        PykernelsError: it cannot run here.
    """
    op = case["op"]
    if op == "moe":
        return check_moe(case["fmt"], case["kernel"], case["activations"])
    given = {name: value for name, value in case.items() if name not in ("op", "check")} | SMALL[op]
    bound = QUANTIZED if given.get("activations") == "int8" else SUMS
    checked = []
    for T in TOKENS:
        some = OPS[op](**given | {NEW[op]: T}, cached=True)
        (inputs,) = some.inputs
        error = relative_error(some.run(*inputs), some.truth(*inputs))
        checked.append(Checked(T, error, bound))
    return _worst(checked)


def _check(experts: PackedExperts, T: int, kernel: str, activations: str) -> Checked:
    routing = balanced_routing(T, experts.shape)
    g = torch.Generator().manual_seed(T)
    x = torch.randn(T, experts.shape.H, generator=g, device="cpu").to(torch.bfloat16)
    reference = functools.partial(
        ref.moe_ffn,
        x,
        routing.ids,
        routing.weights,
        experts,
        dtype=torch.float64,
        h_dtype=torch.bfloat16,
        activations=activations,
    )
    truth = reference()
    y = cpu.moe_ffn(
        x.float(), routing.ids, routing.weights, experts, kernel=kernel, activations=activations
    )
    return Checked(T, relative_error(y, truth), FLOAT32_SUMS + flips(reference, truth))
