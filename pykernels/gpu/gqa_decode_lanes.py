"""GQA decode whose lanes multiply what they load (Gluon, ``mma.sync``), bf16 or E4M3.

The function of ``gqa_decode``'s Triton kernel for heads of 128. Keys and values are loaded 16 bytes
a lane straight into the lanes whose products take them, one step ahead; E4M3 becomes float16 there.
Nothing passes through shared memory. They are the left operands, so that 8 query rows fill a
product. What a product sums over may be in any order in which both operands agree:

- Scores [keys, rows] sum over D: lane 4 g + t has 16 bytes at 16 t, at 64 + 16 t, ... of keys g,
  g + 8, ..., and the queries' elements are put in the same order.
- Values [D, rows] sum over keys: lane 4 g + t has 16 bytes at 16 g (and 128 + 16 g) of keys 2 t,
  2 t + 1, 2 t + 8, ..., and shares are transposed, 8 x 8 in an instruction. The result's rows are
  put in order at the end.

Each warp has keys and a running softmax of its own; their results become one at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_share import ask_for, share_of_slot
from .register_words import pair, powers


def layouts(warps: int, keys: int, fp8: bool) -> tuple[object, object]:
    """(int32 of keys, of values) [warps, keys, 32 or bf16 64] as the products want them."""
    parts = [[part, 0, 0] for part in powers(1, warps)]
    others = [[0, n, 0] for n in powers(8, keys)]
    in_key = gl.DistributedLinearLayout(
        [[0, 0, n] for n in ((1, 2, 16) if fp8 else (1, 2, 16, 32))] + others,
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        parts,
        [],
        [warps, keys, 32 if fp8 else 64],
    )
    in_value = gl.DistributedLinearLayout(
        [[0, 0, n] for n in ((1, 2) if fp8 else (1, 2, 32))] + [[0, 1, 0], *others],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        parts,
        [],
        [warps, keys, 32 if fp8 else 64],
    )
    return in_key, in_value


@gluon.jit
def half_pair(bits):
    """int32 -> the float16 of its low half, that of its high half."""
    low = bits.to(gl.int16).to(gl.float16, bitcast=True)
    high = (bits >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return low, high


@gluon.jit
def decoded_within(word):
    """Four E4M3 as two pairs of float16: exact, an instruction a pair."""
    return gl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decoded_across(even, odd):
    """Bytes 0 to 3 of two words, each beside the other word's, as pairs of float16."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 x, y; .reg .b16 a, b, c, d;"
        " prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;"
        " mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
        " cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d;}",
        "=r,=r,=r,=r,r,r", [even, odd], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def paired_across(even, odd):
    """Both halves of two words, each beside the other word's."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=r,=r,r,r", [even, odd], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def transposed_pairs(even, odd, E4M3: gl.constexpr):
    """Two float32 a lane -> pairs of float16 or bf16; of 8 x 8 of these, in a warp, the transpose.

    Lane 4 g + t gives row g, columns 2 t and 2 t + 1, and gets column g, rows 2 t and 2 t + 1.
    """
    KIND: gl.constexpr = "f16x2" if E4M3 else "bf16x2"
    return gl.inline_asm_elementwise(
        "{.reg .b32 x; cvt.rn." + KIND + ".f32 x, $2, $1;"
        " movmatrix.sync.aligned.m8n8.trans.b16 $0, x;}",
        "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def log2(x):
    """Of normal numbers, to 2 ** -22 of them: one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _joined(bits, E4M3: gl.constexpr):
    low, high = half_pair(bits) if E4M3 else pair(bits)
    return gl.join(low, high)


