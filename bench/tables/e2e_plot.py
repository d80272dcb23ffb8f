"""The plot of whole models: tokens a second of each engine, a group of bars a case."""

from __future__ import annotations

from typing import Any

from .e2e import Row, case_title, peers_of


def speeds(plt: Any, rows: list[Row]) -> Any:
    """A panel for prompts and one for decode, which also shows what the read roof would allow."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    panels_cases = [
        list(dict.fromkeys(case_title(row) for row in rows if row["op"] == op)) for op in ops
    ]
    places = len({row.get("place", "") for row in rows})
    bars = places + max(len(_peers([row for row in rows if row["op"] == op])) for op in ops)
    most = max(map(len, panels_cases))
    size = 4.5 + max(1.2, 0.45 * bars) * len(ops) * most, 4.6
    figure, panels = plt.subplots(1, len(ops), figsize=size, layout="constrained", squeeze=False)
    for axes, op, cases in zip(panels[0], ops, panels_cases, strict=True):
        _bars(axes, [row for row in rows if row["op"] == op], cases, rows)
        axes.set(ylabel="tokens/s", title=op.removeprefix("e2e "))
        axes.set_ylim(bottom=0)
    for axes in panels[0]:  # llama.cpp's prompts have other bars than its decodes
        axes.legend(fontsize=7)
    return figure


def _peers(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in peers_of(row)))


def _bars(axes: Any, rows: list[Row], cases: list[str], every: list[Row]) -> None:
    """The bars of ``rows``; the same colours in all panels, those of ``every`` row."""
    places = list(dict.fromkeys(row.get("place", "") for row in every))
    peers, colours = _peers(rows), [*places, *_peers(every)]
    width = 0.8 / (len(places) + len(peers))
    bars = dict[str, list[tuple[int, float]]]()  # by name
    for row in rows:
        group = cases.index(case_title(row))
        bars.setdefault(_name(row.get("place", "")), []).append((group, row["tok_s"]))
        for peer in peers_of(row):  # the same turns beside each of our places
            bars.setdefault(peer, []).append((group, row[f"tok_s_{peer}"]))
    for i, key in enumerate([*places, *peers]):
        name = _name(key) if key in places else key
        by_case = dict(bars.get(name, []))
        at = [group + i * width for group in by_case]
        axes.bar(at, list(by_case.values()), width, label=name, color=f"C{colours.index(key)}")
    label: str | None = "read roof"
    for row in rows:
        if row.get("bytes_per_step"):
            group, i = cases.index(case_title(row)), places.index(row.get("place", ""))
            roof = row["batch"] * 1e9 * row["roof_gbps"] / row["bytes_per_step"]
            left = group + (i - 0.5) * width
            right = group + 0.8 - width / 2 if len(places) == 1 else left + width
            axes.plot([left, right], [roof, roof], color="black", lw=1, label=label)
            label = None
    labels = [case.replace(", ", "\n") for case in cases]
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], labels, fontsize=7)
    axes.set_xlim(-0.2 - width / 2, len(cases) - width / 2)


def _name(place: str) -> str:
    return f"pykernels, {place}" if place else "pykernels"
