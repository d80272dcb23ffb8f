"""The corpus: the Python standard library's own source, split by file.

A file's part depends on its relative path alone, so any two machines with the same Python agree,
and a file that a later Python adds moves no other file.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELDOUT_PERMILLE = 50
"""Files never trained on, per thousand."""
VALIDATION_PERMILLE = 20
"""The share of the other files that is set aside to choose the training's length, per thousand."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """One file: its path from the library's folder on (with `/`) and its bytes, valid UTF-8."""

    path: str
    data: bytes

    @property
    def text(self) -> str:
        """The bytes decoded as UTF-8; line ends are kept as they are."""
        return self.data.decode("utf-8")


@dataclass(frozen=True)
class Split:
    """Three disjoint lists of files, each in path order."""

    train: list[SourceFile]
    validation: list[SourceFile]
    heldout: list[SourceFile]


def default_stdlib() -> Path:
    """The folder that holds the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def part_of(path: str) -> str:
    """The part ("train", "validation" or "heldout") of a file by its relative path."""
    digest = hashlib.sha256(path.encode("utf-8")).digest()
    if int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PERMILLE:
        return "heldout"
    if int.from_bytes(digest[8:16], "big") % 1000 < VALIDATION_PERMILLE:
        return "validation"
    return "train"


def find_sources(stdlib: Path) -> list[SourceFile]:
    """Every UTF-8 `*.py` file under `stdlib` in path order.

    Installed packages, caches, empty files and `_sysconfigdata*` (written by each build, with that
    build's own paths) are left out. Raises `ValueError` when no file is left.
    """
    sources: list[SourceFile] = []
    for file in sorted(stdlib.rglob("*.py"), key=lambda f: f.relative_to(stdlib).as_posix()):
        relative = file.relative_to(stdlib)
        if _SKIPPED_FOLDERS & set(relative.parts) or file.name.startswith("_sysconfigdata"):
            continue
        data = file.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if data:
            sources.append(SourceFile(relative.as_posix(), data))
    if not sources:
        raise ValueError(f"no UTF-8 *.py file under {stdlib}; give a standard library's folder")
    return sources


def split(sources: Iterable[SourceFile]) -> Split:
    """The sources by `part_of`."""
    parts: dict[str, list[SourceFile]] = {"train": [], "validation": [], "heldout": []}
    for source in sources:
        parts[part_of(source.path)].append(source)
    return Split(**parts)


def total_bytes(sources: Iterable[SourceFile]) -> int:
    """The size of the files together, in bytes."""
    return sum(len(source.data) for source in sources)


def fingerprint(sources: Iterable[SourceFile]) -> str:
    """One SHA-256 over all paths and contents, in hexadecimal."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.path}\0{len(source.data)}\0".encode())
        digest.update(source.data)
    return digest.hexdigest()
