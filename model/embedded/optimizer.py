"""Float32 master weights under a bfloat16 model: Muon for the layers' matrices, AdamW for the rest.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces a matrix' momentum by
the nearest orthogonal matrix; the scale 0.2 sqrt(max(N, K)) (Liu et al. 2025, arXiv:2502.16982,
section 2.2) gives its update the size of an AdamW step, so that both share one learning rate.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .fp8 import fake_quantize

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class OptimizerSettings:
    """Peak values; `lr_scale` of `MasterOptimizer.step` scales both learning rates."""

    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    muon_decay: float = 0.2
    adam_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.97)
    eps: float = 1e-10
    clip: float = 1.0


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices [B, N, K] with the singular vectors of `matrices`.

    Newton-Schulz iterations, in bfloat16 on a GPU.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # [B, n, n], n = min(N, K)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


@dataclass
class _MatrixGroup:
    """All matrices of one shape: their parameters, and the stacked masters [B, N, K]."""

    params: list[nn.Parameter]
    master: Tensor
    velocity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = torch.zeros_like(self.master)


def logical_matrices(name: str, weight: Tensor) -> Tensor:
    """A parameter as logical matrices [B, N, K]: fused `gate_up_proj` [E, 2I, H] -> [2E, I, H]."""
    if name.endswith("gate_up_proj"):
        return weight.unflatten(1, (2, -1)).flatten(0, 1)
    return weight if weight.dim() == 3 else weight.unsqueeze(0)


def is_layer_matrix(name: str, weight: Tensor) -> bool:
    """Whether a parameter is a layer's linear map: what FP8 stores, and what Muon updates."""
    return ".layers." in name and weight.dim() >= 2 and not name.endswith("mlp.gate.weight")


def _grad(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        raise ValueError("a parameter has no gradient; run the backward pass of the whole model")
    return param.grad


class MasterOptimizer:
    """Holds the masters; the model's own parameters are a rounded copy of them."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self._names = {p: n for n, p in model.named_parameters()}
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        self._others: list[nn.Parameter] = []
        for name, param in model.named_parameters():
            if is_layer_matrix(name, param):
                by_shape[logical_matrices(name, param).shape[1:]].append(param)
            else:
                self._others.append(param)
        self._groups = [
            _MatrixGroup(ps, torch.cat([self._matrices(p).detach().float() for p in ps]))
            for ps in by_shape.values()
        ]
        self._other_masters = [nn.Parameter(p.detach().float()) for p in self._others]
        wide = [m for m in self._other_masters if m.dim() >= 2]
        narrow = [m for m in self._other_masters if m.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": wide, "weight_decay": settings.adam_decay},
                {"params": narrow, "weight_decay": 0.0},
            ],
            lr=settings.adam_lr,
            betas=settings.betas,
            eps=settings.eps,
        )

    def _matrices(self, param: nn.Parameter) -> Tensor:
        return logical_matrices(self._names[param], param)

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        """One update from the parameters' gradients, which are cleared; then call `write_back`."""
        s = self.settings
        lr = s.muon_lr * lr_scale
        for group in self._groups:
            # An expert that no token chose has a zero gradient, not a missing one.
            grad = torch.cat(
                [logical_matrices(self._names[p], _grad(p)).float() for p in group.params]
            )
            group.velocity.lerp_(grad, 1 - s.momentum)
            update = orthogonalize(grad.lerp_(group.velocity, s.momentum))
            size = 0.2 * max(group.master.shape[1:]) ** 0.5
            group.master.mul_(1 - lr * s.muon_decay).add_(update, alpha=-lr * size)
        for param, master in zip(self._others, self._other_masters, strict=True):
            master.grad = _grad(param).float()
        nn.utils.clip_grad_norm_(self._other_masters, s.clip)
        for options in self._adam.param_groups:
            options["lr"] = s.adam_lr * lr_scale
        self._adam.step()
        for param in self._names:
            param.grad = None

    @torch.no_grad()
    def write_back(self, fp8: bool) -> None:
        """Copy the masters into the model; with `fp8`, the matrices as their FP8 form holds them.

        Gradients taken at the rounded weights and applied to the masters are the straight-through
        estimator: the model learns to live with its own rounding.
        """
        for group in self._groups:
            values = fake_quantize(group.master) if fp8 else group.master
            start = 0
            for param in group.params:
                count = self._matrices(param).shape[0]
                param.copy_(values[start : start + count].reshape(param.shape))
                start += count
        torch._foreach_copy_([*self._others], [*self._other_masters])

    @torch.no_grad()
    def masters(self) -> dict[str, Tensor]:
        """A float32 CPU copy of every master under its parameter's name and shape."""
        out: dict[str, Tensor] = {}
        for group in self._groups:
            start = 0
            for param in group.params:
                count = self._matrices(param).shape[0]
                piece = group.master[start : start + count].reshape(param.shape)
                out[self._names[param]] = piece.cpu().clone()
                start += count
        for param, master in zip(self._others, self._other_masters, strict=True):
            out[self._names[param]] = master.detach().cpu().clone()
        return out
