"""python -m bench.cache.predict: how well the experts to come can be told from a hidden state.

Layer-wise prefetching (SMOE, Figure 2) fetches experts a layer ahead: a linear predictor is trained
on what enters one router of the embedded model and what the next one chooses, on files that the
model never saw, and tried on others of them; beside it the experts that are chosen most, and the
next layer's own router on the hidden state of the layer before. SMOE's own (IV-D, here --ahead
token) predicts those of the next token in the same layer; beside that predictor the experts of this
token once more, and a predictor that also sees which token was drawn, as it can be when the next
step has begun. Prints, by layer, which part of what is predicted is then chosen (precision), which
is what a fetch is worth.
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
from bench.harness.keeping.provenance import provenance

from .record import source_texts

COUNTS = (1, 2, 3, 6, 8, 12)
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


Rows = Iterator[Mapping[str, Any]]


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
def next_layer(network: nn.Module, learnt: Sequence[Seen], tried: Sequence[Seen]) -> Rows:
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
        yield from _precisions(layer, ways, chosen)


@torch.no_grad()
def next_token(
    learnt: Sequence[Seen], tried: Sequence[Seen], of_learnt: Tokens, of_tried: Tokens
) -> Rows:
    """For each layer, and each way to predict, the precision for the next token by count."""
    for layer in range(len(tried)):
        now, then = of_learnt.pairs
        hidden, chosen = learnt[layer].hidden[now], learnt[layer].chosen[then]
        known = torch.cat((hidden, of_learnt.embedded[then]), -1)
        with torch.enable_grad():
            predictor, informed = trained(hidden, chosen), trained(known, chosen)
        often = chosen.float().mean(0)
        now, then = of_tried.pairs
        hidden, chosen = tried[layer].hidden[now], tried[layer].chosen[then]
        ways = {
            "most chosen": often.expand(chosen.shape),
            "this token's experts": tried[layer].chosen[now] + often,
            "trained": predictor(hidden),
            "trained, token known": informed(torch.cat((hidden, of_tried.embedded[then]), -1)),
        }
        yield from _precisions(layer, ways, chosen)


def _precisions(layer: int, ways: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> Rows:
    for way, scores in ways.items():
        by_count = {str(n): round(precision(scores, chosen, n), 4) for n in COUNTS}
        yield {"layer": layer, "way": way, "precision": by_count}


class Tokens:
    """The tokens of some texts, one text behind the other.

    Attributes:
        embedded: float32 [T, H].
        pairs: int64 [P] each: tokens that have a next one in their text, and these.
    """

    @torch.no_grad()
    def __init__(self, network: Any, texts: Sequence[Sequence[int]]) -> None:
        ids = torch.tensor([token for text in texts for token in text])
        self.embedded = network.get_input_embeddings()(ids).float()
        last = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        whole = torch.ones(len(ids), dtype=torch.bool)
        whole[last] = False
        now = whole.nonzero().flatten()
        self.pairs = now, now + 1


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m bench.cache.predict", description=__doc__)
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="half to learn from")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each")
    parser.add_argument("--ahead", choices=("layer", "token"), default="layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args(arguments)
    network = model.from_pretrained(model.EMBEDDED)
    texts = source_texts(model.EMBEDDED, options.texts, options.tokens)
    half = len(texts) // 2
    learnt, tried = seen(network, texts[:half]), seen(network, texts[half:])
    if options.ahead == "layer":
        rows = [*next_layer(network, learnt, tried)]
    else:
        tokens = (Tokens(network, some) for some in (texts[:half], texts[half:]))
        rows = [*next_token(learnt, tried, *tokens)]
    if options.json is not None:
        results = provenance() | {"ahead": options.ahead, "rows": rows}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{'layer':5} {'predicted by':26} " + " ".join(f"{n:>5}" for n in COUNTS))
    for row in rows:
        cells = " ".join(f"{value:5.0%}" for value in row["precision"].values())
        print(f"{row['layer']:<5} {row['way']:26} {cells}")


if __name__ == "__main__":
    main()
