"""flash-linear-attention on the gated delta rule: the same inputs, states in and out."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness.timing.case import Call, rotating

NAME = "fla"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fla(inputs: Sequence[Inputs], S: int, tokens: int) -> dict[str, Call]:
    """Its recurrent kernel for one token a sequence, else its chunked ones; nothing where it is not
    installed, or on a CPU.

    Args:
        inputs: sets of q, k, v, g, beta of all tokens, and states [S, HV, DK, DV].
    """
    if not inputs[0][0].is_cuda or importlib.util.find_spec("fla") is None:
        return {}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    rule = fused_recurrent_gated_delta_rule if tokens == 1 else chunk_gated_delta_rule

    def run(*given: Any) -> object:
        *sequences, state = given
        q, k, v, g, beta = (each.unflatten(0, (S, tokens)) for each in sequences)
        with torch.no_grad():
            return rule(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

    return {NAME: rotating(run, inputs)}
