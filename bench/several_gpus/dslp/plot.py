"""The plot of streamed prompts: speed, time to the first token, and the links, by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.timing.rows import Row
from bench.papers import osdi_text as told

Results = dict[str, Any]


def figure_of(
    results: Results,
    rows: Sequence[Row],
    whole: Mapping[str, Sequence[tuple[int, float]]],
    path: Path,
) -> None:
    """Writes it. Needs matplotlib.

    Args:
        rows: with as many layers as were timed.
        whole: by way, tokens of a prompt and its seconds with all layers of the model.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    depth = results["depth"]
    computed = depth["whole"] > results["layers"]
    volumes = results.get("volumes") or []
    figure, panels = plt.subplots(
        1, 4 if volumes else 3, figsize=(14.5 if volumes else 11.5, 3.8), layout="constrained"
    )
    speed, times, links = panels[:3]
    lengths, sent = sorted({row["tokens"] for row in rows}), False
    for i, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        own = [row for row in rows if row["way"] == way]
        style: dict[str, Any] = {"marker": "o", "label": way, "color": f"C{i}"}
        speed.plot([row["tokens"] for row in own], [row["tok_s"] for row in own], **style)
        if way in whole:
            times.plot(*zip(*whole[way], strict=True), **style)
        streamed = [row for row in own if "link_gbps" in row]
        if streamed:
            at = [row["tokens"] for row in streamed]
            links.plot(at, [row["link_gbps"] for row in streamed], **style)
            if any(row["between_bytes"] for row in streamed):
                rates = [row["between_gbps"] for row in streamed]
                links.plot(at, rates, **style | {"marker": "x", "ls": ":", "label": ""})
                sent = True
    if sent:
        links.plot([], [], color="0.3", marker="x", ls=":", label="between the GPUs")
    roofs = {row["gpus"]: row["link_roof_gbps"] for row in rows if "link_roof_gbps" in row}
    for gpus, roof in roofs.items():
        links.axhline(roof * gpus, color="0.6", lw=1, ls="--")
        links.text(rows[0]["tokens"], roof * gpus, f"{gpus} x the link", va="bottom", fontsize=7)
    shown = f"{depth['whole']} layers, computed" if computed else f"{results['layers']} layers"
    speed.set(ylabel="tokens/s", title=f"prompts, {results['layers']} layers (Figure 13)")
    times.set(ylabel="s to the first token", title=f"{shown} (Figure 14)")
    times.set_yscale("log", base=2)
    times.yaxis.set_major_formatter("{x:g}")
    times.axhline(told.TTFT_LIMIT_S, color="0.6", lw=1, ls="--")
    for gpus, tokens in told.WITHIN_LIMIT.items():
        label = f"paper: {gpus} GPU{'s' * (gpus > 1)}"
        times.plot([tokens], [told.TTFT_LIMIT_S], "k*" if gpus > 1 else "kv", ms=8, label=label)
    links.set(ylabel="GB/s", title="experts over the links")
    for axes in (speed, times, links):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_short(tokens) for tokens in lengths], fontsize=7, rotation=45)
        axes.set(xlabel="tokens of the prompt")
        axes.set_title(axes.get_title(), fontsize=9)
        axes.grid(True, alpha=0.2)
        axes.legend(fontsize=7)
    links.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    if volumes:
        _volumes(panels[3], volumes)
    figure.suptitle("{model} {format}, {gpu}".format_map(results), fontsize=9)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _volumes(axes: Any, volumes: Sequence[Row]) -> None:
    """Figure 6: bytes that a GPU sends for a layer's experts, by what they are."""
    names = [each["form"] for each in volumes]
    below = [0.0] * len(volumes)
    for op in dict.fromkeys(op for each in volumes for op in each["by_op"]):
        high = [each["by_op"].get(op, 0) / 1e6 for each in volumes]
        axes.bar(names, high, bottom=below, label=op.replace("_", " "), width=0.6)
        below = [a + b for a, b in zip(below, high, strict=True)]
    axes.set(ylabel="MB sent by a GPU")
    axes.set_title(f"a layer, {volumes[0]['tokens']} tokens (Figure 6)", fontsize=9)
    axes.legend(fontsize=7)
