"""A timeline as a picture like SOSP'25 Figure 10: a lane for each worker and stream, a colour for
each op, a line where a layer begins. A whole step first, then a few of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pykernels.errors import PykernelsError

from .timeline import COPY, ENGINE, STREAM, WAIT, WORKER, Lane, Span, Step, Timeline
from .usage import busy_of, length, merged, usage, without

OPS: Mapping[str, tuple[str, str]] = {
    "moe_ffn routed": ("routed experts", "#d1495b"),
    "moe_ffn deferred": ("deferred experts", "#f2a6a0"),
    "moe_ffn shared": ("shared experts", "#edae49"),
    "moe_ffn dense": ("dense MLP", "#c98a2b"),
    "attention": ("attention", "#00798c"),
    "attention_expanded": ("attention", "#00798c"),
    "gated_delta_rule": ("delta net", "#2f4b7c"),
    "causal_conv1d": ("delta net", "#2f4b7c"),
    "delta_step": ("delta net", "#2f4b7c"),
    "delta_gates": ("gates", "#9fb4d8"),
    "delta_norm": ("gates", "#9fb4d8"),
    "gated_rms_norm": ("gates", "#9fb4d8"),
    "sigmoid_mul": ("gates", "#9fb4d8"),
    "linear": ("linear", "#4f9d69"),
    "per_head_linear": ("linear, per head", "#8fc1a0"),
    "gqa_rope_cache_write": ("rope, cache write", "#74c6d4"),
    "mla_rope_cache_write": ("rope, cache write", "#74c6d4"),
    "rope_table": ("rope, cache write", "#74c6d4"),
    "rms_norm": ("norm", "#8d99ae"),
    "add": ("sum", "#adb5c4"),
    "one_shot_all_reduce": ("sum", "#adb5c4"),
    "router": ("router", "#6a4c93"),
    "shared_factor": ("router", "#6a4c93"),
    "split_routing": ("router", "#6a4c93"),
    "sort_routing": ("router", "#6a4c93"),
    "load_experts": ("copy", "#e07be0"),
    "load_weights": ("copy", "#e07be0"),
    "load_pages": ("copy", "#e07be0"),
    "store_rows": ("copy", "#e07be0"),
    "unpack_experts": ("unpacking", "#b5838d"),
    "join_rows": ("norm", "#8d99ae"),
    "embed": ("embedding", "#b08968"),
    "sample_requests": ("sampling", "#3d5a80"),
    COPY: ("copy", "#e07be0"),
    "launch": ("launch", "#2b2d42"),
    "schedule": ("schedule, inputs, deliver", "#5c677d"),
    "inputs": ("schedule, inputs, deliver", "#5c677d"),
    "deliver": ("schedule, inputs, deliver", "#5c677d"),
    WAIT: ("wait", "#ced4da"),
    "run": ("wait", "#ced4da"),
}
"""Label and colour of each op; those that are not here are "other"."""

OTHER = ("other", "#bdb2a7")
_HIDDEN = {"jobs"}
_THIN = {WAIT, "run"}
ZOOMED = 2
"""Layers of the second panel."""


@dataclass(frozen=True)
class Panel:
    """A part of a step, from ``begin`` to ``end`` ns.

    Attributes:
        layers: when each one of the step begins.
        labels: whether the ops' names are written on wide bars.
    """

    title: str
    begin: int
    end: int
    spans: Sequence[Span]
    layers: Mapping[int, int]
    labels: bool = False


def draw(timeline: Timeline, file: Path) -> None:
    """Draws the middle decode step, some of its layers, and the longest step of a prompt.

    Raises:
        PykernelsError: nothing was recorded, matplotlib is not installed, or the file cannot be
            written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PykernelsError(
            "the picture needs matplotlib, which is not installed", "pip install matplotlib"
        ) from None
    panels = panels_of(timeline)
    if not panels:
        raise PykernelsError("no step was recorded", "Record one")
    lanes = timeline.lanes
    row = 0.34 if len(lanes) <= 8 else 0.22
    height = len(panels) * (row * len(lanes) + 1.0) + 1.3
    figure = Figure(figsize=(15, height), layout="constrained", dpi=130)
    figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, each in zip(panels, axes, strict=True):
        _draw_panel(each, panel, lanes)
    _legend(figure, [span for panel in panels for span in panel.spans])
    try:
        figure.savefig(file)
    except OSError as error:
        hint = "Free some space, or give a file elsewhere"
        raise PykernelsError(f"{file} cannot be written: {error.strerror}", hint) from None
    except ValueError as error:
        raise PykernelsError(f"{file} cannot be drawn: {error}", "Give a .png or .svg") from None


