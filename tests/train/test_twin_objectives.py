"""Block and fill twins against plain loops that say what they mean."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import unspool
from helpers import tiny
from helpers.tiny_training import tiny_model
from unspool.errors import DataError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.data.prepared import PackedDocuments
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.learning import forward
from unspool.train.learning.lora import LoraConfig, add_lora
from unspool.train.twins import data, objectives
from unspool.train.twins.data import Mixture, WritingSettings, generated_texts
from unspool.train.twins.objectives import (
    BlockTwinObjective,
    CleanNoisyPasses,
    FillTwinObjective,
    block_starts,
    document_starts,
    quarter_rows,
)
from unspool.train.twins.twin import add_mask_embedding

MASK = 28


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_batch(rows: int = 4) -> TrainingBatch:
    """Two documents a row; the end of the first row belongs to none."""
    ids = torch.randint(0, MASK, (rows, 41), generator=rng(3))
    documents = torch.zeros(rows, 40, dtype=torch.int32)
    documents[:, 17:] = 1
    documents[0, 35:] = -1
    loss_mask = torch.ones(rows, 40, dtype=torch.bool)
    loss_mask[:, :9] = False
    return TrainingBatch(ids, loss_mask, documents)


def a_pair() -> tuple[Transformer, Transformer]:
    """The frozen causal model, and a twin that is not the same any more."""
    twin = tiny_model(seed=5)
    twin.embed.requires_grad_(False)
    add_mask_embedding(twin, MASK, fresh=True)
    return tiny_model().requires_grad_(False), twin


@pytest.fixture
def random_draws(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the objectives drew."""
    recorded: dict[str, Any] = {}

    def watch(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            recorded[name] = inner(*args, **options)
            return recorded[name]

        monkeypatch.setattr(module, name, watched)

    for name in ("draw_grid", "mask_blocks", "mask_uniformly"):
        watch(objectives, name)
    for name in ("_draw_masks", "_sample_tokens"):
        watch(FillTwinObjective, name)
    return recorded


def looking_at(
    model: Transformer, x: Tensor, layer: int, angles: Any, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over one row of tokens that all see each other, and others' keys before them."""
    part: Any = model.layers[layer]
    attention = part.attention
    normed = part.attention_norm(x)
    query = attention.queries(normed, angles)
    own_key, own_value = attention.keys_values(normed, angles)
    keys, values = torch.cat((key, own_key), 2), torch.cat((value, own_value), 2)
    group = model.config.heads // model.config.kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = (query @ keys.mT * model.config.scale).softmax(-1)
    x = x + attention.out((weights @ values).transpose(1, 2).flatten(2))
    return x + part.feed(part.feed_norm(x)), own_key, own_value


def block_vectors(
    clean: Transformer, twin: Transformer, text: Tensor, tokens: Tensor, first: int
) -> Tensor:
    """The twin's vectors of a block at position `first` + len(text), behind a text that the causal
    model reads token by token."""
    places = torch.arange(first, first + len(text) + len(tokens)).numpy()
    none = torch.zeros(1, clean.config.kv_heads, 0, clean.config.head_width)
    kept = [(none, none) for _ in clean.layers]
    for place, token in enumerate(text):
        x = clean.embed(token[None, None])
        angles = clean.rope_tables(places[place : place + 1], 64)
        for layer in range(len(kept)):
            x, key, value = looking_at(clean, x, layer, angles[layer], *kept[layer])
            kept[layer] = torch.cat((kept[layer][0], key), 2), torch.cat((kept[layer][1], value), 2)
    x = twin.embed(tokens[None])
    angles = twin.rope_tables(places[len(text) :], 64)
    for layer in range(len(kept)):
        x, _, _ = looking_at(twin, x, layer, angles[layer], *kept[layer])
    return x[0]


def test_a_block_is_guessed_from_itself_and_what_the_causal_model_read(
    random_draws: dict[str, Any],
):
    batch, (clean, twin) = a_batch(2), a_pair()
    loss = BlockTwinObjective(MASK, clean)(twin, batch, rng())
    grid, (hide, _) = random_draws["draw_grid"], random_draws["mask_blocks"]
    total, count = torch.tensor(0.0), 0
    for row in range(2):
        tokens, size, shift = batch.inputs[row], int(grid.sizes[row]), int(grid.offsets[row])
        for begin, end in ((0, 17), (17, 35 if row == 0 else 40)):
            border = begin + size - shift
            starts = [begin, *(s for s in range(border, end, size) if s > begin)]
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                for place in range(start + 1, stop):
                    displayed = hide[row] if hide[row, place] else ~hide[row]
                    noisy = tokens[start:stop].masked_fill(displayed[start:stop], MASK)
                    noisy[0] = tokens[start]  # the causal model's own
                    x = block_vectors(clean, twin, tokens[begin:start], noisy, begin)
                    guess = twin.logits(x[place - 1 - start])
                    total += functional.cross_entropy(guess, tokens[place])
                    count += 1
    assert int(loss.tokens) == count
    assert torch.allclose(loss.mean, total / count, rtol=1e-4)


def test_the_causal_model_reads_as_it_always_did():
    """Logits of the clean pass are those of the causal model, with any twin."""
    clean, twin = a_pair()
    tokens = a_batch().inputs
    halves = CleanNoisyPasses(clean.config, 4, 40, tokens.device)
    halves.set_starts(torch.zeros(4, 40))
    assert torch.allclose(clean.logits(halves.clean_pass(clean, tokens)), clean(tokens), atol=1e-4)
    before = {name: value.clone() for name, value in clean.state_dict().items()}
    loss = BlockTwinObjective(MASK, clean)(twin, a_batch(), rng())
    loss.mean.backward()
    assert all(value.grad is None for value in clean.parameters())
    assert all(torch.equal(value, before[name]) for name, value in clean.state_dict().items())
    trained = {name for name, value in twin.named_parameters() if value.grad is not None}
    assert "embed.mask" in trained and "norm.weight" in trained and "embed.weight" not in trained


def test_as_an_adapter_the_clean_half_is_the_model_without_it(random_draws: dict[str, Any]):
    """With LoRA the loss is that of a frozen copy beside the adapted model."""
    adapted = tiny_model()
    add_lora(adapted, LoraConfig(rank=2))
    for name, value in adapted.named_parameters():
        if name.endswith(".up"):
            torch.nn.init.normal_(value, 0, 0.1, generator=rng(7))
    alone = BlockTwinObjective(MASK)(adapted, a_batch(), rng())
    beside = BlockTwinObjective(MASK, tiny_model().requires_grad_(False))(adapted, a_batch(), rng())
    assert torch.allclose(alone.mean, beside.mean, rtol=1e-5)
    alone.mean.backward()
    assert all(v.grad is None for n, v in adapted.named_parameters() if not v.requires_grad)


def test_fill_guesses_from_both_sides_and_corrects_what_is_wrong(random_draws: dict[str, Any]):
    batch, (clean, twin) = a_batch(), a_pair()
    loss = FillTwinObjective(MASK, clean)(twin, batch, rng())
    tokens, quarter = batch.inputs, quarter_rows(4)
    assert [part.start for part in quarter] == [0, 1, 2, 3]
    wrong, others = random_draws["mask_uniformly"][0], random_draws["_sample_tokens"][0]
    hidden_total = shown_total = torch.tensor(0.0)
    count = displayed = 0
    for row in range(4):
        for begin, end in ((0, 17), (17, 35 if row == 0 else 40)):
            counts = [p for p in range(begin + 1, end) if row != 1 or p > 9]
            noisy = tokens[row].clone()
            if row == 3:
                for p in counts:
                    noisy[p] = others[p] if wrong[p] else tokens[row, p]
            for p in counts:
                hide = random_draws["_draw_masks"][row]
                for side in (True, False):  # hidden, and where it is seen
                    if not side and row != 3:
                        continue
                    copy = hide if bool(hide[p]) == side else ~hide
                    recorded = noisy.clone()
                    for q in counts:
                        recorded[q] = MASK if copy[q] else noisy[q]
                    none = torch.zeros(0, dtype=torch.int64)
                    x = block_vectors(clean, twin, none, recorded[begin:end], begin)
                    result = functional.cross_entropy(twin.logits(x[p - 1 - begin]), tokens[row, p])
                    if side:
                        hidden_total, count = hidden_total + result, count + 1
                    else:
                        shown_total, displayed = shown_total + result, displayed + 1
    assert int(loss.tokens) == count
    assert loss.extra["hidden"] == pytest.approx(float((hidden_total / count).detach()), rel=1e-4)
    assert loss.extra["shown"] == pytest.approx(float((shown_total / displayed).detach()), rel=1e-4)
    expected = hidden_total / count + 0.25 * shown_total / displayed
    assert torch.allclose(loss.mean, expected, rtol=1e-4)


def test_wrong_tokens_are_what_the_causal_model_might_have_written():
    clean, twin = a_pair()
    batch = a_batch(64)
    with torch.no_grad():  # one token is far likelier than all others
        clean.norm.weight.mul_(30)
    result = FillTwinObjective(MASK, clean)._sample_tokens(
        twin, batch.inputs, document_starts(torch.zeros(64, 40)), rng()
    )
    likeliest = clean(batch.inputs)[:, :-1].argmax(-1)
    assert torch.equal(result[:, 0], batch.inputs[:, 0])
    assert (result[:, 1:] == likeliest).float().mean() > 0.95


def test_every_size_level_and_span_is_drawn():
    starts = document_starts(torch.tensor([[4, 4, 4, 4, 4, 9, 9, 9, 9, 9, 9, -1]]))
    assert starts.tolist() == [[0] * 5 + [5] * 6 + [11]]
    blocks = block_starts(starts, torch.tensor([[4]]), torch.tensor([[1]]))
    assert blocks.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8, 11]]
    grid = objectives.draw_grid(2000, rng())
    assert set(grid.sizes.flatten().tolist()) == {4, 8, 16, 32}
    assert ((grid.offsets >= 0) & (grid.offsets < grid.sizes)).all()
    share = (grid.sizes == 8).float().mean()
    assert 0.3 < share < 0.4
    starts = torch.arange(0, 800, 8).repeat_interleave(8)[None].expand(50, -1)
    hide, level = objectives.mask_blocks(starts, rng())
    assert not hide[:, ::8].any()  # a block's first is never hidden
    blocks = hide.view(50, 100, 8)[:, :, 1:]
    assert 0.2 < blocks.all(2).float().mean() < 0.35  # 20 %, and by chance
    assert level.view(50, 100, 8).std(2).max() == 0  # one level for each block
    assert 0.5 < level.mean() < 0.7
    hide = objectives.mask_spans(200, 300, rng())
    assert 0.15 < hide.float().mean() < 0.5
    spans = "".join("x" if h else "." for h in hide[0]).split(".")
    assert max(map(len, spans)) > 1


