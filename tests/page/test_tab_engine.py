"""The engine of the browser tab, run by node: its numbers and texts are the native library's."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import unspool
from helpers.paged_texts import random_blocks
from unspool.sampling import SamplingSettings
from unspool.sampling.chain import Chain, Pick
from unspool.sampling.rows import RowInput
from unspool.text.tokenizer.gguf import TokenType
from unspool.text.tokenizer.pieces import byte_characters

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "tab_engine.mjs"
VARIANTS = ("simd128", "relaxed")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def run_tab(
    model: Path, *requests: dict[str, Any], variant: str = "simd128", threads: str = "1"
) -> list[Any]:
    # Node 20 has relaxed SIMD only as an experiment: its quick compiler makes wrong code of it.
    options = ["--no-warnings", "--experimental-wasm-relaxed-simd", "--no-liftoff"]
    options = options if variant == "relaxed" else options[:1]
    done = subprocess.run(
        [str(NODE), *options, str(SCRIPT), str(model), variant, threads],
        input=json.dumps(requests), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[Any] = json.loads(done.stdout)
    return results


def floats(encoded: str) -> Any:
    return np.frombuffer(base64.b64decode(encoded), np.float32)


def logits_after(lm: Any, ids: list[int]) -> Any:
    with lm.open_branch(ids) as branch:
        return np.array(lm.engine.extend(branch))[0]


def test_the_wasm_files_are_built_from_these_sources():
    sys.path.insert(0, str(ROOT / "tools"))
    import build_wasm

    sys.path.pop(0)
    assert build_wasm.HASH.read_text().strip() == build_wasm.sources_hash(), (
        "the C++ sources have changed: run tools/build_wasm.py (pip install ziglang==0.17.0)"
    )
    assert sum((build_wasm.TARGET / name).stat().st_size for name in build_wasm.VARIANTS) < 900_000


@needs_node
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_default_model_are_those_of_the_native_library(
    default_model: Path, real_lm: Any, variant: str
):
    ids = real_lm.tokenizer.encode("The quick brown fox jumps over the lazy dog, 1234 times. " * 3)
    requests = [{"action": "logits", "ids": part} for part in (ids, ids[:1], ids[:18])]
    for request, result in zip(
        requests, run_tab(default_model, *requests, variant=variant), strict=True
    ):
        assert np.array_equal(floats(result), logits_after(real_lm, request["ids"]))


def random_texts(count: int) -> list[str]:
    """Texts of characters that split differently: scripts, blanks, digits, marks, emoji."""
    rng = random.Random(1)
    words = [
        "don't", "I'LL", "we've", "'s", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u0085",
        "\ufeff", "12", "3456", "\u0663", "\u00bd", "Hello", " world", "\u00e9", "e\u0301",
        "\u043c\u0438\u0440", "\u4f60\u597d", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\U0001f44d",
        "\U0001f468\u200d\U0001f469", "--", "...", "<|im_end|>", "<|im_start|>user", "_x_", "#!",
        "\x00", "\x1b", "\u017f", "'\u017f", "/*", "{}", "a" * 40, "supercalifragilistic",
    ]  # fmt: skip
    return ["".join(rng.choices(words, k=rng.randrange(1, 12))) for _ in range(count)]


@needs_node
def test_tokens_are_those_of_the_tokenizer(small_default: Path, small_lm: Any):
    tokenizer, texts = small_lm.tokenizer, random_texts(300)
    every_id = list(range(0, tokenizer.vocab_size, 37))
    plain, special, decoded, readable = run_tab(
        small_default,
        {"action": "encode", "texts": texts},
        {"action": "encode", "texts": texts, "special": True},
        {"action": "decode", "ids": every_id},
        {"action": "texts", "ids": every_id},
    )
    assert plain == [tokenizer.encode(text) for text in texts]
    assert special == [tokenizer.encode(text, specials=True) for text in texts]
    assert decoded == tokenizer.decode(every_id)
    assert readable == [tokenizer.token_text(token) for token in every_id]


@needs_node
def test_chat_prompts_are_those_of_the_template(small_default: Path, small_lm: Any):
    chats = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  a\n\nb "}],
        [
            {"role": "user", "content": "Say <|im_end|> please"},
            {"role": "assistant", "content": "<|im_start|>"},
            {"role": "user", "content": ""},
        ],
    ]
    results = run_tab(small_default, *({"action": "chat", "messages": chat} for chat in chats))
    for chat, result in zip(chats, results, strict=True):
        prompt = small_lm.chat_template.encode(chat)
        assert result == {"ids": list(prompt.ids), "text": prompt.text}


@needs_node
@pytest.mark.parametrize("threads", ["2", "3", "failing"])
def test_numbers_do_not_depend_on_the_number_of_threads(
    small_default: Path, small_lm: Any, threads: str
):
    """Prompts and single tokens; with a thread that does not start, one thread computes."""
    text = list(range(500, 660))
    requests: list[dict[str, Any]] = [
        {"action": "logits", "ids": ids} for ids in (text, text[:1], text[:18])
    ]
    writing = {"action": "write", "texts": [text[:9]], "settings": {"seed": "1"}, "count": 20}
    info, *results, written = run_tab(
        small_default, {"action": "info"}, *requests, writing, threads=threads
    )
    assert info["threads"] == (1 if threads == "failing" else int(threads))
    for request, result in zip(requests, results, strict=True):
        assert np.array_equal(floats(result), logits_after(small_lm, request["ids"]))
    assert written == run_tab(small_default, writing)[0]


@needs_node
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_texts(small_default: Path, small_lm: Any, variant: str):
    num_texts = 17 if variant == "relaxed" else 4  # floats are slow without a multiply-add
    texts = [small_lm.tokenizer.encode(f"Text number {number}:") for number in range(num_texts)]
    every_settings = [
        {"seed": 7},
        {"seed": -1, "temperature": 1.3, "top_k": 0, "repetition_penalty": 1.2, "min_p": 0.0},
        {"seed": 2**63, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
         "frequency_penalty": 0.4, "presence_penalty": -0.2, "penalty_window": 9},
    ]  # fmt: skip
    requests = [
        {"action": "write", "texts": texts, "settings": {**settings, "seed": str(settings["seed"])},
         "count": 12}
        for settings in every_settings
    ]  # fmt: skip
    results = run_tab(small_default, *requests, variant=variant)
    for settings, written in zip(every_settings, results, strict=True):
        for sample, (ids, tokens) in enumerate(zip(texts, written, strict=True)):
            generation = small_lm.generate(ids, max_tokens=12, sample=sample, **settings)
            assert tokens == [step.token for step in generation.steps]


@needs_node
def test_branches_share_pages_and_give_the_logits_of_fresh_ones(small_default: Path, small_lm: Any):
    ids, first, second = list(range(100, 140)), [7000, 7001, 7002], list(range(8000, 8020))
    lengths = (40, 33, 32, 17)
    tree = {"action": "tree", "ids": ids, "first": first, "second": second}
    results = run_tab(small_default, *({**tree, "length": length} for length in lengths))
    for length, result in zip(lengths, results, strict=True):
        early, late, again, back = map(floats, result["logits"])
        assert np.array_equal(early, logits_after(small_lm, ids[:length] + first))
        assert np.array_equal(late, logits_after(small_lm, ids[: length - 1] + second))
        assert np.array_equal(again, early)
        assert np.array_equal(back, logits_after(small_lm, ids[:length] + second))
        assert result["memory"]["free_pages"] == result["memory"]["pages"]


@needs_node
def test_steps_report_what_the_stages_of_the_chain_did(small_default: Path, small_lm: Any):
    every_settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"top_k": 0, "top_p": 0.5, "min_p": 0.1, "temperature": 1.5, "frequency_penalty": 0.5},
        {"top_k": 3, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "presence_penalty": 1.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    ]
    ids = [5000, 5001, 5002, 5001]
    row, logits = RowInput(np.array(ids), position=len(ids)), logits_after(small_lm, ids)
    request = {"action": "step", "ids": ids, "promptLength": 2}
    steps = run_tab(
        small_default,
        *({**request, "settings": {**settings, "seed": 3}} for settings in every_settings),
    )
    for settings, step in zip(every_settings, steps, strict=True):
        chain = Chain(SamplingSettings(seed=3, **settings))
        check_step(step, chain.pick_one(logits, row, top=5, explain=True))


def check_step(step: dict[str, Any], pick: Pick) -> None:
    assert step["token"] == pick.token and step["rank"] == pick.rank
    values = [step["logprob"], step["entropy"], step["probability"]]
    assert values == pytest.approx([pick.logprob, pick.entropy, pick.probability], abs=1e-6)
    if pick.draw is None:
        assert step["draw"] is None
    else:
        assert step["draw"]["u"] == pick.draw.u
        bounds = [step["draw"]["low"], step["draw"]["high"]]
        assert bounds == pytest.approx([pick.draw.low, pick.draw.high], abs=1e-6)
    assert [c["token"] for c in step["candidates"]] == [c.token for c in pick.candidates]
    chances = [c["probability"] for c in step["candidates"]]
    assert chances == pytest.approx([c.probability for c in pick.candidates], abs=1e-6)
    counts = [[s["name"], s["kept"], s["removed"], s["changed"]] for s in step["stages"]]
    assert counts == [[s.name, s.kept, s.removed, s.changed] for s in pick.stages]
    for stage, expected in zip(step["stages"], pick.stages, strict=True):
        assert stage["kept_mass"] == pytest.approx(expected.kept_mass, abs=1e-6)
        assert [token for token, *_ in stage["top"]] == [token for token, _ in expected.top]


@needs_node
def test_looks_inside_are_those_of_the_native_library(small_default: Path, small_lm: Any):
    ids, index = list(range(300, 340)), 21
    (look,) = run_tab(small_default, {"action": "look", "ids": ids, "index": index})
    with small_lm.open_branch(ids[:1]) as branch:
        computed = small_lm.engine.look(branch, ids[1:], at=frozenset({index}))
    (inside,) = computed.inside
    assert np.array_equal(floats(look["hidden"]), inside.residuals.reshape(-1))
    assert np.array_equal(floats(look["attention"]), inside.attention[0].reshape(-1))
    for layer, candidates in enumerate(look["lens"]):
        logits = small_lm.model.logits(inside.residuals[layer])[0]
        best = np.argsort(-logits, kind="stable")[:3]
        assert [candidate["token"] for candidate in candidates] == best.tolist()


def write_model(path: Path, family: str) -> None:
    """A random model of two layers whose matrices have all the types that the tab reads."""
    width, inner, heads, kv_heads, vocab_size = 256, 512, 4, 2, 320
    types = [
        "Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
        "F16", "BF16", "Q4_1",
    ]  # fmt: skip
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width // heads)
    writer.add_value_length(width // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*byte_characters(), *(f"<{n}>" for n in range(256, vocab_size))])
    writer.add_token_types([TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["a b"])

    def add(name: str, kind: str, rows: int, columns: int) -> None:
        data = random_blocks(kind, rows, columns, rng).data
        if kind == "BF16":
            data = data.view(np.uint8)
        is_float = kind in ("F16", "F32")
        raw = None if is_float else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", data, raw_dtype=raw)

    def add_vector(name: str, size: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + 0.1 * rng.standard_normal(size)).astype(np.float32))

    add("token_embd", "Q8_0", vocab_size, width)
    add("output", "Q6_K", vocab_size, width)
    add_vector("output_norm.weight", width, 1.0)
    key_width = width // heads * kv_heads
    for block in ("blk.0", "blk.1"):
        sizes = {
            "attn_q": (width, width), "attn_k": (key_width, width), "attn_v": (key_width, width),
            "attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }  # fmt: skip
        for name, (rows, columns) in sizes.items():
            add(f"{block}.{name}", types.pop(0), rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            add_vector(f"{block}.{name}.weight", width, 1.0)
        if family == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                add_vector(f"{block}.{name}.bias", sizes[name][0])
        if family == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                add_vector(f"{block}.{name}.weight", width // heads, 1.0)
    if family == "llama":
        add_vector("rope_freqs.weight", width // heads // 2, 2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_node
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_models_of_other_families_and_types_have_the_same_logits(family: str, tmp_path: Path):
    path = tmp_path / "model.gguf"
    write_model(path, family)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 320, 150)]
    requests = [{"action": "logits", "ids": part} for part in (ids, ids[:5])]
    results = run_tab(path, *requests)
    with unspool.load(path, memory=64 << 20, threads=1) as lm:
        for request, result in zip(requests, results, strict=True):
            expected = logits_after(lm, request["ids"])
            assert np.isfinite(expected).all()
            assert np.array_equal(floats(result), expected)


@needs_node
def test_what_the_tab_cannot_run_is_refused_with_a_reason(small_default: Path, tmp_path: Path):
    content = small_default.read_bytes()
    cases = {
        "text.gguf": (b"not a model at all, only text", "not_a_model", "not a GGUF"),
        "short.gguf": (content[: len(content) // 2], "damaged", "not complete"),
        "head.gguf": (content[:100_000], "damaged", "not complete"),
        "other.gguf": (
            content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1),
            "unsupported_model", "architecture mamba",
        ),
    }  # fmt: skip
    for name, (data, code, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        (result,) = run_tab(tmp_path / name, {"action": "info"})
        assert result["code"] == code and words in result["error"], result
    step = {"action": "step", "ids": [1, 2], "promptLength": 2}
    unknown, range_error, long, missing = run_tab(
        small_default,
        {**step, "settings": {"dry_multiplier": 1}},
        {**step, "settings": {"top_p": 2}},
        {"action": "logits", "ids": [5] * 9000},
        {"action": "logits", "ids": [5, 10**6]},
    )
    assert unknown["code"] == "unsupported_setting" and "dry_multiplier" in unknown["error"]
    assert "from 0 to 1, got 2" in range_error["error"]
    assert long["code"] == "memory" and missing["code"] == "unsupported_setting"
