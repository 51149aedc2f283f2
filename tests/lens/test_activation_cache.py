"""Activations by name: those of transformers, for one text and for many, in memory and on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.errors import DataError, SettingsError, UnspoolError
from unspool.lens import activation_files
from unspool.lens.activation_files import read_corpus
from unspool.model.files.safetensors import SafetensorsFile

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130, 33, 2]
OTHERS = [[5, 6, 7], TOKENS[::-1], [9] * 20]
SITES = ("embedding", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "head_out",
         "pattern", "final_norm", "logits")  # fmt: skip


def observed_by_hooks(family: str) -> dict[str, np.ndarray[Any, Any]]:
    """What forward hooks on transformers see, by TransformerLens' names."""
    oracle = tiny.make(family)
    found: dict[str, np.ndarray[Any, Any]] = {}

    def record(name: str, *, is_input: bool = False) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            value = inputs[0] if is_input else output
            value = value[0] if isinstance(value, tuple) else value
            found[name] = value[0].numpy().copy()

        return hook

    for number, layer in enumerate(oracle.model.layers):
        at = f"blocks.{number}"
        layer.register_forward_hook(record(f"{at}.hook_resid_post"))
        layer.input_layernorm.register_forward_hook(record(f"{at}.hook_resid_pre", is_input=True))
        layer.self_attn.register_forward_hook(record(f"{at}.hook_attn_out"))
        layer.mlp.register_forward_hook(record(f"{at}.hook_mlp_out"))
        layer.self_attn.o_proj.register_forward_hook(record(f"{at}.attn.hook_z", is_input=True))
    oracle.model.norm.register_forward_hook(record("ln_final.hook_normalized"))
    with torch.no_grad():
        outputs = oracle(torch.tensor([TOKENS]), output_attentions=True)
    found["hook_logits"] = outputs.logits[0].numpy()
    for number, weights in enumerate(outputs.attentions):
        found[f"blocks.{number}.attn.hook_pattern"] = weights[0].numpy()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_arrays_are_those_of_hooks_on_transformers(family, family_lm):
    cache = family_lm(family).activations(TOKENS, sites=SITES)
    expected = observed_by_hooks(family)
    for name, values in expected.items():
        array = cache[name]
        if name.endswith("hook_z"):
            array = array.reshape(len(TOKENS), -1)
        np.testing.assert_allclose(array, values, atol=5e-4, err_msg=name)
    assert cache.hooks().keys() > expected.keys()


def test_keys_and_axes(tiny_lm):
    cache = tiny_lm.activations(
        TOKENS, sites=("resid_post", "logits", "pattern"), layers=[-1, 1], positions=[3, -1]
    )
    assert list(cache) == ["resid_post", "logits", "pattern"] and len(cache) == 3
    assert cache.positions == (3, 11) and cache.layers["resid_post"] == (1, 3)
    assert cache["resid_post"].shape == (2, 2, 48) and cache["logits"].shape == (2, 259)
    assert cache["pattern"].shape == (2, 6, 2, 12)
    assert not cache["pattern"][:, :, 0, 4:].any()
    np.testing.assert_array_equal(cache["resid_post", 3], cache["resid_post"][1])
    np.testing.assert_array_equal(cache["blocks.3.hook_resid_post"], cache["resid_post", 3])
    assert "resid_post" in cache and "blocks.2.hook_resid_post" not in cache
    assert "mlp_out" not in cache and "nonsense" not in cache
    with pytest.raises(KeyError, match="layers 1, 3"):
        cache["resid_post", 2]
    with pytest.raises(KeyError, match="resid_post, logits, pattern"):
        cache["mlp_out"]
    assert "resid_post [2, 2, 48]" in repr(cache) and "resid_post" in cache._repr_html_()


def test_hook_names_as_the_request(tiny_lm):
    names = ["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out", "hook_embed"]
    cache = tiny_lm.activations(TOKENS, sites=names)
    assert set(cache.hooks()) == set(names)
    everything = tiny_lm.activations(TOKENS, sites=("resid_post", "mlp_out", "embedding"))
    for name in names:
        np.testing.assert_array_equal(cache[name], everything[name])


