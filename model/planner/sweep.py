"""A case at growing contexts, prompts or batches, as rows and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pykernels.errors import PykernelsError

from .placing import GIB, Placed, placed
from .predict import Prediction, predict

SWEPT = ("context", "prompt", "batch")
_FIRST = {"context": 1024, "prompt": 128, "batch": 1}
_STEPS = {"context": 8, "prompt": 9, "batch": 7}
"""Values of a sweep, each twice the one before."""


@dataclass(frozen=True)
class Point:
    """One value of what is swept, with what the case does there.

    Attributes:
        cache_gib: keys, values and states of all sequences, on all devices.
        deferred: experts of a token.
    """

    value: int
    decode_tok_s: float
    us_per_step: float
    prompt_tok_s: float
    cache_gib: float
    deferred: int
    bound: str


def check_swept(name: str) -> str:
    """The name, if that can be swept.

    Raises:
        PykernelsError: it cannot.
    """
    if name not in SWEPT:
        raise PykernelsError(f"a sweep of {name!r}", f"Give {', '.join(SWEPT)}")
    return name


def sweep(found: Prediction, name: str) -> tuple[list[Point], str]:
    """The case on the same device at each value that fits the machine and the model; and why it
    ends before the last one, "" where it does not."""
    case, points = found.placed.case, list[Point]()
    for step in range(_STEPS[name]):
        value = _FIRST[name] << step
        wanted = replace(case.wanted, **{name: value})  # type: ignore[arg-type]
        if wanted.positions > case.subject.positions:
            return points, f"the model was made for {case.subject.positions} positions"
        there = placed(replace(case, wanted=wanted))
        if not there.fits:
            least = min(there.memory.items(), key=lambda item: item[1].free)
            return points, f"{least[0]} has no memory for {name} {value}"
        points.append(_point(found, there, name, value))
    return points, ""


def _point(found: Prediction, there: Placed, name: str, value: int) -> Point:
    """A value's prediction; what does not depend on it is ``found``'s."""
    same = found.placed.plan.placement == there.plan.placement
    if same and name == "context":
        if found.placed.plan.deferred == there.plan.deferred:
            there = replace(there, programs=found.placed.programs)
        one = predict(there, found.prompt)
    else:
        one = predict(there)
    return Point(
        value,
        one.decode_tok_s,
        one.decode.seconds * 1e6,
        one.prompt.tok_s,
        sum(memory.cache for memory in there.memory.values()) / GIB,
        there.plan.deferred,
        one.decode.bound,
    )


def told(points: Sequence[Point], name: str, ended: str = "") -> list[str]:
    """The rows as text.

    Args:
        ended: see ``sweep``.
    """
    defers = any(point.deferred for point in points)
    head = f"{name:>8} {'decode tok/s':>13} {'ms a step':>10} {'prompt tok/s':>13}"
    lines = [f"{head} {'cache GiB':>10}{'  deferred' if defers else ''}  decode bound by"]
    for point in points:
        lines.append(
            f"{point.value:>8} {point.decode_tok_s:>13.1f} {point.us_per_step / 1e3:>10.2f}"
            f" {point.prompt_tok_s:>13.0f} {point.cache_gib:>10.2f}"
            f"{f'  {point.deferred:>8}' if defers else ''}  {point.bound}"
        )
    return lines + ([f"(no more: {ended})"] if ended else [])


def draw(points: Sequence[Point], name: str, title: str, file: Path) -> None:
    """Writes the rows as a picture.

    Raises:
        PykernelsError: without matplotlib; the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise PykernelsError(
            "a picture needs matplotlib", "pip install matplotlib, or leave out --plot"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    values = [point.value for point in points]
    speeds = (
        ("decode", [point.decode_tok_s for point in points]),
        ("prompt", [point.prompt_tok_s for point in points]),
    )
    for axis, (what, tok_s) in zip(axes, speeds, strict=True):
        axis.plot(values, tok_s, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(name)
        axis.set_ylabel(f"{what}, tok/s")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        hint = "Free some space, or give a file elsewhere"
        raise PykernelsError(f"{file} cannot be written: {error.strerror}", hint) from None
    plt.close(figure)
