"""Compiles what attention, recurrent layers, experts and packed products launch.

The GPU that they are compiled for need not be there.

The interpreter forgives what the compiler does not. Launches are caught, and each kernel is
compiled for what it would have been launched with.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
from test_experts import make_experts

from helpers.adapter_support import random_adapter
from helpers.attention_support import a_layer, some_texts
from helpers.packed_support import random_blocks
from helpers.paged_texts import RandomCheckpoint
from helpers.paged_texts import config as shape
from helpers.recurrent_support import make_step
from unspool.backends.cuda import attention as cuda_attention
from unspool.backends.cuda import experts, matmul
from unspool.backends.cuda.adapters import CudaAdapters
from unspool.backends.cuda.attention import (
    LONG_BLOCK,
    LongChunk,
    attend_long,
    chunk_tiles,
    decode_attention,
    prefill_attention,
    prefill_shape,
    store_keys,
)
from unspool.backends.cuda.experts import ExpertScratch, run_experts
from unspool.backends.cuda.interventions import RowChanges, VectorPool
from unspool.backends.cuda.kernels.canvas import exclude_tokens, measure_rows
from unspool.backends.cuda.load import load_weights
from unspool.backends.cuda.matmul import (
    PACKINGS,
    Addition,
    Epilogue,
    NormWeights,
    PackedMatrix,
    float8_packing,
    pack_float8,
    repack,
)
from unspool.backends.cuda.recurrent import recur
from unspool.backends.cuda.step_io import SegmentCopy
from unspool.backends.cuda.weights import PlainMatrix
from unspool.backends.interventions import Add, Intervention, StepInterventions

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64", torch.float64: "*fp64", int: "i32", float: "fp32",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")
MAX_SHARED_BYTES = 227 << 10  # of a Hopper multiprocessor
compiled: set[str] = set()


def compile_instead(kernel: Any, grid: Any) -> Any:
    def launch(*args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        named = {p.name: p.default for p in kernel.params if p.has_default} | named
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = (
                arguments[name] or name == "NATIVE"
                if isinstance(arguments[name], bool)
                else arguments[name]
            )
            if name.isupper() and name in named:
                signature[name], constants[(place,)] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype if tensor else type(value)]
            if tensor:
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, attributes)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert built.metadata.shared <= MAX_SHARED_BYTES, kernel.fn.__name__
        compiled.add(kernel.fn.__name__)

    return launch


def attention(dtype: torch.dtype, lines: int, **options: Any) -> None:
    layer = a_layer(**options)
    texts = some_texts(layer, [40] * lines, [1] * lines, dtype=dtype)
    shared_args = (texts.keys, texts.values, layer, texts.lines)
    store_keys(texts.qkv, *shared_args, pdl=True)
    for new in (True, False):
        decode_attention(texts.qkv, texts.out, *shared_args, texts.scratch, new=new, pdl=True)
    decode_attention(
        texts.qkv, texts.out, *shared_args, texts.scratch, new=True, pieces=4, pdl=True
    )
    for exact in (False, True):
        work = prefill_shape(layer, dtype, torch.device("cpu"), exact)
        tiles = chunk_tiles(np.array([0, lines]), np.array([0]), np.full(lines, 40), work)
        prefill_attention(texts.qkv, texts.out, *shared_args, torch.from_numpy(tiles), exact=exact)


def long_chunk(dtype: torch.dtype) -> None:
    def library(query: torch.Tensor, *_: Any) -> Any:
        return query, query.new_zeros(query.shape[:2], dtype=torch.float32)

    cuda_attention._library_attention = library
    texts = some_texts(a_layer(heads=6, kv_heads=2, head_width=80), [40], [1], dtype=dtype)
    pages = torch.zeros(2 * LONG_BLOCK // cuda_attention.PAGE_SIZE, dtype=torch.int64)
    chunk = LongChunk(0, 1, LONG_BLOCK + 3, pages)
    attend_long(texts.qkv, texts.out, texts.keys, texts.values, texts.layer, chunk)


def recurrent(kind: str, dtype: torch.dtype, **sizes: Any) -> None:
    step = make_step(kind, [1, 65], captures=[(9, 3)], dtype=dtype, **sizes)
    layer, rows = step.layer, step.rows(chunked=True)
    out = torch.zeros(66, layer.out_width, dtype=dtype)
    recur(step.projected, out, layer, rows, pdl=True, exact=True)
    recur(step.projected, out, layer, rows, pdl=True)
    recur(step.projected, out, layer, rows, pdl=True, stats=torch.zeros(66, 3, 64))
    recur(step.projected, out, layer, step.rows(chunked=False), pdl=True)


def routed(dtype: torch.dtype, tokens: int, kind: str = "", **settings: Any) -> None:
    """Experts of gpt-oss's width, of which no dimension is a power of two; few weights."""
    width, inner = 2880 if kind == "MXFP4" else 2048, 512 if kind in ("Q4_K", "Q6_K") else 96
    _, arguments, weights = make_experts(8, 2, width, inner, dtype=dtype, **settings)
    scratch = ExpertScratch.for_tokens(tokens, weights.config, weights)
    x = torch.zeros(tokens, width, dtype=dtype)
    if kind:
        arguments = replace(
            arguments,
            gate_up=packed_like(arguments.gate_up, kind),
            down=packed_like(arguments.down, kind),
        )
    run_experts(x, arguments, weights.config, x, scratch, pdl=True)


