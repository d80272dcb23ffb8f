"""The tensors of a paged cache, checked, as records have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import PykernelsError
from ..attention.args import PAGE
from .checks import check_tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Cache:
    """A cache of keys and values, or of latents.

    Attributes:
        pages: how many.
        D_K, D_V: numbers of a key and of a value.
        codes: the first so many numbers of a key are E4M3 (``attention.kernel``); 0: none.
        fields: of ``ATTENTION``.
    """

    pages: int
    KVH: int
    D_K: int
    D_V: int
    codes: int
    fields: dict[str, Any]


def gqa_cache(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> Cache:
    """Keys and values [P, 64, KVH, D], with scales [P, 64, KVH] of E4M3.

    Raises:
        PykernelsError: dtypes, shapes or strides that do not fit each other.
    """
    coded = k_scale is not None or v_scale is not None
    check_pages("k", k, coded, "KVH", "D")
    P, _, KVH, D = k.shape
    check_pages("v", v, coded, KVH, D, pages=P)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, coded, P, PAGE, KVH)
    if not KVH:
        raise PykernelsError("a cache of no KV heads", "Give at least one")
    size = k.element_size()
    fields = {
        "k": k,
        "v": v,
        "page_bytes": size * PAGE * KVH * D,
        "token_bytes": size * KVH * D,
        "k_head_bytes": size * D,
        "v_head_bytes": size * D,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "KVH": KVH,
    }
    return Cache(P, KVH, D, D, D if coded else 0, fields)


def mla_cache(latent: torch.Tensor, rope: torch.Tensor, latent_scale: torch.Tensor | None) -> Cache:
    """Latents [P, 64, L] and the rotated parts [P, 64, R]: two parts of one tensor, or E4M3 with a
    scale [P, 64] and a tensor of its own.

    Raises:
        PykernelsError: dtypes, shapes or strides that do not fit each other.
    """
    coded = latent_scale is not None
    check_pages("latent", latent, coded, "L", dense=coded)
    P, _, L = latent.shape
    check_pages("rope", rope, False, "R", pages=P, dense=coded)
    R, size = rope.shape[2], latent.element_size()
    check_scale("latent_scale", latent_scale, coded, P, PAGE)
    if not coded and latent.numel():
        strides, behind = (PAGE * (L + R), L + R, 1), latent.data_ptr() + 2 * L
        if latent.stride() != strides or rope.stride() != strides or rope.data_ptr() != behind:
            raise PykernelsError(
                "latent and rope lie apart",
                f"Make them cache[..., :{L}] and cache[..., {L}:] of one tensor [P, 64, {L + R}]",
            )
    fields = {
        "k": latent,
        "v": latent,
        "page_bytes": size * latent.stride(0),
        "token_bytes": size * latent.stride(1),
        "k_scale": latent_scale,
        "v_scale": latent_scale,
        "rope": rope if coded else None,
        "KVH": 1,
    }
    return Cache(P, 1, L + R, L, L if coded else 0, fields)


def check_pages(
    name: str,
    given: torch.Tensor,
    coded: bool,
    *token: int | str,
    pages: int | str = "P",
    dense: bool = True,
) -> None:
    """Whether it is [P, 64, *token] in bfloat16, or with scales (``coded``) in E4M3."""
    dtype = E4M3 if coded else torch.bfloat16
    check_tensor(name, given, (pages, PAGE, *token), (dtype,))
    if dense and not given.is_contiguous():
        raise PykernelsError(f"{name} has strides {given.stride()}", "Make the cache contiguous")


def check_scale(name: str, scale: torch.Tensor | None, coded: bool, *shape: int) -> None:
    """Whether it is there, float32 and contiguous, where the cache has scales."""
    if not coded:
        return
    if scale is None:
        raise PykernelsError(f"{name} is not given", "An E4M3 cache has scales of all its parts")
    check_tensor(name, scale, shape, (torch.float32,))
    if not scale.is_contiguous():
        raise PykernelsError(f"{name} has strides {scale.stride()}", "Make it contiguous")
