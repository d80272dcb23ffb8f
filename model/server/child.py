"""The process that speaks HTTP: templates, tokens, parsers, sockets.

It has an interpreter of its own, so that nothing of this holds up the engine's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from ..startup.lean_import import import_transformers
from ..startup.standard_streams import settle_standard_streams
from .backend.channel import Channel

_NO_ENGINE = 1


def main(channel_fd: int, listening_fd: int, level: int, path: str) -> int:
    """Serves until a signal ends it, or the other process.

    Args:
        channel_fd, listening_fd: sockets that this process has inherited.
        level: of the log.
        path: of the model, for its tokenizer.
    """
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("pykernels").setLevel(level)
    import_transformers()
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    from ..pretrained import has_tokenizer, load_tokenizer
    from .app import create_app
    from .backend.messages import Begin, Ready
    from .backend.remote import RemoteModel
    from .run import serve

    channel, bound = Channel(channel_fd), socket.socket(fileno=listening_fd)
    tokenizer = load_tokenizer(path) if has_tokenizer(Path(path)) else None
    begin = channel.receive()
    if begin is None:  # the model could not be loaded: the other process says why
        return _NO_ENGINE
    assert isinstance(begin, Begin)

    def lost() -> None:
        logging.getLogger("pykernels").error("the engine's process has ended")
        os._exit(_NO_ENGINE)

    model = RemoteModel(channel, begin.facts, tokenizer, lost)
    app = create_app(model, begin.settings, begin.read_roof)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        serve(app, begin.settings, bound, lambda: channel.send(Ready()))
    return 0


if __name__ == "__main__":
    settle_standard_streams()
    channel_fd, listening_fd, level = map(int, sys.argv[1:4])
    status = main(channel_fd, listening_fd, level, sys.argv[4])
    sys.stderr.flush()
    os._exit(status)  # its threads wait for messages
