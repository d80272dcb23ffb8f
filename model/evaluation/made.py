"""What a written result says of how it was made."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from pykernels.checkout import commit, dirty

_PACKAGES = ("numba", "torch", "transformers")


def made_by() -> dict[str, Any]:
    """How this process was started, and from what.

    Returns:
        ``command``: as it was typed; ``commit``: of the checkout, "" outside of one; ``dirty``:
        whether Python files differ from it; ``versions``: of what results depend on.
    """
    program = Path(sys.argv[0]).name
    command = ["pykernels" if program.endswith(".py") else program, *sys.argv[1:]]
    versions = {name: metadata.version(name) for name in _PACKAGES}
    checkout = {"commit": commit() or "", "dirty": dirty()}
    return {"command": shlex.join(command), **checkout, "versions": versions}
