"""One text on a GPU, alone and among others: the same text, and, when exact, the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import cuda_model, language_model, prompts, torch_model, written
from helpers.paged_texts import RandomCheckpoint, config, host
from unspool.lm import LanguageModel

SHAPE = config(
    vocab_size=5003, width=512, heads=8, kv_heads=2, head_width=64, ff_width=1408, layers=3,
    context=1024, qk_norm="head",
)  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "max_tokens": 40}
PENALIZED: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "max_tokens": 40}
WAYS = [GREEDY, SAMPLED, PENALIZED]
NAMES = ["greedy", "sampled", "penalized"]


@pytest.fixture(scope="module")
def checkpoint() -> RandomCheckpoint:
    return RandomCheckpoint(SHAPE)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def exact(request: pytest.FixtureRequest, checkpoint: RandomCheckpoint, device: str) -> Any:
    model = cuda_model(checkpoint, dtype=request.param, device=device, exact=True)
    with language_model(model, memory=512 << 20) as lm:
        yield lm


def logprobs(lm: LanguageModel, prompt_list: list[list[int]], **options: Any) -> list[list[float]]:
    streams = [lm.stream(ids, seed=n, end=False, **options) for n, ids in enumerate(prompt_list)]
    return [[step.logprob for step in stream] for stream in streams]


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
@pytest.mark.parametrize("count", [2, 16, 256])
def test_exact_alone_and_among_others(exact: LanguageModel, options: dict[str, Any], count: int):
    prompt_list = prompts(count, SHAPE.vocab_size, longest=60)
    together = written(exact, prompt_list, **options)
    for number in range(0, count, max(1, count // 4)):
        alone = written(exact, [prompt_list[number]], **{**options, "seed": number})
        assert alone[0] == together[number], f"text {number} of {count}"


@pytest.mark.parametrize("count", [17, 64, 256])
def test_exact_to_the_last_bit(exact: LanguageModel, count: int):
    """256 texts of 2 key heads: enough for the attention kernel of large batches."""
    prompt_list = prompts(count, SHAPE.vocab_size, longest=60)
    options = {"temperature": 0, "max_tokens": 24}
    together = logprobs(exact, prompt_list, **options)
    for number in range(0, count, max(1, count // 20)):
        assert logprobs(exact, [prompt_list[number]], **options)[0] == together[number]


def test_exact_in_whatever_chunks_a_prompt_is_read(exact: LanguageModel):
    """What was read before is used again, so that only the rest of the prompt is a chunk."""
    ids = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 700).tolist()
    with exact.open_branch(ids) as branch_:
        expected = host(exact.engine.extend(branch_))
    exact.engine.call(exact.engine.tree.index.clear)
    for cut in (1, 77, 350, 699):
        with exact.open_branch(ids[:cut]) as branch:
            exact.engine.extend(branch)
            result = host(exact.engine.extend(branch, ids[cut:]))
        exact.engine.call(exact.engine.tree.index.clear)
        assert np.array_equal(result, expected), f"cut at {cut}"


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_in_32_bits_256_texts_are_the_cpus(
    checkpoint: RandomCheckpoint, options: dict[str, Any], device: str
):
    """Not exact: sums may be in another order, which in 32 bits moves no token here."""
    prompt_list = prompts(256, SHAPE.vocab_size, longest=24)
    options = {**options, "max_tokens": 12}
    with (
        language_model(cuda_model(checkpoint, device=device), memory=512 << 20) as gpu,
        language_model(torch_model(checkpoint, device=device), memory=512 << 20) as torch_on_gpu,
    ):
        actual = written(gpu, prompt_list, **options)
        expected = written(torch_on_gpu, prompt_list, **options)
    num_equal = sum(a == b for a, b in zip(actual, expected, strict=True))
    assert num_equal >= 240, (
        f"{num_equal} of 256"
    )  # a draw may fall on a border: there are 5,000 of them
