"""Dense weights that cross to the cuda device in each step, in Triton's interpreter where there is
no GPU: the truth is transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import machine_of
from runtime.devices.gpus import gpus_of
from runtime.engine import Engine, SamplingParams
from runtime.passes import keep_routing, stream_dense
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan
from runtime.planning.gpu.dense import crossing_layers, staged_weights
from runtime.planning.gpu.plan import place_on
from runtime.program.sizes import StepSizes
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..model.checks import logprob_error
from ..runners import CudaOptions, cuda_runner

BF16 = 0.06
"""Of the norm of a token's logprobs: activations are bfloat16."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", CudaOptions(experts="cpu")),
        pytest.param("qwen3_moe", CudaOptions("cpu", prefill="stream"), marks=pytest.mark.all),
        pytest.param("qwen3_moe", CudaOptions("cpu", dual_batch=True), marks=pytest.mark.all),
        pytest.param("deepseek_v3", CudaOptions(experts="gpu"), marks=pytest.mark.all),
    ],
    ids=["mla-and-shared-experts", "beside-streamed-experts", "two-lanes", "experts-on-the-gpu"],
)
def test_logprobs_are_transformers(
    family: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    """A prompt in chunks and decode steps, with three layers in two slots."""
    made = tiny.make(tmp_path, family, num_hidden_layers=3)
    prompts = [5, 17, 60, 33, 8], [7, 41]
    with torch.no_grad():
        truth = [
            made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in prompts
        ]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    gpus = gpus_of(where)
    with WorkerPool(2 if device.type == "cuda" else 1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            machine = machine_of(gpus, decoder.store)
            placement = place_on(machine, decoder, StepSizes(pages=8), options.experts)
            plan = ExecutionPlan(StepSizes(1, 2, 4, 8, 4), placement)
            every = staged_weights(decoder, machine, plan, 0)
            options = CudaOptions(**{**vars(options), "staged": every})
            runner = cuda_runner(
                decoder, where, pool, 64, None, 4, 2, "generic", max_num_logits=4, options=options
            )
            runner.load()
        with Engine(runner) as engine:
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, logprob_start=1)
            results = engine.generate(list(prompts), params)
        for step in (*runner.steps, *runner.decode_steps):
            loads = [node for node in step.program.nodes if node.op == "load_weights"]
            assert len(loads) == 3 and len({node.outputs["out"] for node in loads}) == 2
    for result, wanted in zip(results, truth, strict=True):
        assert logprob_error(result, wanted) < BF16


def test_as_few_layers_cross_as_can_be_spread_over_all() -> None:
    ten = [10] * 10
    assert crossing_layers(ten, 100) == []
    assert crossing_layers(ten, 90) == [1, 5, 8], "three go, and two come back as slots"
    assert crossing_layers(ten, 20) == crossing_layers(ten, 0) == [*range(10)]
    assert crossing_layers([50, 10, 10, 10], 60) == [0, 1, 2, 3], "no room even so"


def test_a_budget_is_kept(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=6)
    gpus = gpus_of("cpu")
    with open_weights(tmp_path, read_config(tmp_path)) as weights:
        decoder, sizes = weights.decoder, StepSizes(1, 2, 4, 8, 4)
        machine = machine_of(gpus, decoder.store)
        placement = place_on(machine, decoder, StepSizes(pages=8), "cpu")
        plan = ExecutionPlan(sizes, placement)
        every = staged_weights(decoder, machine, plan, 0)
        layer = sum(every.values()) // 6
        some = staged_weights(decoder, machine, plan, 5 * layer / 2**30)
        program = placement.place(keep_routing(decoder.lower(sizes.of(4))))
    assert sum(some.values()) == 3 * layer
    assert staged_weights(decoder, machine, plan, "auto") == {}
    once = stream_dense(program, some)
    with pytest.raises(PykernelsError, match="Apply it once"):
        stream_dense(once, some)
    with pytest.raises(PykernelsError, match="dense_gib='much'"):
        ExecutionConfig(dense_gib="much")
