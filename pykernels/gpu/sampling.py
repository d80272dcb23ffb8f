"""Sampling on the device, each row by its own parameters and seed, without a sort and a sync.

Gumbel's trick makes a draw an argmax, and the noise is a function of (seed, draws, token):
Philox4x32-10 of those counters. So a row's token depends on no other row, and a captured graph
draws anew when the numbers on the device change. What may be drawn is a threshold on the logits, so
the draw is the best perturbed logit above it:

- top-k: the k-th largest is found digit by digit (four launches, 8 bits of the ordered float each,
  by integer histograms);
- min-p: a number below the largest;
- top-p: the best candidate is taken if less than p of the mass lies strictly above it; otherwise no
  token as small as it is in the nucleus, and the best of those above is the next candidate. One or
  two rounds as a rule.

NaN is above all logits, as in torch.topk: a row that has one draws its first, whatever the limits.
"""

from __future__ import annotations

import torch
import triton

from ..errors import PykernelsError
from ..ref.sampling import MAX_LOGPROBS, Sampled
from ..ref.sampling.inputs import SamplingInputs
from . import sampling_kernels as kernels
from .common.launch import FLOATS, check_device, unsupported

_BLOCK = 2048  # logits a program
_WIDE = 8192  # logits a step of the nucleus's loop


def supports(logits: torch.Tensor) -> str | None:
    """None if `greedy` and `sample` take these, or the reason why not."""
    if logits.ndim != 2 or logits.dtype not in FLOATS or logits.stride(1) != 1:
        return f"logits are {logits.dtype} {tuple(logits.shape)}, not floats [T, V] in dense rows"
    if not 0 < logits.shape[1] < 2**30:
        return f"a vocabulary of {logits.shape[1]}"
    return unsupported(logits)


def _check_logits(logits: torch.Tensor) -> None:
    check_device(logits)
    if reason := supports(logits):
        raise PykernelsError(f"sampling does not take these: {reason}", "Convert them")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise PykernelsError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}",
            f"Give it {dtype} {list(shape)}, contiguous",
        )


def _splits(logits: torch.Tensor) -> tuple[int, int]:
    splits = triton.cdiv(logits.shape[1], _BLOCK)
    return splits, triton.next_power_of_2(splits)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The largest of each row (NaN, if it has one), of equal ones the lowest index: int64 [T].

    Two launches.

    Args:
        logits: [T, V], bf16, fp16 or float32.
        out: int64 [T].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    _check_logits(logits)
    (T, V), (splits, padded) = logits.shape, _splits(logits)
    if out is None:
        out = torch.empty(T, dtype=torch.int64, device=logits.device)
    check_device(logits, out)
    _check("out", out, torch.int64, T)
    if T:
        best = torch.empty(T, splits, dtype=torch.int64, device=logits.device)
        kernels.best_keys[(T, splits)](
            logits, best, V, splits, logits.stride(0), BLOCK=_BLOCK, num_warps=4
        )
        kernels.pick_best[(T,)](best, out, splits, SPLITS=padded, num_warps=4)
    return out


_ROWS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    **dict.fromkeys(("seed", "draws"), torch.int64),
    **dict.fromkeys(("top_k", "logprobs"), torch.int32),
}
_GROUPS = {
    "seen": ("repetition", "presence", "frequency", "seen_row"),
    "bias_ids": ("bias", "bias_start", "bias_count"),
    "mask": ("mask_row",),
}
"""Optional inputs that are there all or none."""


def _check_inputs(inputs: SamplingInputs, R: int, V: int) -> None:
    for name, dtype in _ROWS.items():
        _check(name, getattr(inputs, name), dtype, R)
    for first, rest in _GROUPS.items():
        missing = [name for name in (first, *rest) if getattr(inputs, name) is None]
        if missing and len(missing) <= len(rest):
            raise PykernelsError(
                f"there is no {', '.join(missing)}", f"Give all of {first}, {', '.join(rest)}"
            )
    if inputs.seen is not None:
        for name in ("repetition", "presence", "frequency"):
            _check(name, getattr(inputs, name), torch.float32, R)
        _check("seen", inputs.seen, torch.int32, inputs.seen.shape[0], V)
        _check("seen_row", inputs.seen_row, torch.int32, R)  # type: ignore[arg-type]
    if inputs.bias_ids is not None:
        N = inputs.bias_ids.shape[0]
        _check("bias_ids", inputs.bias_ids, torch.int32, N)
        _check("bias", inputs.bias, torch.float32, N)  # type: ignore[arg-type]
        _check("bias_start", inputs.bias_start, torch.int32, R)  # type: ignore[arg-type]
        _check("bias_count", inputs.bias_count, torch.int32, R)  # type: ignore[arg-type]
    if inputs.mask is not None:
        _check("mask", inputs.mask, torch.int32, inputs.mask.shape[0], triton.cdiv(V, 32))
        _check("mask_row", inputs.mask_row, torch.int32, R)  # type: ignore[arg-type]


