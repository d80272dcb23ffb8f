"""Scales of ``skinny_experts`` as each lane needs them: K-quants' and integers' (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def spread(scale, COLS: gl.constexpr, MMA: gl.constexpr):
    """[S, ROWS, 4] of the segments -> [S, ROWS, COLS] of the columns: nothing moves."""
    S: gl.constexpr = scale.shape[0]
    ROWS: gl.constexpr = scale.shape[1]
    v = gl.join(scale, scale).reshape([S, ROWS, 8])
    if COLS >= 16:
        v = gl.join(v, v).permute([0, 1, 3, 2]).reshape([S, ROWS, 16])
    if COLS >= 32:
        v = gl.join(v, v).permute([0, 1, 3, 2]).reshape([S, ROWS, 32])
    return gl.convert_layout(v, MMA)


@gluon.jit
def load_masked(at, mask, EVEN: gl.constexpr):
    """EVEN: nothing is masked."""
    if EVEN:
        found = gl.load(at)
    else:
        found = gl.load(at, mask=mask, other=0)
    return found


@gluon.jit
def load_scales(
    scales,
    halves,
    chunk,
    seg,
    K,
    STRIDE,
    CHUNKS: gl.constexpr,
    KC: gl.constexpr,
    GROUP: gl.constexpr,
    KIND: gl.constexpr,
    EVEN: gl.constexpr,
):
    """What ``scales_of`` reads, of each chunk."""
    found = ()
    for c in gl.static_range(CHUNKS):
        now = chunk + c + 0 * seg
        mask = now * KC < K
        if KIND == "q4_k":
            at = halves + now * 72
            own = at + seg % 2
            d = load_masked(at, mask, EVEN)
            low = load_masked(at + 1, mask, EVEN)
            a = load_masked(own + 2, mask, EVEN)
            b = load_masked(own + 4, mask, EVEN)
            m = load_masked(own + 6, mask, EVEN)
            found += ((d, low, a, b, m),)  # type: ignore[assignment]
        elif KIND == "q6_k":
            at = scales + now * 8 + seg
            first = load_masked(at, mask, EVEN)
            second = load_masked(at + 4, mask, EVEN)
            d = load_masked(halves + now // 2 * 2, mask, EVEN)
            found += ((first, second, d),)  # type: ignore[assignment]
        elif GROUP == 32:
            k = now * KC + seg * (KC // 4)
            found += (load_masked(scales + k // 64 * STRIDE, k < K, EVEN),)  # type: ignore[assignment]
        elif GROUP > 0:
            found += (load_masked(scales + now * KC // GROUP * STRIDE, mask, EVEN),)  # type: ignore[assignment]
    return found


@gluon.jit
def scales_of(found, seg, H: gl.constexpr, KIND: gl.constexpr):
    """(scale, minimum) of a chunk's half."""
    if KIND == "q4_k":
        d, low, a, b, m = found
        ai = a.to(gl.int16, bitcast=True).to(gl.int32)
        bi = b.to(gl.int16, bitcast=True).to(gl.int32)
        mi = m.to(gl.int16, bitcast=True).to(gl.int32)
        far = seg >= 2
        s = gl.where(far, (mi & 0x0F0F) | ((ai >> 2) & 0x3030), ai & 0x3F3F)
        z = gl.where(far, ((mi >> 4) & 0x0F0F) | ((bi >> 2) & 0x3030), bi & 0x3F3F)
        scale = d.to(gl.float32) * ((s >> (8 * H)) & 255).to(gl.float32)
        least = low.to(gl.float32) * ((z >> (8 * H)) & 255).to(gl.float32)
        least += 128.0 * scale  # what the codes lie above
    elif KIND == "q6_k":
        first, second, d = found
        scale = d.to(gl.float32) * (first if H == 0 else second).to(gl.float32)
        least = 160.0 * scale
    else:
        if KIND == "int4" or KIND == "mxfp4":
            word = found & -65536 if H == 1 else found << 16
        else:
            word = gl.where(seg % 2 == 1, found & -65536, found << 16)
        scale = word.to(gl.float32, bitcast=True)
        least = scale
    return scale, least
