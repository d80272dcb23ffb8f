"""Triton kernels with their launchers, each op with a twin of the same name in ``pykernels.ref``.

An op is imported from its module: ``from pykernels.gpu.attention.gqa_decode import gqa_decode``.
This package exports none, so that it can be imported where there is no Triton, and most modules are
called as their op is. The others: ``delta_net.gate`` has ``delta_gates``, ``gated_rms_norm`` and
``sigmoid_mul``, ``embedding`` ``embed``, ``handshake`` ``copy_rows`` and ``combine``,
``moe.from_tiles`` ``unpack_tiles``, ``moe.fused_moe`` ``moe_ffn``, ``norm`` ``rms_norm``,
``moe.permute`` ``sort_pairs`` and ``unpermute`` too, ``quantize`` ``quantize_fp8``,
``rope`` ``rope_table``, ``rope_cache_write.gqa`` and ``.mla`` ``gqa_rope_cache_write`` and
``mla_rope_cache_write``, ``sampling`` ``greedy``, ``sample`` and ``count_tokens``.

They run compiled on a CUDA GPU, and on any CPU through Triton's interpreter: slowly, at small
sizes, which is how the tests run without a GPU (``TRITON_INTERPRET=1``).
"""
