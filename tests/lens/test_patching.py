"""Patching and ablation: each cell is what a hook on transformers gives, and the rest of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.errors import SettingsError

CLEAN = [1, 40, 77, 3, 200, 11]
CORRUPTED = [1, 40, 78, 3, 20, 11]
ANSWER, OTHER = 5, 9
HEADS, HEAD_WIDTH, LAYERS = 6, 8, 4


class HookedModel:
    """A model of transformers whose activations are read and replaced by forward hooks."""

    def __init__(self, family: str) -> None:
        self.model = tiny.make(family)

    def module(self, site: str, layer: int) -> Any:
        block = self.model.model.layers[layer]
        return {
            "resid_post": block,
            "attn_out": block.self_attn,
            "mlp_out": block.mlp,
            "head_out": block.self_attn.o_proj,
        }[site]

    def run(
        self, tokens: list[int], changes: dict[tuple[str, int], Callable[[Any], Any]]
    ) -> torch.Tensor:
        """The logits of the last token, with the value at each (site, layer) changed."""
        with ExitStack() as stack, torch.no_grad():
            for (site, layer), change in changes.items():
                module = self.module(site, layer)
                if site == "head_out":
                    handle = module.register_forward_pre_hook(
                        lambda module, inputs, change=change: (change(inputs[0]), *inputs[1:])
                    )
                else:
                    handle = module.register_forward_hook(
                        lambda module, inputs, output, change=change: _changed(output, change)
                    )
                stack.callback(handle.remove)
            logits: torch.Tensor = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            return logits

    def read(self, tokens: list[int], site: str, layer: int) -> Any:
        values: list[Any] = []
        self.run(tokens, {(site, layer): lambda value: (values.append(value.clone()), value)[1]})
        return values[0]

    def gap(self, tokens: list[int], changes: Any) -> float:
        logits = self.run(tokens, changes)
        return float(logits[ANSWER] - logits[OTHER])


def _changed(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


@pytest.fixture(scope="module")
def hooked() -> HookedModel:
    return HookedModel("llama")


@pytest.mark.parametrize("site", ["resid_post", "attn_out", "mlp_out"])
def test_a_sweep_is_that_of_hooks_on_transformers(site: str, family_lm, hooked: HookedModel):
    sweep = family_lm("llama").patch(
        CLEAN, CORRUPTED, answer=ANSWER, other=OTHER, site=site, progress=False
    )
    expected = np.zeros((LAYERS, len(CLEAN)))
    for layer in range(LAYERS):
        clean = hooked.read(CLEAN, site, layer)
        for position in range(len(CLEAN)):

            def replace(value: Any, clean: Any = clean, position: int = position) -> Any:
                value = value.clone()
                value[0, position] = clean[0, position]
                return value

            expected[layer, position] = hooked.gap(CORRUPTED, {(site, layer): replace})
    np.testing.assert_allclose(sweep.values, expected, atol=2e-3)
    assert sweep.clean == pytest.approx(hooked.gap(CLEAN, {}), abs=2e-3)
    assert sweep.baseline == pytest.approx(hooked.gap(CORRUPTED, {}), abs=2e-3)
    assert np.ptp(expected) > 0.1  # there is something to compare
    assert (sweep.values[:, :2] == np.float32(sweep.baseline)).all()  # both runs are the same there
    if site == "resid_post":
        np.testing.assert_allclose(sweep.restored[-1, -1], 1, atol=1e-3)


def head_change(heads: dict[int, Any]) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        value = value.clone()
        for head, new in heads.items():
            part = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
            value[..., part] = 0.0 if new is None else new[..., part]
        return value

    return change


def test_heads_are_patched_at_all_positions(family_lm, hooked: HookedModel):
    lm = family_lm("llama")
    options = {"answer": ANSWER, "other": OTHER, "site": "head_out", "progress": False}
    sweep = lm.patch(CLEAN, CORRUPTED, **options)
    assert sweep.axes == ("layer", "head") and sweep.values.shape == (LAYERS, HEADS)
    for layer in range(LAYERS):
        clean = hooked.read(CLEAN, "head_out", layer)
        for head in range(HEADS):
            gap = hooked.gap(CORRUPTED, {("head_out", layer): head_change({head: clean})})
            assert sweep.values[layer, head] == pytest.approx(gap, abs=2e-3)
    both = lm.patch(CLEAN, CORRUPTED, **options, heads=[1, 4], sweep=["layer"])
    clean = hooked.read(CLEAN, "head_out", 2)
    gap = hooked.gap(CORRUPTED, {("head_out", 2): head_change({1: clean, 4: clean})})
    assert both.values[2] == pytest.approx(gap, abs=2e-3)
    single = lm.patch(CLEAN, CORRUPTED, **options, sweep=["layer", "position", "head"], layers=1)
    assert single.values.shape == (1, len(CLEAN), HEADS)


def test_axes_that_are_not_swept_are_patched_together(family_lm, hooked: HookedModel):
    lm = family_lm("llama")
    options = {"answer": ANSWER, "other": OTHER, "progress": False}
    by_layer = lm.patch(CLEAN, CORRUPTED, **options, sweep=["layer"])
    np.testing.assert_allclose(by_layer.restored, np.ones(LAYERS), atol=1e-3)
    positions = lm.patch(
        CLEAN, CORRUPTED, **options, site="mlp_out", sweep=["position"], layers=[0, 2]
    )
    clean = {layer: hooked.read(CLEAN, "mlp_out", layer) for layer in (0, 2)}

    def replace(layer: int) -> Callable[[Any], Any]:
        def change(value: Any) -> Any:
            value = value.clone()
            value[0, 4] = clean[layer][0, 4]
            return value

        return change

    gap = hooked.gap(CORRUPTED, {("mlp_out", layer): replace(layer) for layer in (0, 2)})
    assert positions.values[4] == pytest.approx(gap, abs=2e-3)
    embedding = lm.patch(CLEAN, CORRUPTED, **options, site="embedding")
    assert embedding.axes == ("position",)
    together = lm.patch(
        CLEAN, CORRUPTED, **options, site="embedding", positions=[2, 4], sweep=["position"]
    )
    np.testing.assert_allclose(together.values, embedding.values[[2, 4]], atol=1e-4)


def test_knocking_heads_out(family_lm, hooked: HookedModel):
    lm = family_lm("llama")
    sweep = lm.ablate(CLEAN, answer=ANSWER, other=OTHER, progress=False)
    for layer in range(LAYERS):
        for head in range(HEADS):
            gap = hooked.gap(CLEAN, {("head_out", layer): head_change({head: None})})
            assert sweep.values[layer, head] == pytest.approx(gap, abs=2e-3)
    mean = lm.ablate(
        CLEAN, answer=ANSWER, other=OTHER, site="mlp_out", sweep=["layer"], progress=False,
        reference=[CLEAN, CORRUPTED[:3]],
    )  # fmt: skip
    rows = torch.cat([hooked.read(tokens, "mlp_out", 1)[0] for tokens in (CLEAN, CORRUPTED[:3])])
    average = rows.mean(0)
    gap = hooked.gap(CLEAN, {("mlp_out", 1): lambda value: average.expand_as(value)})
    assert mean.values[1] == pytest.approx(gap, abs=2e-3)


def test_metrics(tiny_lm):
    options = {"progress": False, "layers": [1]}
    logits = tiny_lm.activations(CLEAN, sites="logits", positions="last")["logits"][0]
    logprob = tiny_lm.patch(CLEAN, CORRUPTED, answer=ANSWER, **options)
    top = logits.max()
    expected = float(logits[ANSWER] - top - np.log(np.exp(logits - top).sum()))
    assert logprob.clean == pytest.approx(expected, abs=1e-3)
    custom = tiny_lm.patch(CLEAN, CORRUPTED, metric=lambda row: row[3], **options)
    assert custom.clean == pytest.approx(float(logits[3]), abs=1e-3)
    text = tiny_lm.ablate(CLEAN, **options)
    score = tiny_lm.score(CLEAN)
    assert text.baseline == pytest.approx(np.mean(score.logprobs[1:]), abs=1e-3)


def test_a_cell_can_be_written_on(tiny_lm):
    sweep = tiny_lm.patch(CLEAN, CORRUPTED, answer=ANSWER, other=OTHER, progress=False)
    cell = sweep.interventions(2, -1)
    logits = tiny_lm.activations(CORRUPTED, sites="logits", positions="last", interventions=cell)
    row = logits["logits"][0]
    assert row[ANSWER] - row[OTHER] == pytest.approx(float(sweep.values[2, -1]), abs=1e-3)
    assert len(tiny_lm.generate(CORRUPTED, interventions=cell, max_tokens=3, end=False).tokens) == 3
    assert sweep.interventions(0, 0) == ()  # nothing differs before the first difference


def test_the_result(lm):
    sweep = lm.patch(
        "The capital of Italy is", "The capital of France is", answer=" Rome", other=" Paris",
        progress=False,
    )  # fmt: skip
    assert sweep.labels[1][3] == "3 ' Italy'" or "France" in sweep.labels[1][3]
    as_json = json.loads(json.dumps(sweep.to_dict()))
    np.testing.assert_allclose(as_json["values"], sweep.values, atol=1e-5)
    assert as_json["axes"] == ["layer", "position"] and "' Rome'" in as_json["metric"]
    strongest = sweep.strongest(3)
    effects = [abs(cell["effect"]) for cell in strongest]
    assert effects == sorted(effects, reverse=True)
    assert effects[0] == pytest.approx(float(np.abs(sweep.effects).max()))
    html = sweep._repr_html_()
    assert html.count("<td") == sweep.values.size and "layer 0" in html
    assert "corrupted" in repr(sweep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a metric, or an answer"),
        ({"other": 3}, "needs a metric, or an answer"),
        ({"answer": 3, "metric": np.max}, "either metric or answer"),
        ({"metric": 3}, "function"),
        ({"answer": 5000}, "vocabulary"),
        ({"answer": 3, "site": "logits"}, "hidden states"),
        ({"answer": 3, "site": "absent"}, "no site"),
        ({"answer": 3, "sweep": ["head"]}, "sweep must be of layer, position"),
        ({"answer": 3, "sweep": []}, "sweep must be"),
        ({"answer": 3, "heads": [1]}, "heads are those of head_out"),
        ({"answer": 3, "site": "head_out", "heads": [6]}, "from -6 to 5"),
        ({"answer": 3, "layers": [4]}, "from -4 to 3"),
        ({"answer": 3, "positions": 6}, "from -6 to 5"),
    ],
)
def test_bad_sweeps(tiny_lm, options: Any, message: str):
    with pytest.raises(SettingsError, match=message):
        tiny_lm.patch(CLEAN, CORRUPTED, progress=False, **options)


def test_texts_that_cannot_be_compared(tiny_lm):
    with pytest.raises(SettingsError, match="same number of tokens, got 6 and 5"):
        tiny_lm.patch(CLEAN, CORRUPTED[:5], answer=3)
    with pytest.raises(SettingsError, match="are the same"):
        tiny_lm.patch(CLEAN, CLEAN, answer=3)
    with pytest.raises(SettingsError, match="reference must be"):
        tiny_lm.ablate(CLEAN, answer=3, reference="text")
