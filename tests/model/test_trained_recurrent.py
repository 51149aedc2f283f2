"""A small model that has learned something, of the Qwen3.5 kind: 11.4M weights, six layers of gated
DeltaNet and two of attention, 13 minutes of Wikipedia on a GPU beside other work, four bits a
number. Random weights forget at random; these have learned what to keep. Made by

    unspool train enwik8.txt --shape qwen3.5 --depth 8 --width 320 --head-width 64 --length 512 \
        --vocab-size 4096 --steps 1472 --batch-tokens 65536
    unspool train export enwik8-d8 wikipedia-12m-qwen3.5.gguf --type Q4_0
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unspool
from helpers import ask_llama_cpp

FILE = Path(__file__).parents[1] / "data" / "wikipedia-12m-qwen3.5.gguf"
# Written for this test, so the model has not seen it.
TEXT = (
    "The old town of Marlow lies on the left bank of the river. In 1871 it had a population of "
    "4,701 people. The church of All Saints was built in the 19th century, and the bridge, which "
    "was opened in 1832, is one of the first of its kind in England. The town is known for its "
    "annual regatta, for the school that was founded in 1624, and for the poets who lived there."
)


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load(FILE, device="cpu", progress=False)


def test_it_has_learned_english(lm: unspool.LanguageModel):
    """Letters at random would take 5 bits, and all the tokens of its vocabulary alike 12 each."""
    score = lm.score(TEXT)
    bits = -sum(score.logprobs[1:]) / np.log(2) / len(TEXT.encode())
    assert 1.0 < bits < 2.6
    shuffled = " ".join(np.random.default_rng(0).permutation(TEXT.split()))
    assert lm.score(shuffled).perplexity > 2 * score.perplexity


def test_native_torch_and_llama_cpp_read_it_alike(lm: unspool.LanguageModel):
    plain = unspool.load(FILE, backend="torch", device="cpu", dtype="float32", progress=False)
    native, exact = np.array(lm.score(TEXT).logprobs[1:]), np.array(plain.score(TEXT).logprobs[1:])
    assert np.abs(native - exact).mean() < 0.03  # activations are rounded to 8 bits
    ids = lm.tokenizer.encode(TEXT)
    ends = range(8, len(ids), 16)
    reference = ask_llama_cpp.ask(FILE, prompts=[ids[:end] for end in ends])["logprobs"]
    settings = np.array([row[ids[end]] for row, end in zip(reference, ends, strict=True)])
    assert np.abs(settings - exact[[end - 1 for end in ends]]).mean() < 0.06


def test_taken_back_to_any_word_it_goes_on_as_if_nothing_had_been(lm: unspool.LanguageModel):
    complete = lm.generate(TEXT, max_tokens=60, seed=5, temperature=0.9, end=False)
    for length in (59, 31, 7, 0):
        again = complete.rewind(length).resume()
        assert again.tokens == complete.tokens
    lm.engine.call(lm.engine.tree.index.clear)  # everything is read anew
    fresh = lm.generate(TEXT, max_tokens=60, seed=5, temperature=0.9, end=False)
    assert fresh.tokens == complete.tokens
    assert [step.logprob for step in fresh.steps] == [step.logprob for step in complete.steps]


def test_texts_beside_each_other_and_with_drafts_are_those_alone(lm: unspool.LanguageModel):
    prompts = [TEXT[: 40 * n] for n in range(1, 6)]
    together = lm.generate(prompts, max_tokens=24, temperature=0)
    for prompt, text in zip(prompts, together, strict=True):
        lm.engine.call(lm.engine.tree.index.clear)
        assert lm.generate(prompt, max_tokens=24, temperature=0).tokens == text.tokens
        drafted = lm.generate(prompt, max_tokens=24, temperature=0, speculate="lookup")
        assert drafted.tokens == text.tokens
