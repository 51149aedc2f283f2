"""Errors in a file, a batch or the values raise a message and have no other effect."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import unspool
from helpers.paged_texts import Library, RandomCheckpoint, batch_of, config, read, read_whole
from helpers.tiny_gguf import write_tiny
from unspool import native
from unspool.backends.cpu.backend import CpuBackend
from unspool.backends.cpu.model import load_cpu
from unspool.backends.step import ObserveRequest, StepBatch
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.sampling import BadLogitsError

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)

# -- files -----------------------------------------------------------------------------------

Tensors = dict[str, Any]


def write(path: Path, change: Callable[[Tensors], None] = lambda _: None, **changed: int) -> Path:
    """Write a one-layer Llama as GGUF: matrices in F32, those named "ffn" in Q8_0."""

    def prepare(tensors: Tensors) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"].copy()
        for name in ("gate", "up", "down"):
            name = f"blk.0.ffn_{name}.weight"
            tensors[name] = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0)
        change(tensors)

    numbers = {name.replace("__", "."): value for name, value in changed.items()}
    return write_tiny(path, numbers=numbers, change=prepare)


def use(path: Path, **options: Any) -> Any:
    """Load a model and generate: some errors show only when the weights are used."""
    lm = unspool.load(path, backend="native", memory=1 << 20, **options)
    try:
        return lm.generate([1, 2, 3], max_tokens=4, temperature=0).tokens
    finally:
        lm.close()


def test_a_file_that_is_right(tmp_path: Path):
    assert len(use(write(tmp_path / "a.gguf"))) == 4


def cut(name: str, rows: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"][:rows]})


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        (cut("blk.0.attn_k", 8), {}, r"blk\.0\.attn_k\.weight has shape \(8, 32\).*\(16, 32\)"),
        (cut("blk.0.ffn_up", 32), {}, r"ffn_up\.weight has shape \(32, 32\)"),
        (cut("output_norm", 31), {}, r"output_norm\.weight has shape \(31,\)"),
        (cut("token_embd", 257), {}, r"output\.weight has shape \(258, 32\).*\(257, 32\)"),
        (lambda t: t.pop("blk.0.ffn_down.weight"), {}, r"lacks blk\.0\.ffn_down\.weight"),
        (lambda _: None, {"feed_forward_length": 96}, r"has shape \(64, 32\).*\(96, 32\)"),
        (lambda _: None, {"attention__head_count_kv": 1}, r"attn_k\.weight has shape"),
        (lambda _: None, {"attention__head_count_kv": 3}, "kv_heads must be a divisor of 4, got 3"),
        (lambda _: None, {"block_count": 2}, r"lacks blk\.1\."),
        (lambda _: None, {"embedding_length": 16}, "has shape"),
    ],
)
def test_tensors_that_do_not_fit_the_settings(
    change: Callable[[Tensors], None], changes: dict[str, int], words: str, tmp_path: Path
):
    with pytest.raises(ModelFileError, match=words):
        use(write(tmp_path / "a.gguf", change, **changes))


def spoiled(name: str, at: int | tuple[int, int], value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        data = tensors[f"{name}.weight"]
        if data.dtype == np.uint8:  # the scale of the first block in a row
            data[at, 0:2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        else:
            data[at] = value

    return change


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("token_embd", (257, 31), np.nan, "embed.weight"),
        ("blk.0.attn_v", (0, 0), -np.inf, "attention.v.weight"),
        ("blk.0.ffn_down", 31, np.inf, "feed.down.weight"),
        ("blk.0.attn_norm", 3, np.nan, "attention_norm.weight"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"quantize": 4}, {"dtype": "bfloat16"}], ids=str)
def test_weights_that_are_not_finite(
    name: str, at: Any, message: str, value: float, options: dict[str, Any], tmp_path: Path
):
    with pytest.raises(ModelFileError, match=f"{message} holds NaN or infinite numbers.*damaged"):
        use(write(tmp_path / "a.gguf", spoiled(name, at, value)), **options)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("size", 0, "has an axis of size 0"),
        ("size", 1 << 40, "reaches past its end|has shape"),
        ("size", 1 << 63, "reaches past its end|has shape"),
        ("offset", 8, "off its alignment"),
        ("offset", 1 << 62, "reaches past its end"),
    ],
)
def test_invalid_offsets(field: str, value: int, words: str, tmp_path: Path):
    path = write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4  # behind the number of axes: sizes, type, offset
    struct.pack_into("<Q", data, at + (8 if field == "size" else 20), value)
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=words):
        use(path)


# -- numbers that go wrong while it runs ------------------------------------------------------


def test_overflow_is_an_error(tmp_path: Path):
    def huge(tensors: Tensors) -> None:
        tensors["blk.0.ffn_norm.weight"][:] = 1e38

    for options in ({}, {"kv_bits": 8}, {"dtype": "float32"}):
        with pytest.raises(BadLogitsError, match="the model gave NaN logits"):
            use(write(tmp_path / "a.gguf", huge), **options)


ODD = 9  # the token whose numbers overflow


def overflowing(weight: str, **changes: Any) -> RandomCheckpoint:
    """A model in which one matrix of the first layer gives infinity for a single token."""

    def change(name: str, data: Any) -> None:
        if name == "embed.weight":
            data[:, 0] = 0
            data[ODD, 0] = 5
        if name == "layers.0.attention.out.weight":  # no other token gets that value
            data[0] = 0
        if name == f"layers.0.{weight}.weight":
            data[:, 0] = 3e38

    return RandomCheckpoint(config(context=128, **changes), change=change)


@pytest.mark.parametrize("kv_bits", [8, 16, 32])
@pytest.mark.parametrize("weight", ["attention.v", "attention.k", "attention.q", "feed.up"])
def test_nan_in_the_kv_cache_propagates(weight: str, kv_bits: int):
    """As in torch: otherwise a broken prompt would be followed by plausible text."""
    backend = load_cpu(overflowing(weight), kv_bits=kv_bits).backend(memory=1 << 20, context=128)
    tokens = [1, 2, ODD, *range(20, 40)]
    for chunk in (1, 7, 30):
        logits = read_whole(backend, Library(8, 67).again(tokens), chunk)
        assert np.isnan(logits[2:]).any(axis=1).all(), f"in chunks of {chunk}"
    # The same pages, used by another text: what was in them before does not matter.
    clean = [token for token in tokens if token != ODD]
    again = read_whole(backend, Library(8, 67).again(clean), 5)
    fresh = load_cpu(overflowing(weight), kv_bits=kv_bits).backend(memory=1 << 20, context=128)
    assert np.array_equal(again, read_whole(fresh, Library(8, 67).again(clean), 5))
    assert np.isfinite(again).all()


@pytest.mark.parametrize("changes", [
    {"logit_softcap": 5.0, "attention_softcap": 5.0},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "relu", "gated": False},
    {"experts": 3, "experts_per_token": 2, "expert_width": 16, "dense_layers": (0,)},
    {"norm": "layer", "norm_after": True, "qk_norm": "head"},
], ids=str)  # fmt: skip
def test_no_activation_hides_nan(changes: dict[str, Any]):
    checkpoint = overflowing("feed.up", **changes)
    backend = load_cpu(checkpoint, kv_bits=32).backend(memory=1 << 20, context=128)
    logits = read_whole(backend, Library(8, 67).again([1, 2, ODD, 20, 21]), 1)
    if changes.get("norm") != "layer":  # which gives every number to every token
        assert np.isfinite(logits[:2]).all()
    assert np.isnan(logits[2:]).any(axis=1).all()


# -- batches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return load_cpu(RandomCheckpoint(config(context=128))).backend(memory=1 << 18, context=128)


def changed(name: str, at: Any, value: int) -> Callable[[StepBatch], StepBatch]:
    def change(batch: StepBatch) -> StepBatch:
        array = getattr(batch, name).copy()
        array[at] = value
        return dataclasses.replace(batch, **{name: array})

    return change


def with_page(column: int, page: int) -> Callable[[StepBatch], StepBatch]:
    """Replace one page of the first sequence."""

    def change(batch: StepBatch) -> StepBatch:
        pages = batch.table_updates.pages.copy()
        pages[column] = page
        return dataclasses.replace(
            batch, table_updates=dataclasses.replace(batch.table_updates, pages=pages)
        )

    return change


def with_echo(token: int, line: int) -> Callable[[StepBatch], StepBatch]:
    return lambda batch: dataclasses.replace(batch, echoes=np.array([[token, line]]))


BAD_BATCHES = {
    "token too large": changed("tokens", 3, 67),
    "token below zero": changed("tokens", 0, -1),
    "token far out of range": changed("tokens", 0, 1 << 62),
    "position past the pages": changed("positions", -1, 48),
    "position far out of range": changed("positions", slice(None), 1 << 60),
    "position below zero": changed("positions", 0, -1),
    "a gap between positions": changed("positions", 4, 6),
    "page that is none": with_page(1, 1 << 40),
    "page that was not given": with_page(0, -1),
    "a token that does not see itself": changed("visible_end", 4, 4),
    "a token that sees behind the pages": changed("visible_end", 4, 1 << 40),
    "a token that sees pages it has not": changed("visible_end", 4, 65),
    "a line of the table that is none": changed("slots", 0, 1 << 40),
    "row that ends before it begins": changed("row_starts", 1, 21),
    "rows that end elsewhere": changed("row_starts", -1, 19),
    "rows that begin elsewhere": changed("row_starts", 0, 1),
    "logits of nobody": changed("logits_indices", 0, 20),
    "logits of minus one": changed("logits_indices", 0, -1),
    "an echo in a line that is none": with_echo(0, 1 << 40),
    "an echo where there is no page": with_echo(3, 5),
    "an echo of nobody": with_echo(-1, 0),
    "a row without pages": lambda batch: dataclasses.replace(batch, slots=batch.slots[:1]),
    "a token without a place": lambda b: dataclasses.replace(b, positions=b.positions[:-1]),
    "a place for no token": lambda batch: dataclasses.replace(batch, tokens=batch.tokens[:-1]),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_invalid_batches(name: str, backend: CpuBackend):
    library = Library(8, 67)
    good = batch_of([(library.text(18), 17), (library.text(3), 3)])
    expected = backend.launch(good).result().logits
    with pytest.raises(UnspoolError, match="a position, a page or a state that does not exist"):
        backend.launch(BAD_BATCHES[name](good))
    assert np.array_equal(backend.launch(good).result().logits, expected), "it works as before"


@pytest.mark.parametrize("kind", ["residuals", "attention", "parts"])
@pytest.mark.parametrize("token", [-1, 5, 1 << 40])
def test_observing_tokens_that_do_not_exist(kind: str, token: int, backend: CpuBackend):
    batch = batch_of([(Library(8, 67).text(5), 5)], ObserveRequest(**{kind: np.array([token])}))
    with pytest.raises(UnspoolError, match="observed tokens are not in the batch"):
        backend.launch(batch)


def test_pages_that_do_not_exist_are_not_copied(backend: CpuBackend):
    batch = batch_of([(Library(8, 67).text(5), 5)])
    for copy in [(-1, 0), (0, backend.page_count), (1 << 40, 0)]:
        with pytest.raises(UnspoolError, match="pages must be within 0 to"):
            backend.launch(dataclasses.replace(batch, page_copies=np.array([copy])))


def test_a_block_table_that_is_too_large(backend: CpuBackend):
    batch = batch_of([(Library(8, 67).text(5), 5)])
    for name, value in [("slots", 1 << 40), ("slots", -1), ("columns", 1 << 40), ("columns", -1)]:
        updates = dataclasses.replace(batch.table_updates, **{name: np.array([value])})
        with pytest.raises(UnspoolError, match="block table"):
            backend.launch(dataclasses.replace(batch, table_updates=updates))


def test_an_empty_batch(backend: CpuBackend):
    none = np.empty(0, np.int64)
    empty = StepBatch(none, none, none, np.zeros(1, np.int64), none)
    assert backend.launch(empty).result().logits.shape == (0, 67)
    text = Library(8, 67).text(3)
    batch = dataclasses.replace(batch_of([(text, 3)]), logits_indices=none)
    assert backend.launch(batch).result().logits.shape == (0, 67)
    assert np.isfinite(read(backend, [(text, 3)])[0]).all()


# -- wishes that cannot be granted ------------------------------------------------------------


def test_more_threads_or_memory_than_available(tmp_path: Path):
    path = write(tmp_path / "a.gguf")
    with pytest.raises(SettingsError, match=r"threads must be <= \d+, .* got 9999"):
        use(path, threads=9999)
    lm = unspool.load(path, backend="native", memory=3 * 1024 * 2, context=64)
    pages = lm.engine.backend.page_count
    assert pages * 16 < 60
    with pytest.raises(UnspoolError, match=rf"not fit the KV cache.*holds {pages * 16}; allow"):
        lm.generate([1] * 50, max_tokens=10)
    assert len(lm.generate([1, 2], max_tokens=3, temperature=0).tokens) == 3
    with pytest.raises(SettingsError, match=r"at least one KV cache page of .* got 10"):
        _ = unspool.load(path, backend="native", memory=10).engine
    with pytest.raises(UnspoolError, match=r"cannot reserve .* bytes for the KV cache"):
        _ = unspool.load(path, backend="native", memory=1 << 60).engine


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to RLIMIT_AS")
@pytest.mark.parametrize(
    ("room", "words"), [(60, "Cannot allocate memory"), (195, "not enough memory for the weights")]
)
def test_no_memory_for_the_weights(room: int, words: str, default_model: Path):
    """The file is 98 MB and is mapped; its weights take 100 more."""
    code = f"""
import resource, sys
import unspool.cli.run, unspool.lm, unspool.backends.cpu.backend, numpy
from pathlib import Path
from unspool.cli.main import main
from unspool.text.tokenizer.tokenizer import Tokenizer
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {room << 20}, size + {room << 20}))
main(["run", "Hi", "--raw", "-n", "3", "--model", {str(default_model)!r}])
"""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert words in done.stderr


def test_no_threads_to_load_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none_left(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("unspool.backends.cpu.model.Packing", none_left)
    with pytest.raises(UnspoolError, match="no thread could be started"):
        use(write(tmp_path / "a.gguf"))
