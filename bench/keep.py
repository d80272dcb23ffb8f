"""python -m bench.keep NAME -- COMMAND ...: runs a command and keeps its figures in bench/results.

The file is ``<machine>/<date>-NAME.json``: the machine, the command as it was typed, and what it
printed on stdout: JSON as ``rows``, anything else as ``lines``. Every command of ours with
``--json`` fits; ``pykernels`` and ``python`` stand for this source tree's. A command that fails, or
that `timeout` ends, leaves the lines that it had printed, and ``exit_code`` says so.

    python -m bench.keep e2e-embedded -- pykernels bench e2e --json
    python -m bench.keep next-token -- timeout 300 python -m bench.cache.predict --ahead token
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.files import check_folder, writing
from bench.harness.machine import describe_machine
from pykernels.target import detect

_OURS = {"pykernels": ["-m", "model.cli.main"], "python": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. The exit code is that of the command that ran."""
    parser = argparse.ArgumentParser("python -m bench.keep", description=__doc__)
    parser.add_argument("name", help="of the file, behind its date")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    parser.add_argument("command", nargs="+", help="-- COMMAND ...")
    options = parser.parse_args(arguments)
    command = options.command
    check_folder(options.out)
    machine = describe_machine(detect(), _device(command))
    start = time.monotonic()
    done = subprocess.run(_runnable(command), stdout=subprocess.PIPE, text=True)
    kept: dict[str, Any] = {
        "machine": machine,
        "command": shlex.join(command),
        "seconds": round(time.monotonic() - start, 1),
        **({"exit_code": done.returncode} if done.returncode else {}),
        **printed(done.stdout),
    }
    folder = options.out / machine["slug"]
    stem = f"{machine['date'].split()[0]}-{options.name}"
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths = (folder / f"{stem}{number}.json" for number in numbers)
        path = next(path for path in paths if not path.exists())  # no run takes another's place
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(path)
    return done.returncode


def printed(text: str) -> dict[str, Any]:
    """``rows`` of JSON (a value, or a value on each line), else ``lines`` of text."""
    lines = [line for line in text.splitlines() if line.strip()]
    for parts in ([text], lines):
        try:
            values = [json.loads(part) for part in parts]
        except ValueError:
            continue
        alone = values[0] if len(values) == 1 else values
        if isinstance(alone, dict) and "rows" in alone:
            return alone
        return {"rows": alone if isinstance(alone, list) else [alone]}
    return {"lines": lines}


def _device(command: Sequence[str]) -> str:
    """The first GPU that a command names, or "cpu"."""
    named = dict(zip(command, command[1:], strict=False)).get("--device", "cpu")
    return named.split(",")[0]


def _runnable(command: Sequence[str]) -> list[str]:
    """The command with this interpreter and this source tree in it."""
    at = next((i for i, word in enumerate(command) if word in _OURS), None)
    if at is None:
        return list(command)
    return [*command[:at], sys.executable, *_OURS[command[at]], *command[at + 1 :]]


if __name__ == "__main__":
    sys.exit(main())
