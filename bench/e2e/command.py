"""`pykernels bench e2e`: one model, or several in turns with peers where asked for those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.cli.shared.formats import ListsFormats


class OneOrSeveral(ListsFormats):
    """A command of one model that hands the options of several ones to ``bench.e2e.__main__``."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        from .__main__ import main

        if set(names_of(args)) & self._of_several():
            ctx.exit(main(args))
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from .__main__ import parser

        super().format_help(ctx, formatter)
        print(f"With any of {', '.join(sorted(self._of_several()))}:\n\n{parser().format_help()}")

    def _of_several(self) -> set[str]:
        """Options that a run over several models has and that of one has not."""
        from .__main__ import parser

        there = {name for parameter in self.params for name in parameter.opts}
        return set(parser()._option_string_actions) - there - {"-h", "--help"}


def names_of(args: Sequence[str]) -> list[str]:
    """The options among words: "--peers" of "--peers=llama.cpp"."""
    return [word.partition("=")[0] for word in args if word.startswith("--")]