def test_another_batch_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    """On a GPU masks are compiled: what changes from batch to batch must only be numbers in tensors
    that stay. Here the same code is traced without a GPU (which flex attention allows forward)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    clean, twin = a_pair()
    twin.requires_grad_(False)
    expected = BlockTwinObjective(MASK, clean)(twin, a_batch(), rng(2))
    filled = FillTwinObjective(MASK, clean)(twin, a_batch(), rng(2))

    def looking(allowed: Any, rows: int, queries: int, keys: int, device: Any, config: Any) -> Any:
        return create_block_mask(allowed, rows, None, queries, keys, device=device)

    monkeypatch.setattr("unspool.train.twins.objectives.build_mask", looking)
    monkeypatch.setattr(forward, "_compiled_flex_attention", lambda: flex_attention)
    torch._dynamo.reset()
    for layer in (*clean.layers, *twin.layers):
        layer.compile(backend="eager", dynamic=False)
    block_twin, fill_twin = BlockTwinObjective(MASK, clean), FillTwinObjective(MASK, clean)
    with torch.no_grad():
        block_twin(twin, a_batch(), rng(1))
        fill_twin(twin, a_batch(), rng(1))
        with torch._dynamo.config.patch(error_on_recompile=True):
            result = block_twin(twin, a_batch(), rng(2))
            again = fill_twin(twin, a_batch(), rng(2))
    torch._dynamo.reset()
    assert torch.allclose(result.mean, expected.mean, rtol=1e-4)
    assert torch.allclose(again.mean, filled.mean, rtol=1e-4)


# -- What twins learn from ------------------------------------------------------------------------


def text(count: int = 100) -> PackedDocuments:
    return PackedDocuments(np.arange(count, dtype=np.uint16), np.array([0, 30, count]), None)


def chats() -> PackedDocuments:
    """Documents of 5, 9 and 23 tokens, from 1000 on; the first two of each do not count."""
    borders = np.array([0, 5, 14, 37])
    loss_mask = np.ones(37, bool)
    for begin in borders[:-1]:
        loss_mask[begin : begin + 2] = False
    return PackedDocuments(np.arange(1000, 1037).astype(np.uint16), borders, loss_mask)


def test_text_comes_in_windows_that_know_their_documents():
    batch = Mixture({"text": (text(), 1.0)}, 6, 19).batch(0)
    assert batch.ids.shape == (6, 20)
    assert batch.document_ids is not None and batch.loss_mask is not None
    for row, documents in zip(batch.ids.tolist(), batch.document_ids.tolist(), strict=True):
        assert row == list(range(row[0], row[0] + 20)) and row[0] % 20 == 0
        assert documents == [int(token >= 30) - int(row[0] >= 30) for token in row[:-1]]
    assert batch.loss_mask.all()


def test_conversations_are_packed_whole_and_the_rest_of_a_row_is_none():
    mixture = Mixture({"chat": (chats(), 1.0)}, 32, 15)
    recorded = set()
    batch = mixture.batch(0)
    assert batch.document_ids is not None and batch.loss_mask is not None
    for row, documents, loss_mask in zip(
        batch.ids.tolist(), batch.document_ids.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        there = [token for token in row if token >= 1000]
        recorded.update(there)
        assert row[len(there) :] == [0] * (16 - len(there))
        assert all(number == -1 for number in documents[len(there) :])
        for place in range(1, 15):
            follows = row[place] == row[place - 1] + 1 and row[place] not in (1005, 1014)
            is_same = documents[place] == documents[place - 1] >= 0
            assert not is_same or follows
        expected = [t >= 1000 and t not in (1000, 1001, 1005, 1006, 1014, 1015) for t in row]
        assert loss_mask == expected[1:]
    assert recorded == set(range(1000, 1037))  # the long one in two pieces


def test_batches_are_functions_of_their_number_and_shares_are_kept():
    sources = {"text": (text(), 0.25), "chat": (chats(), 0.75)}
    first_item, other = (Mixture(sources, 400, 15, seed=3) for _ in range(2))
    assert (first_item.batch(5).ids == other.batch(5).ids).all()
    assert (first_item.batch(5).ids != first_item.batch(6).ids).any()
    share = float((first_item.batch(5).ids[:, 0] < 1000).float().mean())
    assert 0.17 < share < 0.33
    with pytest.raises(DataError, match="text has too few tokens"):
        Mixture({"text": (text(10), 1.0), "chat": (chats(), 1.0)}, 4, 15)


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("llama", folder)
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, folder)
    return folder


@pytest.fixture
def model(shared_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that has written nothing yet."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(data, "PART", 4)
    return shared_model


def write(model: Path, texts: int, loads: list[int], **extra: Any) -> PackedDocuments:
    def load() -> Any:
        loads.append(texts)
        return unspool.load(model, backend="torch")

    settings = WritingSettings(texts=texts, max_tokens=8, question_tokens=6, questions=("Why?",))
    return generated_texts(model, open_checkpoint(model).config, settings, load, **extra)


def test_texts_are_written_once_and_gone_on_with(model: Path):
    loads: list[int] = []
    first = write(model, 4, loads)
    assert first.num_documents >= 2 and first.loss_mask is not None
    extra = write(model, 8, loads)
    assert extra.num_documents > first.num_documents
    assert (extra.ids[: len(first.ids)] == first.ids).all()  # the same texts, followed by others
    assert (write(model, 8, loads).ids == extra.ids).all()
    assert loads == [4, 8]
    prompt = int(np.argmax(first.loss_mask))
    with unspool.load(model, backend="torch") as lm:
        arguments = list(lm.chat_prompt("Why?").ids)
        assert first.ids[:prompt].tolist() == arguments
        answer = first.ids[prompt : int(first.offsets[1])].tolist()
        again = lm.generate(arguments, max_tokens=8, temperature=0)
        assert answer == again.tokens  # the first is written without chance


def test_when_time_is_over_what_is_there_must_do(model: Path):
    loads: list[int] = []
    few = write(model, 8, loads, seconds=0.0)
    assert 1 <= few.num_documents <= 4
    assert write(model, 8, loads).num_documents > few.num_documents


def test_a_model_without_a_template_goes_on_with_beginnings(model: Path, tmp_path: Path):
    model = shutil.copytree(model, tmp_path / "model")
    settings = (model / "tokenizer_config.json").read_text()
    (model / "tokenizer_config.json").write_text(settings.replace("chat_template", "unused"))
    with pytest.raises(DataError, match="no chat template"):
        write(model, 3, [])
    result = write(model, 3, [], prefixes=[[5, 6, 7, 8], [9, 10, 11]])
    assert result.ids[:4].tolist() == [5, 6, 7, 8] and result.loss_mask is not None
    assert result.loss_mask.all() and result.num_documents == 3
