"""Launches that only compile: every launcher takes tensors on "meta" for those of a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

import pykernels.gpu
from pykernels.gpu import norm
from pykernels.gpu.common import launch, precompile


def test_no_module_asks_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(pykernels.gpu.__path__, "pykernels.gpu.")
    ]
    sms = SimpleNamespace(multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: sms)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: None)
    monkeypatch.setattr(JITFunction, "run", JITFunction.run)  # put back behind the test
    monkeypatch.setattr(precompile, "_replace", monkeypatch.setattr)
    precompile.only_compile.__wrapped__((9, 0))
    meta, asked = torch.device("meta"), 0
    for module in modules:
        for name, answer in (("arch", (9, 0)), ("num_sms", 7), ("device_supports", None)):
            if hasattr(module, name):
                asked += 1
                assert getattr(module, name)(meta) == answer, f"{module.__name__}.{name}"
    assert asked > 10 and launch.launches_early(meta) and launch.supports(meta) is None


@pytest.mark.gpu
def test_what_is_compiled_together_does_not_run() -> None:
    x = torch.randn(3, 48, device="cuda", dtype=torch.bfloat16)  # a width that no other test has
    weight, out = torch.ones(48, device="cuda"), torch.zeros_like(x)
    with precompile.compiled_together(4) as compiles:
        norm.rms_norm(x, weight, 1e-6, out=(out, None))
    assert compiles and not out.any()
    norm.rms_norm(x, weight, 1e-6, out=(out, None))
    truth = torch.nn.functional.rms_norm(x.float(), (48,), weight, 1e-6)
    torch.testing.assert_close(out.float(), truth, rtol=1e-2, atol=1e-2)
    with precompile.compiled_together(1) as compiles:
        assert not compiles and not precompile.only_compiles()
