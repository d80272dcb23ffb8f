"""`pykernels bench attention|linear|router`, `moe` on a GPU: one case of `python -m bench.gpu`.

The cases, their peers and roofs are in bench, which is to the right of this package: it runs as
a program of its own. An option here is an argument of ``case()`` in that op's file there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError

from .common import Debug, State, command

AsJson = Annotated[
    bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
]
Device = Annotated[str, typer.Option("--device", metavar="cuda:N", help="Which GPU.")]


def _count(help: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, metavar="N", help=help)


def _text(choices: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(metavar=choices, help=help)


def run_case(op: str, device: str, as_json: bool, flags: dict[str, int | str]) -> None:
    """Times one case in a process of its own, which writes to this one's streams.

    Raises:
        PykernelsError: the device is no GPU that is here, or the process was killed.
        typer.Exit: the process failed, with its code; it has said why.
    """
    import torch

    from ..pretrained import check_device

    if op != "moe" and device.startswith("cuda") and not torch.cuda.is_available():
        raise PykernelsError(
            f"bench {op} times a GPU's kernels, and this PyTorch sees no CUDA GPU",
            "Install a CUDA build of PyTorch and the driver, or run it where there is a GPU",
        )
    if check_device(device).type != "cuda":
        raise PykernelsError(f"bench {op} has no kernel for {device}", "Give it --device cuda:0")
    root = str(Path(__file__).resolve().parents[2])  # a folder named bench may be elsewhere too
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    arguments = ["--op", op, "--device", device]
    arguments += ["--json"] * as_json + ["--debug"] * State.debug
    case = [f"{name}={value}" for name, value in flags.items()]
    result = subprocess.run(
        [sys.executable, "-P", "-m", "bench.gpu", *arguments, "--case", *case],
        env={**os.environ, "PYTHONPATH": search},
    )
    if result.returncode < 0:  # it had no time to say why
        raise PykernelsError(
            f"the process that times bench {op} ended with signal {-result.returncode}",
            "Look into the system's log (dmesg); 9 is mostly a lack of memory: take smaller sizes",
        )
    if result.returncode:
        raise typer.Exit(result.returncode)


@command
def attention(
    kind: Annotated[
        str,
        _text(
            "mla_decode|mla_prefill|gqa_decode|gqa_prefill", "Latent or grouped-query attention."
        ),
    ] = "mla_decode",
    batch: Annotated[int, _count("Sequences.")] = 1,
    context: Annotated[int, _count("Tokens in the cache of each.")] = 8192,
    heads: Annotated[int, _count("Query heads.")] = 128,
    kv_heads: Annotated[int, _count("Key and value heads (gqa).")] = 8,
    head_dim: Annotated[int, _count("Width of a head (gqa).")] = 128,
    format: Annotated[str, _text("bf16|fp8", "Of the cache.")] = "bf16",
    window: Annotated[
        int, typer.Option(min=0, metavar="N", help="Sliding window (gqa); 0: none.")
    ] = 0,
    new: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="New tokens; 0: one of a decode, all of a prefill."),
    ] = 0,
    keys: Annotated[
        str, _text("rows|pages", "Where a gqa_prefill's keys lie; those of fp8 are in pages.")
    ] = "rows",
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time attention over a paged cache on the GPU, against its roofs and torch."""
    flags: dict[str, int | str] = {
        "kind": kind, "batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "format": format, "window": window, "new": new, "keys": keys,
    }  # fmt: skip
    run_case("attention", device, as_json, flags)


@command
def linear(
    format: Annotated[str, _text("NAME", "Weight format, as `bench moe` names them.")] = "int4",
    tokens: Annotated[int, _count("Rows of the input.")] = 1,
    activations: Annotated[
        str,
        _text("auto|bf16|fp8", "Inputs of the product; auto: fp8 for many rows of fp8 weights."),
    ] = "auto",
    inputs: Annotated[int, _count("Width of the input.")] = 7168,
    outputs: Annotated[int, _count("Width of the output.")] = 7168,
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time a quantized linear layer on the GPU, against its roofs and torch."""
    flags: dict[str, int | str] = {
        "format": format, "tokens": tokens, "activations": activations, "inputs": inputs,
        "outputs": outputs,
    }  # fmt: skip
    run_case("linear", device, as_json, flags)


@command
def router(
    kind: Annotated[
        str, _text("v3|v2|softmax|sigmoid", "DeepSeek's grouped routers, or one group.")
    ] = "v3",
    tokens: Annotated[int, _count("Tokens in one call.")] = 1,
    experts: Annotated[int, _count("Experts in the layer.")] = 256,
    topk: Annotated[int, _count("Experts a token uses.")] = 8,
    hidden: Annotated[int, _count("Width of the model.")] = 7168,
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the router and the tokens' sort by expert on the GPU, against torch."""
    flags: dict[str, int | str] = {
        "kind": kind, "tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden,
    }  # fmt: skip
    run_case("router", device, as_json, flags)
