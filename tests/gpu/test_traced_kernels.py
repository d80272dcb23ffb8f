"""Whose kernel is whose: a program's nodes launch, in the interpreter, what a trace names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.devices.cuda.step import executable, handshake
from runtime.engine import Engine, SamplingParams
from runtime.program.partition import partition
from runtime.tracing.kernels import TORCH, assigned
from runtime.tracing.timeline import COPY, STREAM, WAIT, Lane, Span, op_of
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner

LANE = Lane(STREAM, "cuda:0", 7, "cuda:0 stream 7")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it looks into Triton's interpreter")
@pytest.mark.parametrize(("family", "experts"), [("deepseek_v3", "gpu"), ("qwen3_moe", "cpu")])
def test_a_kernel_is_of_the_op_that_launches_it(
    family: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    launched: list[tuple[str, str, int | None]] = []  # kernel, op, layer
    now: list[tuple[str, int | None]] = [("", None)]
    launch = interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        launched.append((self.fn.__name__, *now[0]))
        return launch(self, *args, **kwargs)

    def marked(bind):  # type: ignore[no-untyped-def]
        def binder(memory, node, *link):  # type: ignore[no-untyped-def]
            run = bind(memory, node, *link)

            def marked_run() -> None:
                op = COPY if node.op in ("submit", "wait") else op_of(node)
                now[0] = op, node.layer
                run()

            return marked_run

        return binder

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    binders = {op: marked(bind) for op, bind in executable.BINDERS.items()}
    monkeypatch.setattr(executable, "BINDERS", binders)
    for end in ("submit", "wait"):
        monkeypatch.setattr(handshake, end, marked(getattr(handshake, end)))
    tiny.make(tmp_path, family)
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            runner = cuda_runner(
                decoder,
                "cpu",
                pool,
                64,
                None,
                1,
                1,
                "generic",
                options=CudaOptions(experts=experts),
            )
            runner.load()
        with Engine(runner, threaded=False) as engine:
            launched.clear()
            engine.generate([[5]], SamplingParams(temperature=0, max_tokens=2))
    kernels = [(name, op, layer) for name, op, layer in launched if op]
    spans = [Span(LANE, name, name, 10 * i, 10 * i + 9) for i, (name, *_) in enumerate(kernels)]
    copies = [
        Span(LANE, "at::copy", "at::copy", 10 * i + 9, 10 * i + 10) for i in range(len(spans))
    ]
    nodes = partition(runner.steps[0].program)["cuda:interpreted"].nodes
    both = sorted([*spans, *copies], key=lambda span: span.begin)
    found = assigned(both, nodes)
    ours = [span for span in found if span.op not in (TORCH, WAIT)]
    assert len(ours) == len(kernels) > 40
    assert [(span.op, span.layer) for span in ours] == [(op, layer) for _, op, layer in kernels]
