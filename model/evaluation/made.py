"""What a written result says of how it was made."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("numba", "torch", "transformers")


def made_by() -> dict[str, Any]:
    """``command``: as it was typed; ``versions``: of what results depend on."""
    program = Path(sys.argv[0]).name
    command = ["pykernels" if program.endswith(".py") else program, *sys.argv[1:]]
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {"command": shlex.join(command), "versions": versions}
