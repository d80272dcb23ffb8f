"""`--format` of the measuring commands: help that names every weight format."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ListsFormats(TyperCommand):
    """A command whose `--help` ends the help of `--format` with the names of all formats.

    They are looked up only when help is asked for: that imports torch.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from pykernels.quant import FORMATS

        for parameter in self.params:
            option: Any = parameter
            if option.name == "format":
                option.help = f"{option.help.split(':')[0]}: {', '.join(FORMATS)}."
        super().format_help(ctx, formatter)
