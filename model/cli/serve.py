"""`pykernels serve`: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError
from pykernels.registry import requested

from .common import Debug, Kernel, Threads, command, err, prepare_threads
from .session import Defer, Device, Experts, KvDtype, Model, Rules, status


@command
def serve(
    model: Model = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8080,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Of the model, for requests; may be repeated.", show_default="DIR's"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its first line is a key that each request must bring."),
    ] = None,
    rules: Rules = None,
    device: Device = "cpu",
    experts: Experts = "auto",
    threads: Threads = None,
    kernel: Kernel = None,
    defer: Defer = "off",
    kv_dtype: KvDtype = "bf16",
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM."""
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    with status("importing torch and transformers"):
        from transformers.utils import logging

        from .. import EMBEDDED
        from ..llm import load_engine
        from ..server.app import create_app
        from ..server.run import bound_socket
        from ..server.run import serve as run
        from ..server.settings import ServerSettings

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    path = model or EMBEDDED
    names = tuple(name or ()) or ("embedded" if model is None else path.resolve().stem,)
    settings = ServerSettings(host, port, _key(api_key_file), names)
    with bound_socket(settings) as bound:
        llm = load_engine(
            path,
            rules=rules,
            threads=chosen_threads,
            kernel=chosen_kernel,
            defer=defer,
            device=device,
            experts=experts,
            kv_dtype=kv_dtype,
            max_waiting=settings.max_waiting,
        )
        with llm:
            address, at = bound.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            err().print(f"{names[0]} is served at http://{shown}:{at}/v1", markup=False)
            run(create_app(llm, settings), settings, bound)


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PykernelsError(f"{file} cannot be read: {error}", "Give a file with a key") from error
    if not lines or not lines[0].strip():
        raise PykernelsError(f"the first line of {file} is empty", "Write the key there")
    return lines[0].strip()
