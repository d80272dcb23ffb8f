"""Rows of the table of GPU ops (see ``ops.py``): what a step of a model has around its products."""

from __future__ import annotations

import torch

from pykernels.gpu.sampling import count_tokens, sample
from pykernels.ref.sampling import MAX_LOGPROBS, Sampled
from pykernels.ref.sampling_inputs import SamplingInputs

from .ops import FP32, Op, Tensors, empty, integers, large, normal

INT32, INT64 = torch.int32, torch.int64
_SEEN = ("repetition", "presence", "frequency", "seen", "seen_row")


def _sample(name: str, *optional: str) -> Op:
    """``optional``: of the inputs."""

    def make(device: torch.device) -> Tensors:
        R, V = large(device, 6, 3), large(device, 129_280, 2500)
        made = {
            "logits": normal(device, R, V, dtype=FP32) * 3,
            "temperature": torch.rand(R, device=device).round(decimals=1),  # some 0: greedy
            "top_k": integers(device, 90, R, dtype=INT32),
            "top_p": torch.rand(R, device=device),
            "min_p": torch.rand(R, device=device) / 9,
            "seed": integers(device, 1 << 40, R, dtype=INT64),
            "draws": integers(device, 1 << 40, R, dtype=INT64),
            "logprobs": integers(device, 9, R, dtype=INT32) - 1,
            "tokens": empty(device, R, dtype=INT64),
            "own": empty(device, R, dtype=FP32),
            "top_ids": empty(device, R, MAX_LOGPROBS, dtype=INT64),
            "top_logprobs": empty(device, R, MAX_LOGPROBS, dtype=FP32),
        }
        if "seen" in optional:
            made |= {part: torch.rand(R, device=device) + 0.5 for part in _SEEN[:3]}
            made["seen"] = integers(device, 4, 2, V, dtype=INT32)
            made["seen_row"] = integers(device, 3, R, dtype=INT32) - 1
        if "bias_ids" in optional:
            ids = torch.randperm(V, device=device)[: 5 * R].view(R, 5).to(INT32)
            ids[0, 2] = -1
            made |= {"bias_ids": ids, "bias": normal(device, R, 5, dtype=FP32)}
        if "mask" in optional:
            made["mask"] = integers(device, 1 << 31, 2, -(-V // 32), dtype=INT32)
            made["mask_row"] = integers(device, 3, R, dtype=INT32) - 1
        return made

    def run(t: Tensors) -> None:
        inputs = {k: v for k, v in t.items() if k in SamplingInputs.__dataclass_fields__}
        out = Sampled(t["tokens"], t["own"], t["top_ids"], t["top_logprobs"])
        sample(t["logits"], SamplingInputs(**inputs), out)

    return Op(name, make, run, ("tokens", "own", "top_ids", "top_logprobs"))


def _count_tokens() -> Op:
    def make(device: torch.device) -> Tensors:
        rows = torch.randperm(5, device=device)[:4].to(INT32) - 1
        tokens = integers(device, 40, 4, dtype=INT64) - 1
        return {"tokens": tokens, "rows": rows, "seen": integers(device, 9, 4, 39, dtype=INT32)}

    def run(t: Tensors) -> None:
        count_tokens(t["tokens"], t["rows"], t["seen"])

    return Op("count_tokens", make, run, ("seen",))


STEP = (
    _sample("sample"), _sample("sample, all inputs", "seen", "bias_ids", "mask"), _count_tokens(),
)  # fmt: skip
