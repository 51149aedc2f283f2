"""Drafting heads: kernels and plain arithmetic agree, texts stay the same, others are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from heads_support import IDS, save_eagle, save_own

import unspool
from unspool.decoding.heads import arrays
from unspool.decoding.heads.drafter import HeadDrafter, load_head
from unspool.decoding.heads.files import SHIPPED, read_head
from unspool.decoding.heads.growing import Node, Shape, grow, last_tokens
from unspool.decoding.heads.ladder import SHAPES, Costs, Fixed, Ladder
from unspool.decoding.heads.native import NativeHead
from unspool.decoding.heads.own import OwnHead
from unspool.engine.request import DraftTree
from unspool.errors import ModelFileError, SettingsError, UnspoolError

PROMPT = [7, 41, 99, 3, 150, 12, 200, 64, 31, 5, 18, 77, 240, 9, 11, 120, 33, 8, 54]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("native")
    tiny.save("llama", folder)
    lm = unspool.load(folder, backend="native", memory=8 << 20)
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def own(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    save_own(folder, native)
    return folder


@pytest.fixture(scope="module")
def eagle(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    save_eagle(folder, native)
    return folder


def vectors_of(lm: Any, tokens: list[int], layers: tuple[int, ...]) -> Any:
    """The model's inner vectors [layers, tokens, width]."""
    engine = lm.engine
    branch = engine.open(tokens)
    at = frozenset(range(len(tokens)))
    seen = engine.look(branch, at=at, wanted=1, deep=False).inside
    branch.release()
    return np.concatenate([part.residuals for part in seen], 1)[list(layers)]


def read_text(head: Any, lm: Any, tokens: list[int]) -> Any:
    context = head.context()
    count = len(tokens) - 1
    vectors = vectors_of(lm, tokens[:-1], head.layers)
    context.read(np.arange(count), vectors, tokens[1:])
    return context


def a_tree(tokens: list[int]) -> list[list[Node]]:
    root = Node(tokens[-1])
    first = [Node(int(IDS[5]), root, 1), Node(int(IDS[90]), root, 1)]
    return [[root], first, [Node(int(IDS[7]), first[1], 2), Node(int(IDS[8]), first[0], 2)]]


# -- the arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["F32", "Q8_0", "Q4_1"])
def test_the_kernels_compute_what_the_specification_says(native: Any, tmp_path: Path, weights: str):
    save_own(tmp_path, native, weights=weights, heads=6, kv_heads=3, head_width=8)
    files = read_head(tmp_path)
    quick, plain = NativeHead(files, native.model, native.context), OwnHead(files, native.model)
    tokens = (PROMPT * 5)[:83]
    contexts = [read_text(head, native, tokens) for head in (quick, plain)]
    for level in a_tree(tokens):
        one, other = (context.expand(level, tokens).copy() for context in contexts[:1] * 2)
        assert np.array_equal(one, other), "the same twice"
        expected = contexts[1].expand(level, tokens)
        # Blocks are multiplied with rows rounded to 8 bits; the head's own rows are in 8 bits.
        assert np.abs(one - expected).max() < 0.06 * np.abs(expected).max()
        assert np.corrcoef(one.ravel(), expected.ravel())[0, 1] > 0.998
        contexts[0].expand(level, tokens)  # whose states the next level goes on with
    for context in contexts:
        context.cut(40)
        assert len(context) == 40
    again = read_text(plain, native, tokens[:41])
    root = a_tree(tokens[:41])[0]
    cut = contexts[1].expand(root, tokens[:41])
    assert np.allclose(again.expand(root, tokens[:41]), cut, atol=1e-5)
    assert np.corrcoef(contexts[0].expand(root, tokens[:41]).ravel(), cut.ravel())[0, 1] > 0.998


def test_numpy_and_torch_alike(native: Any, own: Path, eagle: Path):
    tokens = PROMPT
    for load in (
        lambda device: OwnHead(read_head(own), native.model, device),
        lambda device: _eagle(eagle, native, device),
    ):
        found = []
        for device in (None, "cpu"):
            head = load(device)
            context = read_text(head, native, tokens)
            found.append([context.expand(level, tokens) for level in a_tree(tokens)])
        for one, other in zip(*found, strict=True):
            assert np.allclose(one, other, atol=1e-4)


def _eagle(folder: Path, lm: Any, device: str | None) -> Any:
    from unspool.decoding.heads.eagle import EagleHead

    return EagleHead(folder, json.loads((folder / "config.json").read_text()), lm.model, device)


