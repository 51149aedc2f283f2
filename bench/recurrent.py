"""Recurrent layers beside llama.cpp on a CPU: python bench/recurrent.py [--rounds 3] [--threads N]

A random model in the shape of Qwen3.5-0.8B (18 layers of gated DeltaNet, 6 of attention; 4-bit
matrices) as a GGUF file, which both engines load. They take turns, each in a process of its own.
llama.cpp is the one in xllamacpp (`pip install xllamacpp`).

decode   a prompt of 32 tokens, 64 greedy tokens; tokens a second after the first
prompt   a prompt of 512 tokens; its tokens a second up to the first one written
batch    16 texts at once, prompts of 32, 32 new tokens each; new tokens a second of all together

What a rewind costs is measured by `bench/engine.py states`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, LAYERS, INNER, VOCABULARY = 1024, 24, 3584, 248_320
HEADS, KV_HEADS, HEAD_WIDTH = 8, 2, 256
DELTA_HEADS, DELTA_WIDTH, KERNEL, EVERY = 16, 128, 4, 4
_DELTA = DELTA_HEADS * DELTA_WIDTH
DECODE_PROMPT, DECODE_NEW, PROMPT = 32, 64, 512
BATCH, BATCH_PROMPT, BATCH_NEW = 16, 32, 32
Write = Callable[[list[list[int]], int], None]


def shape_file(path: Path) -> None:
    """The random model; its bytes are those of real quantized blocks."""
    from gguf import GGMLQuantizationType, GGUFWriter

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "qwen35")
    numbers = {
        "block_count": LAYERS, "context_length": 32_768, "embedding_length": WIDTH,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH, "rope.dimension_count": HEAD_WIDTH // 4,
        "full_attention_interval": EVERY, "ssm.conv_kernel": KERNEL, "ssm.state_size": DELTA_WIDTH,
        "ssm.group_count": DELTA_HEADS, "ssm.time_step_rank": DELTA_HEADS, "ssm.inner_size": _DELTA,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.rope.freq_base", 1e7)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"<{n}>" for n in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(VOCABULARY - 1)

    def matrix(name: str, rows: int, columns: int, kind: str = "Q4_0") -> None:
        size = {"Q4_0": 16, "Q8_0": 32}[kind]
        data = rng.integers(0, 256, (rows, columns // 32, 2 + size), np.uint8)
        spread = (4.6 if kind == "Q4_0" else 74) * columns**0.5
        data[..., :2] = np.frombuffer(np.float16(1 / spread).tobytes(), np.uint8)
        writer.add_tensor(
            f"{name}.weight", data.reshape(rows, -1), raw_dtype=GGMLQuantizationType[kind]
        )

    def vector(name: str, *shape: int, middle: float = 1.0) -> None:
        values = middle + 0.1 * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", VOCABULARY, WIDTH, "Q8_0")
    vector("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        vector(f"{at}attn_norm.weight", WIDTH)
        vector(f"{at}post_attention_norm.weight", WIDTH)
        if (layer + 1) % EVERY:
            matrix(f"{at}attn_qkv", 3 * _DELTA, WIDTH)
            matrix(f"{at}attn_gate", _DELTA, WIDTH)
            matrix(f"{at}ssm_alpha", DELTA_HEADS, WIDTH, "Q8_0")
            matrix(f"{at}ssm_beta", DELTA_HEADS, WIDTH, "Q8_0")
            vector(f"{at}ssm_conv1d.weight", 3 * _DELTA, KERNEL, middle=0.2)
            vector(f"{at}ssm_a", DELTA_HEADS, middle=-1.0)
            vector(f"{at}ssm_dt.bias", DELTA_HEADS, middle=-2.0)
            vector(f"{at}ssm_norm.weight", DELTA_WIDTH)
            matrix(f"{at}ssm_out", WIDTH, _DELTA)
        else:
            matrix(f"{at}attn_q", 2 * HEADS * HEAD_WIDTH, WIDTH)
            matrix(f"{at}attn_k", KV_HEADS * HEAD_WIDTH, WIDTH)
            matrix(f"{at}attn_v", KV_HEADS * HEAD_WIDTH, WIDTH)
            vector(f"{at}attn_q_norm.weight", HEAD_WIDTH)
            vector(f"{at}attn_k_norm.weight", HEAD_WIDTH)
            matrix(f"{at}attn_output", WIDTH, HEADS * HEAD_WIDTH)
        matrix(f"{at}ffn_gate", INNER, WIDTH)
        matrix(f"{at}ffn_up", INNER, WIDTH)
        matrix(f"{at}ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- the engines ----------------------------------------------------------------------------


def unspool_writes(model: Path, threads: int) -> Write:
    import unspool

    lm = unspool.load(model, device="cpu", threads=threads, progress=False)
    asked: dict[str, Any] = {"temperature": 0, "end": False, "top": 0, "explain": False}

    def write(prompts: list[list[int]], new: int) -> None:
        begun = [lm.begin(ids, max_tokens=new, **asked) for ids in prompts]
        for generation, steps in begun:
            for _ in generation.extend(steps):
                pass

    return write


def llama_cpp_writes(model: Path, threads: int) -> Write:
    import xllamacpp as llama

    settings = llama.CommonParams()
    settings.model.path = str(model)
    settings.n_ctx, settings.n_parallel, settings.warmup = BATCH * 1024, BATCH, False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = llama.Server(settings)
    asked = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "top_k": 1}

    def one(ids: list[int], new: int) -> None:
        found = server.handle_completions({"prompt": ids, "n_predict": new, **asked})
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), new), found

    def write(prompts: list[list[int]], new: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            for done in [pool.submit(one, ids, new) for ids in prompts]:
                done.result()

    return write


ENGINES = {"unspool": unspool_writes, "llama.cpp": llama_cpp_writes}


def measured(write: Write, rng: np.random.Generator) -> dict[str, float]:
    """Tokens a second of each kind of work; prompts are new every time."""

    def seconds(rows: int, length: int, new: int) -> float:
        prompts = [rng.integers(0, 200_000, length).tolist() for _ in range(rows)]
        begun = time.perf_counter()
        write(prompts, new)
        return time.perf_counter() - begun

    first = min(seconds(1, DECODE_PROMPT, 1) for _ in range(2))
    return {
        "decode": DECODE_NEW / (seconds(1, DECODE_PROMPT, 1 + DECODE_NEW) - first),
        "prompt": PROMPT / seconds(1, PROMPT, 1),
        "batch": BATCH * BATCH_NEW / seconds(BATCH, BATCH_PROMPT, BATCH_NEW),
    }


def child(engine: str, model: Path, threads: int, seed: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--engine", engine, "--model", str(model)]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--seed", str(seed)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--model", type=Path, default=Path("/tmp/qwen35-0.8b-random.gguf"))
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        write = ENGINES[given.engine](given.model, given.threads)
        write([[5] * 8], 2)
        print(json.dumps(measured(write, np.random.default_rng(given.seed))), flush=True)
        os._exit(0)  # closing a server takes seconds
    if not given.model.exists():
        shape_file(given.model)
    speeds: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for number in range(given.rounds):
        for engine in ENGINES:
            speeds[engine].append(child(engine, given.model, given.threads, number))
    for work in ("decode", "prompt", "batch"):
        ours, theirs = (
            statistics.median(round[work] for round in speeds[engine]) for engine in ENGINES
        )
        print(f"{work:<8} {ours:8.1f} tokens/s  llama.cpp {theirs:8.1f}  ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
