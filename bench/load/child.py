"""One load in a process of its own, whose peak of memory is then that load's.

python -m bench.load.child read|keep|load FOLDER THREADS [FORMAT]: one JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

CHUNK = 8 << 20


def files_of(folder: Path) -> list[Path]:
    """The files that weights are in: a folder's, or a GGUF file with those of its split set."""
    if folder.is_file():
        return sorted(folder.parent.glob(re.sub(r"-\d{5}-of-", "-*-of-", folder.name)))
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))


def read(folder: Path, kept: bool) -> dict[str, Any]:
    """Plain reading, on as many threads as loading reads with.

    Args:
        kept: into new memory for all of it, as whoever loads must; else each chunk is dropped.
    """
    from model.checkpoint.tensors.ahead import READERS, ahead
    from runtime.machine.memory import allocate

    files = files_of(folder)
    touch(files)
    start, total = time.perf_counter(), 0
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(4 * READERS)]
    for file in files:
        size = file.stat().st_size
        whole = allocate(size).numpy().data if kept else None
        descriptor = os.open(file, os.O_RDONLY)

        def one(i: int, descriptor: int = descriptor, whole: memoryview | None = whole) -> int:
            at = i * CHUNK
            buffer = buffers[i % len(buffers)] if whole is None else whole[at : at + CHUNK]
            return os.preadv(descriptor, [buffer], at)

        total += sum(ahead(one, -(-size // CHUNK), CHUNK))
        os.close(descriptor)
    return {"seconds": time.perf_counter() - start, "bytes": total}


def converting(model_type: str, fmt: str) -> list[dict[str, Any]]:
    """The family's rules, its experts in a format."""
    from model.rules import default_rules

    rules = [rule.model_dump(by_alias=True) for rule in default_rules(model_type)]
    for rule in rules:
        if rule["replace"]["class"]:
            rule["replace"]["kwargs"] = {**rule["replace"]["kwargs"], "format": fmt}
    return rules


def touch(files: list[Path]) -> None:
    """Writes to as much new memory as files have, and gives it back: what a hypervisor has yet to
    find costs ten times what the same pages cost from then on, whoever writes to them."""
    from runtime.machine.memory import allocate

    allocate(sum(file.stat().st_size for file in files)).fill_(1)


def load(folder: Path, threads: int, fmt: str | None) -> dict[str, Any]:
    """Headers, reading, packing (of experts in a format) or mapping; no kernel is compiled."""
    from model.checkpoint.config import read_config
    from model.opened import open_weights
    from pykernels.cpu import make_pack
    from pykernels.quant import FORMATS
    from runtime.devices.cpu.weights import layouts
    from runtime.workers.matrix import packer
    from runtime.workers.pool import WorkerPool

    config = read_config(folder)
    with WorkerPool(threads) as pool:
        for name in FORMATS:
            make_pack(name)  # from the cache of kernels
        with open_weights(folder, config):
            pass  # imports the architecture's module
        touch(files_of(folder))
        rules = None if fmt is None else converting(config.model_type, fmt)
        before, start = memory("VmRSS"), time.perf_counter()
        with open_weights(folder, config, rules) as weights:
            decoder = weights.readable(packer(pool), lambda done, total: None)
            program = decoder.lower()
            decoder.store.load((program, layouts(program)))
        seconds = time.perf_counter() - start
        final = memory("VmRSS") - before
        del decoder
    total = sum(file.stat().st_size for file in files_of(folder))
    peak = max(final, memory("VmHWM") - before)  # Linux notes the peak late
    return {"seconds": seconds, "bytes": total, "final": final, "peak": peak}


def memory(what: str) -> int:
    """Bytes that /proc/self/status gives."""
    match = re.search(rf"^{what}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


if __name__ == "__main__":
    kind, path, count, *rest = sys.argv[1:]
    fmt = rest[0] if rest else None
    where = Path(path)
    result = load(where, int(count), fmt) if kind == "load" else read(where, kind == "keep")
    print(json.dumps(result))
