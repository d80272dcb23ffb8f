"""Makes bench/notes/generate.svg from a real run: python bench/notes/picture.py."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    'generate --max-new-tokens 128 --seed 1 "def quicksort(xs):"',
    "bench moe --format fp8 --tokens 1 --hidden 7168 --inter 2048 --experts 16 --topk 8",
)
WIDTH = 112


def main() -> None:
    """Run the commands, record what a terminal would show, write the picture to bench/notes."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for command in COMMANDS:
        result = subprocess.run(
            f"{sys.executable} -m model.cli.main {command}",
            shell=True,
            capture_output=True,
            text=True,
        )
        result.check_returncode()
        console.print(Text("$ ", style="bold green") + Text(f"pykernels {command}", style="bold"))
        console.print(Text(result.stdout.rstrip()))
        console.print(Text(result.stderr.rstrip(), style="dim") if result.stderr else "")
    svg = console.export_svg(title="pykernels")
    # No font from the net: the reader's own monospace one.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "monospace")
    (Path(__file__).parent / "generate.svg").write_text(svg)


if __name__ == "__main__":
    main()
