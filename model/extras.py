"""Packages that only some commands need, and how to install them."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from pykernels.errors import PykernelsError

_CHECKOUT = Path(__file__).resolve().parents[1]


PICTURES = (".png", ".svg", ".pdf")
"""Ends of names by which matplotlib draws, on any machine."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def check_plot(file: Path | None) -> None:
    """Raise `PykernelsError` if a picture is asked for that cannot be drawn, before what it is to
    show is measured."""
    if file is None:
        return
    if file.suffix.lower() not in PICTURES:
        raise PykernelsError(f"{file} is no picture's name", f"End it with {' or '.join(PICTURES)}")
    if not file.absolute().parent.is_dir():
        raise PykernelsError(f"There is no folder {file.parent}", "Make it, or give another one")
    if not is_installed("matplotlib"):
        raise PykernelsError(
            f"{file} cannot be drawn: matplotlib is not installed",
            "pip install matplotlib, or leave the picture out",
        )


def pinned() -> str:
    """The options with which a checkout's pip takes the versions that are known to go together."""
    return "-c constraints.txt " if (_CHECKOUT / "constraints.txt").is_file() else ""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml.

    pykernels is on no index, so its extras have no name there: a checkout installs its own, and
    beside a wheel it is the extra's packages.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"In {_CHECKOUT}: pip install -e '.[{extra}]'"
    wanted = [line.partition(";") for line in metadata.requires("pykernels") or []]
    packages = [
        f"'{package.strip()}'"
        for package, _, condition in wanted
        if condition.replace("'", '"').strip() == f'extra == "{extra}"'
    ]
    return f"pip install {' '.join(packages)}"