@gluon.jit
def _keys(words, A: gl.constexpr, E4M3: gl.constexpr):
    """[W, N, words] -> [W, N, 128], D in the queries' order (``_queries``)."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    if E4M3:
        low, high = decoded_within(words)
        x = gl.join(_joined(low, True), _joined(high, True))  # .., bit 0 of d, bit 1
        x = x.reshape([W, N, 2, 4, 4, 2, 2]).permute([0, 1, 2, 4, 6, 3, 5])
    else:
        x = _joined(words, False).reshape([W, N, 4, 4, 4, 2]).permute([0, 1, 2, 4, 3, 5])
    return gl.convert_layout(x.reshape([W, N, 128]), A)


@gluon.jit
def _queries(q, B: gl.constexpr, E4M3: gl.constexpr):
    """[W, ROWS, 128] -> [W, 128, ROWS] in the order of ``_keys``."""
    W: gl.constexpr = q.shape[0]
    ROWS: gl.constexpr = q.shape[1]
    if E4M3:
        x = q.reshape([W, ROWS, 2, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1])
    else:
        x = q.reshape([W, ROWS, 4, 4, 4, 2]).permute([0, 2, 4, 3, 5, 1])
    return gl.convert_layout(x.reshape([W, 128, ROWS]), B)


@gluon.jit
def _values(words, A: gl.constexpr, E4M3: gl.constexpr):
    """[W, N, words] -> [W, 128, N], D in the order that ``_columns`` undoes."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[2]
    even, odd = gl.split(words.reshape([W, N // 2, 2, WORDS]).permute([0, 1, 3, 2]))
    if E4M3:
        a, b, c, d = decoded_across(even, odd)
        left = gl.join(_joined(a, True), _joined(b, True))
        x = gl.join(left, gl.join(_joined(c, True), _joined(d, True)))
        x = x.reshape([W, N // 2, 8, 4, 2, 2, 2]).permute([0, 3, 6, 5, 2, 1, 4])
    else:
        a, b = paired_across(even, odd)
        x = gl.join(_joined(a, False), _joined(b, False))
        x = x.reshape([W, N // 2, 2, 8, 4, 2, 2]).permute([0, 2, 4, 6, 3, 1, 5])
    return gl.convert_layout(x.reshape([W, 128, N]), A)


@gluon.jit
def _columns(acc, E4M3: gl.constexpr):
    """[128, ROWS] sums of ``_values`` -> [ROWS, 128]."""
    ROWS: gl.constexpr = acc.shape[1]
    PARTS: gl.constexpr = 1 if E4M3 else 2
    x = acc.reshape([PARTS, 16 // PARTS, 8, ROWS]).permute([3, 0, 2, 1])
    return x.reshape([ROWS, 128])


@gluon.jit
def _shares(p, B: gl.constexpr, E4M3: gl.constexpr):
    """[W, N, ROWS] float32 as scores lie -> the same in 16 bits as a right operand."""
    W: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    ROWS: gl.constexpr = p.shape[2]
    even, odd = gl.split(p.reshape([W, N, ROWS // 2, 2]))
    x = _joined(transposed_pairs(even, odd, E4M3), E4M3).reshape([W, N // 8, 8, ROWS // 8, 4, 2])
    return gl.convert_layout(x.permute([0, 1, 4, 5, 3, 2]).reshape([W, N, ROWS]), B)


@gluon.jit
def _in_half(x):
    """``attention_parts.rows_in_half`` of [W, ROWS, 128]."""
    top = gl.max(gl.abs(x.to(gl.float32)), 2)
    power = gl.maximum(top.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    inverse = ((254 << 23) - power).to(gl.float32, bitcast=True)
    half = (x.to(gl.float32) * inverse[:, :, None]).to(gl.float16)
    return half, power.to(gl.float32, bitcast=True)


@gluon.jit
def _pages(table, start, end, w, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """The page of each warp's keys from ``start`` on, [W]."""
    at = start + w * KEYS
    return gl.load(table + at // PAGE, mask=at < end, other=0)


@gluon.jit
def _rows(page, start, w, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Row in the cache of each warp's first key, int64 [W]."""
    return page.to(gl.int64) * PAGE + (start + w * KEYS) % PAGE


@gluon.jit
def _key_words(ptrs, page, start, w, TOKEN: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Behind the end whatever is there: their scores are not looked at."""
    at = _rows(page, start, w, KEYS, PAGE) * TOKEN
    return gl.load(ptrs + at[:, None, None])


@gluon.jit
def _value_words(
    ptrs, page, start, end, w, n, TOKEN: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr
):
    """Zeros behind the end."""
    at = _rows(page, start, w, KEYS, PAGE) * TOKEN
    there = n[None, :] < (end - start - w * KEYS)[:, None]
    return gl.load(ptrs + at[:, None, None], mask=there[:, :, None], other=0)


@gluon.jit
def _scales(
    k_ptrs, v_ptrs, page, start, end, w, n, KVH: gl.constexpr, KEYS: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Of keys and values, [W, KEYS]; ones behind the end."""
    at = (_rows(page, start, w, KEYS, PAGE) * KVH)[:, None]
    there = n[None, :] < (end - start - w * KEYS)[:, None]
    k_scale = gl.load(k_ptrs + at, mask=there, other=1.0)
    return k_scale, gl.load(v_ptrs + at, mask=there, other=1.0)


@gluon.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def gqa_decode_lanes(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, window, B, S, slots, table_stride, q_b, q_s, q_h,
    G: gl.constexpr, KVH: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, W: gl.constexpr,
    ROWS: gl.constexpr, BATCH: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, MANY: gl.constexpr, EARLY: gl.constexpr,
    E4M3: gl.constexpr, LK: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """One program: a part of a sequence's keys, for ROWS (8 or 16) query rows of a KV head.

    Args:
        k_ptr, v_ptr: int32 [P, PAGE, KVH, 32 or, bf16, 64]; PAGE is a multiple of KEYS.
        KEYS: of a warp and step.
        MANY: more than one new token.
    """
    STEP: gl.constexpr = W * KEYS
    WORDS: gl.constexpr = 32 if E4M3 else 64
    TOKEN: gl.constexpr = KVH * WORDS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)  # [W, ROWS]
    KEY: gl.constexpr = gl.SliceLayout(2, MMA)  # [W, KEYS]
    QUERY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [W, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    if EARLY:
        ask_for(table_ptr, length_ptr, B, table_stride, W)
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    blocks = gl.cdiv(S * G, ROWS)
    kv, slot = gl.program_id(0) // blocks, gl.program_id(1)
    first_row = (gl.program_id(0) % blocks) * ROWS
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, window, STEP, BATCH, W, WINDOW
        )
    else:
        length = gl.load(length_ptr + b)
    first = 0
    if WINDOW:
        first = gl.maximum(0, length - S + 1 - window) // STEP * STEP
    each = gl.cdiv(gl.cdiv(length - first, STEP), gl.maximum(parts, 1)) * STEP
    begin = first + part * each
    end = gl.minimum(length, begin + each)
    if SPLIT:
        end = gl.where(parts > 0, end, begin)  # a slot of no sequence does nothing
    table = table_ptr + b.to(gl.int64) * table_stride

    # Where words, scales and shares lie. Warps are the first dimension.
    wk = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))
    wv = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))
    ws = gl.arange(0, W, layout=gl.SliceLayout(1, KEY))
    nk = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))
    nv = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))
    ns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, KEY))
    ik = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))
    iv = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))
    k_at = k_ptr + kv * WORDS + nk[None, :, None] * TOKEN + ik[None, None, :]
    v_at = v_ptr + kv * WORDS + nv[None, :, None] * TOKEN + iv[None, None, :]

    pk = _pages(table, begin, end, wk, KEYS, PAGE)
    pv = _pages(table, begin, end, wv, KEYS, PAGE)
    k_words = _key_words(k_at, pk, begin, wk, TOKEN, KEYS, PAGE)
    v_words = _value_words(v_at, pv, begin, end, wv, nv, TOKEN, KEYS, PAGE)
    if E4M3:
        ks_at = k_scale_ptr + kv + (ns * KVH)[None, :]
        vs_at = v_scale_ptr + kv + (ns * KVH)[None, :]
        ps = _pages(table, begin, end, ws, KEYS, PAGE)
        k_scale, v_scale = _scales(ks_at, vs_at, ps, begin, end, ws, ns, KVH, KEYS, PAGE)
        ps = _pages(table, begin + STEP, end, ws, KEYS, PAGE)
    pk = _pages(table, begin + STEP, end, wk, KEYS, PAGE)
    pv = _pages(table, begin + STEP, end, wv, KEYS, PAGE)

    wq = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))
    q_at = b.to(gl.int64) * q_b + (row // G).to(gl.int64) * q_s + (kv * G + row % G) * q_h
    at = q_at[None, :, None] + c[None, None, :] + (wq * 0)[:, None, None]
    inside = (row < S * G)[None, :, None] & (wq >= 0)[:, None, None]
    q = gl.load(q_ptr + at, mask=inside, other=0.0)
    factor = inner
    if E4M3:
        q, factor = _in_half(q)
        factor = gl.convert_layout(factor, ROW)[:, None, :] * inner
    q = _queries(q, RIGHT, E4M3)
    row_s = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))
    last = length - S + row_s // G  # newest key that the row sees

    m = gl.full([W, ROWS], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([W, ROWS], 0.0, gl.float32, layout=ROW)
    acc = gl.full([W, 128, ROWS], 0.0, gl.float32, layout=MMA)
    zero = gl.full([W, KEYS, ROWS], 0.0, gl.float32, layout=MMA)
    for start in range(begin, end, STEP):
        after = start + STEP
        k = _keys(k_words, LEFT, E4M3)
        k_words = _key_words(k_at, pk, after, wk, TOKEN, KEYS, PAGE)
        pk = _pages(table, after + STEP, end, wk, KEYS, PAGE)
        s = mma_v2(k, q, zero)
        if E4M3:  # as in ``attention_parts.scaled_step``: the values' factors are in the shares
            s = s * k_scale[:, :, None]
            weight = gl.maximum(v_scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
            k_scale, v_scale = _scales(ks_at, vs_at, ps, after, end, ws, ns, KVH, KEYS, PAGE)
            ps = _pages(table, after + STEP, end, ws, KEYS, PAGE)
        if SOFTCAP:
            s = 1 - 2 / (gl.exp2(s * factor) + 1)
            s = s * outer
        else:
            s = s * factor
        if E4M3:
            s += log2(weight)[:, :, None]
        key = start + ws[:, None] * KEYS + ns[None, :]
        seen = (key < end)[:, :, None]
        if MANY:
            seen = seen & (key[:, :, None] <= last[None, None, :])
        if WINDOW:
            seen = seen & (key[:, :, None] > last[None, None, :] - window)
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        base = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        p = gl.exp2(s - base[:, None, :])
        alpha = gl.exp2(m - base)
        m = top
        if E4M3:
            total = total * alpha + gl.sum(p * (1 / weight)[:, :, None], 1)
        else:
            total = total * alpha + gl.sum(p, 1)
        v = _values(v_words, LEFT, E4M3)
        v_words = _value_words(v_at, pv, after, end, wv, nv, TOKEN, KEYS, PAGE)
        pv = _pages(table, after + STEP, end, wv, KEYS, PAGE)
        acc = mma_v2(v, _shares(p, RIGHT, E4M3), acc * alpha[:, None, :])

    # The warps' results become one.
    top = gl.max(m, 0)
    base = gl.where(top == float("-inf"), 0.0, top)
    share = gl.exp2(m - base[None, :])
    total = gl.sum(total * share, 0)
    acc = gl.sum(acc * share[:, None, :], 0)
    y = gl.convert_layout(_columns(acc, E4M3), OUT)
    whole = gl.convert_layout(total, gl.SliceLayout(1, OUT))
    y = y / gl.where(whole == 0, 1.0, whole)[:, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    # Not split: slots are sequences.
    o_at = (slot.to(gl.int64) * S + row // G) * (KVH * G) + kv * G + row % G
    to = out_ptr + o_at[:, None] * 128 + c[None, :]
    if SPLIT:
        z = gl.where(total == 0, float("-inf"), top + gl.log2(gl.where(total == 0, 1.0, total)))
        z = gl.convert_layout(z, gl.SliceLayout(1, OUT))
        rows = gl.where(parts > 0, S * G, 0)
        gl.store(lse_ptr + o_at, z, mask=row < rows)
        rows = gl.where(begin < end, rows, 0)
        gl.store(to, y, mask=(row < rows)[:, None])
    else:
        gl.store(to, y.to(out_ptr.dtype.element_ty), mask=(row < S * G)[:, None])
