"""The folder of a packed cache while it is written: new, or of an earlier run of the same work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pykernels.errors import PykernelsError

from .manifest import CONVERTING, PACKED, Manifest, parse
from .mapped import MappedFile
from .one_writer import one_writer

LOCK = "converting.lock"
"""Name of the file that a process locks while it writes the others."""
_NOTHING = {LOCK, f"{CONVERTING}.part"}
"""What a process leaves that was killed before it had begun."""


@contextmanager
def begun(target: Path, manifest: Manifest) -> Iterator[None]:
    """Makes the folder, or goes on with one where an earlier run did the same work; within it no
    other process writes there.

    Raises:
        PykernelsError: something else is there, or another process writes it.
    """
    _has_begun(target, manifest)  # else no lock is left in a folder of something else
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PykernelsError(
            f"{target} cannot be made: {error.strerror}", "Choose another folder"
        ) from None
    with one_writer(target / LOCK, target):
        if not _has_begun(target, manifest):  # nor has another process meanwhile
            manifest.write(target)
        for rest in target.glob("*.part"):
            rest.unlink()
        yield


def is_whole(file: Path) -> bool:
    """Whether a file is there, with all that its header promises: the disk may have lost some."""
    if not file.is_file():
        return False
    try:
        MappedFile(file)
    except PykernelsError:
        return False
    return True


def _has_begun(target: Path, manifest: Manifest) -> bool:
    """Whether the same work has begun there; not, if there is nothing."""
    for name in (PACKED, CONVERTING):
        if (target / name).is_file():
            try:
                what = parse(target / name).difference(manifest)
            except PykernelsError as error:
                raise PykernelsError(
                    error.cause, "Delete the folder, or choose another one"
                ) from None
            if what is None:
                return True
            raise PykernelsError(
                f"{target} is a packed cache with another {what}",
                "Delete it, or choose another folder",
            )
    if target.exists() and not (target.is_dir() and _is_empty(target)):
        raise PykernelsError(
            f"{target} is there already, and no packed cache", "Choose a folder that is new"
        )
    return False


def _is_empty(folder: Path) -> bool:
    return all(file.name in _NOTHING for file in folder.iterdir())
