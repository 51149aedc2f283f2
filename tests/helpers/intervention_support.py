"""Random interventions for tests, and hooks on transformers' models that do the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from helpers.cuda_support import PAGES, backend
from helpers.paged_texts import Library, RandomCheckpoint, Text, batch_of, config, host
from helpers.parity import difference
from unspool.backends.interventions import (
    NATIVE_SITES,
    SITES,
    Add,
    ClampFeature,
    Intervention,
    MeanAblate,
    ProjectOut,
    Replace,
    Scale,
    SpanCollector,
    resolve,
    site_layers,
    site_width,
)
from unspool.backends.step import ObserveRequest, StepBatch
from unspool.model.config import ModelConfig, Recurrence

OPS = ("add", "project_out", "replace", "scale", "clamp_feature", "mean_ablate")


def random_op(kind: str, width: int, rng: np.random.Generator) -> Any:
    """An operation that changes values of size 1 by about their size."""
    vector = rng.standard_normal(width)
    if kind == "add":
        return Add(vector, scale=float(rng.uniform(-2, 2)))
    if kind == "project_out":
        return ProjectOut(vector)
    if kind == "replace":
        return Replace(vector)
    if kind == "mean_ablate":
        return MeanAblate(vector)
    if kind == "scale":
        return Scale(float(rng.choice([0.5, -1.3])))
    encoder = rng.standard_normal(width) / width**0.5
    # A threshold of 0: elsewhere rounding decides whether a feature near it is on.
    return ClampFeature(encoder, vector, bias=0.3, value=1.5)


def apply(op: Any, x: torch.Tensor) -> torch.Tensor:
    """What an operation does to vectors [..., width], written from its definition."""
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in op.arrays.items()}
    if isinstance(op, Add):
        return x + arrays["vector"] * op.scale
    if isinstance(op, ProjectOut):
        unit = arrays["direction"] / arrays["direction"].norm()
        return x - (x * unit).sum(-1, keepdim=True) * unit
    if isinstance(op, Scale):
        return x * op.factor
    if isinstance(op, ClampFeature):
        inner = (x * arrays["encoder"]).sum(-1, keepdim=True) + op.bias
        return x + (op.value - inner * (inner > op.threshold)) * arrays["decoder"]
    return next(iter(arrays.values())).expand_as(x)


def steered_batch(
    parts: list[tuple[Text, int]],
    interventions: list[tuple[Intervention, ...]],
    look: ObserveRequest | None = None,
    prompt_length: int = 8,
) -> StepBatch:
    """`batch_of` with the interventions of each text."""
    batch, collector = batch_of(parts, look), SpanCollector()
    for (text, count), chosen, first in zip(
        parts, interventions, batch.row_starts.tolist(), strict=False
    ):
        if resolved := resolve(chosen, prompt_length):
            collector.add(resolved, text.read, text.read + count, first)
    batch.interventions = collector.build()
    return batch


def random_intervention(
    config: ModelConfig, sites: list[tuple[str, int]], rng: np.random.Generator
) -> Intervention:
    """An intervention at one of the (site, layer) pairs, somewhere in a short text."""
    site, layer = sites[rng.integers(len(sites))]
    width, heads = site_width(config, site, layer), None
    if site == "head_out" and rng.random() < 0.6:
        width = config.shape(layer).head_width
        heads = tuple({int(rng.integers(config.shape(layer).heads)) for _ in range(2)})
    first = int(rng.integers(0, 12))
    places: list[Any] = ["all", "generated", "last", first, range(first, first + 5)]
    return Intervention(
        site,
        random_op(str(rng.choice(OPS)), width, rng),
        layers=None if site in ("embedding", "final_norm", "logits") else layer,
        positions=[*places, slice(first, None)][rng.integers(6)],
        heads=heads,
    )


Change = Callable[[torch.Tensor], torch.Tensor]


class HookedModel:
    """A transformers model with changes at the sites of one layer, by module names."""

    def __init__(self, model: Any, names: dict[str, str]) -> None:
        self._model, self._names = model, names

    def _module(self, key: str, layer: int) -> Any:
        if key == "logits":
            return self._model.get_output_embeddings()
        return self._model.get_submodule(self._names[key].format(layer))

    def logits(self, tokens: list[int], site: str, layer: int, change: Change) -> np.ndarray:
        with ExitStack() as stack, torch.no_grad():
            for handle in self._hooks(site, layer, change):
                stack.callback(handle.remove)
            return self._model(torch.tensor([tokens])).logits[0].float().numpy()

    def _hooks(self, site: str, layer: int, change: Change) -> list[Any]:
        def before(module: Any, inputs: Any, options: Any) -> Any:
            if inputs:
                return (change(inputs[0]), *inputs[1:]), options
            return inputs, {**options, "hidden_states": change(options["hidden_states"])}

        def after(module: Any, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return change(output[0]), *output[1:]
            return change(output)

        block = self._module("block", layer)
        if site in ("embedding", "resid_pre"):
            block = self._module("block", layer if site == "resid_pre" else 0)
            return [block.register_forward_pre_hook(before, with_kwargs=True)]
        if site == "resid_post":
            return [block.register_forward_hook(after)]
        if site == "resid_mid":
            layer_input: list[torch.Tensor] = []

            def remember(module: Any, inputs: Any, options: Any) -> None:
                layer_input[:] = [inputs[0] if inputs else options["hidden_states"]]

            def around(module: Any, inputs: Any, output: Any) -> Any:
                return after(module, inputs, output) if not layer_input else shifted(output)

            def shifted(output: Any) -> Any:
                out = output[0] if isinstance(output, tuple) else output
                new = change(layer_input[0] + out) - layer_input[0]
                return (new, *output[1:]) if isinstance(output, tuple) else new

            return [
                block.register_forward_pre_hook(remember, with_kwargs=True),
                self._module("attn_out", layer).register_forward_hook(around),
            ]
        module = self._module(site, layer)
        if site in ("head_out", "mlp_hidden"):
            return [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [module.register_forward_hook(after)]


CLOSE_STEERED = 3e-4
_DELTA = Recurrence(conv_kernel=4, key_heads=2, value_heads=4, key_width=8, value_width=12)
STEERED_MODELS: dict[str, dict[str, Any]] = {
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


def native_sites(shape: ModelConfig) -> list[tuple[str, int]]:
    sites = [site for site in SITES if site in NATIVE_SITES]
    return [(site, layer) for site in sites for layer in site_layers(shape, site)]


def run_steered(
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


def check_changes_and_readings(name: str, make_reference: Any, make_model: Any) -> None:
    """The backends of two kinds of models change and read the same numbers, at every site.

    Short rows are decoded in a captured graph on a GPU, long ones are prompts.
    """
    shape = config(**{"layers": 1, "context": 128, **STEERED_MODELS[name]})
    checkpoint = RandomCheckpoint(shape)
    reference, running = (backend(make(checkpoint)) for make in (make_reference, make_model))
    rng, sites = np.random.default_rng(len(name)), native_sites(shape)
    everywhere = tuple(random_intervention(shape, [site], rng) for site in sites)
    several = tuple(random_intervention(shape, sites, rng) for _ in range(4))
    look = ObserveRequest(
        tokens=np.array([2, 16, 19]), sites=tuple(sites), residuals=np.array([3]),
        parts=np.array([18]),
    )  # fmt: skip
    expected, actual = (
        run_steered(b, [17, 3], [everywhere, several], look) for b in (reference, running)
    )
    size = max(1.0, float(np.abs(expected[0]).max()))
    assert difference(actual[0], expected[0]) < CLOSE_STEERED * size
    assert difference(actual[1].residuals, expected[1].residuals) < CLOSE_STEERED * 10
    assert difference(actual[1].parts, expected[1].parts) < CLOSE_STEERED * 10
    for key, values in expected[1].sites.items():
        bound = CLOSE_STEERED * max(5.0, float(np.abs(values).max()))
        assert difference(actual[1].sites[key], values) < bound, key
    plain = run_steered(running, [17, 3], [(), ()])[0]
    assert difference(plain, actual[0]) > 0.01, "nothing is changed"
    lengths, changes = [2, 3], [several, everywhere]
    expected, actual = (run_steered(b, lengths, changes, num_first=1) for b in (reference, running))
    size = max(1.0, float(np.abs(expected[0]).max()))
    assert difference(actual[0], expected[0]) < CLOSE_STEERED * size
