"""The options that every run over whole models has, and what a run is told of them."""

from __future__ import annotations

import argparse
from typing import Any

from model.cli.shared.common import prepare_threads
from pykernels.env import env
from pykernels.registry import requested
from runtime.planning.config import ExecutionConfig

SHARED = ("device", "layers", "experts", "vocab")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``prepared`` reads."""
    add = parser.add_argument
    add("--device", default="cpu", metavar="cpu|cuda:N", help="default: cpu")
    add("--layers", type=int, default=4, metavar="N", help="of each model (default: 4)")
    add("--experts", type=int, metavar="N", help="in a layer (default: the model's)")
    add("--vocab", type=int, metavar="N", help="tokens (default: the model's)")
    add("--threads", type=int, metavar="N", help="default: PYKERNELS_THREADS, else every core")


def prepared(chosen: argparse.Namespace) -> dict[str, Any]:
    """Checks flags, kernel, threads and device; returns the fields of a run's settings that
    ``add_model_options`` decides. To be called before torch is imported.

    Raises:
        PykernelsError: one of them is wrong, or there is no such GPU.
    """
    env.check()
    kernel = requested()
    threads = prepare_threads(chosen.threads)
    from runtime.machine.topology import Topology

    from .cli import check_gpu

    check_gpu(ExecutionConfig(device=chosen.device))
    fields = {name: getattr(chosen, name) for name in SHARED}
    return fields | {"kernel": kernel, "threads": threads or Topology.detect().default_threads()}
