"""Interventions and readings on the GPU backend, by Triton's interpreter: the numbers of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import PAGES, backend, cuda_model, language_model, torch_model
from helpers.intervention_support import random_intervention, random_op, steered_batch
from helpers.paged_texts import Library, RandomCheckpoint, config, host
from helpers.parity import difference
from unspool.backends.cuda import interventions as on_gpu
from unspool.backends.interventions import NATIVE_SITES, SITES, Add, Intervention, site_layers
from unspool.backends.step import ObserveRequest
from unspool.model.config import ModelConfig, Recurrence

pytest.importorskip("triton")

CLOSE = 3e-4
_DELTA = Recurrence(conv_kernel=4, key_heads=2, value_heads=4, key_width=8, value_width=12)
MODELS: dict[str, dict[str, Any]] = {
    "norms after, scales, token inputs": {
        "norm_after": True, "layer_scale": True, "token_width": 8,
        "attention_gate": True, "logit_softcap": 3.0, "embedding_scale": 2.0,
    },
    "parallel": {
        "parallel": True, "norm": "layer", "out_bias": True, "logit_scale": 0.5,
        "residual_scale": 0.6,
    },
    "recurrent with experts": {
        "layers": 2, "mixers": ("delta", "attention"), "recurrence": _DELTA, "experts": 4,
        "experts_per_token": 2, "expert_width": 24, "shared_width": 20,
    },
    "sums": {
        "norm_sums": True, "norm_before": False, "norm": "layer", "embedding_norm": True,
        "head_transform": True, "activation": "gelu", "gated": False,
    },
}  # fmt: skip


def sites_of(shape: ModelConfig) -> list[tuple[str, int]]:
    sites = [site for site in SITES if site in NATIVE_SITES]
    return [(site, layer) for site in sites for layer in site_layers(shape, site)]


def run(
    running: Any, lengths: list[int], steered: list[Any], look: Any = None, num_first: int = 0
) -> Any:
    """Logits of texts of these lengths, read in one step, or after their first tokens."""
    library = Library(PAGES, running.vocab_size)
    texts, observed, logits = [library.text(length) for length in lengths], None, []
    counts = [lengths] if not num_first else [[num_first] * len(lengths)]
    if num_first:
        counts += [[length - num_first for length in lengths]]
    for number, step in enumerate(counts):
        batch = steered_batch(list(zip(texts, step, strict=True)), steered, look=look)
        if running.state_bytes:
            rows = np.arange(len(texts))
            before = np.full_like(rows, -1) if not number else rows
            batch.state_slots = np.stack((before, rows), 1)
        result = running.launch(batch).result()
        for text, count in zip(texts, step, strict=True):
            text.read += count
        logits.append(host(result.logits))
        observed = result.observations
    return np.concatenate(logits), observed


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(MODELS)],
)
def test_changes_and_readings_are_those_of_torch(name: str):
    shape = config(**{"layers": 1, "context": 128, **MODELS[name]})
    checkpoint = RandomCheckpoint(shape)
    reference, running = (backend(make(checkpoint)) for make in (torch_model, cuda_model))
    rng, sites = np.random.default_rng(len(name)), sites_of(shape)
    everywhere = tuple(random_intervention(shape, [site], rng) for site in sites)
    several = tuple(random_intervention(shape, sites, rng) for _ in range(4))
    look = ObserveRequest(
        tokens=np.array([2, 16, 19]), sites=tuple(sites), residuals=np.array([3]),
        parts=np.array([18]),
    )  # fmt: skip
    expected, actual = (run(b, [17, 3], [everywhere, several], look) for b in (reference, running))
    size = max(1.0, float(np.abs(expected[0]).max()))
    assert difference(actual[0], expected[0]) < CLOSE * size
    assert difference(actual[1].residuals, expected[1].residuals) < CLOSE * 10
    assert difference(actual[1].parts, expected[1].parts) < CLOSE * 10
    for key, values in expected[1].sites.items():
        bound = CLOSE * max(5.0, float(np.abs(values).max()))
        assert difference(actual[1].sites[key], values) < bound, key
    plain = run(running, [17, 3], [(), ()])[0]
    assert difference(plain, actual[0]) > 0.01, "nothing is changed"
    # Short rows are those of a captured graph; the rest is a prompt beside them.
    lengths, changes = [2, 3], [several, everywhere]
    expected, actual = (run(b, lengths, changes, num_first=1) for b in (reference, running))
    size = max(1.0, float(np.abs(expected[0]).max()))
    assert difference(actual[0], expected[0]) < CLOSE * size


def test_rows_are_those_of_the_row_alone_and_vectors_make_room(monkeypatch: pytest.MonkeyPatch):
    """A pool that holds few numbers: it drops the vectors of earlier steps, and grows."""
    monkeypatch.setattr(on_gpu, "_POOL_FLOATS", 8)
    shape = config(layers=1, context=128)
    running: Any = backend(cuda_model(RandomCheckpoint(shape), exact=True))
    rng, vector = np.random.default_rng(1), np.ones(shape.width)
    ops = [random_op(kind, shape.width, rng) for kind in ("clamp_feature", "project_out")]
    changes = [
        tuple(Intervention("resid_post", op, 0) for op in ops),
        (Intervention("mlp_out", Add(vector), 0), Intervention("resid_post", Add(vector), 0)),
    ]
    alone = [
        run(running, [2, 2], [changes[n] if n == number else () for n in range(2)])[0]
        for number in range(2)
    ]
    together = run(running, [2, 2], changes)[0]
    assert np.array_equal(together, np.concatenate((alone[0][:2], alone[1][2:])))
    assert difference(together, run(running, [2, 2], [(), ()])[0]) > 0.01, "nothing is changed"
    assert running._vectors.num_resets >= 1


def test_texts_with_interventions_through_the_engine():
    shape = config(layers=1, context=128)
    checkpoint = RandomCheckpoint(shape)
    vector = np.random.default_rng(0).standard_normal(shape.width) * 2
    options: dict[str, Any] = {"max_tokens": 3, "seed": 1, "end": False}
    steered = [Intervention("resid_post", Add(vector), positions="generated")]
    texts = []
    for make in (torch_model, cuda_model):
        with language_model(make(checkpoint), memory=1 << 20) as lm:
            plain = lm.generate([5, 6, 7], **options)
            text = lm.generate([5, 6, 7], interventions=steered, **options)
            again = lm.generate([5, 6, 7], **options)
            assert plain.tokens == again.tokens
            texts.append((plain.tokens, text.tokens))
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
