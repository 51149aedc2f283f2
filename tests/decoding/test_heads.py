"""Drafting heads: kernels and plain arithmetic agree, texts stay the same, others are refused."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads_support import PROMPT, read_text, save_eagle, save_own
from unspool.decoding.heads import arrays
from unspool.decoding.heads.drafter import HeadDrafter, load_head
from unspool.decoding.heads.files import SHIPPED, read_head
from unspool.decoding.heads.growing import Node, Shape, grow, last_tokens
from unspool.decoding.heads.ladder import SHAPES, Costs, Fixed, Ladder
from unspool.decoding.heads.own import OwnHead
from unspool.engine.request import DraftTree
from unspool.errors import ModelFileError, SettingsError, UnspoolError

# -- the same text ----------------------------------------------------------------------------

WAYS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 6, "top": 3},
    {"temperature": 0.8, "seed": 7, "mirostat_tau": 4.0},
]


@pytest.mark.parametrize(
    ("which", "options"),
    [
        *(("own", options) for options in WAYS),
        ("eagle", WAYS[1]),
        *(pytest.param("eagle", options, marks=pytest.mark.slow) for options in WAYS[2:]),
    ],
)
def test_the_text_is_the_same(
    native: Any, own: Path, eagle: Path, options: dict[str, Any], which: str
):
    head = load_head(own if which == "own" else eagle, native)
    prompts = [PROMPT, PROMPT[:2], [5], PROMPT[3:]]
    plain = [native.generate(prompt, max_tokens=24, **options) for prompt in prompts]
    for shape in (Shape(1), Shape(5), Shape(9, width=3, depth=4)):
        made = list[HeadDrafter]()

        def make(request: Any, shape: Shape = shape, made: Any = made) -> HeadDrafter:
            made.append(HeadDrafter(head, request, Fixed(shape)))
            return made[-1]

        drafted = native.generate(prompts, max_tokens=24, progress=False, speculate=make, **options)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        same = [[step.logprob for step in text.steps] for text in plain]
        assert [[step.logprob for step in text.steps] for text in drafted] == same, "to the bit"
        if "mirostat_tau" not in options:
            assert any(step.draft for text in drafted for step in text.steps)


def test_an_oracle_head_is_followed(native: Any, own: Path, monkeypatch: pytest.MonkeyPatch):
    """A head that knows the text: drafts begin at the right place, with the right past."""
    plain = native.generate(PROMPT, max_tokens=30, temperature=0.8, seed=8)
    whole, head = [*PROMPT, *plain.tokens], load_head(own, native)
    place = {int(token): number for number, token in enumerate(head.ids)}
    context = type(head.context())
    read = list[int]()

    def expand(self: Any, nodes: list[Node], tokens: list[int]) -> Any:
        read.append(len(self))
        logits = np.zeros((len(nodes), len(head.ids)), np.float32)
        for row, node in enumerate(nodes):
            at = len(tokens) + node.depth
            if at < len(whole) and whole[at] in place:
                logits[row, place[whole[at]]] = 9
        return logits

    monkeypatch.setattr(context, "expand", expand)
    steps = native.engine.steps
    drafted = native.generate(
        PROMPT, max_tokens=30, temperature=0.8, seed=8,
        speculate=lambda request: HeadDrafter(head, request, Fixed(Shape(9, width=3, depth=4))),
    )  # fmt: skip
    assert drafted.tokens == plain.tokens
    assert native.engine.steps - steps < 20
    assert read == sorted(read) and read[0] >= 1


def test_what_is_read_does_not_depend_on_rounds(native: Any, own: Path):
    """What the head has read in the end is what one run over the whole text would show it."""
    head = load_head(own, native)
    made = list[HeadDrafter]()

    def make(request: Any) -> HeadDrafter:
        made.append(HeadDrafter(head, request, Fixed(Shape(7, width=3, depth=3))))
        return made[-1]

    text = native.generate([11, 22, 33], max_tokens=40, temperature=0.8, seed=3, speculate=make)
    drafter, tokens = made[0], [11, 22, 33, *text.tokens]
    count = len(drafter._positions)
    assert drafter._positions == list(range(count)) and count >= 40
    expected = read_text(head, native, tokens[: count + 1])
    assert np.array_equal(drafter._context._fused[:count], expected._fused[:count])


def test_a_text_that_begins_like_another_is_known_already(native: Any, own: Path):
    head, texts, made = load_head(own, native), deque[HeadDrafter](maxlen=4), list[HeadDrafter]()

    def make(request: Any) -> HeadDrafter:
        made.append(HeadDrafter(head, request, Fixed(Shape(3)), texts))
        return made[-1]

    options = {"max_tokens": 12, "temperature": 0.8, "speculate": make}
    prompt = list(range(10, 100))
    first = native.generate(prompt, seed=1, **options)
    going_on = [*prompt, *first.tokens[:5], 9, 8, 7]
    second = native.generate(going_on, seed=2, **options)
    assert second.reused > 80, "it was not computed again for the head's sake"
    drafter, tokens = made[1], [*going_on, *second.tokens]
    count = len(drafter._positions)
    assert drafter._positions == list(range(count)) and count > len(going_on)
    expected = read_text(head, native, tokens[: count + 1])
    assert np.array_equal(drafter._context._fused[:count], expected._fused[:count])
    # What was computed without the head is computed again as far as it matters most.
    native.generate(list(range(100, 190)), max_tokens=2)
    third = native.generate(list(range(100, 190)), seed=3, **options)
    assert third.reused == 90 - 64 and made[2]._positions[0] == 90 - 64


def test_on_torch_too(tiny_lm: Any, tmp_path: Path):
    save_own(tmp_path / "head", tiny_lm)
    plain = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1)
    head = load_head(tmp_path / "head", tiny_lm)
    assert isinstance(head, OwnHead)
    for shape in (Shape(3), Shape(9, width=3, depth=4)):
        made = list[HeadDrafter]()

        def make(request: Any, shape: Shape = shape, made: Any = made) -> HeadDrafter:
            made.append(HeadDrafter(head, request, Fixed(shape)))
            return made[-1]

        drafted = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1, speculate=make)
        assert drafted.tokens == plain.tokens
        count = len(made[0]._positions)
        expected = read_text(head, tiny_lm, [*PROMPT, *drafted.tokens][: count + 1])
        assert count > 20
        assert np.allclose(made[0]._context._fused, expected._fused, atol=1e-3)


def test_by_its_name(native: Any, own: Path):
    plain = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2)
    for word in (f"head:{own}", f"head:{own}:3"):
        drafted = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2, speculate=word)
        assert drafted.tokens == plain.tokens
    with pytest.raises(SettingsError, match="no drafting head is shipped"):
        native.generate(PROMPT, speculate="head")


@pytest.mark.real
def test_the_shipped_head_writes_the_same_sooner(lm: Any):
    options = {"max_tokens": 40, "temperature": 0}
    plain = lm.chat("Why do leaves change color in fall?", **options)
    steps = lm.engine.steps
    from unspool.decoding.heads.drafter import shipped_head

    head = load_head(shipped_head(lm.model), lm)
    drafted = lm.chat(
        "Why do leaves change color in fall?", **options,
        speculate=lambda request: HeadDrafter(head, request, Fixed(Shape(5))),
    )  # fmt: skip
    assert drafted.tokens == plain.tokens
    assert lm.engine.steps - steps < len(plain.tokens) / 1.3
    assert lm.chat("Name a color.", **options, speculate="head").tokens


@pytest.mark.real
@pytest.mark.parametrize(
    "form", [{"regex": "[a-z ]{20,60}"}, {"json": True}, {"guard": "ban=the|and"}], ids=str
)
def test_the_shipped_head_with_grammars_and_guards(lm: Any, form: dict[str, Any]):
    from unspool.decoding.heads.drafter import shipped_head

    options = {"max_tokens": 32, "temperature": 0.8, "seed": 3, **form}
    head = load_head(shipped_head(lm.model), lm)
    plain = lm.generate("The weather in Rome:", **options)
    drafted = lm.generate(
        "The weather in Rome:", **options,
        speculate=lambda r: HeadDrafter(head, r, Fixed(Shape(11, width=3, depth=4))),
    )  # fmt: skip
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert any(step.draft == "accepted" for step in drafted.steps)


def test_what_is_shipped_is_whole():
    folders = [folder for folder in SHIPPED.iterdir() if folder.is_dir()]
    assert folders
    for folder in folders:
        files = read_head(folder)
        assert len(files.config.fingerprint) == 64
        assert sum(file.stat().st_size for file in folder.iterdir()) < 6 << 20


# -- what is refused --------------------------------------------------------------------------


def test_a_head_of_another_model_is_refused(native: Any, tmp_path: Path):
    save_own(tmp_path / "other", native, fingerprint="0" * 64, base="a model far away")
    with pytest.raises(SettingsError, match="a model far away, and this is another"):
        native.generate([1], speculate=f"head:{tmp_path / 'other'}")
    save_own(tmp_path / "wide", native, width=96)
    with pytest.raises(SettingsError, match="another model"):
        load_head(tmp_path / "wide", native)
    save_eagle(tmp_path / "eagle", native)
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    (tmp_path / "eagle" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="use it with the model"):
        load_head(tmp_path / "eagle", native)


def test_damaged_heads(native: Any, own: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match="is not a folder"):
        native.generate([1], speculate="head:/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"no config\.json"):
        load_head(tmp_path / "empty", native)
    told = json.loads((own / "config.json").read_text())
    for change, said in (
        ({"format": "pigeon"}, "no kind of drafting head"),
        ({"layers": [1, -2]}, "number that no head can have"),
        ({"ff_width": 65}, "feed.gate_up is not"),
    ):
        folder = tmp_path / said[:4]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**told, **change}))
        (folder / "head.safetensors").write_bytes((own / "head.safetensors").read_bytes())
        with pytest.raises(UnspoolError, match=said):
            load_head(folder, native)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_text(json.dumps(told))
    (cut / "head.safetensors").write_bytes((own / "head.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelFileError, match=r"truncated|header"):
        load_head(cut, native)
    del told["layers"]
    (cut / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelFileError, match="does not say 'layers'"):
        load_head(cut, native)


# -- the shape of drafts ----------------------------------------------------------------------


def test_growing():
    class Table:
        def expand(self, nodes: list[Node], tokens: Any) -> Any:
            rows = {0: [0.0, 3.0, 2.0, -9.0], 1: [1.0, 0.5, -9.0, -9.0], 2: [0.0, 0.0, 5.0, -9.0]}
            return np.array([rows[min(node.depth, 2)] for node in nodes], np.float32)

    ids = np.array([10, 11, 12, 13])
    context: Any = Table()
    assert grow(context, [1], ids, Shape(3), 1.0) == [11, 10, 12]
    # The chances are .71, .62 (together .44), .99: a chain ends before it is too unlikely.
    cut = [grow(context, [1], ids, Shape(3, sure=sure), 1.0) for sure in (0.75, 0.5, 0.2)]
    assert cut == [[], [11], [11, 10, 12]]
    tree = grow(context, [1], ids, Shape(6, width=2, depth=3), 1.0)
    assert isinstance(tree, DraftTree)
    assert len(tree.tokens) == 6 and tree.tokens[0] == 11 and tree.parents[0] == -1
    assert all(parent < number for number, parent in enumerate(tree.parents))
    assert Shape(15, width=4, depth=6).within(2).levels == 2 and Shape(7).within(2) == Shape(2)
    parent = Node(4, Node(3), 1)
    assert last_tokens(parent, [1, 2, 3], 4) == [4, 3, 2, 1]
    assert last_tokens(Node(9), [9], 4) == [9, 9, 9, 9]
    assert arrays.joined([np.ones(1), np.ones(2)], 0).shape == (3,)


# What a round of each rung checks and brings, on average: as measured once, by the head of the
# default model.
CHECKED = (0.7, 1.1, 1.7, 2.4, 3.8, 15, 31)
BROUGHT = (1.45, 1.65, 1.85, 2.1, 2.4, 3.37, 3.69)


def run_ladder(cost: Any, rounds: int, brought: Any = BROUGHT) -> tuple[float, Ladder, list[str]]:
    """Tokens a second against those without drafts; costs by how many guesses are checked."""
    ladder, tokens, seconds, notes, owed = Ladder(Costs()), 0, 0.0, list[str](), 0.0
    for number in range(rounds):
        shape = ladder.choose()
        rung = SHAPES.index(shape) if shape else None
        usual = CHECKED[rung] if rung is not None else 0
        checked = usual * (0.5 + number % 3 / 2)  # rounds differ
        took, owed = cost(checked), owed + (brought[rung] if rung is not None else 1)
        won = max(1, int(owed))  # whole tokens, as many as it should be in the end
        owed -= won
        note = ladder.learn(won - 1, took)
        notes += [note] if note else []
        tokens, seconds = tokens + won, seconds + took
    return tokens / seconds * cost(0), ladder, notes


def test_the_ladder_climbs_where_it_pays_and_leaves_where_it_does_not():
    # Rows are nearly free: the largest tree is best.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.01 * n, 400)
    assert SHAPES[ladder.rung].nodes >= 15 and speed > 2
    # Each row costs a third of a run: chains of guesses that are rather sure.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.33 * n, 400)
    assert SHAPES[ladder.rung].sure >= 0.4 and speed > 1.1
    # Each row costs as much as a run: off, and soon.
    speed, ladder, notes = run_ladder(lambda n: 1 + 1.0 * n, 2000, brought=[1] * len(SHAPES))
    assert speed > 0.98 and ladder.resting and "drafting stopped" in notes[0]
    assert not ladder.reading or ladder.resting <= 16
    # One round that was held up does not tip the scales.
    costs = Costs()
    for seconds in (1.0, 1.0, 1.0, 60.0):
        costs.add(0, 2, seconds)
    assert costs.seconds(0) == pytest.approx(1.0)
    # Where the smallest drafts take as long as three tokens, three of them are enough to know.
    _, ladder, notes = run_ladder(lambda n: 1.0 if n == 0 else 3.0, 8 + 3)
    assert ladder.resting and len(notes) == 1
    # Where a token takes less than a draft, none is made, in this text nor in the next.
    speed, ladder, notes = run_ladder(lambda n: 4e-4 * (1 + 0.01 * n), 600)
    assert speed == pytest.approx(1) and "drafting rests" in notes[0]
    assert all(Ladder(ladder.costs).choose() is None for _ in range(3))
    # At most so many: chains are cut, larger trees left out.
    assert Ladder(Costs(), most=3).top == 4 and Ladder(Costs(), most=15).top == 5
    # A new text begins where the last one came to.
    assert Ladder(ladder.costs).resting == ladder.resting
