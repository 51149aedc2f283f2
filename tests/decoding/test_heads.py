"""Drafting heads: kernels and plain arithmetic agree, texts stay the same, others are refused."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.heads_support import PROMPT, read_text, save_eagle, save_own
from unspool.decoding.speculative import arrays
from unspool.decoding.speculative.controller import SHAPES, FixedShape, RoundCosts, ShapeController
from unspool.decoding.speculative.head import (
    SHIPPED,
    DraftNode,
    DraftShape,
    UnspoolHead,
    build_draft,
    last_tokens,
    read_head,
)
from unspool.decoding.speculative.head_drafter import HeadDrafter, load_head
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
        *(("unspool_head", options) for options in WAYS),
        ("eagle", WAYS[1]),
        *(pytest.param("eagle", options, marks=pytest.mark.slow) for options in WAYS[2:]),
    ],
)
def test_the_text_is_the_same(
    native: Any, unspool_head: Path, eagle: Path, options: dict[str, Any], which: str
):
    head = load_head(unspool_head if which == "unspool_head" else eagle, native)
    prompts = [PROMPT, PROMPT[:2], [5], PROMPT[3:]]
    plain = [native.generate(prompt, max_tokens=24, **options) for prompt in prompts]
    for shape in (DraftShape(1), DraftShape(5), DraftShape(9, width=3, depth=4)):
        created = list[HeadDrafter]()

        def make(request: Any, shape: DraftShape = shape, created: Any = created) -> HeadDrafter:
            created.append(HeadDrafter(head, request, FixedShape(shape)))
            return created[-1]

        drafted = native.generate(prompts, max_tokens=24, progress=False, speculate=make, **options)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        equal = [[step.logprob for step in text.steps] for text in plain]
        assert [[step.logprob for step in text.steps] for text in drafted] == equal, "to the bit"
        if "mirostat_tau" not in options:
            assert any(step.draft for text in drafted for step in text.steps)


def test_an_oracle_head_is_followed(
    native: Any, unspool_head: Path, monkeypatch: pytest.MonkeyPatch
):
    """A head that knows the text: drafts begin at the right place, with the right past."""
    plain = native.generate(PROMPT, max_tokens=30, temperature=0.8, seed=8)
    full, head = [*PROMPT, *plain.tokens], load_head(unspool_head, native)
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
        return logits

    monkeypatch.setattr(context, "expand", expand)
    steps = native.engine.steps
    drafted = native.generate(
        PROMPT, max_tokens=30, temperature=0.8, seed=8,
        speculate=lambda request: HeadDrafter(head, request, FixedShape(DraftShape(9, width=3,
        depth=4))),
    )  # fmt: skip
    assert drafted.tokens == plain.tokens
    assert native.engine.steps - steps < 20
    assert read == sorted(read) and read[0] >= 1


def test_what_is_read_does_not_depend_on_rounds(native: Any, unspool_head: Path):
    """What the head has read in the end is what one run over the whole text would show it."""
    head = load_head(unspool_head, native)
    created = list[HeadDrafter]()

    def make(request: Any) -> HeadDrafter:
        created.append(HeadDrafter(head, request, FixedShape(DraftShape(7, width=3, depth=3))))
        return created[-1]

    text = native.generate([11, 22, 33], max_tokens=40, temperature=0.8, seed=3, speculate=make)
    drafter, tokens = created[0], [11, 22, 33, *text.tokens]
    count = len(drafter._positions)
    assert drafter._positions == list(range(count)) and count >= 40
    expected = read_text(head, native, tokens[: count + 1])
    assert np.array_equal(drafter._context._fused[:count], expected._fused[:count])


def test_a_text_that_begins_like_another_is_known_already(native: Any, unspool_head: Path):
    head, texts, created = (
        load_head(unspool_head, native),
        deque[HeadDrafter](maxlen=4),
        list[HeadDrafter](),
    )

    def make(request: Any) -> HeadDrafter:
        created.append(HeadDrafter(head, request, FixedShape(DraftShape(3)), texts))
        return created[-1]

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
    assert np.array_equal(drafter._context._fused[:count], expected._fused[:count])
    # What was computed without the head is computed again as far as it matters most.
    native.generate(list(range(100, 190)), max_tokens=2)
    third = native.generate(list(range(100, 190)), seed=3, **options)
    assert third.reused == 90 - 64 and created[2]._positions[0] == 90 - 64


def test_on_torch_too(tiny_lm: Any, tmp_path: Path):
    save_own(tmp_path / "head", tiny_lm)
    plain = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1)
    head = load_head(tmp_path / "head", tiny_lm)
    assert isinstance(head, UnspoolHead)
    for shape in (DraftShape(3), DraftShape(9, width=3, depth=4)):
        created = list[HeadDrafter]()

        def make(request: Any, shape: DraftShape = shape, created: Any = created) -> HeadDrafter:
            created.append(HeadDrafter(head, request, FixedShape(shape)))
            return created[-1]

        drafted = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1, speculate=make)
        assert drafted.tokens == plain.tokens
        count = len(created[0]._positions)
        expected = read_text(head, tiny_lm, [*PROMPT, *drafted.tokens][: count + 1])
        assert count > 20
        assert np.allclose(created[0]._context._fused, expected._fused, atol=1e-3)


def test_by_its_name(native: Any, unspool_head: Path):
    plain = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2)
    for word in (f"head:{unspool_head}", f"head:{unspool_head}:3"):
        drafted = native.generate(PROMPT, max_tokens=60, temperature=0.8, seed=2, speculate=word)
        assert drafted.tokens == plain.tokens
    with pytest.raises(SettingsError, match="no drafting head is shipped"):
        native.generate(PROMPT, speculate="head")


@pytest.mark.real
def test_the_shipped_head_writes_the_same_sooner(lm: Any):
    options = {"max_tokens": 40, "temperature": 0}
    plain = lm.chat("Why do leaves change color in fall?", **options)
    steps = lm.engine.steps
    from unspool.decoding.speculative.head_drafter import shipped_head

    head = load_head(shipped_head(lm.model), lm)
    drafted = lm.chat(
        "Why do leaves change color in fall?", **options,
        speculate=lambda request: HeadDrafter(head, request, FixedShape(DraftShape(5))),
    )  # fmt: skip
    assert drafted.tokens == plain.tokens
    assert lm.engine.steps - steps < len(plain.tokens) / 1.3
    assert lm.chat("Name a color.", **options, speculate="head").tokens


@pytest.mark.real
@pytest.mark.parametrize(
    "form", [{"regex": "[a-z ]{20,60}"}, {"json": True}, {"guard": "ban=the|and"}], ids=str
)
def test_the_shipped_head_with_grammars_and_guards(lm: Any, form: dict[str, Any]):
    from unspool.decoding.speculative.head_drafter import shipped_head

    options = {"max_tokens": 32, "temperature": 0.8, "seed": 3, **form}
    head = load_head(shipped_head(lm.model), lm)
    plain = lm.generate("The weather in Rome:", **options)
    drafted = lm.generate(
        "The weather in Rome:", **options,
        speculate=lambda r: HeadDrafter(head, r, FixedShape(DraftShape(11, width=3, depth=4))),
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


def test_damaged_heads(native: Any, unspool_head: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match="is not a folder"):
        native.generate([1], speculate="head:/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"no config\.json"):
        load_head(tmp_path / "empty", native)
    reported = json.loads((unspool_head / "config.json").read_text())
    for change, output in (
        ({"format": "pigeon"}, "unknown format"),
        ({"layers": [1, -2]}, "number out of range"),
        ({"ff_width": 65}, "feed.gate_up must have"),
    ):
        folder = tmp_path / output[:4]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**reported, **change}))
        (folder / "head.safetensors").write_bytes((unspool_head / "head.safetensors").read_bytes())
        with pytest.raises(UnspoolError, match=output):
            load_head(folder, native)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_text(json.dumps(reported))
    (cut / "head.safetensors").write_bytes((unspool_head / "head.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelFileError, match=r"truncated|header"):
        load_head(cut, native)
    del reported["layers"]
    (cut / "config.json").write_text(json.dumps(reported))
    with pytest.raises(ModelFileError, match="has no 'layers'"):
        load_head(cut, native)


# -- the shape of drafts ----------------------------------------------------------------------


def test_growing():
    class Table:
        def expand(self, nodes: list[DraftNode], tokens: Any) -> Any:
            rows = {0: [0.0, 3.0, 2.0, -9.0], 1: [1.0, 0.5, -9.0, -9.0], 2: [0.0, 0.0, 5.0, -9.0]}
            return np.array([rows[min(node.depth, 2)] for node in nodes], np.float32)

    ids = np.array([10, 11, 12, 13])
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
    parent = DraftNode(4, DraftNode(3), 1)
    assert last_tokens(parent, [1, 2, 3], 4) == [4, 3, 2, 1]
    assert last_tokens(DraftNode(9), [9], 4) == [9, 9, 9, 9]
    assert arrays.concat([np.ones(1), np.ones(2)], 0).shape == (3,)


# What a round of each rung checks and brings, on average: as measured once, by the head of the
# default model.
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