def panels_of(timeline: Timeline) -> list[Panel]:
    """The panels, in the order in which they are drawn."""
    panels: list[Panel] = []
    decode = sorted(
        (step for step in timeline.steps if step.kind == "decode"), key=lambda s: s.end - s.begin
    )
    if decode:
        step = decode[len(decode) // 2]
        panels.append(_whole(timeline, step))
        spans, begins = panels[0].spans, panels[0].layers
        if len(begins) > ZOOMED:
            numbers = list(begins)
            first = numbers[len(numbers) // 2 - ZOOMED // 2]
            behind = numbers.index(first) + ZOOMED
            end = begins[numbers[behind]] if behind < len(numbers) else step.end
            begin = begins[first]
            title = f"layers {first} and {first + 1} of it, {(end - begin) / 1e3:,.0f} µs"
            panels.append(Panel(title, begin, end, _cut(spans, begin, end), begins, True))
    prefill = [step for step in timeline.steps if step.kind == "prefill"]
    if prefill:
        step = max(prefill, key=lambda step: step.T)
        panels.append(_whole(timeline, step))
    return panels


def layer_begins(spans: Sequence[Span]) -> dict[int, int]:
    """When each layer's first span begins, in the layers' order."""
    begins: dict[int, int] = {}
    for span in spans:
        if span.layer is not None and span.op != WAIT and span.lane.kind in (WORKER, STREAM):
            begins[span.layer] = min(span.begin, begins.get(span.layer, span.begin))
    return dict(sorted(begins.items()))


def _whole(timeline: Timeline, step: Step) -> Panel:
    spans = timeline.within([step])
    return Panel(_title(timeline, step), step.begin, step.end, spans, layer_begins(spans))


def _title(timeline: Timeline, step: Step) -> str:
    tokens = f"{step.T} token{'s' * (step.T > 1)}"
    use = usage(Timeline((step,), timeline.spans), step.kind)
    assert use is not None
    parts = [f"{step.kind} step, {tokens}, {use.us / 1e3:,.2f} ms"]
    if use.workers:
        parts.append(f"CPU busy {use.cpu:.0%} (mean of its workers {use.workers:.0%})")
    parts += [f"{device} busy {share:.0%}" for device, share in use.streams.items()]
    if use.workers and use.streams:
        parts.append(f"both {use.both:.0%}")
    parts.append(f"neither {use.neither:.0%}" if use.streams else f"idle {use.neither:.0%}")
    return " · ".join(parts)


def _cut(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    cut = []
    for s in spans:
        first, last = max(s.begin, begin), min(s.end, end)
        if first < last:
            cut.append(Span(s.lane, s.name, s.op, first, last, s.layer, s.detail))
    return cut


def _draw_panel(axes: Any, panel: Panel, lanes: Sequence[Lane]) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = {lane: len(lanes) - 1 - i for i, lane in enumerate(lanes)}
    total = panel.end - panel.begin
    unit, per_unit = ("ms", 1e6) if total > 2e7 else ("µs", 1e3)
    # By look: one collection of bars each draws 10^5 tasks in a second.
    bars: dict[tuple[Lane, str], list[tuple[int, int]]] = {}
    for span in panel.spans:
        if span.op not in _HIDDEN:
            bars.setdefault((span.lane, span.op), []).append((span.begin, span.end))
    for (lane, op), pairs in bars.items():
        intervals = np.array(pairs, np.int64)
        if op not in _THIN:  # a wait within a task is idle time
            intervals = without(intervals, merged(bars.get((lane, WAIT), [])))
        tall = 0.14 if op in _THIN else 0.78
        axes.broken_barh(
            list(zip(intervals[:, 0] - panel.begin, np.diff(intervals)[:, 0], strict=True)),
            (rows[lane] - tall / 2, tall),
            facecolors=OPS.get(op, OTHER)[1],
            edgecolor="none",
            zorder=2 if op in _THIN else 3,
        )
    _layers(axes, panel, len(lanes))
    if panel.labels:
        _label(axes, panel, rows)
    busy = busy_of(span for span in panel.spans if span.op not in _HIDDEN | {"run"})
    for lane, row in rows.items():
        share = length(busy[lane]) / total if lane in busy else 0.0
        axes.text(
            1.004, row, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center",
            fontsize=8, color="#495057",
        )  # fmt: skip
    axes.set_yticks(list(rows.values()), [lane.name for lane in rows], fontsize=9)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(0, total)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda ns, _: f"{ns / per_unit:g}")
    axes.set_xlabel(unit, fontsize=9, labelpad=1)
    axes.set_title(panel.title, loc="left", fontsize=10, pad=16)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _layers(axes: Any, panel: Panel, height: int) -> None:
    begins = {k: at for k, at in panel.layers.items() if panel.begin <= at < panel.end}
    edges = [*(at - panel.begin for at in begins.values()), panel.end - panel.begin]
    many = len(begins) > 40
    for i, layer in enumerate(begins):
        if i % 2 == 0:
            axes.axvspan(edges[i], edges[i + 1], color="#f1f3f5", zorder=0, linewidth=0)
        axes.axvline(edges[i], color="#868e96", linewidth=0.6, linestyle=(0, (4, 3)), zorder=6)
        if not many or i % 5 == 0:
            text = f"layer {layer}" if len(begins) <= 14 else str(layer)
            axes.annotate(
                text, (edges[i], height - 0.4), xytext=(2, 2), textcoords="offset points",
                fontsize=7.5, color="#495057",
            )  # fmt: skip


def _label(axes: Any, panel: Panel, rows: Mapping[Lane, int]) -> None:
    """Writes the op on each run of one lane's spans that is wide enough for it."""
    total = panel.end - panel.begin
    runs: list[list[Any]] = []  # lane, op, begin, end
    for span in sorted(panel.spans, key=lambda s: (s.lane, s.begin)):
        if span.op in _HIDDEN | _THIN or span.lane.kind == ENGINE:
            continue
        last = runs[-1] if runs else None
        near = last is not None and span.begin - last[3] < total // 200
        if last is not None and near and (last[0], last[1]) == (span.lane, span.op):
            last[3] = max(last[3], span.end)
        else:
            runs.append([span.lane, span.op, span.begin, span.end])
    for lane, op, begin, end in runs:
        text = OPS.get(op, OTHER)[0]
        if (end - begin) / total > 0.0062 * len(text) + 0.004:
            axes.text(
                (begin + end) / 2 - panel.begin, rows[lane], text, ha="center", va="center",
                fontsize=8, color="white", zorder=7, clip_on=True,
            )  # fmt: skip


def _legend(figure: Any, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    present = {span.op for span in spans} - _HIDDEN
    shown = dict(look for op, look in OPS.items() if op in present)
    if present - set(OPS):
        shown |= dict([OTHER])
    patches = [Patch(color=colour, label=label) for label, colour in shown.items()]
    figure.legend(
        handles=patches, loc="outside lower left", ncols=min(9, len(patches)), frameon=False,
        fontsize=9,
    )  # fmt: skip
