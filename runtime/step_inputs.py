"""The inputs of a step, for whatever lowers a model or runs a program by hand.

int64 [T]: "tokens", token ids; "positions"; "sequences", the row of the page table of each token's
sequence; "slot_mapping", where its keys and values go (page * 64 + offset, -1 nowhere).
int64 [S, pages]: "page_table". int64 [R]: "logits_indices", tokens whose logits are wanted.
int64 [S], by sequence: "query_starts", its first token in the step; "query_lengths", its tokens
there; "lengths", its keys with those of this step; "page_rows", its row of the page table.
"sampling.*" [R]: each row's parameters.
"""

from __future__ import annotations

import torch

from pykernels.ref.sampling import MAX_LOGPROBS

from .ops import OPS, SAMPLING
from .program import Builder, Program

_BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows")
_NEUTRAL = {
    "slot_mapping": -1,
    "sampling.top_p": 1,
    "sampling.repetition": 1,
    "sampling.num_logprobs": -1,
}


def sampling_dtype(name: str) -> torch.dtype:
    """The dtype of an input of ``sample_requests``."""
    kind = OPS["sample_requests"].inputs[name].kind
    return torch.float32 if kind == "float32" else torch.int64


def step_inputs(b: Builder, table_pages: int) -> None:
    """Declares the inputs of a step but the parameters of sampling.

    Args:
        table_pages: pages of one sequence at most.
    """
    for name in ("tokens", "positions", "sequences", "slot_mapping"):
        b.buffer(name, "T", dtype=torch.int64, kind="input")
    for name in _BY_SEQUENCE:
        b.buffer(name, "S", dtype=torch.int64, kind="input")
    b.buffer("page_table", "S", table_pages, dtype=torch.int64, kind="input")
    b.buffer("logits_indices", "R", dtype=torch.int64, kind="input")


def lower_sampling(b: Builder, logits: str) -> None:
    """Adds the node that draws tokens, its parameters as inputs and its results as outputs.

    Args:
        logits: buffer [R, V].
    """
    inputs = {
        name: b.buffer(f"sampling.{name}", "R", dtype=sampling_dtype(name), kind="input")
        for name in SAMPLING
    }
    outputs = {
        "tokens": b.buffer("sampled_token_ids", "R", dtype=torch.int64, kind="output"),
        "logprobs": b.buffer("logprobs", "R", kind="output"),
        "top_ids": b.buffer("top_ids", "R", MAX_LOGPROBS, dtype=torch.int64, kind="output"),
        "top_logprobs": b.buffer("top_logprobs", "R", MAX_LOGPROBS, kind="output"),
    }
    b.node("sample_requests", "sample", {"logits": logits, **inputs}, outputs)


def allocate_inputs(program: Program) -> dict[str, torch.Tensor]:
    """A tensor for each input of a program in its largest shape: zeros, but slots of -1 (keys and
    values go nowhere), and parameters of sampling that take the likeliest token."""
    return {
        name: torch.full(
            program.shape(name), _NEUTRAL.get(name, 0), dtype=buffer.dtype, device="cpu"
        )
        for name, buffer in program.buffers.items()
        if buffer.kind == "input"
    }
