"""llama.cpp's experts: its ggml library through ctypes, the graph that it builds for a MoE layer.

``MUL_MAT_ID`` for gate, up and down, SwiGLU between, then the weighted sum of a token's experts.
Weights lie where llama.cpp itself would put them: in the first of the CPU's extra buffer types
(repacked rows, for instance) that takes the operation, else as they are in a GGUF file.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_F32, _I32 = 0, 26
_CONTEXT = 4 << 20  # bytes for names and shapes; data lies in backend buffers


class Block(NamedTuple):
    """A ggml type: its number, weights and bytes of a block, where fp16 scales lie in it."""

    number: int
    weights: int
    nbytes: int
    halves: tuple[int, ...]


BLOCKS = {
    "bf16": Block(30, 1, 2, ()),
    "f16": Block(1, 1, 2, ()),
    "q8_0": Block(8, 32, 34, (0,)),
    "q4_0": Block(2, 32, 18, (0,)),
    "q4_1": Block(3, 32, 20, (0, 2)),
    "q5_0": Block(6, 32, 22, (0,)),
    "q5_1": Block(7, 32, 24, (0, 2)),
    "iq4_nl": Block(20, 32, 18, (0,)),
    "iq4_xs": Block(23, 256, 136, (0,)),
    "iq2_xxs": Block(16, 256, 66, (0,)),
    "iq2_xs": Block(17, 256, 74, (0,)),
    "iq2_s": Block(22, 256, 82, (0,)),
    "iq3_xxs": Block(18, 256, 98, (0,)),
    "iq3_s": Block(21, 256, 110, (0,)),
    "iq1_s": Block(19, 256, 50, (0,)),
    "iq1_m": Block(29, 256, 56, ()),
    "tq1_0": Block(34, 256, 54, (52,)),
    "tq2_0": Block(35, 256, 66, (64,)),
    "nvfp4": Block(40, 64, 36, ()),
    "q1_0": Block(41, 128, 18, (0,)),
    "q2_0": Block(42, 64, 18, (0,)),
    "q2_k": Block(10, 256, 84, (80, 82)),
    "q3_k": Block(11, 256, 110, (108,)),
    "q4_k": Block(12, 256, 144, (0, 2)),
    "q5_k": Block(13, 256, 176, (0, 2)),
    "q6_k": Block(14, 256, 210, (208,)),
    "mxfp4": Block(39, 32, 17, ()),
}
"""The GGUF types (ggml-common.h)."""


class _Init(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


_P, _I64 = c_void_p, c_int64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_Init,)),
    "ggml_free": (None, (_P,)),
    "ggml_new_tensor_1d": (_P, (_P, c_int, _I64)),
    "ggml_new_tensor_2d": (_P, (_P, c_int, _I64, _I64)),
    "ggml_new_tensor_3d": (_P, (_P, c_int, _I64, _I64, _I64)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_view_2d": (_P, (_P, _P, _I64, _I64, c_size_t, c_size_t)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, c_int)),
    "ggml_backend_get_device": (_P, (_P,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_dev_supports_op": (c_bool, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors": (_P, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (_P, _P)),
}


class Ggml:
    """The functions of ``_FUNCTIONS``, without their prefix; RuntimeError where one is missing."""

    def __init__(self) -> None:
        spec = find_spec("llama_cpp")  # found, not imported: that would want its dependencies
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError("llama-cpp-python is not installed")
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        names = "libggml-base.so", "libggml-cpu.so", "libggml.so"
        libraries = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in names]
        for name, (result, arguments) in _FUNCTIONS.items():
            function = next((getattr(lib, name) for lib in libraries if hasattr(lib, name)), None)
            if function is None:
                raise RuntimeError(f"this ggml has no {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self) -> int:
        """A context whose tensors get their memory later, from a backend."""
        return int(self.init(_Init(_CONTEXT, None, True)))

    def extra_buffers(self, backend: int) -> list[int]:
        """The CPU's own buffer types (repacked weights), in llama.cpp's order."""
        registry = self.backend_dev_backend_reg(self.backend_get_device(backend))
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        types = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(
            self.backend_get_device(backend)
        )
        buffers: list[int] = []
        while types and types[len(buffers)]:
            buffers.append(int(types[len(buffers)]))
        return buffers


class LlamaCpp:
    """One engine of ``bench.peers``: random weights in ``layers`` layers, calls in turn."""

    def __init__(self, mode: str, shape: Any, threads: int, layers: int, max_tokens: int) -> None:
        self.block, self.shape, self.g = BLOCKS[mode], shape, Ggml()
        self.backend = self.g.backend_cpu_init()
        self.g.backend_cpu_set_n_threads(self.backend, threads)
        self._weights = self.g.context()
        E, H, I, _ = shape  # noqa: E741
        self.layers = [
            [self._matrix(N, K, E) for N, K in ((I, H), (I, H), (H, I))] for _ in range(layers)
        ]
        if not self._allocate():
            raise MemoryError("ggml could not allocate the weights")
        for gate, up, down in self.layers:
            for tensor, N, K in ((gate, I, H), (up, I, H), (down, H, I)):
                data = random_rows(self.block, N, K, E)
                self.g.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
                del data  # before the next is made: two would need twice the room
        self._call: tuple[int, int] | None = None

    def _matrix(self, N: int, K: int, E: int) -> int:
        return int(self.g.new_tensor_3d(self._weights, self.block.number, K, N, E))

    def _allocate(self) -> int:
        """The weights' buffer, of the first extra type that takes the operation."""
        g, device = self.g, self.g.backend_get_device(self.backend)
        for kind in g.extra_buffers(self.backend):
            buffer = g.backend_alloc_ctx_tensors_from_buft(self._weights, kind)
            if not buffer:
                continue
            scratch = g.context()
            x = g.new_tensor_3d(scratch, _F32, self.shape.H, 1, 1)
            ids = g.new_tensor_2d(scratch, _I32, self.shape.topk, 1)
            product = g.mul_mat_id(scratch, self.layers[0][0], x, ids)
            fits = g.backend_dev_supports_op(device, product)
            g.free(scratch)
            if fits:
                return int(buffer)
            g.backend_buffer_free(buffer)
            self._renew()
        return int(g.backend_alloc_ctx_tensors(self._weights, self.backend) or 0)

    def _renew(self) -> None:
        """Tensors without memory again, after a buffer that did not fit was freed."""
        self.g.free(self._weights)
        self._weights = self.g.context()
        E, H, I, _ = self.shape  # noqa: E741
        self.layers = [
            [self._matrix(N, K, E) for N, K in ((I, H), (I, H), (H, I))] for _ in self.layers
        ]

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        g, (_, H, _, topk) = self.g, self.shape
        if self._call:
            g.free(self._call[0])
            g.backend_buffer_free(self._call[1])
        context = g.context()
        self._x = g.new_tensor_3d(context, _F32, H, 1, tokens)
        self._ids = g.new_tensor_2d(context, _I32, topk, tokens)
        self._share = g.new_tensor_3d(context, _F32, 1, topk, tokens)
        self._results = [self._layer(context, tokens, *layer) for layer in self.layers]
        self._graphs = []
        for result in self._results:
            self._graphs.append(g.new_graph(context))
            g.build_forward_expand(self._graphs[-1], result)
        self._call = context, int(g.backend_alloc_ctx_tensors(context, self.backend))
        random = np.random.default_rng(1)
        self._set(self._x, random.standard_normal((tokens, H), np.float32))
        self._set(self._share, random.random((tokens, topk), np.float32))
        self._routings = [np.array(one, np.int32) for one in ids]
        self._y = np.zeros((tokens, H), np.float32)

    def _layer(self, context: int, tokens: int, gate: int, up: int, down: int) -> int:
        """The graph's last tensor: [H, tokens]."""
        g, (_, H, _, topk) = self.g, self.shape
        gated = g.mul_mat_id(context, gate, self._x, self._ids)
        h = g.swiglu_split(context, gated, g.mul_mat_id(context, up, self._x, self._ids))
        out = g.mul(context, g.mul_mat_id(context, down, h, self._ids), self._share)
        parts = [g.view_2d(context, out, H, tokens, 4 * H * topk, 4 * H * i) for i in range(topk)]
        total = parts[0]
        for part in parts[1:]:
            total = g.add(context, total, part)
        return int(total)

    def _set(self, tensor: int, data: Any) -> None:
        self.g.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def call(self, routing: int, layer: int) -> None:
        self._set(self._ids, self._routings[routing])
        if status := self.g.backend_graph_compute(self.backend, self._graphs[layer]):
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        result, y = self._results[layer], self._y
        self.g.backend_tensor_get(result, y.ctypes.data, 0, y.nbytes)

    def finite(self) -> bool:
        return bool(np.isfinite(self._y).all()) and bool(self._y.any())


def random_rows(block: Block, N: int, K: int, E: int) -> Any:
    """uint8 [E, N, bytes of K weights]: random codes, small scales; every expert is the first."""
    random = np.random.default_rng(0)
    if block.weights == 1:
        values = random.standard_normal((N, K), np.float32) / np.float32(math.sqrt(K))
        if block == BLOCKS["f16"]:
            rows = values.astype(np.float16).view(np.uint8)
        else:  # bf16: the upper halves of small floats
            rows = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        blocks = random.integers(0, 256, (N * K // block.weights, block.nbytes), np.uint8)
        for at in block.halves:
            blocks[:, at : at + 2] = np.array([1e-3], np.float16).view(np.uint8)
        if not block.halves:
            blocks[:, 0] = 120  # MXFP4's exponent: 2 ** -7
        if block == BLOCKS["iq1_m"]:
            blocks[:, 55] = 0x10  # the highest 4 bits of its scale, which is below 2 ** -10
        rows = blocks.reshape(N, -1)
    return np.repeat(rows.reshape(N, -1)[None], E, 0)
