"""EAGLE-3 heads: as published; texts stay the same; those of other models are refused."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.heads_support import IDS, PROMPT, read_text, save_eagle, vectors_of
from unspool.decoding.speculative.controller import SHAPES, FixedShape, RoundCosts, ShapeController
from unspool.decoding.speculative.eagle import load_eagle
from unspool.decoding.speculative.head import DraftNode, DraftShape, build_draft
from unspool.decoding.speculative.head_drafter import HeadDrafter
from unspool.engine.request import DraftTree
from unspool.errors import ModelFileError, SettingsError

WAYS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 6, "top": 3},
    {"temperature": 0.8, "seed": 7, "mirostat_tau": 4.0},
]


def make_drafters(head: Any, shape: DraftShape, *texts: Any) -> tuple[Any, list[HeadDrafter]]:
    """A maker of drafters for `speculate`, and the drafters that it has made."""
    created: list[HeadDrafter] = []

    def make(request: Any) -> HeadDrafter:
        created.append(HeadDrafter(head, request, FixedShape(shape), *texts))
        return created[-1]

    return make, created


@pytest.mark.parametrize("options", WAYS)
def test_the_text_is_the_same(native: Any, eagle: Path, options: dict[str, Any]):
    head = load_eagle(eagle, native.model)
    prompts = [PROMPT, PROMPT[:2], [5]]
    plain = [native.generate(prompt, max_tokens=24, **options) for prompt in prompts]
    for shape in (DraftShape(1), DraftShape(5), DraftShape(9, width=3, depth=4)):
        make, _ = make_drafters(head, shape)
        drafted = native.generate(prompts, max_tokens=24, progress=False, speculate=make, **options)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        equal = [[step.logprob for step in text.steps] for text in plain]
        assert [[step.logprob for step in text.steps] for text in drafted] == equal, "to the bit"
        if "mirostat_tau" not in options:
            assert any(step.draft for text in drafted for step in text.steps)


def test_an_oracle_head_is_followed(native: Any, eagle: Path, monkeypatch: pytest.MonkeyPatch):
    """A head that knows the text: drafts begin at the right place, with the right past."""
    plain = native.generate(PROMPT, max_tokens=30, temperature=0.8, seed=8)
    full, head = [*PROMPT, *plain.tokens], load_eagle(eagle, native.model)
    place = {int(token): number for number, token in enumerate(head.ids)}
    context = type(head.context())
    read = list[int]()

    def expand(self: Any, nodes: list[DraftNode], tokens: list[int]) -> Any:
        read.append(len(self))
        logits = np.zeros((len(nodes), len(head.ids)), np.float32)
        for row, node in enumerate(nodes):
            at = len(tokens) + node.depth
            if at < len(full) and full[at] in place:
                logits[row, place[full[at]]] = 9
        return torch.from_numpy(logits)

    monkeypatch.setattr(context, "expand", expand)
    steps = native.engine.steps
    make, _ = make_drafters(head, DraftShape(9, width=3, depth=4))
    drafted = native.generate(PROMPT, max_tokens=30, temperature=0.8, seed=8, speculate=make)
    assert drafted.tokens == plain.tokens
    assert native.engine.steps - steps < 20
    assert read == sorted(read) and read[0] >= 1


def test_what_is_read_does_not_depend_on_rounds(native: Any, eagle: Path):
    """What the head has read in the end is what one run over the whole text would show it."""
    head = load_eagle(eagle, native.model)
    make, created = make_drafters(head, DraftShape(7, width=3, depth=3))
    text = native.generate([11, 22, 33], max_tokens=40, temperature=0.8, seed=3, speculate=make)
    drafter, tokens = created[0], [11, 22, 33, *text.tokens]
    count = len(drafter._positions)
    assert drafter._positions == list(range(count)) and count >= 40
    expected = read_text(head, native, tokens[: count + 1])
    assert torch.allclose(drafter._context.hidden[:count], expected.hidden[:count], atol=1e-5)


def test_a_text_that_begins_like_another_is_known_already(native: Any, eagle: Path):
    head = load_eagle(eagle, native.model)
    make, created = make_drafters(head, DraftShape(3), deque[HeadDrafter](maxlen=4))
    options = {"max_tokens": 12, "temperature": 0.8, "speculate": make}
    prompt = list(range(10, 100))
    first = native.generate(prompt, seed=1, **options)
    going_on = [*prompt, *first.tokens[:5], 9, 8, 7]
    second = native.generate(going_on, seed=2, **options)
    assert second.reused > 80, "it was not computed again for the head's sake"
    drafter, tokens = created[1], [*going_on, *second.tokens]
    count = len(drafter._positions)
    assert drafter._positions == list(range(count)) and count > len(going_on)
    expected = read_text(head, native, tokens[: count + 1])
    assert torch.allclose(drafter._context.hidden[:count], expected.hidden[:count], atol=1e-5)
    # What was computed without the head is computed again as far as it matters most.
    native.generate(list(range(100, 190)), max_tokens=2)
    third = native.generate(list(range(100, 190)), seed=3, **options)
    assert third.reused == 90 - 64 and created[2]._positions[0] == 90 - 64


def test_a_gap_is_read_across_and_a_rewind_forgets(native: Any, eagle: Path):
    head, tokens = load_eagle(eagle, native.model), (PROMPT * 3)[:50]
    vectors = vectors_of(native, tokens, head.layers)
    request = native.prepare_generation(tokens[:1], temperature=0.8).request
    drafter = HeadDrafter(head, request, FixedShape(DraftShape(3)))
    drafter.see(0, vectors[:, :10])
    drafter.see(30, vectors[:, 30:45])  # positions 10 to 29 are never shown
    drafter.propose(tokens[:46], 3)
    assert drafter._positions == [*range(10), *range(30, 45)]
    drafter.see(35, vectors[:, 35:40])  # the text was rewound
    drafted = drafter.propose(tokens[:41], 3)
    places = np.array([*range(10), *range(30, 40)])
    assert drafter._positions == places.tolist()
    context = head.context()
    context.read(places, vectors[:, places], [tokens[place + 1] for place in places])
    assert drafted == build_draft(context, tokens[:41], head.ids, DraftShape(3), 0.8)


def test_on_torch_too(tiny_lm: Any, tmp_path: Path):
    save_eagle(tmp_path / "head", tiny_lm)
    plain = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1)
    head = load_eagle(tmp_path / "head", tiny_lm.model)
    for shape in (DraftShape(3), DraftShape(9, width=3, depth=4)):
        make, created = make_drafters(head, shape)
        drafted = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1, speculate=make)
        assert drafted.tokens == plain.tokens
        count = len(created[0]._positions)
        expected = read_text(head, tiny_lm, [*PROMPT, *drafted.tokens][: count + 1])
        assert count > 20
        assert torch.allclose(created[0]._context.hidden, expected.hidden, atol=1e-3)


def test_by_its_name(native: Any, eagle: Path):
    plain = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2)
    for word in (f"eagle:{eagle}", f"eagle:{eagle}:3"):
        drafted = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2, speculate=word)
        assert drafted.tokens == plain.tokens
    with pytest.raises(SettingsError, match="speculate is 'eagle'"):
        native.generate(PROMPT, speculate="eagle")


def test_a_head_of_another_model_is_refused(native: Any, tmp_path: Path):
    save_eagle(tmp_path, native)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "eagle_aux_hidden_state_layer_ids": [1, 2]})
    )
    with pytest.raises(ModelFileError, match="use it with the model"):
        load_eagle(tmp_path, native.model)
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "eagle_aux_hidden_state_layer_ids": [1, 2, 99]})
    )
    with pytest.raises(ModelFileError, match="a layer or a token"):
        load_eagle(tmp_path, native.model)


def test_damaged_heads(native: Any, eagle: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match="is not a folder"):
        native.generate([1], speculate="eagle:/no/such/folder")
    with pytest.raises(SettingsError, match=r"no config\.json"):
        load_eagle(tmp_path, native.model)
    raw = json.loads((eagle / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "speculators_model_type": "pigeon"}))
    with pytest.raises(ModelFileError, match="unknown format"):
        load_eagle(tmp_path, native.model)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFileError, match="has no weights"):
        load_eagle(tmp_path, native.model)
    full = (eagle / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(full[:5000])
    with pytest.raises(ModelFileError, match=r"truncated|header"):
        load_eagle(tmp_path, native.model)
    (tmp_path / "model.safetensors").write_bytes(full)
    raw["transformer_layer_config"]["num_attention_heads"] = 3
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFileError, match=r"do not fit|kv_heads"):
        load_eagle(tmp_path, native.model)


def test_growing():
    class Table:
        def expand(self, nodes: list[DraftNode], tokens: Any) -> Any:
            rows = {0: [0.0, 3.0, 2.0, -9.0], 1: [1.0, 0.5, -9.0, -9.0], 2: [0.0, 0.0, 5.0, -9.0]}
            return torch.tensor([rows[min(node.depth, 2)] for node in nodes])

    ids = torch.tensor([10, 11, 12, 13])
    context: Any = Table()
    assert build_draft(context, [1], ids, DraftShape(3), 1.0) == [11, 10, 12]
    # The chances are .71, .62 (together .44), .99: a chain ends before it is too unlikely.
    cut = [
        build_draft(context, [1], ids, DraftShape(3, min_probability=sure), 1.0)
        for sure in (0.75, 0.5, 0.2)
    ]
    assert cut == [[], [11], [11, 10, 12]]
    tree = build_draft(context, [1], ids, DraftShape(6, width=2, depth=3), 1.0)
    assert isinstance(tree, DraftTree)
    assert len(tree.tokens) == 6 and tree.tokens[0] == 11 and tree.parents[0] == -1
    assert all(parent < number for number, parent in enumerate(tree.parents))
    assert DraftShape(15, width=4, depth=6).within(2).levels == 2 and DraftShape(7).within(
        2
    ) == DraftShape(2)


# What a round of each rung checks and brings, on average: as measured once.
CHECKED = (0.7, 1.1, 1.7, 2.4, 3.8, 15, 31)
GAINS = (1.45, 1.65, 1.85, 2.1, 2.4, 3.37, 3.69)


def run_ladder(
    cost: Any, rounds: int, gains: Any = GAINS
) -> tuple[float, ShapeController, list[str]]:
    """Tokens a second against those without drafts; costs by how many guesses are checked."""
    ladder, tokens, seconds, notes, owed = ShapeController(RoundCosts()), 0, 0.0, list[str](), 0.0
    for number in range(rounds):
        shape = ladder.choose()
        rung = SHAPES.index(shape) if shape else None
        usual = CHECKED[rung] if rung is not None else 0
        checked = usual * (0.5 + number % 3 / 2)  # rounds differ
        took, owed = cost(checked), owed + (gains[rung] if rung is not None else 1)
        won = max(1, int(owed))  # whole tokens, as many as it should be in the end
        owed -= won
        note = ladder.learn(won - 1, took)
        notes += [note] if note else []
        tokens, seconds = tokens + won, seconds + took
    return tokens / seconds * cost(0), ladder, notes


def test_the_ladder_climbs_where_it_pays_and_leaves_where_it_does_not():
    # Rows are nearly free: the largest tree is best.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.01 * n, 400)
    assert SHAPES[ladder.size].nodes >= 15 and speed > 2
    # Each row costs a third of a run: chains of guesses that are rather sure.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.33 * n, 400)
    assert SHAPES[ladder.size].min_probability >= 0.4 and speed > 1.1
    # Each row costs as much as a run: off, and soon.
    speed, ladder, notes = run_ladder(lambda n: 1 + 1.0 * n, 2000, gains=[1] * len(SHAPES))
    assert speed > 0.98 and ladder.paused and "drafting stopped" in notes[0]
    assert not ladder.reading or ladder.paused <= 16
    # One round that was held up does not tip the scales.
    costs = RoundCosts()
    for seconds in (1.0, 1.0, 1.0, 60.0):
        costs.add(0, 0, 2, seconds)
    assert costs.seconds(0) == pytest.approx(1.0)
    # Where the smallest drafts take as long as three tokens, three of them are enough to know.
    _, ladder, notes = run_ladder(lambda n: 1.0 if n == 0 else 3.0, 8 + 3)
    assert ladder.paused and len(notes) == 1
    # Where a token takes less than a draft, none is created, in this text nor in the next.
    speed, ladder, notes = run_ladder(lambda n: 4e-4 * (1 + 0.01 * n), 600)
    assert speed == pytest.approx(1) and "drafting rests" in notes[0]
    assert all(ShapeController(ladder.costs).choose() is None for _ in range(3))
    # With a limit, chains are cut and larger trees left out.
    assert (
        ShapeController(RoundCosts(), most=3).largest == 4
        and ShapeController(RoundCosts(), most=15).largest == 5
    )
    # A new text begins where the last one came to.
    assert ShapeController(ladder.costs).paused == ladder.paused


def test_a_tree_is_as_good_as_its_chains(native: Any, eagle: Path):
    """Each node of a tree gets the logits that it would get in a single chain."""
    head = load_eagle(eagle, native.model)
    context = read_text(head, native, PROMPT)
    root = DraftNode(PROMPT[-1])
    first = [DraftNode(int(IDS[5]), root, 1), DraftNode(int(IDS[90]), root, 1)]
    second = [DraftNode(int(IDS[7]), first[1], 2), DraftNode(int(IDS[8]), first[0], 2)]
    for level in ([root], first):
        context.expand(level, PROMPT)
    tree = context.expand(second, PROMPT)
    for row, path in enumerate(((IDS[90], IDS[7]), (IDS[5], IDS[8]))):
        node = DraftNode(PROMPT[-1])
        context.expand([node], PROMPT)
        for depth, token in enumerate(path, 1):
            node = DraftNode(int(token), node, depth)
            (logits,) = context.expand([node], PROMPT)
        assert np.allclose(logits, tree[row], atol=1e-4)
    context.truncate(10)
    again = read_text(head, native, PROMPT[:11])
    expected = again.expand([DraftNode(PROMPT[10])], PROMPT[:11])
    assert np.allclose(context.expand([DraftNode(PROMPT[10])], PROMPT[:11]), expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "before"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_eagle_3_as_published(native: Any, tmp_path: Path, kind: str, before: bool):
    """Against the formula, written down once more with torch for a whole sequence at a time."""
    weights = save_eagle(tmp_path, native, kind=kind, before=before)
    head, tokens = load_eagle(tmp_path, native.model), PROMPT
    assert head.ids.tolist() == IDS.tolist()
    vectors = vectors_of(native, tokens[:-1], head.layers)
    context = head.context()
    context.read(np.arange(len(tokens) - 1), vectors, tokens[1:])
    chain, drafted = list[int](), list[Any]()
    node = DraftNode(tokens[-1])
    for depth in range(1, 5):
        drafted.append(context.expand([node], tokens)[0])
        chain.append(int(head.ids[drafted[-1].argmax()]))
        node = DraftNode(chain[-1], node, depth)
    expected = _published(weights, vectors, tokens[1:], chain[:-1], kind, before)
    assert np.allclose(np.stack(drafted), expected, atol=2e-3)


def _published(
    weights: dict[str, Any],
    vectors: Any,
    words: list[int],
    chain: list[int],
    kind: str,
    before: bool,
) -> Any:
    """Logits behind the text and each drafted token: every step runs the whole sequence anew."""
    w = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in weights.items()}
    at = "layers.0."

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[name]

    hidden = torch.from_numpy(np.concatenate(list(vectors), -1)) @ w["fc.weight"].T
    ids, result = list(words), []
    for step in range(len(chain) + 1):
        length = len(ids)
        e = norm(w["embed_tokens.weight"][ids], at + "input_layernorm.weight")
        h = norm(hidden, at + "hidden_norm.weight")
        pair, residual = torch.cat([e, h], -1), h if before else hidden
        angle = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        parts = {}
        for part, heads in (("q", 6), ("k", 2), ("v", 2)):
            x = (pair @ w[f"{at}self_attn.{part}_proj.weight"].T).view(length, heads, 8)
            if kind == "qwen3" and part != "v":
                x = norm(x, f"{at}self_attn.{part}_norm.weight")
            if part != "v":
                turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
                x = x * cos[:, None] + turned * sin[:, None]
            parts[part] = x.transpose(0, 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            parts["q"], parts["k"].repeat_interleave(3, 0), parts["v"].repeat_interleave(3, 0),
            is_causal=True,
        )  # fmt: skip
        x = (
            residual
            + mixed.transpose(0, 1).reshape(length, -1) @ w[at + "self_attn.o_proj.weight"].T
        )
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T)
        out = x + (gate * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        result.append((norm(out[-1], "norm.weight") @ w["lm_head.weight"].T).numpy())
        if step < len(chain):  # the last output stands for what is known before the drafted token
            ids.append(chain[step])
            hidden = torch.cat([hidden, out[-1:]])
    return np.stack(result)
