"""How each peer computes the experts. Runs in the peer's own Python; imports no package of ours.

Every engine has random weights (one expert, copied: timing does not look at values, and filling is
quick) in ``layers`` layers that take turns, and does per call what ours does: top-k experts of
gate, up, SiLU, down and the weighted sum, for ``ids`` [T, topk] that the parent has chosen.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from resource import getpagesize
from typing import Any, NamedTuple, Protocol

from bench.peers.catalog import PEERS


class Shape(NamedTuple):
    """Experts, hidden size, intermediate size, experts a token takes."""

    E: int
    H: int
    I: int  # noqa: E741
    topk: int


class Engine(Protocol):
    """What the driver needs of a peer."""

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        """Takes the routings of the calls to come, each ``tokens * topk`` expert numbers."""

    def call(self, routing: int, layer: int) -> None:
        """One fused MoE call."""

    def finite(self) -> bool:
        """Whether the last result is made of numbers."""


class KtKernel:
    """kt-kernel 0.7.2: the C++ experts of KTransformers.

    ``submit`` hands a task to its C++ queue and ``sync`` waits, as its own server does.
    """

    def __init__(self, mode: str, shape: Shape, threads: int, layers: int, max_tokens: int) -> None:
        import torch

        ext = import_module("kt_kernel").kt_kernel_ext  # the build for this CPU

        self.torch, self.shape = torch, shape
        workers = ext.WorkerPoolConfig()
        workers.subpool_count, workers.subpool_numa_map = 1, [0]
        workers.subpool_thread_count = [threads]
        self.cpu = ext.CPUInfer(workers)
        kind = {
            "fp8": ("AMXFP8_MOE", 8, 128),
            "bf16": ("AMXBF16_MOE", 0, 0),
            "rawint4": ("AMXInt4_KGroup_MOE", 4, 32),
            "amxint4": ("AMXInt4_MOE", 0, 0),
            "amxint8": ("AMXInt8_MOE", 0, 0),
            "avx2fp8": ("AVX2FP8_MOE", 8, 128),
            "avx2bf16": ("AVX2BF16_MOE", 0, 0),
            "avx2rawint4": ("AVX2RawInt4_MOE", 4, 32),
        }
        name, bits, group = kind[mode]
        # ``order`` names the source of each expert. One that is quantized while loading (amx) goes
        # to the place of its source, so each needs its own; any other goes to its place in
        # ``order``, so that one source is enough for all. None is needed after loading, nor are
        # the copies that the fp8 and amx loaders make first (``Peer.loading``).
        sources = shape.E if mode.startswith("amx") else 1
        order = torch.arange(shape.E, dtype=torch.int64) % sources
        weights = self._weights(mode, sources)
        stored = next(p.bytes_per_weight for p in PEERS if p.name == f"kt-kernel {mode}")
        nbytes = 3 * shape.E * shape.H * shape.I * stored
        self.layers: list[Any] = []
        before = _resident()
        for _ in range(layers):
            config = ext.moe.MOEConfig(shape.E, shape.topk, shape.H, shape.I, 0)
            config.max_len, config.pool = max(128, max_tokens), self.cpu.backend_
            if bits:
                config.quant_config.bits, config.quant_config.group_size = bits, group
                config.quant_config.zero_point = False
            for part, (weight, scale) in weights.items():
                setattr(config, f"{part}_proj", weight.data_ptr())
                if scale is not None:
                    setattr(config, f"{part}_scale", scale.data_ptr())
            layer = getattr(ext.moe, name)(config)
            self.cpu.submit(layer.load_weights_task(order.data_ptr()))
            self.cpu.sync()
            self.layers.append(layer)
        # Of all layers at once: one may load into pages that the allocator kept from the last.
        if _resident() - before < 0.9 * layers * nbytes:  # calls would find them in cache
            raise RuntimeError("not every expert is in memory after loading")

    def _weights(self, mode: str, count: int) -> dict[str, tuple[Any, Any]]:
        """(weights, scales or None) of each matrix of ``count`` equal experts, [count, N, K], as
        kt-kernel's loaders take them."""
        torch, (_, H, I, _) = self.torch, self.shape  # noqa: E741

        def repeated(expert: Any) -> Any:
            return expert.expand(count, *expert.shape).contiguous()

        weights = {}
        for part, N, K in (("gate", I, H), ("up", I, H), ("down", H, I)):
            scale = None
            if mode.endswith("fp8"):
                weight = torch.randint(0, 119, (N, K), dtype=torch.uint8)
                scale = torch.rand(N // 128, K // 128) * 1e-2
            elif mode.endswith("rawint4"):
                weight = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
                scale = (torch.rand(N, K // 32) * 1e-2).to(torch.bfloat16)
            else:
                weight = (torch.randn(N, K) / K**0.5).to(torch.bfloat16)
            weights[part] = repeated(weight), None if scale is None else repeated(scale)
        return weights

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        torch = self.torch
        self.ids = torch.tensor(ids, dtype=torch.int64)
        self.weights = torch.rand(tokens, self.shape.topk)
        self.x = torch.randn(tokens, self.shape.H).to(torch.bfloat16)
        self.y = torch.zeros_like(self.x)
        self.tokens = torch.tensor([tokens], dtype=torch.int32)

    def call(self, routing: int, layer: int) -> None:
        task = self.layers[layer].forward_task(
            self.tokens.data_ptr(),
            self.shape.topk,
            self.ids[routing].data_ptr(),
            self.weights.data_ptr(),
            self.x.data_ptr(),
            self.y.data_ptr(),
            False,
        )
        self.cpu.submit(task)
        self.cpu.sync()

    def finite(self) -> bool:
        return bool(self.y.float().isfinite().all())


class Torch:
    """``F.linear`` on the tokens of each expert in turn, as Hugging Face's eager experts do."""

    def __init__(self, mode: str, shape: Shape, threads: int, layers: int, max_tokens: int) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.shape = torch, shape
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[mode]
        E, H, I, _ = shape  # noqa: E741
        gate_up, down = torch.randn(2 * I, H) / H**0.5, torch.randn(H, I) / I**0.5
        self.layers = [
            [
                matrix.to(self.dtype).expand(E, *matrix.shape).contiguous()
                for matrix in (gate_up, down)
            ]
            for _ in range(layers)
        ]

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        torch = self.torch
        self.ids = torch.tensor(ids).view(len(ids), tokens, self.shape.topk)
        self.weights = torch.rand(tokens, self.shape.topk).to(self.dtype)
        self.x = torch.randn(tokens, self.shape.H).to(self.dtype)

    def call(self, routing: int, layer: int) -> None:
        torch, ids = self.torch, self.ids[routing]
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
        gate_up, down = self.layers[layer]
        self.y = torch.zeros_like(self.x)
        for expert in ids.unique().tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(self.x[token], gate_up[expert]).chunk(2, -1)
            out = linear(silu(gate) * up, down[expert])
            self.y.index_add_(0, token, out * self.weights[token, choice, None])

    def finite(self) -> bool:
        return bool(self.y.isfinite().all())


class Numpy:
    """One float32 GEMV after another through NumPy's BLAS, for one token."""

    def __init__(self, mode: str, shape: Shape, threads: int, layers: int, max_tokens: int) -> None:
        import numpy as np

        self.np, self.shape = np, shape
        E, H, I, _ = shape  # noqa: E741
        g = np.random.default_rng(0)
        gate_up = g.standard_normal((2 * I, H), np.float32) / np.float32(H**0.5)
        down = g.standard_normal((H, I), np.float32) / np.float32(I**0.5)
        self.layers = [
            [np.repeat(matrix[None], E, 0) for matrix in (gate_up, down)] for _ in range(layers)
        ]

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        if tokens != 1:
            raise ValueError(f"{tokens} tokens: the GEMV is for one")
        g = self.np.random.default_rng(1)
        self.ids = ids
        self.weights = g.random(self.shape.topk, self.np.float32)
        self.x = g.standard_normal(self.shape.H, self.np.float32)

    def call(self, routing: int, layer: int) -> None:
        np, inter = self.np, self.shape.I
        gate_up, down = self.layers[layer]
        self.y = np.zeros(self.shape.H, np.float32)
        for weight, expert in zip(self.weights, self.ids[routing], strict=True):
            both = gate_up[expert] @ self.x
            gate, up = both[:inter], both[inter:]
            self.y += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))

    def finite(self) -> bool:
        return bool(self.np.isfinite(self.y).all())


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def _llama_cpp(*numbers: Any) -> Engine:
    from bench.peers.llama_cpp import LlamaCpp  # needs NumPy, which not every peer has

    return LlamaCpp(*numbers)


ENGINES: dict[str, Any] = {
    "kt-kernel": KtKernel,
    "llama.cpp": _llama_cpp,
    "torch": Torch,
    "numpy": Numpy,
}
