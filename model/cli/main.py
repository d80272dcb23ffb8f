"""Entry point of the console script `pykernels`."""

from __future__ import annotations

import signal


def main() -> None:
    """Imports the commands and runs one.

    Until the command itself begins, Ctrl-C ends the process as it ends one in C: at once and
    without a word (``shared.common.command`` handles it from there on).
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app import run

    run()


if __name__ == "__main__":
    main()
