"""The small kernels between the large ones, at the sizes of DeepSeek-V3 and of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.cases.step import ops as step_ops
from bench.harness.timing.case import Case, built, rotating, sets_for
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.mla_read import mla_read
from pykernels.gpu.embedding import embed
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.sampling import greedy, sample
from pykernels.ref.sampling.inputs import SamplingInputs

BF16 = torch.bfloat16


def _sets(make: Callable[[], tuple[Any, ...]], nbytes: int, device: torch.device) -> list[Any]:
    return [make() for _ in range(min(sets_for(nbytes, device), 32))]


def norm_case(T: int, H: int, device: torch.device) -> Case:
    """RMSNorm of x plus residual, both results written."""
    nbytes = 2 * T * H * 4 + 2 * H
    weight = torch.rand(H, device=device, dtype=BF16)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(T, H, device=device).to(BF16), torch.randn(T, H, device=device).to(BF16)

    sets = _sets(make, nbytes, device)
    out = torch.empty(T, H, device=device, dtype=BF16), torch.empty(T, H, device=device, dtype=BF16)

    def peer(x: torch.Tensor, residual: torch.Tensor) -> object:
        total = x + residual
        return F.rms_norm(total, (H,), weight, 1e-6), total

    return Case(
        "small_ops",
        "rms_norm + residual",
        {"tokens": T, "hidden": H},
        rotating(lambda x, r: rms_norm(x, weight, 1e-6, r, out), sets),
        nbytes,
        0,
        {"torch": rotating(peer, sets)},
        len(sets),
    )


def embed_case(T: int, V: int, H: int, device: torch.device) -> Case:
    table = torch.randn(V, H, device=device, dtype=BF16)
    sets = [(torch.randint(0, V, (T,), device=device),) for _ in range(32)]
    out = torch.empty(T, H, device=device, dtype=BF16)
    return Case(
        "small_ops",
        "embed",
        {"tokens": T, "vocab": V, "hidden": H},
        rotating(lambda ids: embed(ids, table, out=out), sets),
        2 * 2 * T * H + 8 * T,
        0,
        {"torch": rotating(lambda ids: F.embedding(ids, table), sets)},
        32,
    )


def mla_read_case(B: int, K: int, eight: bool, device: torch.device) -> Case:
    """The cached latents of B prefixes of K tokens to bf16 rows."""
    page, L, R = 64, 512, 64
    nbytes = B * K * (L * (1 if eight else 2) + 4 * eight + 2 * R + 2 * (L + R))
    pages = B * K // page
    dtype = torch.float8_e4m3fn if eight else BF16
    starts = torch.arange(B, device=device, dtype=torch.int32) * K
    lengths = torch.full_like(starts, K)

    def make() -> tuple[Any, ...]:
        latent, rotated = (torch.randn(pages, page, n, device=device, dtype=BF16) for n in (L, R))
        scale = torch.rand(pages, page, device=device) if eight else None
        return latent.to(dtype), rotated, torch.randperm(pages, device=device).int(), scale

    sets = _sets(make, nbytes, device)
    out = (
        torch.empty(B * K, L, device=device, dtype=BF16),
        torch.empty(B * K, R, device=device, dtype=BF16),
    )

    def ours(latent: Any, rotated: Any, table: Any, scale: Any) -> object:
        return mla_read(latent, rotated, table.view(B, -1), starts, lengths, B * K, scale, out)

    def peer(latent: Any, rotated: Any, table: Any, scale: Any) -> object:
        if scale is None:
            return latent[table], rotated[table]
        codes = latent.view(torch.uint8)[table].view(dtype)
        return (codes.float() * scale[table].unsqueeze(-1)).to(BF16), rotated[table]

    return Case(
        "small_ops",
        "mla_read",
        {"batch": B, "context": K, "cache": "fp8" if eight else "bf16"},
        rotating(ours, sets),
        nbytes,
        0,
        {"torch": rotating(peer, sets)},
        len(sets),
    )


def _sampling_inputs(R: int, how: str, device: torch.device) -> SamplingInputs:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((R,), value, dtype=dtype, device=device)

    return SamplingInputs(
        temperature=column(0.8),
        top_k=column(50 if "top-k" in how else 0, torch.int32),
        top_p=column(0.9 if "top-p" in how else 1.0),
        min_p=column(0.0),
        seed=column(0, torch.int64),
        draws=column(0, torch.int64),
        logprobs=column(20 if "logprobs" in how else -1, torch.int32),
    )


def sample_case(T: int, V: int, how: str, device: torch.device) -> Case:
    """Greedy, temperature, top-k, top-p, both, with the 20 likeliest. Bytes: the logits once."""
    nbytes = 4 * T * V
    sets = _sets(lambda: (torch.randn(T, V, device=device) * 3,), nbytes, device)
    inputs, heat = _sampling_inputs(T, how, device), torch.full((T,), 0.8, device=device)
    top_k, top_p = "top-k" in how, "top-p" in how
    out = torch.empty(T, dtype=torch.int64, device=device)

    def ours(logits: torch.Tensor) -> object:
        return greedy(logits, out) if how == "greedy" else sample(logits, inputs)

    def peer(logits: torch.Tensor) -> torch.Tensor:
        if how == "greedy":
            return logits.argmax(-1)
        logits = logits / heat.unsqueeze(1)
        if top_k:
            least = logits.topk(50, -1)[0][:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if top_p:
            ordered, order = logits.sort(-1)
            drop = ordered.softmax(-1).cumsum(-1) <= 0.1
            logits = logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)
        if "logprobs" in how:
            logits.log_softmax(-1).topk(20, -1)
        noise = torch.empty_like(logits).exponential_()
        return (logits.softmax(-1) / noise).argmax(-1)

    return Case(
        "small_ops",
        "sample",
        {"rows": T, "vocab": V, "how": how},
        rotating(ours, sets),
        nbytes,
        0,
        {"torch": rotating(peer, sets)},
        len(sets),
    )


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """One token and a prompt of each."""
    made: list[tuple[Any, ...]] = []
    for T in (1, 8192) if quick else (1, 8, 8192):
        made += [(norm_case, T, 7168)]
    made += [(mla_read_case, 1, 32768, eight) for eight in ((False,) if quick else (False, True))]
    for T in (1,) if quick else (1, 8192):
        made += [(embed_case, T, 129_280, 7168)]
    for T in (1,) if quick else (1, 8):
        for how in ("greedy", "temperature", "top-k", "top-p", "top-k, top-p", "logprobs"):
            made += [(sample_case, T, 129_280, how)]
    made += step_ops.rows(quick)
    for make, *arguments in made:
        yield built("small_ops", make, *arguments, device)


def case(device: torch.device, what: str = "norm", tokens: int = 1, hidden: int = 7168) -> Case:
    """One case by name."""
    made: dict[str, Callable[[], Case]] = {
        "norm": lambda: norm_case(tokens, hidden, device),
        "embed": lambda: embed_case(tokens, 129_280, hidden, device),
        "sample": lambda: sample_case(tokens, 129_280, "top-k, top-p", device),
    }
    if what not in made:
        raise PykernelsError(f"There is no case {what!r}", f"Use one of {', '.join(made)}")
    return made[what]()
