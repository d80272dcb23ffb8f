"""Which source files a kernel's file imports, directly or not, and what they hold.

Files are read in each process, so nothing here can be out of date; parsing them would take half a
second, so what each imports is kept in one file of the cache folder, by the digest of its text.

``from package import name`` is the submodule of that name, or the package's ``__init__`` where that
binds the name. Beyond that an ``__init__`` counts for nothing: it runs, but what is imported from
the module below it comes from there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...env import env

PROJECT = Path(__file__).parents[3]
"""The folder of these packages; ``site-packages`` where they are installed."""

OURS = ("pykernels", "runtime", "model", "bench", "tests")

_VERSIONED = "llvmlite", "numba", "numpy", "torch"
"""Installed packages that count by their version, as Python's own modules do."""

_KEPT = "imports.json"
_MOST = 4000
"""Texts whose imports are kept: some hundred edits."""


def _began() -> float:
    """When this process began, in seconds since the epoch."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age + 0.01  # a tick; Python itself takes longer to start
    return 0.0


_BEGAN = _began()


class Source(NamedTuple):
    """A file's name below the folder of its top package, and the digest of its text."""

    name: str
    digest: str


class Import(NamedTuple):
    """``from`` so many dots and ``module`` import ``names``; no names: ``import module``."""

    level: int
    module: str
    names: tuple[str, ...]


class Parsed(NamedTuple):
    """What a file imports when it is run, and the names that it binds."""

    imports: tuple[Import, ...]
    binds: frozenset[str]


@functools.cache
def source(file: Path) -> Source:
    """A file's name and digest."""
    return Source(file.relative_to(_top(file.parent)).as_posix(), _digest(_text(file)))


@functools.cache
def is_newer(file: Path) -> bool:
    """Whether the file changed after this process began: what was imported may be another text."""
    return file.stat().st_ctime >= _BEGAN


@functools.cache
def of_project(file: Path) -> bool:
    """Whether its source counts: neither Python's own nor of a package that counts by version."""
    if _is_ours(file):
        return True
    for installed in ("site-packages", "dist-packages"):
        if installed in file.parts[:-1]:
            return file.parts[file.parts.index(installed) + 1] not in _VERSIONED
    return file.is_file() and not file.is_relative_to(sysconfig.get_path("stdlib"))


def _is_ours(file: Path) -> bool:
    return any(file.is_relative_to(PROJECT / ours) for ours in OURS)


@functools.cache
def closure(file: Path) -> frozenset[Path]:
    """The file and all of the project that it imports, directly or not."""
    found, left = {file}, [file]
    while left:
        for other in _imported(left.pop()) - found:
            found.add(other)
            left.append(other)
    return frozenset(found)


@functools.cache
def digest(file: Path) -> str:
    """One digest of ``closure(file)``: names and texts, wherever they lie."""
    return _digest(repr(sorted(map(source, closure(file)))).encode())


@functools.cache
def changed(file: Path) -> bool:
    """Whether a file of ``closure(file)`` changed after this process began."""
    return any(map(is_newer, closure(file)))


@functools.cache
def _text(file: Path) -> bytes:
    return file.read_bytes()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


@functools.cache
def _top(folder: Path) -> Path:
    """The folder that holds the top package of what is in ``folder``."""
    if _is_ours(folder):
        return PROJECT
    return _top(folder.parent) if (folder / "__init__.py").is_file() else folder


@functools.cache
def _imported(file: Path) -> frozenset[Path]:
    """The files of the project that one imports itself."""
    if file == PROJECT / "pykernels" / "cpu" / "jit.py":
        return frozenset()  # it compiles, and is compiled into nothing
    found: set[Path] = set()
    for level, module, names in _parsed(file).imports:
        for root in _roots(file, level, module):
            found.update(_files(root, tuple(module.split(".")) if module else (), names))
    return frozenset(other for other in found if of_project(other))


def _roots(file: Path, level: int, module: str) -> list[Path]:
    """The folders below which an import's module is looked for."""
    if level:
        return [file.parents[level - 1]]
    ours = [PROJECT] if module.split(".")[0] in OURS else []
    return ours if _is_ours(file) else [*ours, _top(file.parent)]


@functools.cache
def _files(root: Path, module: tuple[str, ...], names: tuple[str, ...]) -> frozenset[Path]:
    """The files that an import may take something from; none if there is no such module."""
    target = root.joinpath(*module)
    if not names:  # ``import a.b``: a and b are both used by their names
        parts = (root.joinpath(*module[:count]) for count in range(1, len(module) + 1))
        return frozenset(found for part in parts if (found := _file(part)))
    own = _file(target)
    if own is None or own.name != "__init__.py":
        beside = {_file(target / name) for name in names}  # a package without an __init__
        return frozenset(found for found in (own, *beside) if found)
    found_files = set()
    for name in names:
        below = _file(target / name)
        if below:
            found_files.add(below)
        if below is None or name in _parsed(own).binds:
            found_files.add(own)
    return frozenset(found_files)


@functools.cache
def _file(module: Path) -> Path | None:
    for file in (module / "__init__.py", module.with_name(f"{module.name}.py")):
        if file.is_file():
            return file
    return None


def _parsed(file: Path) -> Parsed:
    text = _text(file)
    kept, key = _kept(), _digest(text)
    if (found := kept.get(key)) is None:
        found = kept[key] = _parse(text)
        _fresh.append(key)
    return found


_fresh: list[str] = []
"""Digests of what was parsed since ``_kept`` was read or written."""


@functools.cache
def _kept() -> dict[str, Parsed]:
    """What earlier processes parsed; a damaged file counts as none."""
    try:
        rows = json.loads((env.cache_dir / _KEPT).read_text())
        return {
            key: Parsed(
                tuple(Import(level, module, tuple(names)) for level, module, names in imports),
                frozenset(binds),
            )
            for key, (imports, binds) in rows.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep() -> None:
    """Writes what was parsed for the next process. A folder that cannot be written is let be: the
    kernels themselves will tell."""
    if not _fresh:
        return
    _fresh.clear()
    rows = {key: (parsed.imports, sorted(parsed.binds)) for key, parsed in _kept().items()}
    recent = dict(list(rows.items())[-_MOST:])
    into = env.cache_dir / _KEPT
    part = into.with_name(f"{_KEPT}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        into.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(recent))
            os.replace(part, into)
        finally:
            part.unlink(missing_ok=True)


def _parse(text: bytes) -> Parsed:
    tree = ast.parse(text)
    nodes = list(_run(tree))
    imports: list[Import] = []
    binds: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [Import(0, alias.name, ()) for alias in node.names]
            binds |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(Import(node.level, node.module or "", names))
            binds |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            binds.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            binds.add(node.id)
    return Parsed(tuple(imports), frozenset(binds))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, but for those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _run(other)
        else:
            yield from _run(child)
