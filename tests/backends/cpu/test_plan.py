"""Plans: the operations of each kind of model, in their order, and as people see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from paged_texts import config

from unspool.backends.cpu import structures
from unspool.backends.cpu.plan import Plan
from unspool.backends.cpu.plan_builder import build_plan
from unspool.cli.main import _exit_code
from unspool.errors import ModelFileError
from unspool.model.weights import shapes

LLAMA = """\
buffers: x 32 (tokens), qkv 128 (tokens), mixed 64 (tokens), hidden 96 (tokens), \
last 32 (wanted), logits 67 (wanted)
   0  embed     x         = embed *
   1  snapshot  x
   2  linear    qkv       = layers.0.attention.q, layers.0.attention.k, layers.0.attention.v * \
normed x
   3  place     qkv -> pages of layer 0
   4  attend    mixed     = qkv
   5  linear    x        += layers.0.attention.out * mixed
   6  snapshot  x
   7  linear    hidden    = layers.0.feed.gate, layers.0.feed.up * normed x
   8  linear    x        += layers.0.feed.down * activated hidden
   9  snapshot  x
  10  gather    last      = x
  11  linear    logits    = head * normed last"""


def steps(plan: Plan) -> list[str]:
    """What each operation of a one-layer model does, in short."""
    return [
        f"{o.kind} {o.source}>{o.target}{'+' * o.add}"
        for o in plan.operations
        if o.kind != "snapshot"
    ]


def test_a_llama_in_words():
    assert str(build_plan(config(layers=1))) == LLAMA


def test_windows_and_caps_are_said():
    shape = config(layers=2, windows=(0, 1200), attention_softcap=50.0, logit_softcap=30.0)
    text = str(build_plan(shape))
    assert "mixed     = qkv (capped at 50)" in text
    assert "mixed     = qkv (last 1,200) (capped at 50)" in text
    assert text.splitlines()[-1].split(None, 1)[1] == "softcap   logits    = (capped at 30)"


def test_parallel_layers_read_the_same_input():
    """Both halves are read before either is added."""
    found = steps(build_plan(config(layers=1, parallel=True)))
    first_add = next(n for n, step in enumerate(found) if step.endswith(">x+"))
    assert found.index("linear x>qkv") < first_add and found.index("linear x>hidden") < first_add
    assert found[first_add:][:2] == ["linear mixed>x+", "linear hidden>x+"]


def test_norms_behind():
    found = steps(build_plan(config(layers=1, norm_before=False, norm_after=True)))
    assert found[1:9] == [
        "linear x>qkv", "place qkv>", "attend qkv>mixed", "linear mixed>out", "norm out>x+",
        "linear x>hidden", "linear hidden>out", "norm out>x+",
    ]  # fmt: skip
    plan = build_plan(config(layers=1, norm_before=False, norm_after=True))
    normed = [o.target for o in plan.operations if o.prepare == "normed"]
    assert normed == ["logits"], "nothing else is normed on its way in"


def test_norms_of_queries_and_keys():
    whole = build_plan(config(layers=1, qk_norm="whole"))
    assert steps(whole)[1:5] == ["linear x>qkv", "norm qkv>qkv", "norm qkv>qkv", "place qkv>"]
    norms = [o for o in whole.operations if o.kind == "norm"]
    assert [(o.offset, o.width) for o in norms] == [(0, 64), (64, 32)]
    by_head = build_plan(config(layers=1, qk_norm="head"))
    assert "norm qkv>qkv" not in steps(by_head)
    (place,) = [o for o in by_head.operations if o.kind == "place"]
    assert place.vector.endswith("q_norm.weight") and place.second_vector.endswith("k_norm.weight")


def test_experts():
    shape = config(layers=2, experts=3, experts_per_token=2, expert_width=40, dense_layers=(1,))
    plan = build_plan(shape)
    assert steps(plan)[5:10] == [
        "linear x>router", "route router>", "experts x>picked", "experts picked>answers",
        "combine answers>x+",
    ]  # fmt: skip
    first = next(o for o in plan.operations if o.kind == "experts")
    assert first.matrices[:3] == tuple(
        f"layers.0.feed.{side}.weight[{e}]" for e, side in [(0, "gate"), (0, "up"), (1, "gate")]
    )
    assert "layers.1.feed.gate.weight" in {m for o in plan.operations for m in o.matrices}


@pytest.mark.parametrize("name", ["norm_after", "parallel", "experts", "biases"])
def test_every_weight_is_used_and_nothing_else(name: str):
    changes: dict[str, Any] = {
        "norm_after": {"norm_after": True, "norm": "layer", "qk_norm": "head"},
        "parallel": {"parallel": True, "tied": True, "qk_norm": "whole"},
        "experts": {"experts": 2, "experts_per_token": 1, "expert_width": 8, "dense_layers": (0,)},
        "biases": {"qkv_bias": True, "out_bias": True, "ff_bias": True, "head_bias": True},
    }
    shape = config(**changes[name])
    plan = build_plan(shape)
    used = {m.split("[")[0] for o in plan.operations for m in o.matrices} | set(plan.vectors)
    assert used == set(shapes(shape))


def test_heads_that_the_kernels_have_no_room_for():
    assert build_plan(config(heads=64, kv_heads=1))
    with pytest.raises(ModelFileError, match=r"65 heads share one key head.*backend='torch'"):
        build_plan(config(heads=65, kv_heads=1))
    assert build_plan(config(head_width=2048))
    with pytest.raises(ModelFileError, match=r"a head is 2,050 wide.*backend='torch'"):
        build_plan(config(head_width=2050))


def test_structures_are_those_of_the_headers():
    """Field by field and in the same order, so that what Python fills is what C++ reads."""
    native = Path(structures.__file__).parent / "native"
    text = "".join((native / name).read_text(encoding="utf-8") for name in ("plan.h", "api.h"))
    for name in ("Op", "Vector", "RotaryTable", "KeyValues", "TapList", "ModelSpec", "Batch"):
        start = text.index(f"struct {name} {{")
        lines = text[start : text.index("};", start)].splitlines()[1:]
        fields = [line for line in lines if ";" in line and "return" not in line]
        declared = [line.split(";")[0].split() for line in fields]
        ours = getattr(structures, "BatchStructure" if name == "Batch" else name)
        assert [words[-1] for words in declared] == [field[0] for field in ours._fields_], name
        sizes = [8 if "*" in words[-2] or "64" in words[-2] else 4 for words in declared]
        assert [getattr(ours, field[0]).size for field in ours._fields_] == sizes, name


def test_the_words_have_the_numbers_of_the_header():
    text = (Path(structures.__file__).parent / "native" / "plan.h").read_text(encoding="utf-8")
    for words, prefix in ((structures.KINDS, "k"), (structures.ROWS, "k")):
        for word, number in words.items():
            assert f"{prefix}{word.capitalize()} = {number}" in text
    for word, number in structures.ACTIVATIONS.items():
        assert f"k{word.title().replace('_', '')} = {number}" in text


# -- the command -----------------------------------------------------------------------------


def test_the_plan_of_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    tiny.save("gemma2", tmp_path)
    assert _exit_code(["models", "plan", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "qkv 160" in out and "layers.3.feed.down" in out and "(last 7)" in out
    assert _exit_code(["models", "plan", str(tmp_path / "nothing")]) == 2


@pytest.mark.real
def test_the_plan_of_the_default_model(default_model: Path, capfd: pytest.CaptureFixture[str]):
    assert _exit_code(["models", "plan", str(default_model)]) == 0
    out = capfd.readouterr().out
    assert "linear    qkv" in out and "layers.29.feed.down" in out
