"""What the tasks of the gated delta rule read, and how a call is cut into tasks."""

from __future__ import annotations

from dataclasses import dataclass

from ..intrin.descriptor import descriptor

BLOCK = 8
"""Tokens that meet the state at once: it is read and written once for all of them."""

DELTA_RULE, delta_rule_at = descriptor(
    "gated_delta_rule",
    (
        "count_at",  # address of the number of sequences
        "starts",  # int64 [S], the first row of each
        "lengths",  # int64 [S], its rows in this step
        "slots",  # int64 [S], of its state; negative: padding
        "past",  # int64 [S], tokens that the state has seen; 0: it begins as zeros
        "q",  # float32 [T, HK, DK]
        "q_stride",  # bytes from a token to the next
        "k",  # float32 [T, HK, DK]
        "k_stride",
        "v",  # float32 [T, HV, DV]
        "v_stride",
        "g",  # float32 [T, HV]
        "g_stride",
        "beta",  # float32 [T, HV]
        "beta_stride",
        "HK",
        "HV",
        "group",  # value head h has the keys of head h // group % HK
        "scale",  # of the queries, bits of a float32
        "eps",  # likewise
        "state",  # float32 [slots, HV, DK, DV]
        "slot_bytes",
        "out",  # float32 [T, HV, DV]
        "out_stride",
        "columns",  # of a head's state that one task has: a multiple of DeltaRule.strip
    ),
)

_TASKS = 4
"""Tasks a thread: so many end at about the same time."""


@dataclass(frozen=True)
class DeltaRulePlan:
    """The cut of one call; sums are of one column each, so that every cut gives the same bits.

    Attributes:
        columns: of a head's state in a task; a task has one head of one sequence, or part of it.
    """

    columns: int


def plan(S: int, HV: int, DV: int, strip: int, threads: int) -> DeltaRulePlan:
    """Whole heads, or as few columns as give every thread enough tasks.

    A whole head's state lies in memory as one stream; what tasks of one head share, the norms and
    the products of its keys and queries, each of them computes for itself.

    Args:
        S: sequences that have tokens.
        HV, DV: value heads, and their size.
        strip: the fewest columns of a task (``DeltaRule.strip``).
        threads: that share the tasks.
    """
    columns = DV
    while S * HV * (DV // columns) < _TASKS * threads and columns // 2 % strip == 0:
        columns //= 2
    return DeltaRulePlan(columns)
