"""Execution plans: the operations of each kind of model, in order, and the printed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny_gguf
from helpers.paged_texts import config
from unspool.backends.cpu import structures
from unspool.backends.cpu.plan import build_plan
from unspool.cli.main import _exit_code
from unspool.errors import ModelFileError
from unspool.model.weights import weight_shapes

LLAMA = """\
buffers: x 32 (tokens), qkv 128 (tokens), mixed 64 (tokens), hidden 96 (tokens), \
last 32 (selected), logits 67 (selected)
   0  embed     x         = embed *
   1  linear    qkv       = layers.0.attention.q, layers.0.attention.k, layers.0.attention.v * \
norm(x)
   2  rope      qkv -> pages of layer 0
   3  attention mixed     = qkv
   4  linear    x        += layers.0.attention.out * mixed
   5  linear    hidden    = layers.0.feed.gate, layers.0.feed.up * norm(x)
   6  linear    x        += layers.0.feed.down * activation(hidden)
   7  gather    last      = x
   8  norm      last      = last
   9  linear    logits    = head * last"""


def test_printed_plan_of_a_llama():
    assert str(build_plan(config(layers=1))) == LLAMA


def test_windows_and_caps_are_printed():
    shape = config(layers=2, windows=(0, 1200), attention_softcap=50.0, logit_softcap=30.0)
    text = str(build_plan(shape))
    assert "mixed     = qkv (capped at 50)" in text
    assert "mixed     = qkv (last 1,200) (capped at 50)" in text
    assert text.splitlines()[-1].split(None, 1)[1] == "softcap   logits    = (capped at 30)"


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_after": True, "norm": "layer", "qk_norm": "head"},
        {"parallel": True, "tied": True, "qk_norm": "whole"},
        {"experts": 2, "experts_per_token": 1, "expert_width": 8, "dense_layers": (0,)},
        {"qkv_bias": True, "out_bias": True, "ff_bias": True, "head_bias": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_weight_is_used_and_nothing_else(changes: dict[str, Any]):
    shape = config(**changes)
    plan = build_plan(shape)
    used = {m.split("[")[0] for o in plan.operations for m in o.matrices} | set(plan.vectors)
    assert used == set(weight_shapes(shape))


def test_limits_of_the_kernels():
    assert build_plan(config(heads=64, kv_heads=1))
    with pytest.raises(ModelFileError, match=r"must be <= 64 .* got 65.*backend='torch'"):
        build_plan(config(heads=65, kv_heads=1))
    assert build_plan(config(head_width=2048))
    with pytest.raises(ModelFileError, match=r"must be <= 2,048 .* got 2,050.*backend='torch'"):
        build_plan(config(head_width=2050))


def test_structures_match_the_headers():
    """Same fields in the same order as in C++."""
    native = Path(structures.__file__).parent / "native"
    text = "".join((native / name).read_text(encoding="utf-8") for name in ("plan.h", "api.h"))
    names = "Op Vector RopeTable LayerPages KvCache Taps Adapters ModelSpec Batch"
    for name in names.split():
        start = text.index(f"struct {name} {{")
        lines = text[start : text.index("};", start)].splitlines()[1:]
        fields = [line for line in lines if ";" in line.split("//")[0] and "return" not in line]
        declared = [line.split(";")[0].split() for line in fields]
        struct = getattr(structures, f"{name}Struct")
        assert [names[-1] for names in declared] == [field[0] for field in struct._fields_], name
        sizes = [8 if "*" in names[-2] or "64" in names[-2] else 4 for names in declared]
        assert [getattr(struct, field[0]).size for field in struct._fields_] == sizes, name


def test_enums_match_the_header():
    text = (Path(structures.__file__).parent / "native" / "plan.h").read_text(encoding="utf-8")
    for names, prefix in ((structures.KINDS, "k"), (structures.ROWS, "k")):
        for name, number in names.items():
            assert f"{prefix}{name.capitalize()} = {number}" in text
    for name, number in structures.ACTIVATIONS.items():
        assert f"k{name.title().replace('_', '')} = {number}" in text


# -- the command -----------------------------------------------------------------------------


def test_the_plan_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf")
    assert _exit_code(["models", "plan", str(path)]) == 0
    out = capfd.readouterr().out
    assert "qkv " in out and "layers.0.feed.down" in out
    assert _exit_code(["models", "plan", str(tmp_path / "nothing")]) == 2