@pytest.mark.parametrize(("kind", "before"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_eagle_3_as_published(native: Any, tmp_path: Path, kind: str, before: bool):
    """Against the formula, written down once more with torch for a whole sequence at a time."""
    weights = save_eagle(tmp_path, native, kind=kind, before=before)
    head, tokens = _eagle(tmp_path, native, None), PROMPT
    assert head.ids.tolist() == IDS.tolist()
    vectors = vectors_of(native, tokens[:-1], head.layers)
    context = head.context()
    context.read(np.arange(len(tokens) - 1), vectors, tokens[1:])
    chain, drafted = list[int](), list[Any]()
    node = Node(tokens[-1])
    for depth in range(1, 5):
        drafted.append(context.expand([node], tokens)[0])
        chain.append(int(head.ids[drafted[-1].argmax()]))
        node = Node(chain[-1], node, depth)
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
    ids, found = list(words), []
    for step in range(len(chain) + 1):
        length = len(ids)
        e = norm(w["embed_tokens.weight"][ids], at + "input_layernorm.weight")
        h = norm(hidden, at + "hidden_norm.weight")
        both, residual = torch.cat([e, h], -1), h if before else hidden
        angle = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        parts = {}
        for part, heads in (("q", 6), ("k", 2), ("v", 2)):
            x = (both @ w[f"{at}self_attn.{part}_proj.weight"].T).view(length, heads, 8)
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
        found.append((norm(out[-1], "norm.weight") @ w["lm_head.weight"].T).numpy())
        if step < len(chain):  # the last output stands for what is known before the drafted token
            ids.append(chain[step])
            hidden = torch.cat([hidden, out[-1:]])
    return np.stack(found)


# -- the same text ----------------------------------------------------------------------------

WAYS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 6, "top": 3},
    {"temperature": 0.8, "seed": 7, "mirostat_tau": 4.0},
]


@pytest.mark.parametrize("which", ["own", "eagle"])
@pytest.mark.parametrize("options", WAYS, ids=str)
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


def test_on_torch_too(tiny_lm: Any, tmp_path: Path):
    save_own(tmp_path / "head", tiny_lm)
    plain = tiny_lm.generate(PROMPT, max_tokens=20, temperature=0.8, seed=1)
    head = load_head(tmp_path / "head", tiny_lm)
    assert isinstance(head, OwnHead)
    for shape in (Shape(3), Shape(9, width=3, depth=4)):
        drafted = tiny_lm.generate(
            PROMPT, max_tokens=20, temperature=0.8, seed=1,
            speculate=lambda r, shape=shape: HeadDrafter(head, r, Fixed(shape)),
        )  # fmt: skip
        assert drafted.tokens == plain.tokens


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
    with pytest.raises(ModelFileError, match=r"cut short|header"):
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
    tree = grow(context, [1], ids, Shape(6, width=2, depth=3), 1.0)
    assert isinstance(tree, DraftTree)
    assert len(tree.tokens) == 6 and tree.tokens[0] == 11 and tree.parents[0] == -1
    assert all(parent < number for number, parent in enumerate(tree.parents))
    assert Shape(15, width=4, depth=6).within(2).levels == 2 and Shape(7).within(2) == Shape(2)
    parent = Node(4, Node(3), 1)
    assert last_tokens(parent, [1, 2, 3], 4) == [4, 3, 2, 1]
    assert last_tokens(Node(9), [9], 4) == [9, 9, 9, 9]
    assert arrays.joined([np.ones(1), np.ones(2)], 0).shape == (3,)


def run_ladder(cost: Any, gain: Any, rounds: int) -> tuple[float, Ladder, list[str]]:
    """Tokens a second against those without drafts; costs and gains by the number of nodes."""
    ladder, tokens, seconds, notes, owed = Ladder(Costs()), 0, 0.0, list[str](), 0.0
    for _ in range(rounds):
        shape = ladder.choose()
        nodes = shape.nodes if shape else 0
        took, owed = cost(nodes), owed + (gain(nodes) if nodes else 1)
        won = max(1, int(owed))  # whole tokens, as many as it should be in the end
        owed -= won
        note = ladder.learn(won - 1, took)
        notes += [note] if note else []
        tokens, seconds = tokens + won, seconds + took
    return tokens / seconds * cost(0), ladder, notes


def test_the_ladder_climbs_where_it_pays_and_leaves_where_it_does_not():
    gains = {1: 1.68, 2: 2.1, 3: 2.37, 5: 2.63, 7: 2.78, 15: 3.37, 31: 3.69}  # as measured once
    # Rows are nearly free: the largest tree is best.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.01 * n, lambda n: gains[n], 300)
    assert SHAPES[ladder.rung].nodes >= 15 and speed > 2
    # Each row costs a third of a run: short chains.
    speed, ladder, _ = run_ladder(lambda n: 1 + 0.33 * n, lambda n: gains[n], 300)
    assert SHAPES[ladder.rung].nodes in (1, 2) and speed > 1.0
    # Each row costs as much as a run: off, and soon.
    speed, ladder, notes = run_ladder(lambda n: 1 + 1.0 * n, lambda n: 1, 2000)
    assert speed > 0.98 and ladder.resting and "drafting stopped" in notes[0]
    assert not ladder.reading or ladder.resting <= 16
    # A new text begins where the last one came to.
    assert Ladder(ladder.costs).resting == ladder.resting
