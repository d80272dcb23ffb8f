"""The rules of the house, checked on source text: who may import whom, what a library may not do.

`violations(source, name, is_package)` is a pure function, so that test_architecture.py can also
feed it modules that break each rule and see them caught.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

PACKAGES = {"pykernels": 0, "runtime": 1, "model": 2, "bench": 3, "tests": 4}
"""Rank of each top-level package: a module imports packages of a lower rank, and its own."""

PYKERNELS = {
    "": 0,  # the package itself holds the version and imports nothing
    "errors": 0,
    "amx_state": 1,
    "checkout": 0,
    "env": 1,
    "shapes": 1,
    "target": 2,
    "perf": 2,
    "registry": 3,
    "quant": 3,
    "testing": 4,
    "ref": 4,
    "cpu": 5,
    "gpu": 5,
}
"""Rank of each module or subpackage of pykernels. Equal ranks do not see each other. A new one is
added here by decision, not by accident: until then the test fails."""

SIBLINGS = {("registry", "quant")}
"""Pairs of equal rank where the first may import the second."""

ONLY_IN = {
    "transformers": {"model", "bench", "tests"},
    "tokenizers": {"model", "bench", "tests"},
    "typer": {"model", "bench", "tests"},
    "rich": {"model", "bench", "tests"},
    "pydantic": {"model", "bench", "tests"},
    "pytest": {"bench", "tests"},
    "triton": {"pykernels", "tests"},
}
"""Third-party packages with a fence: only these packages of ours import them."""

PRINTERS = ("model.cli.", "model.doctor.", "model.embedded.", "bench", "tests")
"""Where `print` is right: the command line, the training scripts, the benchmarks."""

MAX_LINES = 500
MAX_TEST_NAME = 60
MAX_PARAMETERS = 12
"""Of a command; several options that belong together are one dataclass."""


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    """The broken rules of one module, one line each.

    Args:
        source: its text.
        name: its dotted name, `pykernels.cpu.jit`; of a package without `__init__`.
        is_package: whether it is an `__init__.py`.
    """
    nodes = _nodes(source)
    found = [f"{name}:{line}: {text}" for line, text in _imports(nodes, name, is_package)]
    if not name.startswith(PRINTERS):
        found += [
            f"{name}:{node.lineno}: print in a library: return it, log it or warn"
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
    found += [
        f"{name}:{node.lineno}: the name of a test has {len(node.name)} characters: say it shorter"
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]
    found += [
        f"{name}:{node.lineno}: {node.name} has {count} parameters: make a dataclass of options"
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "command" for each in node.decorator_list)
        and (count := len(node.args.args) + len(node.args.kwonlyargs)) > MAX_PARAMETERS
    ]
    if (lines := len(source.splitlines())) >= MAX_LINES:
        found.append(f"{name}: {lines} lines: split it, one concept a file")
    return found


def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


Sources = Mapping[str, tuple[str, bool]]
"""Dotted name of each module -> its text, and whether it is an `__init__.py`."""


def circle(sources: Sources) -> list[str]:
    """The modules of one circle of imports, those inside functions too; empty if there is none."""
    return _cycle(_graph(sources))


def folder_circle(sources: Sources) -> list[str]:
    """The folders of one circle of imports, those for types alone too; empty if there is none.

    An import is an arrow between two children of the innermost folder that holds both ends: a child
    stands for all that lies below it, and the folder's own files are one more child. So neither two
    folders import each other nor a folder and what it holds, at any depth.
    """
    graphs: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, targets in _graph(sources).items():
        here = _folder(sources, name)
        for there in {_folder(sources, target) for target in targets if target in sources}:
            depth = len(os.path.commonprefix([here, there]))
            first, second = (".".join(folder[: depth + 1]) for folder in (here, there))
            if first != second:
                graphs.setdefault(here[:depth], {}).setdefault(first, set()).add(second)
    return next(filter(None, map(_cycle, graphs.values())), [])


def _folder(sources: Sources, name: str) -> tuple[str, ...]:
    parts = tuple(name.split("."))
    return parts if sources[name][1] else parts[:-1]


def _graph(sources: Sources) -> dict[str, set[str]]:
    """By module, what it imports: a module of `sources`, or a name that is none."""
    graph: dict[str, set[str]] = {}
    for name, (source, is_package) in sources.items():
        graph[name] = set()
        for node in _nodes(source):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            if not isinstance(node, ast.ImportFrom):
                continue
            base = node.module or ""
            if node.level:
                here = name if is_package else name.rpartition(".")[0]
                base = importlib.util.resolve_name("." * node.level + base, here)
            for alias in node.names:
                target = f"{base}.{alias.name}"
                graph[name].add(target if target in sources else base)
    return graph


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _imports(nodes: list[ast.AST], name: str, is_package: bool) -> Iterator[tuple[int, str]]:
    package = name.split(".")[0]
    if package == "pykernels" and _part(name) not in PYKERNELS:
        yield 1, f"unknown part {_part(name)!r} of pykernels: rank it in tests/architecture.py"
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _check(node.lineno, package, name, alias.name, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = name if is_package else name.rpartition(".")[0]
                try:
                    base = importlib.util.resolve_name("." * node.level + base, here)
                except ImportError:
                    yield node.lineno, "a relative import that leaves its package"
                    continue
            # `from . import cpu` names submodules; `from .cpu import f` names the module itself.
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            targets = submodules if base == "pykernels" else [base]
            for target in targets:
                yield from _check(node.lineno, package, name, target, relative=bool(node.level))


def _check(
    line: int, package: str, name: str, target: str, relative: bool
) -> Iterator[tuple[int, str]]:
    top = target.split(".")[0]
    if top in PACKAGES:
        if top == package:
            if not relative and package not in ("tests", "bench"):
                yield line, f"absolute import of {target} inside {package}: make it relative"
        elif PACKAGES[top] >= PACKAGES[package]:
            yield line, f"{package} imports {target}: the arrows go the other way"
        if top == package == "pykernels":
            yield from _check_part(line, _part(name), _part(target))
    elif package not in ONLY_IN.get(top, {package}):
        yield line, f"{package} imports {top}: only {', '.join(sorted(ONLY_IN[top]))} may"


def _check_part(line: int, here: str, there: str) -> Iterator[tuple[int, str]]:
    if there not in PYKERNELS:  # `from . import __version__`: a name, not a module
        there = ""
    if here == there or here not in PYKERNELS or (here, there) in SIBLINGS:
        return
    if PYKERNELS[there] >= PYKERNELS[here] and there != "":
        yield line, f"pykernels.{here} imports pykernels.{there}: the arrows go the other way"


def _part(name: str) -> str:
    """`cpu` of `pykernels.cpu.jit`; the empty string for `pykernels` itself."""
    return (name.split(".") + [""])[1]