def use_gpu_tiles() -> None:
    """Tiles of a large GPU: those of the interpreter take minutes to compile."""
    tiling, gpu = experts.gather_tiling, SimpleNamespace(type="cuda")
    experts.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    experts.gather_tiling = lambda *sizes: tiling(*sizes[:-1], gpu)  # type: ignore[assignment]
    matmul.gemv_tiling = lambda *sizes: [1, 4, 132]


def packed_like(matrix: Any, kind: str) -> PackedMatrix:
    rows, columns = matrix.rows, matrix.columns
    if kind == "FP8":
        parts = pack_float8(torch.zeros(rows, columns, dtype=torch.uint8), torch.ones(rows, 1))
        return PackedMatrix(float8_packing(columns, 1), parts, rows, columns, matrix.dtype)
    raw = torch.from_numpy(random_blocks(kind, 1, columns)).expand(rows, -1)
    return PackedMatrix(PACKINGS[kind], repack(kind, raw), rows, columns, matrix.dtype, matrix.bias)


def packed(kind: str, dtype: torch.dtype) -> None:
    parts = repack(kind, torch.from_numpy(random_blocks(kind, 64, 1024)))
    matrix = PackedMatrix(PACKINGS[kind], parts, 64, 1024, dtype)
    x, out = torch.zeros(1024, dtype=dtype), torch.zeros(64, dtype=dtype)
    by = Epilogue(1e-5, NormWeights(torch.ones(1024)), "silu", gated=True, pdl=True)
    matrix.gemv(x, out[:32], by)
    matrix.gemv(x, out, Epilogue(1e-5, residual=out, pdl=True))
    addition = Addition(torch.zeros_like(x), x, x, NormWeights(torch.ones(1024)), scale=0.5)
    matrix.gemv(x, out, Epilogue(1e-5, NormWeights(torch.ones(1024)), pdl=True, addition=addition))
    matrix.gemm(x[None], out[None])


def added(dtype: torch.dtype) -> None:
    """A product with an addition before it, of Gemma's width."""
    matrix = PlainMatrix(torch.zeros(64, 2304, dtype=dtype))
    x, out = torch.zeros(1, 2304, dtype=dtype), torch.zeros(1, 64, dtype=dtype)
    norm = NormWeights(torch.ones(2304))
    addition = Addition(torch.zeros_like(x), x, x, norm, scale=0.5)
    matrix.gemv(x, out, Epilogue(1e-5, norm, pdl=True, addition=addition))
    epilogue = Epilogue(1e-5, activation="gelu_tanh", residual=out, is_factor=True, pdl=True)
    matrix.gemv(x, out, replace(epilogue, addition=replace(addition, second=None)))


