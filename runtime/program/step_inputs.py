"""The inputs of a step, for whatever lowers a model or runs a program by hand.

int64 [T]: "tokens", token ids; "positions"; "sequences", the row of the page table of each token's
sequence; "slot_mapping", where its keys and values go (page * 64 + offset, -1 nowhere);
"is_prompt", 0 for tokens of an output, of which ``passes.defer`` may defer experts.
int64 [S, pages]: "page_table". int64 [R]: "logits_indices", tokens whose logits are wanted.
int64 [S], by sequence: "query_starts", its first token in the step; "query_lengths", its tokens
there; "lengths", its keys with those of this step; "page_rows", its row of the page table; where
layers have states, "state_slots", the slot of its own, and "has_state", 0 where that starts from
zeros. Steps that save states on their way have of each sequence "head_lengths", its tokens up to
there; "tail_starts" and "tail_lengths", those behind it, of which most have none; "saved_slots",
the slot that gets a copy, -1 none.
Where layers with a window have pages of their own, "window_table" and "window_slots" are to them
what "page_table" and "slot_mapping" are to the others.
"sampling.*": [R], each row's parameters; tables that rows share (``ops``).
"""

from __future__ import annotations

import torch

from pykernels.ref.sampling import MAX_LOGPROBS

from .op_table.delta_nets import BY_TAIL
from .ops import OPS, SAMPLING, SAMPLING_TABLES
from .program import Builder, Program

IS_PROMPT = "is_prompt"
STATE_SLOTS, HAS_STATE = "state_slots", "has_state"
HEAD_LENGTHS, TAIL_STARTS, TAIL_LENGTHS, SAVED_SLOTS = BY_TAIL
WINDOW_TABLE, WINDOW_SLOTS = "window_table", "window_slots"
_BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows")
_NEUTRAL = {
    "slot_mapping": -1,
    WINDOW_SLOTS: -1,
    SAVED_SLOTS: -1,
    "sampling.top_p": 1,
    "sampling.repetition": 1,
    "sampling.num_logprobs": -1,
    "sampling.seen_row": -1,
    "sampling.mask_row": -1,
    "sampling.masks_written": 1,
}
MASKS_WRITTEN = "sampling.masks_written"
"""The input [1] that is 1 when the masks of the step are there, for which its sampler waits."""
MAX_BIASES = 4096
"""Tokens of one sequence whose logits are biased, at most."""


def sampling_dtype(name: str) -> torch.dtype:
    """The dtype of an input of ``sample_requests``."""
    kind = OPS["sample_requests"].inputs[name].kind
    return {"float32": torch.float32, "int32": torch.int32}.get(kind, torch.int64)


def sampling_tables(S: int, R: int, V: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tables of ``sample_requests``.

    Args:
        S: sequences that may have penalties, a mask, or ``MAX_BIASES`` biases each.
        R: rows of logits that may have one bias.
        V: logits of a row.
    """
    biases = S * MAX_BIASES + R
    return {"seen": (S, V), "bias_ids": (biases,), "bias": (biases,), "mask": (S, -(-V // 32))}


def allocate_columns(R: int) -> dict[str, torch.Tensor]:
    """The columns of ``sample_requests`` by name, each of R rows that take the likeliest token."""
    return {
        name: torch.full(
            (R,), _NEUTRAL.get(f"sampling.{name}", 0), dtype=sampling_dtype(name), device="cpu"
        )
        for name in SAMPLING
    }


def step_inputs(b: Builder, table_pages: int, states: bool = False, windows: bool = False) -> None:
    """Declares the inputs of a step but the parameters of sampling.

    Args:
        table_pages: pages of one sequence at most.
        states: whether layers keep a state of each sequence.
        windows: whether layers with a window have pages of their own.
    """
    by_token = ("tokens", "positions", "sequences", "slot_mapping", IS_PROMPT)
    for name in (*by_token, *((WINDOW_SLOTS,) if windows else ())):
        b.buffer(name, "T", dtype=torch.int64, kind="input")
    for name in (*_BY_SEQUENCE, *((STATE_SLOTS, HAS_STATE) if states else ())):
        b.buffer(name, "S", dtype=torch.int64, kind="input")
    for name in ("page_table", *((WINDOW_TABLE,) if windows else ())):
        b.buffer(name, "S", table_pages, dtype=torch.int64, kind="input")
    b.buffer("logits_indices", "R", dtype=torch.int64, kind="input")


def lower_sampling(b: Builder, logits: str, V: int) -> None:
    """Adds the node that draws tokens, its parameters as inputs and its results as outputs.

    Args:
        logits: buffer [R, V].
    """
    inputs = {
        name: b.buffer(f"sampling.{name}", "R", dtype=sampling_dtype(name), kind="input")
        for name in SAMPLING
    }
    tables = sampling_tables(b.size("S"), b.size("R"), V)
    assert tuple(tables) == SAMPLING_TABLES
    for name, shape in tables.items():
        inputs[name] = b.buffer(
            f"sampling.{name}", *shape, dtype=sampling_dtype(name), kind="input"
        )
    inputs["masks_written"] = b.buffer(MASKS_WRITTEN, 1, dtype=torch.int64, kind="input")
    outputs = {
        "seen": inputs["seen"],
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
