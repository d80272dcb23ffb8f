"""The eager `Linear` against torch's own product of the same bfloat16 numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from transformers import PretrainedConfig

from model.modules.linear import Linear
from model.modules.registry import ModuleContext
from pykernels.quant import Weight
from pykernels.testing import relative_error


def test_any_thread_and_mode_may_call_it() -> None:
    original = nn.Linear(256, 72).requires_grad_(False)
    weight = original.weight.bfloat16()
    linear = Linear(original, ModuleContext("linear", PretrainedConfig()))
    linear.load("bf16", Weight(weight))
    given = [torch.randn(T, 256).bfloat16() for T in (1, 3, 40)]
    with torch.inference_mode():  # what a first call makes must serve later ones
        linear(given[0])
    for x in given:
        truth = x.double() @ weight.double().T + original.bias.double()
        assert relative_error(linear(x.float()), truth) < 1e-6
        assert linear(x).dtype == torch.bfloat16
    wanted = [linear(x) for x in given]
    with ThreadPoolExecutor(3) as threads:
        for i, found in enumerate(threads.map(lambda i: linear(given[i % 3]), range(300))):
            assert torch.equal(found, wanted[i % 3])
