"""The arrows: pykernels -> runtime -> model -> bench, tests; each imports only leftwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import PACKAGES, PYKERNELS, circle, folder_circle, violations

ROOT = Path(__file__).resolve().parent.parent


def modules() -> list[tuple[str, Path]]:
    """Dotted name and path of every Python file of the house."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_keep_the_rules(package: str) -> None:
    found = list[str]()
    for name, (source, is_package) in sources_of(package).items():
        found += violations(source, name, is_package)
    assert not found, "\n".join(found)


def test_the_table_of_parts_names_only_parts_that_the_map_has() -> None:
    readme = (ROOT / "pykernels/README.md").read_text()
    parts = {path.stem for path in (ROOT / "pykernels").iterdir() if path.suffix == ".py"}
    parts |= {path.name for path in (ROOT / "pykernels").iterdir() if path.is_dir()}
    for part in sorted(parts - {"__init__", "__pycache__"}):
        assert part in PYKERNELS, f"pykernels/{part} has no rank"
        assert part in readme, f"pykernels/{part} is missing on the map of pykernels/README.md"


def sources_of(*packages: str) -> dict[str, tuple[str, bool]]:
    """Text of each module of these packages, and whether it is an `__init__.py`."""
    return {
        name: (path.read_text(), path.name == "__init__.py")
        for name, path in modules()
        if name.split(".")[0] in packages
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(sources_of(*PACKAGES.keys() - {"tests"})) == []


@pytest.mark.parametrize("package", ["runtime", "model", "bench"])
def test_no_folders_import_each_other_in_a_circle(package: str) -> None:
    assert folder_circle(sources_of(package)) == []


def test_a_circle_is_caught() -> None:
    sources = {
        "a": ("", True),
        "a.b": ("from .c import f", False),
        "a.c": ("def f():\n    from . import b", False),
    }
    assert set(circle(sources)) == {"a.b", "a.c"}


FOLDER_CIRCLES = [
    ({"a.b.x": "from ..c.y import f", "a.c.y": "", "a.c.z": "from a.b import x"}, {"a.b", "a.c"}),
    (
        {"a.x": "from .b.y import f", "a.b.y": "", "a.b.z": "from ..v import g", "a.v": ""},
        {"a", "a.b"},
    ),
    (
        {
            "a.b.x": "if TYPE_CHECKING:\n    from ..c.d.y import T",
            "a.b.e.w": "",
            "a.c.d.y": "",
            "a.c.z": "from ..b.e.w import f",
        },
        {"a.b", "a.c"},
    ),
]


@pytest.mark.parametrize(
    ("texts", "folders"), FOLDER_CIRCLES, ids=["side by side", "a subfolder", "types, deep below"]
)
def test_a_circle_of_folders_is_caught(texts: dict[str, str], folders: set[str]) -> None:
    sources = {name: (text, False) for name, text in texts.items()}
    assert circle(sources) == []
    assert set(folder_circle(sources)) == folders


MOST_FILES = 15
"""Python files in a folder: what a reader takes in at a glance."""


def test_folders_are_small() -> None:
    count: dict[Path, int] = {}
    for name, path in modules():
        if not name.startswith("tests"):
            count[path.parent] = count.get(path.parent, 0) + 1
    assert {str(f.relative_to(ROOT)): n for f, n in count.items() if n > MOST_FILES} == {}


CAUGHT = [
    ("pykernels.cpu.jit", "from ..gpu import moe_ffn", "other way", "cpu sees gpu"),
    ("pykernels.gpu.norm", "from ..cpu.jit import jit", "other way", "gpu sees cpu"),
    ("pykernels.target", "from . import registry", "other way", "from . import part"),
    ("pykernels.errors", "from .env import env", "other way", "errors sees env"),
    ("pykernels.quant.fp8", "from ..ref.moe import moe_ffn", "other way", "quant sees ref"),
    ("pykernels.cpu.jit", "from pykernels.env import env", "make it relative", "absolute"),
    ("pykernels.cpu.jit", "import runtime.workers.pool", "other way", "kernels see threads"),
    (
        "runtime.workers.pool",
        "def f():\n    from model import inject",
        "other way",
        "inside a function",
    ),
    (
        "runtime.workers.pool",
        "import transformers",
        "only bench, model, tests may",
        "runtime sees HF",
    ),
    ("pykernels.ref.moe", "from transformers import AutoModel", "only", "kernels see HF"),
    ("model.modules.inject", "import bench.report", "other way", "model sees bench"),
    (
        "model.modules.inject",
        "from model.rules import Rule",
        "make it relative",
        "absolute in model",
    ),
    ("runtime.workers.pool", "from ... import model", "leaves its package", "too many dots"),
    ("pykernels.sorcery", "x = 1", "unknown part 'sorcery'", "a module without a rank"),
    ("runtime.workers.pool", "def f():\n    print('hello')", "print in a library", "print"),
    ("runtime.workers.pool", "x = 1\n" * 500, "500 lines", "a long file"),
    (
        "model.cli.chat",
        f"@command\ndef chat({', '.join(f'a{i}' for i in range(13))}): ...",
        "13 parameters",
        "a command of many options",
    ),
]


@pytest.mark.parametrize(
    ("name", "source", "complaint", "why"), CAUGHT, ids=[row[3] for row in CAUGHT]
)
def test_a_module_that_breaks_a_rule_is_caught(
    name: str, source: str, complaint: str, why: str
) -> None:
    found = violations(source, name)
    assert len(found) == 1, (why, found)
    assert complaint in found[0]


KEPT = [
    ("pykernels.cpu.moe.kernel", "from ...ref import moe_ffn\nfrom ..jit import jit", False),
    ("pykernels.cpu", "from .moe import moe_ffn", True),
    ("pykernels.target", "from .errors import PykernelsError\nfrom . import __version__", False),
    (
        "runtime.devices.cpu.routed",
        "from pykernels.cpu import moe_ffn\nfrom .pool import WorkerPool",
        False,
    ),
    ("model.cli.main", "import transformers\nprint('text')\nfrom runtime import pool", False),
    ("bench.moe", "from bench.report import table\nfrom model import from_pretrained", False),
]


@pytest.mark.parametrize(("name", "source", "is_package"), KEPT)
def test_a_module_that_keeps_the_rules_passes(name: str, source: str, is_package: bool) -> None:
    assert violations(source, name, is_package) == []
