"""Interventions inside the model: torch against hooks on transformers, native against torch, and
the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers import tiny
from helpers.intervention_support import (
    OPS,
    HookedModel,
    apply,
    random_intervention,
    random_op,
    steered_batch,
)
from helpers.paged_texts import Library, RandomCheckpoint, config, host
from helpers.parity import ODD_SHAPES, difference
from unspool import native
from unspool.backends.cpu.model import CpuModel, load_cpu
from unspool.backends.interventions import (
    NATIVE_SITES,
    OUTPUT_SITES,
    SITES,
    Add,
    Function,
    Intervention,
    Replace,
    Scale,
    check_interventions,
    site_layers,
    site_width,
)
from unspool.backends.step import Backend, ObserveRequest
from unspool.backends.torch.backend import TorchModel
from unspool.errors import UnspoolError
from unspool.model.config import LayerShape, ModelConfig
from unspool.model.files.checkpoint import load_transformer, open_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
needs_native = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)
PAGES, CLOSE = 64, 3e-4

_LLAMA = {
    "block": "model.layers.{}", "attn_out": "model.layers.{}.self_attn",
    "mlp_out": "model.layers.{}.mlp", "head_out": "model.layers.{}.self_attn.o_proj",
    "mlp_hidden": "model.layers.{}.mlp.down_proj", "final_norm": "model.norm",
    "logits": "", "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj", "v": "model.layers.{}.self_attn.v_proj",
}  # fmt: skip
_NEOX = "gpt_neox.layers.{}"
MODULES = {
    "llama": _LLAMA,
    "gpt2": {
        "block": "transformer.h.{}", "attn_out": "transformer.h.{}.attn",
        "mlp_out": "transformer.h.{}.mlp", "head_out": "transformer.h.{}.attn.c_proj",
        "mlp_hidden": "transformer.h.{}.mlp.c_proj", "final_norm": "transformer.ln_f",
        "logits": "",
    },
    "gpt-neox": {  # attention and feed-forward in parallel
        "block": _NEOX, "attn_out": f"{_NEOX}.attention", "mlp_out": f"{_NEOX}.mlp",
        "head_out": f"{_NEOX}.attention.dense", "mlp_hidden": f"{_NEOX}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm", "logits": "",
    },
    "gemma2": {  # norms after both parts, caps
        **{name: _LLAMA[name] for name in ("block", "head_out", "mlp_hidden", "final_norm")},
        "attn_out": "model.layers.{}.post_attention_layernorm",
        "mlp_out": "model.layers.{}.post_feedforward_layernorm",
    },
    "lfm2": {  # convolutions beside attention
        "block": "model.layers.{}", "attn_out": "model.layers.{}.self_attn",
        "recurrent_out": "model.layers.{}.conv", "mlp_out": "model.layers.{}.feed_forward",
        "head_out": "model.layers.{}.self_attn.out_proj", "final_norm": "model.embedding_norm",
        "logits": "",
    },
    "qwen3.5": {
        **{name: _LLAMA[name] for name in ("block", "attn_out", "mlp_out", "final_norm", "logits")},
        "recurrent_out": "model.layers.{}.linear_attn",
        "head_out": "model.layers.{}.self_attn.o_proj",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=MODULES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model with its module names, and the same model here."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.save(request.param, folder)
    return HookedModel(model, MODULES[request.param]), folder, MODULES[request.param]


def torch_backend(folder: Path) -> Backend:
    model = TorchModel(load_transformer(open_checkpoint(folder)))
    return model.backend(memory=8 << 20, context=128)


def run(
    backend: Backend, lengths: list[int], steered: list[tuple[Intervention, ...]], **options: Any
) -> Any:
    """Logits of prompts of these lengths, each with its interventions, and what is observed."""
    library = Library(PAGES, backend.vocab_size)
    texts = [library.text(length) for length in lengths]
    parts = list(zip(texts, lengths, strict=True))
    batch = steered_batch(parts, steered, **options)
    if backend.state_bytes:
        rows = np.arange(len(parts))
        batch.state_slots = np.stack((np.full_like(rows, -1), rows), 1)
    result = backend.launch(batch).result()
    return host(result.logits), result.observations


def test_torch_does_what_hooks_on_transformers_do(oracle: Any):
    hooked, folder, names = oracle
    backend = torch_backend(folder)
    shape: ModelConfig = backend.model.config  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    tokens = Library(PAGES, shape.vocab_size).text(21).tokens
    plain = hooked.logits(tokens, "resid_pre", 0, lambda x: x)
    assert difference(run(backend, [21], [()])[0], plain) < CLOSE
    sites = ["embedding", "resid_pre", "resid_mid", "resid_post"]
    sites += [name for name in names if name != "block"]
    if "attn_out" in names and names["attn_out"].endswith("layernorm"):
        sites.remove("resid_mid")  # no module has the stream there
    for number, site in enumerate(sites):
        for layer in {0, site_layers(shape, site)[-1]}:
            if site != "embedding" and layer not in site_layers(shape, site):
                continue
            if site == "resid_mid" and shape.mixer(layer) != "attention":
                continue
            op = random_op(OPS[number % len(OPS)], site_width(shape, site, layer), rng)
            first = int(rng.integers(1, 15))

            def change(x: torch.Tensor, op: Any = op, first: int = first) -> torch.Tensor:
                return torch.cat((x[:, :first], apply(op, x[:, first:])), 1)

            layers = None if site in ("embedding", *OUTPUT_SITES) else layer
            steered = Intervention(site, op, layers, slice(first, None))
            ours, _ = run(backend, [21], [(steered,)])
            expected = hooked.logits(tokens, site, layer, change)
            assert difference(ours, expected) < CLOSE * max(1, np.abs(expected).max()), (site, op)


def test_pattern_and_functions(tmp_path: Path):
    tiny.save("llama", tmp_path)
    backend = torch_backend(tmp_path)
    plain, _ = run(backend, [21, 1], [(), ()])
    pattern, _ = run(backend, [21, 1], [(Intervention("pattern", Scale(0), 1, heads=(2, 3)),), ()])
    heads = Intervention("head_out", Scale(0), 1, heads=(2, 3))
    ablated, _ = run(backend, [21, 1], [(heads,), ()])
    assert difference(pattern, ablated) < CLOSE  # no weights, no output
    assert (
        difference(pattern[:21], plain[:21]) > 0.1 and difference(pattern[21:], plain[21:]) < CLOSE
    )
    for site, op in (("resid_mid", Add(np.ones(48), 0.7)), ("q", Scale(0.5)), ("logits", Scale(2))):
        layers = None if site == "logits" else 2
        function = Function(lambda x, op=op: apply(op, x))
        calls = [Intervention(site, o, layers, range(3, 9)) for o in (op, function)]
        expected, actual = (run(backend, [21, 1], [(call,), ()])[0] for call in calls)
        assert difference(expected, actual) == 0 and difference(expected, plain) > 1e-3
    wrong = Intervention("resid_mid", Function(lambda x: x[0]), 2)
    with pytest.raises(UnspoolError, match=r"must return a tensor \[21, 48\]"):
        run(backend, [21], [(wrong,)])


# -- native against torch ---------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    **ODD_SHAPES,
    "post-norms and scales": {"norm_after": True, "residual_scale": 0.6, "layer_scale": True},
    "norms of sums": {
        "norm_before": False, "norm_sums": True, "embedding_norm": True, "norm": "layer",
    },
    "one vector per token and layer": {
        "token_width": 12, "qk_norm": "head", "attention_gate": True,
    },
    "experts and shared": {
        "experts": 5, "experts_per_token": 2, "expert_width": 21, "shared_width": 24,
    },
    "layers that differ": {
        "layers": 3,
        "shapes": tuple(
            LayerShape(heads=heads, kv_heads=kv_heads, head_width=16, ff_width=inner)
            for heads, kv_heads, inner in ((4, 2, 48), (1, 1, 33), (3, 1, 7))
        ),
    },
}  # fmt: skip
FAMILIES = [
    "gemma3",
    "gemma4-all",
    "qwen3.5-moe",
    "granite-hybrid",
    "nemotron-h",
    "lfm2",
    "gpt-oss",
]


def pair_of(name: str, folder: Path) -> tuple[Backend, Backend]:
    """The torch and the native backend of a model."""
    checkpoint: Any
    if name in SHAPES:
        checkpoint = RandomCheckpoint(config(**{"context": 128, **SHAPES[name]}))
    else:
        tiny.save(name, folder)
        checkpoint = open_checkpoint(folder)
    models = (
        TorchModel(load_transformer(checkpoint)),
        load_cpu(checkpoint, store="float32", kv_bits=32),
    )
    a, b = (model.backend(memory=8 << 20, context=128) for model in models)
    return a, b


def all_sites(shape: ModelConfig, among: Any = NATIVE_SITES) -> list[tuple[str, int]]:
    return [(site, layer) for site in SITES if site in among for layer in site_layers(shape, site)]


@needs_native
@pytest.mark.parametrize("name", [*SHAPES, *FAMILIES])
def test_native_equals_torch_at_every_site(name: str, tmp_path: Path):
    reference, backend = pair_of(name, tmp_path)
    shape: ModelConfig = backend.model.config  # type: ignore[attr-defined]
    rng, sites = np.random.default_rng(len(name)), all_sites(shape)
    every = tuple(sites)
    for site, layer in (*sites[:: max(1, len(sites) // 12)], sites[-1]):
        steered: list[tuple[Intervention, ...]] = [
            (random_intervention(shape, [(site, layer)], rng),),
            (),
            tuple(random_intervention(shape, sites, rng) for _ in range(3)),
        ]
        for interventions in steered:
            check_interventions(interventions, shape, backend.sites)
        look = ObserveRequest(
            tokens=np.arange(1, 40, 3), sites=every, residuals=np.arange(4, 30), parts=np.arange(9)
        )
        results = [run(b, [20, 1, 19], steered, look=look) for b in (reference, backend)]
        (expected, inside), (logits, seen) = results
        size = max(1.0, float(np.abs(expected).max()))
        assert difference(logits, expected) < CLOSE * size, (site, layer)
        assert difference(seen.residuals, inside.residuals) < CLOSE * 10
        assert difference(seen.parts, inside.parts) < CLOSE * 10
        assert seen.sites.keys() == inside.sites.keys() == set(sites)
        for key, values in inside.sites.items():
            bound = CLOSE * max(5.0, float(np.abs(values).max()))
            assert difference(seen.sites[key], values) < bound, (site, layer, key)


@needs_native
def test_readings_are_the_values_of_the_run(tmp_path: Path):
    """What is read is what the residual stream is made of, and replacing it by itself changes
    nothing."""
    _, backend = pair_of("post-norms and scales", tmp_path)
    shape: ModelConfig = backend.model.config  # type: ignore[attr-defined]
    sites = tuple(all_sites(shape))
    look = ObserveRequest(tokens=np.arange(20), sites=sites)
    plain, inside = run(backend, [20], [()], look=look)
    assert np.array_equal(inside.sites["logits", 0], plain)
    assert np.array_equal(inside.sites["resid_post", 0], inside.sites["resid_pre", 1])
    for site, layer in sites:
        values = inside.sites[site, layer][None, 3:9]
        layers = None if site in ("embedding", *OUTPUT_SITES) else layer
        unchanged = Intervention(site, Replace(values), layers, range(3, 9))
        again, seen = run(backend, [20], [(unchanged,)], look=look)
        assert np.array_equal(seen.sites[site, layer], inside.sites[site, layer])
        assert difference(again, plain) < 1e-4
        if site not in ("attn_out", "mlp_out"):  # the difference of two sums is rounded
            assert np.array_equal(again, plain), site


# -- the same bits in any batch -----------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_same_bits_alone_in_chunks_and_in_any_batch(threads: int):
    shape = config(width=64, head_width=16, ff_width=96, layers=3, norm_after=True, parallel=False)
    model = CpuModel(RandomCheckpoint(shape, "Q8_0"), store=None, threads=threads, kv_bits=8)
    backend = model.backend(memory=8 << 20, context=256)
    rng, sites = np.random.default_rng(3), all_sites(shape)
    lengths = [40, 7, 33, 1, 25]
    steered = [
        tuple(random_intervention(shape, sites, rng) for _ in range(n)) for n in (3, 1, 5, 2, 0)
    ]
    library = Library(PAGES, shape.vocab_size)
    tokens = [library.text(length).tokens for length in lengths]

    def read(groups: list[list[tuple[int, int]]]) -> list[np.ndarray[Any, Any]]:
        """Logits of each text, read in the given steps: (number of the text, tokens)."""
        shelf = Library(PAGES, shape.vocab_size)
        texts, rows = [shelf.again(text) for text in tokens], [list[Any]() for _ in tokens]
        for group in groups:
            parts = [(texts[number], count) for number, count in group]
            batch = steered_batch(parts, [steered[number] for number, _ in group])
            logits = host(backend.launch(batch).result().logits)
            for (number, count), part in zip(
                group, np.split(logits, batch.row_starts[1:-1]), strict=True
            ):
                texts[number].read += count
                rows[number].append(part)
        return [np.concatenate(parts) for parts in rows]

    alone = read([[(number, length)] for number, length in enumerate(lengths)])
    together = read([[(number, length) for number, length in enumerate(lengths)]])
    backwards = read(
        [[(number, lengths[number])] for number in (4, 2)] + [[(3, 1), (0, 40), (1, 7)]]
    )
    single = read([[(number, 1)] for number, length in enumerate(lengths) for _ in range(length)])
    chunks = read(
        [[(0, 13), (2, 9)], [(2, 24), (1, 3), (0, 1)], [(1, 4), (0, 26), (3, 1)], [(4, 25)]]
    )
    for other in (together, backwards, single, chunks):
        for a, b in zip(alone, other, strict=True):
            assert np.array_equal(a, b)
    assert steered_batch([(library.text(25), 25)], [()]).interventions is None
