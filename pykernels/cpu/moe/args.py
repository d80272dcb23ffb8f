"""The descriptor of one MoE call: what a task reads to find its inputs, weights and outputs.

Plain int64 fields, addresses included, so that one 64-bit word hands a whole call to a task.
The call's ``S`` (token, expert) pairs are sorted by expert; ``A`` is the number of active experts,
those with at least one pair, in ascending order.
"""

from __future__ import annotations

from ..intrin.descriptor import descriptor

MOE_ARGS, moe_args_at = descriptor(
    "moe_args",
    (
        "T",  # tokens
        "S",  # pairs
        "A",  # active experts
        "E",  # experts of the layer
        "topk",  # of a token
        "x",  # rows (activations.row_layout) of T tokens, H padded with zeros
        "x_stride",  # bytes
        "h",  # rows, I padded with zeros, of the pairs of experts that take the tiles
        "h_stride",
        "h_gemm",  # of the others: they hold less
        "h_gemm_stride",
        "h_rows",  # int64 [A] base: h_rows[a] + pair * h_stride is that pair's row
        "acc",  # float32 [32-row blocks of down, T, 32]
        "y",  # float32 [T, H]
        "y_stride",  # bytes
        "H",
        "cursor",  # int64 [E] scratch of the sort by expert
        "experts",  # int64 [A] expert numbers
        "starts",  # int64 [A + 1] first pair of each active expert
        "pair_token",  # int64 [S]
        "pair_weight",  # float32 [S]
        "gate_up",  # address of expert 0's blocks; the next expert's is gate_up_stride on
        "gate_up_stride",
        "gate_up_scale",
        "gate_up_scale_stride",
        "gate_up_scale_block",  # bytes of one block's scales
        "gate_up_block",  # bytes of one 32-row block
        "gate_up_bias",  # float32: of expert 0, 32 of gate and 32 of up for each block
        "gate_up_bias_stride",
        "gate_up_k",  # 128-wide groups of H
        "i_blocks",  # 32-row blocks of gate (and of up)
        "i_chunk",  # of them in one task
        "i_chunks",  # tasks for one expert
        "i_group",  # blocks whose h is quantized together
        "h_done",  # int64 [A, groups of an expert]: blocks of each that are written; 0: tasks own
        # whole groups
        "down",
        "down_stride",
        "down_scale",
        "down_scale_stride",
        "down_scale_block",
        "down_block",
        "down_bias",  # float32: of expert 0, 32 for each block
        "down_bias_stride",
        "down_k",  # 128-wide groups of I
        "h_cuts",  # int64 [h_chunks + 1]: the 32-row block where each begins, and the end
        "h_chunks",  # runs of such blocks, a down task each for an expert
        "down_splits",  # tasks that a run is split into by its experts, one after the other
        "run_pack",  # addresses of the stages' tasks
        "run_gate_up",
        "run_down",
        "gate_up_tiles",  # addresses of the formats' routines: gemv.common's,
        "down_tiles",
        "gate_up_gemm",  # gemm.common's,
        "down_gemm",
        "quantize_h",  # and activations.quantize's, for h; 0: nothing to quantize
        "quantize_h_gemm",  # the same for h of an expert that takes the GEMM
        "tables",  # address of the lookup tables (weights.lookup)
        "int8",  # 1: the GEMMs multiply int8 codes, 0: bf16
        "interleave_x",  # 1: A tiles hold the inputs 0, 2, 1, 3 of each four (gemm.common)
        "interleave_h",
        "tile_steps",  # A tiles of 16 pairs by 128 inputs
        "gemm_from",  # tokens of an expert from which its weights go through the GEMM
        "x_tiles",  # A tiles of x: [group of 16 pairs][gate_up_k * tile_steps][16][64 bytes]
        "h_tiles",  # the same of h, down_k * tile_steps
        "groups",  # int64 [A] first group of each active expert that takes the GEMM
        "P",  # pieces: runs of up to 64 pairs of such an expert, packed by one task
        "piece_active",  # int64 [P] which active expert a piece is of
        "piece_pair",  # int64 [P] its first pair
        "pieces",  # int64 [A] pieces of each active expert
        "scratch",  # of worker 0; the next one's is scratch_stride on
        "scratch_stride",
        "raised",  # 0, or raised.RAISED once something that tasks call has raised
    ),
)
"""The numpy dtype, and what kernels read it through: ``args = moe_args_at(address)``."""