def adapted(dtype: torch.dtype, rank: int) -> None:
    config = shape(layers=1, width=128, head_width=32)
    weights = load_weights(RandomCheckpoint(config), dtype=dtype, device=torch.device("cpu"))
    adapters = CudaAdapters(weights, rows=4)
    adapters.set(1, random_adapter(config, rank, seed=0))
    adapt = adapters.for_rows(torch.ones(4, dtype=torch.int32), pdl=True)
    for matrix in weights.matrices():
        rows, columns = matrix.rows, matrix.columns
        adapt(matrix, torch.zeros(4, columns, dtype=dtype), torch.zeros(4, rows, dtype=dtype))


def canvas_details(dtype: torch.dtype) -> None:
    logits, canvas = torch.zeros(4, 3000, dtype=dtype), torch.zeros(4, 2, dtype=torch.int64)
    exclude_tokens[(4,)](logits, 3000, canvas)
    numbers = torch.zeros(4, 3, dtype=torch.float64)
    measure_rows[(4,)](logits, 3000, canvas, numbers, numbers, 3000, BLOCK=2048)


def copied() -> None:
    words = torch.zeros(64, dtype=torch.int32)
    SegmentCopy([(0, 2, 0)], torch.device("cpu")).launch(words, words, 3)


def changed(dtype: torch.dtype, width: int) -> None:
    config = shape(width=width, layers=1)
    pool = VectorPool(torch.device("cpu"))
    rows = RowChanges(config, pool, pdl=True)
    item = Intervention("resid_post", Add(np.ones(width)))
    rows.set(StepInterventions((item,), np.array([[0, 2, 0, 0]])), np.arange(2), 2)
    rows.apply("resid", 1, torch.zeros(2, width, dtype=dtype))


if __name__ == "__main__":
    JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign]
    use_gpu_tiles()
    attention(torch.bfloat16, 1, heads=32, kv_heads=8, head_width=128, norm=True)
    attention(torch.float16, 300, heads=6, kv_heads=2, head_width=80, rotary=32, window=70,
              softcap=30.0, sinks=True)  # fmt: skip
    attention(torch.float32, 1, heads=3, kv_heads=3, head_width=64)
    for head_width in (256, 512):
        attention(torch.bfloat16, 1, heads=8, kv_heads=2, head_width=head_width, rotary=64)
    long_chunk(torch.bfloat16)
    recurrent("delta", torch.bfloat16, conv_kernel=4, key_heads=2, value_heads=4, key_width=128,
              value_width=128)  # fmt: skip
    recurrent("delta", torch.float16, key_width=24)
    recurrent("mamba2", torch.bfloat16, conv_kernel=4, key_heads=1, key_width=128, value_width=64,
              norm_groups=2, conv_bias=True)  # fmt: skip
    recurrent("mamba2", torch.float32, tiled=True)
    for kernel in (2, 4):
        recurrent("conv", torch.bfloat16, width=96, conv_kernel=kernel)
    for dtype, tokens in ((torch.bfloat16, 2), (torch.bfloat16, 300), (torch.float32, 2)):
        routed(dtype, tokens)
    routed(torch.bfloat16, 2, "MXFP4", activation="swiglu_clamped", activation_limit=7.0,
           expert_bias=True, router_bias=True)  # fmt: skip
    routed(torch.bfloat16, 2, "Q4_K", router="sigmoid", selection_bias=True)
    routed(torch.bfloat16, 2, "FP8", gated=False, activation="relu2")
    for kind in ("MXFP4", "Q4_K", "FP8"):
        routed(torch.bfloat16, 300, kind)
    for kind in ("Q4_0", "Q4_K", "MXFP4", "NVFP4"):
        packed(kind, torch.bfloat16)
    packed("Q4_1", torch.float32)
    added(torch.bfloat16)
    for dtype, rank in ((torch.bfloat16, 16), (torch.float32, 40)):
        adapted(dtype, rank)
    for dtype in (torch.bfloat16, torch.float32):
        canvas_details(dtype)
        changed(dtype, 576)
    changed(torch.bfloat16, 9000)
    copied()
    print(*sorted(compiled))