def test_a_list_is_read_as_each_text_alone(tiny_lm):
    caches = tiny_lm.activations(OTHERS, sites=("resid_post", "logits"))
    assert isinstance(caches, list)
    for text, cache in zip(OTHERS, caches, strict=True):
        alone = tiny_lm.activations(text, sites=("resid_post", "logits"))
        assert list(cache.tokens) == text
        np.testing.assert_allclose(cache["resid_post"], alone["resid_post"], atol=1e-5)
        np.testing.assert_allclose(cache["logits"], alone["logits"], atol=1e-4)


def test_a_generation_is_read_under_its_interventions(tiny_lm):
    from unspool.backends.interventions import Add, Intervention

    change = Intervention("resid_post", Add(np.full(48, 3.0)), layers=1, positions="generated")
    text = tiny_lm.generate(TOKENS, max_tokens=4, seed=1, end=False, interventions=[change])
    read = tiny_lm.activations(text, sites="resid_post")
    plain = tiny_lm.activations([*text.prompt, *text.tokens], sites="resid_post")
    difference = np.abs(read["resid_post"] - plain["resid_post"]).max((0, 2))
    assert not difference[: len(TOKENS)].any() and (difference[len(TOKENS) :] > 0.1).all()
    new = tiny_lm.activations(text, positions="generated")
    assert new.positions == tuple(range(len(TOKENS), len(TOKENS) + 4))


