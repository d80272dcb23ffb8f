"""transformers' own float32 model of a row: its log-probabilities, and where its routers hesitate.

Its weights are those that the checkpoint stores in bfloat16; the frequencies of its rotary
embedding stay float32, which ``.to(bfloat16)`` would round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

SIGMOID = ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "minimax_m2")
"""Families whose scores are sigmoids; those of the others are a softmax's."""


class Truth(NamedTuple):
    """Of a sequence: ``logprobs`` float32 [T, V]; ``gap`` [T]: the least of all layers, by which
    the last chosen expert's score is above the first refused one's."""

    logprobs: torch.Tensor
    gap: torch.Tensor


def truth_of(reference: PreTrainedModel, tokens: list[int]) -> Truth:
    """What transformers computes for a sequence."""
    reference.set_experts_implementation("eager")  # grouped products want multiples of 16
    layers = reference.model.layers
    mlps = [getattr(layer, "mlp", None) or layer.feed_forward for layer in layers]
    blocks = [mlp for mlp in mlps if hasattr(mlp, "experts")]
    routers = [layer.router for layer in layers if getattr(layer, "router", None) is not None]
    least = torch.full((len(tokens),), torch.inf)

    def look(block: Any, hidden: torch.Tensor, ids: torch.Tensor, _: torch.Tensor) -> None:
        torch.minimum(least, gaps(block, hidden, ids, reference.config), out=least)

    def hook(block: Any) -> Any:
        return lambda _, args, named: look(block, *args, *named.values())

    def look_beside(router: Any, _: Any, chosen: tuple[torch.Tensor, ...]) -> None:
        """Gemma 4's router is no part of a block, and says its probabilities."""
        scores, _, ids = chosen
        last = scores.gather(1, ids).amin(-1)
        gap = last - scores.scatter(1, ids, -torch.inf).amax(-1)
        torch.minimum(least, gap, out=least)

    hooks = [router.register_forward_hook(look_beside) for router in routers]
    hooks += [b.experts.register_forward_pre_hook(hook(b), with_kwargs=True) for b in blocks]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0].float()
    for each in hooks:
        each.remove()
    return Truth(logits.log_softmax(-1), least)


def gaps(block: Any, hidden: torch.Tensor, ids: torch.Tensor, config: Any) -> torch.Tensor:
    """By how much a block's last chosen score is above the first refused one's: [T].

    Args:
        hidden: [T, H] of the experts' inputs; ids: [T, topk], the chosen ones.
    """
    gate = getattr(block, "gate", None) or block.router
    logits = torch.nn.functional.linear(hidden, gate.weight, getattr(gate, "bias", None))
    sigmoid = config.model_type in SIGMOID
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    own = dict([*block.named_parameters(), *block.named_buffers()])
    endings = "e_score_correction_bias", "expert_bias"
    bias = next((own[name] for name in own if name.endswith(endings)), None)
    scores = scores if bias is None else scores + bias.flatten()
    greedy = getattr(config, "topk_method", None) == "greedy"  # DeepSeek-V2-Lite's groups are idle
    groups = 1 if greedy else getattr(config, "n_group", None) or 1
    between = torch.full(scores.shape[:1], torch.inf)
    if groups > 1:
        members = scores.unflatten(-1, (groups, -1))
        # The sum of two has twice the error of one: so here their mean.
        best = members.topk(2, -1).values.mean(-1) if sigmoid else members.amax(-1)
        ranked = best.sort(-1, descending=True)
        kept = config.topk_group
        between = ranked.values[:, kept - 1] - ranked.values[:, kept]
        dropped = torch.zeros_like(best, dtype=torch.bool).scatter(
            1, ranked.indices[:, kept:], True
        )
        scores = members.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    last = scores.gather(1, ids).amin(-1)
    refused = scores.scatter(1, ids, -torch.inf).amax(-1)
    return torch.minimum(between, last - refused)