def _results(logits: torch.Tensor, out: Sampled | None) -> Sampled:
    R, device = logits.shape[0], logits.device
    if out is None:
        out = Sampled(
            torch.empty(R, dtype=torch.int64, device=device),
            torch.empty(R, dtype=torch.float32, device=device),
            torch.empty(R, MAX_LOGPROBS, dtype=torch.int64, device=device),
            torch.empty(R, MAX_LOGPROBS, dtype=torch.float32, device=device),
        )
    for name, tensor in out._asdict().items():
        dtype = torch.float32 if "logprobs" in name else torch.int64
        _check(name, tensor, dtype, *((R, MAX_LOGPROBS) if "top" in name else (R,)))
    return out


def sample(logits: torch.Tensor, inputs: SamplingInputs, out: Sampled | None = None) -> Sampled:
    """One token a row: mask, bias, penalties, temperature, top-k, min-p, top-p, as `ref.sample`.

    Which optional inputs there are is all that is decided on the host: in a captured graph rows may
    change every number, and each draw wants ``draws`` one more. Seven launches.

    Args:
        logits: [R, V], bf16, fp16 or float32.
        inputs: of R rows, on the logits' device, each tensor contiguous; the masks may be in pinned
            memory. What is outside its table (a ``seen_row``, a list of biases) is read from memory
            that is not its own.
        out: results to write to.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    _check_logits(logits)
    (R, V), (splits, padded) = logits.shape, _splits(logits)
    _check_inputs(inputs, R, V)
    out = _results(logits, out)
    mask = inputs.mask
    pinned = mask is not None and logits.is_cuda and mask.is_pinned()
    tensors = [x for x in vars(inputs).values() if x is not None and not (pinned and x is mask)]
    device = check_device(logits, *out, *tensors)
    if not R:
        return out

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    adjusted, noisy = (scratch(R, V, dtype=torch.float32) for _ in "an")
    best, drawn = (scratch(R, splits, dtype=torch.int64) for _ in "bd")
    tops, masses, kept_masses = (scratch(R, splits, dtype=torch.float32) for _ in "tmk")
    allowed = scratch(R, splits, dtype=torch.int32)
    keys = scratch(R, splits, MAX_LOGPROBS, dtype=torch.int64)
    counts = scratch(R, 4, splits, 256, dtype=torch.int32)
    found = scratch(R, 4, 2, dtype=torch.int64)
    kernels.adjust[(R, splits)](
        logits,
        adjusted,
        best,
        allowed,
        tops,
        masses,
        keys,
        inputs.logprobs,
        inputs.repetition,
        inputs.presence,
        inputs.frequency,
        inputs.seen,
        inputs.seen_row,
        inputs.bias_ids,
        inputs.bias,
        inputs.bias_start,
        inputs.bias_count,
        inputs.mask,
        inputs.mask_row,
        V,
        splits,
        logits.stride(0),
        triton.cdiv(V, 32),
        SEEN=inputs.seen is not None,
        BIAS=inputs.bias_ids is not None and len(inputs.bias_ids) > 0,
        MASK=inputs.mask is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # each operation rounds, as the definition's does
    )
    for byte in (3, 2, 1, 0):
        kernels.digits[(R, splits)](
            adjusted,
            inputs.temperature,
            inputs.top_k,
            counts,
            found,
            V,
            splits,
            SPLITS=padded,
            BYTE=byte,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    kernels.perturb[(R, splits)](
        adjusted,
        best,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seed,
        inputs.draws,
        counts,
        found,
        noisy,
        drawn,
        kept_masses,
        V,
        splits,
        SPLITS=padded,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    kernels.finish[(R,)](
        logits,
        adjusted,
        best,
        allowed,
        tops,
        masses,
        keys,
        noisy,
        drawn,
        kept_masses,
        inputs.temperature,
        inputs.top_p,
        inputs.logprobs,
        *out,
        V,
        splits,
        logits.stride(0),
        SPLITS=padded,
        TOPS=triton.next_power_of_2(MAX_LOGPROBS),
        BLOCK=_WIDE,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return out


def count_tokens(tokens: torch.Tensor, seen_row: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Adds the tokens just drawn to what penalties count, in place: 2 each.

    Args:
        tokens: int64 [R]; -1: none was drawn.
        seen_row: int32 [R], distinct rows of ``seen``; -1: the row has no penalties.
        seen: int32 [P, V], as in `SamplingInputs`.

    Returns:
        ``seen``.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(tokens, seen_row, seen)
    if tokens.ndim != 1 or seen.ndim != 2:
        raise PykernelsError(
            f"tokens are {tuple(tokens.shape)}, seen is {tuple(seen.shape)}", "Give [R] and [P, V]"
        )
    _check("tokens", tokens, torch.int64, tokens.shape[0])
    _check("seen_row", seen_row, torch.int32, tokens.shape[0])
    _check("seen", seen, torch.int32, *seen.shape)
    if tokens.shape[0]:
        kernels.count_drawn[(tokens.shape[0],)](tokens, seen_row, seen, seen.shape[1], num_warps=1)
    return seen
