"""transformers' list of its own classes, kept: making it is a quarter of the time of its import.

When transformers is imported it opens all of its 2,000 modelling files, twice, to see which classes
are in them. What it found is kept for a day in the cache folder, for the same installed files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.machine.kept import kept

_MAKER = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names of modules and what they export, by the packages that are needed."""


@contextmanager
def kept_index() -> Iterator[None]:
    """While transformers is imported, its list of models' classes is the one that is kept."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the one module that makes the list, and puts ours in its place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MAKER or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            setattr(module, _FUNCTION, _quickly(getattr(module, _FUNCTION)))

        loader.exec_module = run_and_replace
        return spec


def _quickly(define: Callable[..., Structure]) -> Callable[..., Structure]:
    """The function that makes the list of a folder; of the folder of all models it is kept."""

    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Structure:
        file = Path(module_path)
        folder = file.parent if file.name == "__init__.py" else file
        if folder.name != "models" or folder.parent.name != "transformers":
            return define(module_path, prefix)
        files = folder, folder.parent / "__init__.py"
        stamp = [str(folder), *(file.stat().st_mtime_ns for file in files)]

        def measure() -> dict[str, Any]:
            found = [
                [sorted(needed), {name: sorted(exported) for name, exported in modules.items()}]
                for needed, modules in define(str(folder)).items()
            ]
            return {"stamp": stamp, "modules": found}

        found = kept("transformers-modules", measure, lambda value: value["stamp"] == stamp)
        before = f"{prefix}." if prefix else ""
        return {
            frozenset(needed): {before + name: set(names) for name, names in modules.items()}
            for needed, modules in found["modules"]
        }

    return define_import_structure
