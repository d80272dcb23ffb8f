"""python -m bench.cache.predict: how well the next layer's experts can be told from a hidden state.

Layer-wise prefetching (SMOE, Figure 2) fetches experts a layer ahead; SMOE's own (IV-D) predicts
those of the next token in the same layer, which is not tried here. A linear predictor is trained on
what enters one router of the embedded model and what the next one chooses, on files that the model
never saw, and tried on others of them; beside it the experts that are chosen most, and the next
layer's own router on the hidden state of the layer before. Prints, by layer, which part of what is
predicted is then chosen (precision), which is what a fetch is worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import model

from .record import source_texts

COUNTS = (1, 2, 3, 6, 12)
"""Experts that are predicted for a token."""
_STEPS, _RATE, _DECAY = 400, 0.01, 1e-4


@dataclass(frozen=True)
class Seen:
    """What a router saw and chose.

    Attributes:
        hidden: float32 [T, H], its input; chosen: bool [T, E].
    """

    hidden: torch.Tensor
    chosen: torch.Tensor


def routers(network: nn.Module) -> list[nn.Module]:
    """The routers of an eager model, in the order of its layers."""
    return [part for name, part in network.named_modules() if name.endswith("mlp.gate")]


@torch.no_grad()
def seen(network: nn.Module, texts: Sequence[Sequence[int]]) -> list[Seen]:
    """What each router saw of some texts."""
    hidden, ids = ({i: list[torch.Tensor]() for i in range(len(routers(network)))} for _ in "ab")
    experts = 0
    hooks = []

    def watch(number: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any) -> None:
            nonlocal experts
            hidden[number].append(inputs[0].flatten(0, -2).float())
            ids[number].append(outputs[2])
            experts = outputs[0].shape[-1]

        return hook

    for number, router in enumerate(routers(network)):
        hooks.append(router.register_forward_hook(watch(number)))
    for text in texts:
        network(torch.tensor([text]))
    for handle in hooks:
        handle.remove()
    return [
        Seen(torch.cat(hidden[i]), chosen_of(torch.cat(ids[i]), experts))
        for i in range(len(hidden))
    ]


def chosen_of(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """bool [T, experts] of int64 [T, topk]."""
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter_(1, ids, True)


def trained(hidden: torch.Tensor, chosen: torch.Tensor) -> nn.Linear:
    """A predictor of what is chosen, by binary cross-entropy.

    Args:
        hidden: float32 [T, H]; chosen: bool [T, E].
    """
    torch.manual_seed(0)
    predictor = nn.Linear(hidden.shape[1], chosen.shape[1])
    optimizer = torch.optim.AdamW(predictor.parameters(), _RATE, weight_decay=_DECAY)
    target, loss_of = chosen.float(), nn.BCEWithLogitsLoss()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss_of(predictor(hidden), target).backward()
        optimizer.step()
    return predictor


def precision(scores: torch.Tensor, chosen: torch.Tensor, count: int) -> float:
    """Which part of each token's ``count`` highest scores is chosen; both [T, E]."""
    best = scores.topk(count, -1).indices
    return float(chosen.gather(1, best).float().mean())


@torch.no_grad()
def rows(
    network: nn.Module, learnt: Sequence[Seen], tried: Sequence[Seen]
) -> Iterator[Mapping[str, Any]]:
    """For each layer behind the first one, and each way to predict, the precision by count."""
    for layer in range(1, len(tried)):
        before, chosen = tried[layer - 1].hidden, tried[layer].chosen
        with torch.enable_grad():
            predictor = trained(learnt[layer - 1].hidden, learnt[layer].chosen)
        often = learnt[layer].chosen.float().mean(0).expand(chosen.shape)
        ways = {
            "most chosen": often,
            "its router, a layer early": routers(network)[layer](before[None])[0].flatten(0, -2),
            "trained": predictor(before),
        }
        for way, scores in ways.items():
            found = {str(n): round(precision(scores, chosen, n), 4) for n in COUNTS}
            yield {"layer": layer, "way": way, "precision": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m bench.cache.predict", description=__doc__)
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="half to learn from")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args(arguments)
    network = model.from_pretrained(model.EMBEDDED)
    texts = source_texts(model.EMBEDDED, options.texts, options.tokens)
    half = len(texts) // 2
    found = [*rows(network, seen(network, texts[:half]), seen(network, texts[half:]))]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'layer':5} {'predicted by':26} " + " ".join(f"{n:>5}" for n in COUNTS))
    for row in found:
        cells = " ".join(f"{value:5.0%}" for value in row["precision"].values())
        print(f"{row['layer']:<5} {row['way']:26} {cells}")


if __name__ == "__main__":
    main()
