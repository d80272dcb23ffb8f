"""What comes before attention, on the calling thread: norms, rotary embedding, the cache's rows."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ..attention.args import PAGE
from ..cache_write import (
    GQA_ROPE_CACHE_WRITE,
    MAX_HEAD,
    MLA_ROPE_CACHE_WRITE,
    make_gqa_rope_cache_write,
    make_mla_rope_cache_write,
)
from ..rope import ROPE, make_rope_table
from .cache import check_pages, check_scale, gqa_cache
from .checks import floats, integers, number
from .serial import Record, counted, run_tasks


def rope_table(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """cos and sin of each token's angles, times ``scale``, on the calling thread alone.

    Args:
        positions: int32 or int64 [T].
        frequencies: floats [R / 2].
        scale: YaRN's attention factor.

    Returns:
        float32 [T, 2, R / 2].

    Raises:
        PykernelsError: inputs that do not fit.
    """
    positions = integers("positions", positions, "T")
    frequencies = floats("frequencies", frequencies, "R / 2")
    T, half = len(positions), len(frequencies)
    out = torch.empty(T, 2, half, dtype=torch.float32, device="cpu")
    record = Record(
        ROPE,
        count_at=counted(T),
        positions=positions,
        frequencies=frequencies,
        half=half,
        scale=number("scale", scale),
        out=out,
    )
    run_tasks(make_rope_table(), record.address)
    return out


def gqa_rope_cache_write(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    heads: int | None = None,
    starts: tuple[int, int, int] | None = None,
    v_norm: bool = False,
) -> torch.Tensor:
    """Norms of queries and keys, rotary embedding of both, and keys and values into their slots, on
    the calling thread alone.

    Args:
        qkv: floats [T, (NH + 2 KVH) D] or, with ``heads``, wider: queries, keys, values.
        angles: float32 [T, 2, R / 2] of ``rope_table``, R <= D; the first R numbers of a head turn.
        slot_mapping: int32 or int64 [T], ``page * 64 + offset``; what lies outside (-1) is not
            written.
        k, v: the cache, bfloat16 [P, 64, KVH, D], contiguous, D a multiple of 16 and 1024 at most;
            with scales, float8_e4m3fn.
        k_scale, v_scale: float32 [P, 64, KVH].
        q_norm, k_norm: weights of RMSNorm: [D] for a norm of each head, [NH D] and [KVH D] for one
            of all heads together; None: none.
        eps: of the norms.
        interleaved: pairs are (2i, 2i + 1), not (i, i + R / 2).
        heads: NH; None: what the row, which is no wider then, has beside 2 KVH.
        starts: columns of ``qkv`` where queries, keys and values begin, with ``heads``; None: they
            follow each other, from the row's beginning.
        v_norm: whether the values of a head are normed, too, without a weight.

    Returns:
        The queries, float32 [T, NH, D].

    Raises:
        PykernelsError: inputs that do not fit.
    """
    cache = gqa_cache(k, v, k_scale, v_scale)
    D, KVH, fields = cache.D_K, cache.KVH, cache.fields
    _check_size("a head", D)
    qkv = floats("qkv", qkv, "T", "row")
    T, width = qkv.shape
    NH = width // D - 2 * KVH if heads is None else heads
    begin = starts or (0, NH * D, (NH + KVH) * D)
    counts = (NH, KVH, KVH)
    inside = all(0 <= at <= width - n * D for at, n in zip(begin, counts, strict=True))
    if NH < 1 or not inside or (heads is None and width != (NH + 2 * KVH) * D):
        raise PykernelsError(
            f"rows of {width} numbers for {NH} heads of queries and {KVH} of keys and of values"
            f" of {D}",
            "Give rows of (NH + 2 KVH) D numbers, or heads and starts within the row",
        )
    angles, half = _angles(angles, T, D)
    norms = {
        name: None if weight is None else _norm(f"{name}_norm", weight, n, D)
        for name, weight, n in (("q", q_norm, NH), ("k", k_norm, KVH))
    }
    out = torch.empty(T, NH, D, dtype=torch.float32, device="cpu")
    record = Record(
        GQA_ROPE_CACHE_WRITE,
        count_at=counted(T),
        table=angles,
        half=half,
        interleaved=bool(interleaved),
        slot_mapping=_slots(slot_mapping, T, cache.pages),
        page_bytes=fields["page_bytes"],
        token_bytes=fields["token_bytes"],
        eps=number("eps", eps),
        qkv=qkv[:, begin[0] :],
        qkv_stride=4 * width,
        k_start=4 * (begin[1] - begin[0]),
        v_start=4 * (begin[2] - begin[0]),
        NH=NH,
        KVH=KVH,
        D=D,
        q_weight=norms["q"],
        k_weight=norms["k"],
        q_norm=0 if norms["q"] is None else len(norms["q"]) // D,
        k_norm=0 if norms["k"] is None else len(norms["k"]) // D,
        v_weight=torch.ones(D, dtype=torch.float32, device="cpu") if v_norm else None,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        head_bytes=fields["k_head_bytes"],
        out=out,
        out_stride=4 * NH * D,
    )
    run_tasks(make_gqa_rope_cache_write(), record.address)
    return out


def mla_rope_cache_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_norm: torch.Tensor,
    latent_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> torch.Tensor:
    """Norm of the latents, rotary embedding, and both into the cache; the queries' part turned; on
    the calling thread alone.

    Args:
        q: floats [T, NH, R], the part of each query that turns.
        kv: floats [T, L + R]: latents, and the key part that turns.
        angles, slot_mapping: as in ``gqa_rope_cache_write``.
        latent: the cache, bfloat16 [P, 64, L], L a multiple of 16 and 1024 at most; with
            ``latent_scale``, float8_e4m3fn.
        rope: bfloat16 [P, 64, R].
        kv_norm: floats [L], the weight of the latents' RMSNorm.
        latent_scale: float32 [P, 64].
        eps, interleaved: as in ``gqa_rope_cache_write``.

    Returns:
        float32 [T, NH, R].

    Raises:
        PykernelsError: inputs that do not fit.
    """
    coded = latent_scale is not None
    check_pages("latent", latent, coded, "L", dense=False)
    P, _, L = latent.shape
    q = floats("q", q, "T", "NH", "R")
    T, NH, R = q.shape
    check_pages("rope", rope, False, R, pages=P, dense=False)
    check_scale("latent_scale", latent_scale, coded, P, PAGE)
    _check_size("a latent", L)
    for name, pages in (("latent", latent), ("rope", rope)):
        if pages.stride(2) != 1:
            raise PykernelsError(f"{name} has strides {pages.stride()}", "Make its rows dense")
    angles, half = _angles(angles, T, R)
    if 2 * half != R or not NH:
        raise PykernelsError(
            f"{NH} heads of {R} numbers with {half} angles", "Give R / 2 angles, and a head"
        )
    out = torch.empty(T, NH, L + R, dtype=torch.float32, device="cpu")
    size = latent.element_size()
    record = Record(
        MLA_ROPE_CACHE_WRITE,
        count_at=counted(T),
        table=angles,
        half=half,
        interleaved=bool(interleaved),
        slot_mapping=_slots(slot_mapping, T, P),
        page_bytes=size * latent.stride(0),
        token_bytes=size * latent.stride(1),
        eps=number("eps", eps),
        q=q,
        q_stride=4 * NH * R,
        NH=NH,
        kv=floats("kv", kv, T, L + R),
        kv_stride=4 * (L + R),
        weight=floats("kv_norm", kv_norm, L),
        L=L,
        cache=latent,
        scale=latent_scale,
        rope=rope,
        rope_page_bytes=2 * rope.stride(0),
        rope_token_bytes=2 * rope.stride(1),
        out=out,
        out_stride=4 * NH * (L + R),
    )
    run_tasks(make_mla_rope_cache_write(), record.address)
    return out[..., L:].contiguous()


def _check_size(what: str, size: int) -> None:
    if not 0 < size <= MAX_HEAD or size % 16:
        raise PykernelsError(
            f"{what} of {size} numbers", f"Give a multiple of 16, {MAX_HEAD} at most"
        )


def _angles(angles: torch.Tensor, T: int, D: int) -> tuple[torch.Tensor, int]:
    """The table, contiguous, and R / 2."""
    angles = floats("angles", angles, T, 2, "R / 2")
    half = angles.shape[2]
    if 2 * half > D:
        raise PykernelsError(f"{half} angles for heads of {D}", "Give D / 2 at most")
    return angles, half


def _slots(slot_mapping: torch.Tensor, T: int, pages: int) -> torch.Tensor:
    """Slots as the kernels take them: outside of the cache, -1."""
    slot_mapping = integers("slot_mapping", slot_mapping, T)
    return slot_mapping.where((slot_mapping >= 0) & (slot_mapping < pages * PAGE), -1)


def _norm(name: str, weight: torch.Tensor, heads: int, D: int) -> torch.Tensor:
    """float32 [D], or [heads * D]."""
    weight = floats(name, weight, "D")
    if len(weight) not in (D, heads * D):
        raise PykernelsError(
            f"{name} has {len(weight)} weights", f"Give {D} of each head or {heads * D} of all"
        )
    return weight
