"""A step of streamed prompts is parked between layers, and others decode: the tokens stay those of
transformers' own model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.devices.cuda.step.gate import Gate
from runtime.engine import Engine, SamplingParams
from runtime.runner.batch import StepBatch
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.all)]
)
def test_requests_decode_while_a_step_is_parked(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=2)
    prompts, count = ([7, 41, 2], [5, 17, 60, 33, 8]), 6
    truth = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            written = made.reference.generate(ids, max_new_tokens=count, do_sample=False)
        truth.append(tuple(written[0, len(prompt) :].tolist()))
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            options = CudaOptions("cpu", prefill="stream")
            runner = cuda_runner(
                decoder, where, pool, 64, 8, 4, 2, "generic", (), 4, options=options
            )
            runner.load()
        with Engine(runner, threaded=False) as engine:
            prefill: Any = runner.prefill_runner
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            first = engine.submit(prompts[0], params)
            chunks = iter(first)
            next(chunks)
            launch = prefill.launch

            def parked(batch: StepBatch) -> None:
                with monkeypatch.context() as closed:  # before the GPU is past the last layer
                    closed.setattr(prefill, "resume", lambda: prefill.park(60))
                    launch(batch)

            monkeypatch.setattr(prefill, "launch", parked)
            second = engine.submit(prompts[1], params)
            found = [first.result().token_ids]
            assert not prefill.ready()
            monkeypatch.undo()
            prefill.resume()
            found.append(second.result().token_ids)
        runner.close()
    assert found == truth


def test_a_gate_opens_by_itself(device: torch.device) -> None:
    gate = Gate(device.type == "cuda")
    pass_gate, began = gate.launch(device), time.monotonic()
    gate.close(60)
    gate.close(0.2)  # the last one counts
    pass_gate()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert 0.15 < time.monotonic() - began < 10
    gate.close(60)
    gate.open()
    pass_gate()
