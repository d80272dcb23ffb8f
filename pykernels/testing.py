"""What kernel tests share: poisoned buffers, routing makers, errors against a yardstick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .quant import Biases, Format, PackedExperts
from .quant.layout import ceil_to
from .shapes import MoEShape, Routing


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer of NaN: what a kernel forgets to write, or reads before it is written, shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cpu")


def random_experts(
    shape: MoEShape, fmt: Format, seed: int = 0, down_fmt: Format | None = None
) -> PackedExperts:
    """Packed experts with Gaussian weights of the usual size, quantized to ``fmt`` (down:
    ``down_fmt``), and biases where ``shape.spec`` has them."""
    g = torch.Generator().manual_seed(seed)
    experts = PackedExperts(shape, fmt, down_fmt=down_fmt)
    I, H = shape.I, shape.H  # noqa: E741
    for expert in range(shape.E):
        sizes, formats = ((I, H), (I, H), (H, I)), (fmt, fmt, experts.down_fmt)
        matrices = [_normal(g, N, K) / K**0.5 for N, K in sizes]
        biases = None
        if shape.spec.bias:
            biases = Biases(*(_normal(g, N) for N, _ in sizes))
        quantized = (f.quantize(m) for f, m in zip(formats, matrices, strict=True))
        experts.pack(expert, *quantized, biases=biases)
    return experts


def fit(shape: MoEShape, fmt: Format) -> MoEShape:
    """The shape with H and I rounded up to what the format's blocks need."""
    H, I = (ceil_to(n, fmt.k_multiple) for n in (shape.H, shape.I))  # noqa: E741
    return replace(shape, H=H, I=I)


def balanced_routing(T: int, shape: MoEShape, seed: int = 0) -> Routing:
    """Every token takes ``topk`` distinct experts, all equally likely."""
    g = torch.Generator().manual_seed(seed)
    ids = _uniform(g, T, shape.E).argsort(-1)[:, : shape.topk].contiguous()
    return Routing(ids, _uniform(g, T, shape.topk))


def skewed_routing(T: int, shape: MoEShape, seed: int = 0) -> Routing:
    """Expert e is drawn with weight 1 / (e + 1) (Zipf): a few are crowded, some are empty."""
    g = torch.Generator().manual_seed(seed)
    odds = 1 / torch.arange(1, shape.E + 1, dtype=torch.float32, device="cpu")
    ids = torch.multinomial(odds.expand(T, -1), shape.topk, generator=g)
    return Routing(ids, _uniform(g, T, shape.topk))


def one_expert_routing(T: int, shape: MoEShape, expert: int = 0) -> Routing:
    """Every token takes the same ``topk`` experts, from ``expert`` on."""
    ids = (torch.arange(shape.topk, dtype=torch.int64, device="cpu") + expert) % shape.E
    weights = torch.full((T, shape.topk), 0.5, dtype=torch.float32, device="cpu")
    return Routing(ids.expand(T, -1).contiguous(), weights)


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """``|actual - truth| / |truth|`` in float64 (Frobenius norms); NaN anywhere gives NaN."""
    truth = truth.double()
    return float((actual.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def assert_close(
    actual: torch.Tensor, truth: torch.Tensor, bound: float, what: str = "result"
) -> None:
    """Fails, with the figure, unless the relative error is at most ``bound`` (NaN fails)."""
    assert actual.shape == truth.shape, f"{what}: shape {actual.shape}, expected {truth.shape}"
    if truth.numel() == 0:
        return
    error = relative_error(actual, truth)
    assert error <= bound, f"{what}: relative error {error:.2e} above {bound:.2e}"


def flips(reference: Callable[..., torch.Tensor], truth: torch.Tensor) -> float:
    """Relative error that sums in float32 may cause where ``h`` is rounded to bf16, or to codes.

    A sum that is a little off falls to the other side of a tie only if that is as near. So these
    inputs' own ties count, not those of a likely draw: the reference is taken again with every h a
    little larger, and smaller. A little is 2^-20 of its row's root mean square and as much of
    itself. Float32 sums of a thousand products are off by a quarter of that (the standard
    deviation, measured), and then one flip in 3000 is not counted; fewer, of fewer products. Which
    of the flips happen, and their signs, is open: twice the change of all is allowed.

    Args:
        reference: ``ref.moe_ffn`` with its arguments but ``nudge``.
        truth: its result without.
    """

    def nudged(sign: int) -> torch.Tensor:
        def nudge(h: torch.Tensor) -> torch.Tensor:
            size = h.abs() + h.square().mean(-1, keepdim=True).sqrt()
            return h + sign * 2.0**-20 * size

        return reference(nudge=nudge)

    return 2 * sum(relative_error(nudged(sign), truth) ** 2 for sign in (1, -1)) ** 0.5


def _normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float32, device="cpu")


def _uniform(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float32, device="cpu")
