"""A case at growing contexts, prompts or batches, as rows and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pykernels.errors import PykernelsError

from .placing import placed
from .predict import Prediction, predict

SWEPT = ("context", "prompt", "batch")
STEPS = 7
"""Values of a sweep, each twice the one before."""
_FIRST = {"context": 512, "prompt": 128, "batch": 1}


@dataclass(frozen=True)
class Point:
    """One value of what is swept, with what the case does there."""

    value: int
    decode_tok_s: float
    prompt_tok_s: float
    bound: str


def check_swept(name: str) -> str:
    """The name, if that can be swept.

    Raises:
        PykernelsError: it cannot.
    """
    if name not in SWEPT:
        raise PykernelsError(f"a sweep of {name!r}", f"Give {', '.join(SWEPT)}")
    return name


def sweep(found: Prediction, name: str) -> list[Point]:
    """The case on the same device at each value that fits the machine and the model."""
    case, points = found.placed.case, list[Point]()
    for step in range(STEPS):
        value = _FIRST[name] << step
        wanted = replace(case.wanted, **{name: value})  # type: ignore[arg-type]
        if wanted.positions > case.subject.positions:
            break
        there = placed(replace(case, wanted=wanted))
        if not there.fits:
            break
        one = predict(there)
        points.append(Point(value, one.decode_tok_s, one.prompt.tok_s, one.decode.bound))
    return points


def told(points: Sequence[Point], name: str) -> list[str]:
    """The rows as text."""
    lines = [f"{name:>8} {'decode tok/s':>14} {'prompt tok/s':>14}  decode bound by"]
    for point in points:
        speeds = f"{point.decode_tok_s:>14.1f} {point.prompt_tok_s:>14.0f}"
        lines.append(f"{point.value:>8} {speeds}  {point.bound}")
    return lines


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
    except (OSError, ValueError) as error:
        raise PykernelsError(f"{file}: {error}", "Give another file, as sweep.png") from None
    plt.close(figure)