def test_the_native_backend_reads_the_same(lm, torch_small):
    """`lm` is a small model of 4 bits on the CPU backend."""
    text = "The capital of Italy is Rome"
    native = lm.activations(text, sites=SITES)
    reference = torch_small.activations(text, sites=SITES)
    for site in SITES:
        values, expected = native[site], reference[site]
        error = np.abs(values - expected).max()
        assert error < 0.1 * np.abs(expected).max() + 1e-3, site


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": "nonsense"}, "no site 'nonsense'"),
        ({"sites": "blocks.9.hook_resid_post"}, "layer must be from 0 to 3"),
        ({"sites": "blocks.1.hook_nonsense"}, "no hook"),
        ({"sites": ()}, "sites is empty"),
        ({"sites": "recurrent_out"}, "no layer of this model has recurrent_out"),
        ({"layers": 4}, "layers"),
        ({"layers": []}, "layers is empty"),
        ({"positions": 12}, "positions"),
        ({"positions": "nowhere"}, "positions must be"),
        ({"positions": slice(50, 60)}, "selects none"),
        ({"positions": "generated"}, "selects none"),
    ],
)
def test_bad_requests(tiny_lm, options: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        tiny_lm.activations(TOKENS, **options)
    with pytest.raises(UnspoolError, match="text 1"):
        tiny_lm.activations([[1, 2], [5000]])


# -- on disk


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [[(7 * n + k) % 259 for k in range(3 + n % 9)] for n in range(150)]
    path.write_text("\n".join(json.dumps({"ids": ids}) for ids in texts), encoding="utf-8")
    return path


def shards_of(folder: Path) -> list[SafetensorsFile]:
    return [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]


def rows_of(folder: Path, name: str) -> np.ndarray[Any, Any]:
    parts = [
        shard.integers(name)
        if name in ("text", "position", "token")
        else shard.stored(name).float32()
        for shard in shards_of(folder)
    ]
    return np.concatenate(parts)


def test_shards_hold_the_activations_of_all_texts(tiny_lm, corpus: Path, tmp_path: Path):
    saved = tiny_lm.save_activations(
        corpus, tmp_path / "out", field="ids", sites=("resid_post", "final_norm"), layers=[1, 3],
        max_tokens=8, shard_bytes=100_000, progress=False,
    )  # fmt: skip
    texts = list(read_corpus(corpus, "ids"))
    assert saved.num_texts == 150 and saved.num_shards > 2
    assert saved.num_cut == sum(len(text) > 8 for text in texts)
    numbers, positions = rows_of(tmp_path / "out", "text"), rows_of(tmp_path / "out", "position")
    tokens = rows_of(tmp_path / "out", "token")
    expected = [(n, k, token) for n, ids in enumerate(texts) for k, token in enumerate(ids[:8])]
    rows = list(zip(numbers.tolist(), positions.tolist(), tokens.tolist(), strict=True))
    assert rows == expected
    states = rows_of(tmp_path / "out", "blocks.3.hook_resid_post")
    for number in (0, 77, 149):
        alone = tiny_lm.activations(texts[number][:8], layers=3)["resid_post", 3]
        np.testing.assert_allclose(states[numbers == number], alone, atol=1e-5)
    entries = shards_of(tmp_path / "out")[0].tensors
    assert set(entries) == {"text", "position", "token", "blocks.1.hook_resid_post",
                            "blocks.3.hook_resid_post", "ln_final.hook_normalized"}  # fmt: skip


def test_a_stopped_run_resumes(tiny_lm, corpus: Path, tmp_path: Path, monkeypatch):
    options: dict[str, Any] = {"layers": 2, "shard_bytes": 60_000, "progress": False}
    texts = list(read_corpus(corpus, "ids"))
    tiny_lm.save_activations(texts, tmp_path / "whole", **options)

    def stopped() -> Iterator[Any]:
        yield from islice(texts, 100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_lm.save_activations(stopped(), tmp_path / "parts", **options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("shard*")}
    assert 0 < len(before) and not list((tmp_path / "parts").glob("*.part"))
    read: list[int] = []
    compute = activation_files.activation_caches
    monkeypatch.setattr(
        activation_files,
        "activation_caches",
        lambda lm, prompts, **rest: (read.append(len(prompts)), compute(lm, prompts, **rest))[1],
    )
    saved = tiny_lm.save_activations(texts, tmp_path / "parts", **options)
    assert sum(read) < 150 and saved.num_texts == 150  # finished shards are not computed again
    for name, stamp in before.items():
        assert (tmp_path / "parts" / name).stat().st_mtime_ns == stamp
    for name in ("text", "token", "blocks.2.hook_resid_post"):
        np.testing.assert_allclose(
            rows_of(tmp_path / "parts", name), rows_of(tmp_path / "whole", name), atol=1e-5
        )
    with pytest.raises(SettingsError, match="layers"):
        tiny_lm.save_activations(texts, tmp_path / "parts", **{**options, "layers": 1})
    with pytest.raises(SettingsError, match="other texts"):
        tiny_lm.save_activations([[1, 2], *texts[1:]], tmp_path / "parts", **options)


def test_parquet_and_half_precision(tiny_lm, tmp_path: Path):
    arrow = pytest.importorskip("pyarrow.parquet")
    options: dict[str, Any] = {"layers": 1, "progress": False, "dtype": "float16"}
    tiny_lm.save_activations(OTHERS, tmp_path / "a", format="parquet", **options)
    tiny_lm.save_activations(OTHERS, tmp_path / "b", **options)
    table = arrow.read_table(tmp_path / "a" / "shard-00000.parquet").to_pydict()
    states = rows_of(tmp_path / "b", "blocks.1.hook_resid_post")
    np.testing.assert_array_equal(np.array(table["blocks.1.hook_resid_post"], np.float32), states)
    assert table["token"] == [token for text in OTHERS for token in text]


def test_what_cannot_be_written(tiny_lm, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"folder": tmp_path / "full"}, "other files"),
        ({"sites": "pattern"}, "patterns"),
        ({"dtype": "int3"}, "dtype"),
        ({"format": "csv"}, "format"),
        ({"max_tokens": 0}, "max_tokens"),
    ]
    for options, message in cases:
        with pytest.raises(SettingsError, match=message):
            tiny_lm.save_activations(OTHERS, **{"folder": tmp_path / "out", **options})
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    file = tmp_path / "texts.jsonl"
    for content, message in (("{", "line 1: not JSON"), ('{"a": 1}', "no field 'text', only a"),
                             ('{"text": 3}', "must be text")):  # fmt: skip
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            list(read_corpus(file))
    with pytest.raises(UnspoolError, match="cannot be read"):
        list(read_corpus(tmp_path / "absent.jsonl"))
