"""Which source files a kernel's file imports, directly or not, and what they hold.

Files are read in each process, so nothing here can be out of date; parsing them would take half a
second, so what each imports is kept in one file of the cache folder, by the digest of its text.

``from package import name`` is the submodule of that name, or the package's ``__init__`` where that
binds the name. Beyond that an ``__init__`` counts for nothing: it runs, but what is imported from
the module below it comes from there.

Files are strings here: ``Path`` would take ten times as long, at every start.
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

PROJECT = str(Path(__file__).parents[3])
"""The folder of these packages; ``site-packages`` where they are installed."""

OURS = ("pykernels", "runtime", "model", "bench", "tests")

_OURS_BELOW = tuple(os.path.join(PROJECT, ours, "") for ours in OURS)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_JIT = os.path.join(PROJECT, "pykernels", "cpu", "jit.py")

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
def source(file: str) -> Source:
    """A file's name and digest."""
    return Source(file.removeprefix(_top(os.path.dirname(file))), _digest(_text(file)))


@functools.cache
def is_newer(file: str) -> bool:
    """Whether the file changed after this process began: what was imported may be another text."""
    return os.stat(file).st_ctime >= _BEGAN


@functools.cache
def of_project(file: str) -> bool:
    """Whether its source counts: neither Python's own nor of a package that counts by version."""
    if _is_ours(file):
        return True
    for installed in ("/site-packages/", "/dist-packages/"):
        if installed in file:
            return file.partition(installed)[2].split("/")[0] not in _VERSIONED
    return os.path.isfile(file) and not file.startswith(_STDLIB)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS_BELOW)


@functools.cache
def closure(file: str) -> frozenset[str]:
    """The file and all of the project that it imports, directly or not."""
    files, left = {file}, [file]
    while left:
        for other in _imported(left.pop()) - files:
            files.add(other)
            left.append(other)
    return frozenset(files)


@functools.cache
def digest(file: str) -> str:
    """One digest of ``closure(file)``: names and texts, wherever they lie."""
    return _digest(repr(sorted(map(source, closure(file)))).encode())


@functools.cache
def changed(file: str) -> bool:
    """Whether a file of ``closure(file)`` changed after this process began."""
    return any(map(is_newer, closure(file)))


@functools.cache
def _text(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


@functools.cache
def _top(folder: str) -> str:
    """The folder that holds the top package of what is in ``folder``."""
    if _is_ours(f"{folder}/"):
        return PROJECT
    if os.path.isfile(f"{folder}/__init__.py"):
        return _top(os.path.dirname(folder))
    return folder


@functools.cache
def _imported(file: str) -> frozenset[str]:
    """The files of the project that one imports itself."""
    if file == _JIT:
        return frozenset()  # it compiles, and is compiled into nothing
    files: set[str] = set()
    for level, module, names in _parsed(file).imports:
        for root in _roots(file, level, module):
            files.update(_files(root, module, names))
    return frozenset(other for other in files if of_project(other))


def _roots(file: str, level: int, module: str) -> list[str]:
    """The folders below which an import's module is looked for."""
    if level:
        return [file.rsplit("/", level)[0]]
    ours = [PROJECT] if module.split(".")[0] in OURS else []
    return ours if _is_ours(file) else [*ours, _top(os.path.dirname(file))]


@functools.cache
def _files(root: str, module: str, names: tuple[str, ...]) -> frozenset[str]:
    """The files that an import may take something from; none if there is no such module."""
    parts = module.split(".") if module else []
    target = "/".join((root, *parts))
    if not names:  # ``import a.b``: a and b are both used by their names
        above = ("/".join((root, *parts[:count])) for count in range(1, len(parts) + 1))
        return frozenset(found for each in above if (found := _file(each)))
    own = _file(target)
    if own is None or not own.endswith("/__init__.py"):
        beside = {_file(f"{target}/{name}") for name in names}  # a package without an __init__
        return frozenset(found for found in (own, *beside) if found)
    found_files = set()
    for name in names:
        below = _file(f"{target}/{name}")
        if below:
            found_files.add(below)
        if below is None or name in _parsed(own).binds:
            found_files.add(own)
    return frozenset(found_files)


@functools.cache
def _file(module: str) -> str | None:
    for file in (f"{module}/__init__.py", f"{module}.py"):
        if os.path.isfile(file):
            return file
    return None


def _parsed(file: str) -> Parsed:
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
