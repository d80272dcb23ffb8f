"""The plot of whole models: tokens a second of each engine, a group of bars a case."""

from __future__ import annotations

from typing import Any

from .table import Row, peers_of, title


def speeds(plt: Any, rows: list[Row]) -> Any:
    """A panel for prompts and one for decode, which also shows what the read roof would allow."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in peers_of(row)))
    most = max(sum(row["op"] == op for row in rows) for op in ops)
    size = 4.5 + 1.2 * len(ops) * most, 4.6
    figure, panels = plt.subplots(1, len(ops), figsize=size, layout="constrained", squeeze=False)
    for axes, op in zip(panels[0], ops, strict=True):
        shown = [row for row in rows if row["op"] == op]
        _bars(axes, shown, peers)
        axes.set(ylabel="tokens/s", title=op.removeprefix("e2e "))
        axes.set_ylim(bottom=0)
    panels[0][-1].legend(fontsize=7)
    return figure


def _bars(axes: Any, rows: list[Row], peers: list[str]) -> None:
    width = 0.8 / (1 + len(peers))
    at = range(len(rows))
    axes.bar(list(at), [row["tok_s"] for row in rows], width, label="pykernels")
    for i, peer in enumerate(peers, 1):
        there = [
            (x + i * width, row) for x, row in zip(at, rows, strict=True) if f"x_{peer}" in row
        ]
        heights = [row[f"tok_s_{peer}"] for _, row in there]
        axes.bar([x for x, _ in there], heights, width, label=peer)
    for x, row in zip(at, rows, strict=True):
        if "roof_gbps" in row:
            roof = row["batch"] * 1e9 * row["roof_gbps"] / row["bytes_per_step"]
            axes.plot(
                [x - width / 2, x + 0.8 - width / 2],
                [roof, roof],
                color="black",
                lw=1,
                label=None if x else "read roof",
            )
    labels = [title(row).replace(", ", "\n") for row in rows]
    axes.set_xticks([x + 0.4 - width / 2 for x in at], labels, fontsize=7)
    axes.set_xlim(-0.2 - width / 2, len(rows) - width / 2)
