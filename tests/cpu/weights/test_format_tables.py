"""The list of what a new weight format needs is that of the tables with rows by format."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from pykernels.quant import FORMATS

ROOT = Path(__file__).parents[3]
SECTION = "## Add a weight format"
FEW = 3
"""A table with rows of so many formats is one by format."""


def tables() -> Iterator[tuple[str, str, bool]]:
    """(file, name, whether it has all formats) of the CPU kernels' tables that name some."""
    for file in sorted((ROOT / "pykernels/cpu").rglob("*.py")):
        text = file.read_text()
        if not any(f'"{fmt}"' in text for fmt in FORMATS):
            continue
        module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        for statement in ast.parse(text).body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            (target,) = getattr(statement, "targets", None) or [statement.target]
            constants = {
                node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)
            }
            value = getattr(module, target.id) if isinstance(target, ast.Name) else None
            if isinstance(value, dict | frozenset) and constants & set(FORMATS):
                rows = {row[0] if isinstance(row, tuple) else row for row in value}
                if len(found := rows & set(FORMATS)) >= FEW:
                    yield file.name, target.id, len(found) == len(FORMATS)


def test_the_readme_lists_them() -> None:
    section = (ROOT / "pykernels/README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("   | [")]
    found = list(tables())
    for file, name, complete in found:
        (row,) = [row for row in rows if f"{file}](" in row and f"`{name}`" in row]
        assert (f"`{name}`" in row.split("|")[2]) == complete, f"{name} of {file}: {row}"
    assert {name for _, name, complete in found if complete} >= {"PACKINGS", "SCALE_K", "_ROW"}
