"""A model over two processes computes what one process computes, within rounding: every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_support import backend, family, language_model, read_in_many_ways, torch_model

from adapter_support import all_logits, with_adapters
from unspool.backends.torch.parallel.loaded import split_model
from unspool.backends.torch.parallel.ranks import Ranks
from unspool.errors import UnspoolError

CLOSE = 1e-4
FAR = 1e-3  # of recurrent layers, where a last digit goes on from token to token
FAMILIES = {
    "gpt2": CLOSE,  # biases, and no rotation
    "llama-tied-bias": CLOSE,
    "qwen3": CLOSE,  # norms of each head
    "olmo2": CLOSE,  # norms over all heads
    "gemma3": CLOSE,
    "gemma4-shared": CLOSE,  # layers without keys, numbers of the token for each
    "gemma4-experts": CLOSE,  # experts beside a feed-forward, fewer key heads than ranks
    "qwen3-moe": CLOSE,
    "gpt-oss": CLOSE,  # sinks, experts with biases
    "qwen3.5-moe": FAR,  # gated DeltaNet, a shared expert
    "lfm2": FAR,  # short convolutions, which every rank has
}
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 258, 30)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks.spawned(2, "cpu")
    yield found
    assert not found.failure
    found.close()
    assert all(process.poll() == 0 for process in found._processes), "closing ends them"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return family("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, ranks: Ranks, tmp_path: Path):
    checkpoint = family(name, tmp_path)
    one, two = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    assert two.config == one.config
    assert two.fingerprint() == one.fingerprint(), "it is the same model, whatever the ranks"
    alone, together = language_model(one, memory=4 << 20), language_model(two, memory=4 << 20)
    with alone.opened(PROMPT) as a, together.opened(PROMPT) as b:
        wanted = alone.engine.extend(a, wanted=len(PROMPT))
        found = together.engine.extend(b, wanted=len(PROMPT))
    assert np.abs(wanted).max() > 1, "a model that says nothing would prove nothing"
    assert np.abs(found - wanted).max() < FAMILIES[name]
    texts = [lm.generate(PROMPT, temperature=0, max_tokens=12).tokens for lm in (alone, together)]
    assert texts[0] == texts[1]
    for lm in (alone, together):
        lm.close()


def test_steps_of_all_kinds(checkpoint: Any, ranks: Ranks):
    """Prompts, chunks, drafts and tokens beside each other, taken back and read again."""
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    one, two = (read_in_many_ways(backend(model), 259) for model in models)
    assert np.abs(one - two).max() < CLOSE


def test_the_same_seeds_give_the_same_texts(checkpoint: Any, ranks: Ranks):
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    options: dict[str, Any] = {"seed": 7, "temperature": 0.8, "repetition_penalty": 1.2}
    one, two = (
        [each.tokens for each in language_model(model).samples(PROMPT, 3, max_tokens=10, **options)]
        for model in models
    )
    assert len({tuple(tokens) for tokens in one}) > 1
    assert one == two


def test_adapters(checkpoint: Any, ranks: Ranks):
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    one, two = (all_logits(with_adapters(model)) for model in models)
    for wanted, found in zip(one, two, strict=True):
        assert np.abs(np.asarray(wanted) - np.asarray(found)).max() < 5 * CLOSE


@pytest.mark.parametrize("name", ["gemma4-dense", "qwen3.5"])
def test_a_look_inside_sees_the_heads_of_all_ranks(name: str, ranks: Ranks, tmp_path: Path):
    """Of layers with more and with fewer heads of keys, and of recurrent ones."""
    checkpoint = family(name, tmp_path)
    seen = []
    for model in (torch_model(checkpoint), split_model(checkpoint, ranks, "float32")):
        lm = language_model(model, memory=4 << 20)
        branch = lm.engine.open(PROMPT)
        seen.append(lm.engine.look(branch, at=frozenset({3, 17})).inside)
        lm.close()
    (one,), (two,) = seen
    assert np.abs(one.residuals - two.residuals).max() < FAR
    assert np.abs(one.parts - two.parts).max() < FAR
    for name in ("attention", "recurrent"):
        for wanted, found in zip(getattr(one, name), getattr(two, name), strict=True):
            assert np.array_equal(np.isnan(wanted), np.isnan(found))
            assert np.nanmax(np.abs(wanted - found)) < FAR
    assert len(one.attention) == 2


def test_what_lenses_read_of_the_weights(ranks: Ranks, tmp_path: Path):
    checkpoint = family("gpt2", tmp_path)
    one, two = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    vectors = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    assert np.abs(one.logits(vectors) - two.logits(vectors)).max() < CLOSE
    assert np.array_equal(one.normed(vectors), two.normed(vectors))
    for name in ("embed.weight", "head.weight"):
        assert np.array_equal(one.rows(name, 100, 200), two.rows(name, 100, 200))
    for name in ("norm.weight", "norm.bias", "head.bias"):
        wanted, found = one.vector(name), two.vector(name)
        assert (wanted is None and found is None) or np.array_equal(wanted, found)


def test_a_model_that_was_let_go_is_forgotten_and_others_go_on(checkpoint: Any, ranks: Ranks):
    first, second = (split_model(checkpoint, ranks, "float32") for _ in range(2))
    first.close()
    first.close()
    assert second.fingerprint() == torch_model(checkpoint).fingerprint()
    assert not ranks.failure


def test_it_has_no_transformer_in_one_place(checkpoint: Any, ranks: Ranks):
    lm = language_model(split_model(checkpoint, ranks, "float32"))
    with pytest.raises(UnspoolError, match="in one process"):
        _ = lm.transformer
