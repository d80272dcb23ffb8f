"""Figures 5 and 6: which experts are chosen, as recorded of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cells import Cell
from ..rows import RESULTS

FILE = RESULTS / "papers" / "routing.json"
TEXTS, PROMPT, TOKENS = 6, 64, 192
"""Of the recording: held-out files of Python's library, their tokens."""
HALF = 0.5


def figure5() -> list[Cell]:
    """How many experts of a layer have half of all choices, and the share of the first eighth."""
    found = []
    data = json.loads(FILE.read_text())
    for layer, counts in enumerate(data["counts"]):
        ordered = np.sort(np.array(counts))[::-1]
        share = np.cumsum(ordered) / ordered.sum()
        E = len(counts)
        half = 100 * (int(np.searchsorted(share, HALF)) + 1) / E
        what, file = f"embedded model, layer {layer}", "papers/routing.json"
        found += [
            Cell(
                "Figure 5",
                f"{what}: experts with half of the choices",
                "%",
                measured=half,
                file=file,
            ),
            Cell(
                "Figure 5",
                f"{what}: choices of the most used eighth",
                "%",
                measured=100 * float(share[E // 8 - 1]),
                file=file,
            ),
        ]
    return found


def figure6() -> list[Cell]:
    """How many of a token's experts the token before had, which a map shows as lines."""
    data = json.loads(FILE.read_text())
    E, topk = data["experts"], data["topk"]
    found = []
    for layer, chosen in enumerate(data["chosen"]):
        pairs = [len(set(a) & set(b)) / topk for a, b in zip(chosen, chosen[1:], strict=False)]
        what = f"embedded model, layer {layer}: of the token before (even: {100 * topk / E:.0f})"
        again = 100 * float(np.mean(pairs))
        found.append(Cell("Figure 6", what, "%", measured=again, file="papers/routing.json"))
    return found


def record_choices(out: Path) -> None:
    """Records the embedded model's choices on this machine, as JSON and a map."""
    import model
    from bench.cache.record import record, source_texts
    from bench.e2e.ours import Ours
    from runtime.planning.config import ExecutionConfig

    execution = ExecutionConfig()
    ours = Ours.checkpoint(model.EMBEDDED, execution)
    try:
        texts = source_texts(model.EMBEDDED, TEXTS, PROMPT + TOKENS)
        ids = [one.ids[one.prompt :] for one in record(ours, texts, PROMPT, execution)]
    finally:
        ours.close()
    every = np.concatenate(ids)  # [tokens, L, topk]
    E = int(every.max()) + 1
    counts = [np.bincount(every[:, layer].ravel(), minlength=E) for layer in range(every.shape[1])]
    data: dict[str, Any] = {
        "command": "python -m bench.papers routing",
        "model": ours.name,
        "experts": E,
        "topk": int(every.shape[2]),
        "texts": TEXTS,
        "prompt": PROMPT,
        "tokens": TOKENS,
        "counts": [each.tolist() for each in counts],
        "chosen": [ids[0][:, layer].tolist() for layer in range(every.shape[1])],
    }
    (out / "routing.json").write_text(json.dumps(data) + "\n")
    _draw(counts, ids[0], E, out / "smoe-routing.png")


def _draw(counts: list[NDArray[Any]], ids: NDArray[np.int32], E: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = ids.shape[1]
    figure, axes = plt.subplots(1, layers + 1, figsize=(3 * (layers + 1), 4))
    for layer, each in enumerate(counts):
        share = np.cumsum(np.sort(each)[::-1]) / each.sum()
        axes[0].plot(np.arange(1, E + 1) / E, share, label=f"layer {layer}")
    axes[0].plot([0, 1], [0, 1], ":", color="grey")
    axes[0].set_title("choices of the most used experts", fontsize=9)
    axes[0].legend(fontsize=7)
    for layer, axis in enumerate(axes[1:]):
        mask = np.zeros((len(ids), E))
        np.put_along_axis(mask, ids[:, layer], 1, axis=1)
        axis.imshow(mask.T, aspect="auto", interpolation="nearest", cmap="Blues")
        axis.set_title(f"layer {layer}: expert by token", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=90)
    plt.close(figure)
