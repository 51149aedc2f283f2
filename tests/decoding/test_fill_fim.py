"""Gaps filled by FIM tokens: found by their texts, prompts as the models were trained on."""

from __future__ import annotations

from typing import Any

import pytest

import unspool
from helpers import assets
from helpers.decoding_support import pages_left
from helpers.word_model import FIM, save_worded
from unspool import gap
from unspool.decoding.infill.fill import OtherFile, fim_prompt, fim_tokens, make_fim_request
from unspool.text.tokenizer.tokenizer import Tokenizer

LEFT, RIGHT = "def area(page):\n    return ", "\n\nprint(area(3))\n"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_worded(tmp_path_factory.mktemp("coder"), FIM)
    return unspool.load(folder, backend="torch", memory=16 << 20)


@pytest.mark.parametrize(
    ("family", "texts"),
    [
        ("qwen", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
        ("deepseek", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
        ("llama3", None),
        ("mistral", None),
    ],
)
def test_tokens_are_found_by_their_texts(family: str, texts: tuple[str, ...] | None):
    tokenizer = Tokenizer.from_file(assets.tokenizer_json_folder() / family)
    result = fim_tokens(tokenizer)
    if texts is None:
        assert result is None
        return
    assert result is not None
    ids = [result.prefix, result.suffix, result.middle]
    assert [tokenizer.token_text(token) for token in ids] == list(texts)
    assert {*ids, *tokenizer.end_ids} <= result.ends


def test_the_prompt_has_prefix_suffix_middle(coder):
    tokens, tokenizer = fim_tokens(coder.tokenizer), coder.tokenizer
    ids = fim_prompt(tokenizer, tokens, LEFT, RIGHT)
    text = f"<|fim_prefix|>{LEFT}<|fim_suffix|>{RIGHT}<|fim_middle|>"
    assert ids == tokenizer.encode(text, specials=True)
    ids = fim_prompt(tokenizer, tokens, LEFT, RIGHT, [OtherFile("a.py", "x = 1\n")])
    before = "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"
    assert tokenizer.decode(ids) == before + text
    hidden = fim_prompt(tokenizer, tokens, "<|fim_middle|>", "")  # in a text it is no control token
    assert hidden.count(tokens.middle) == 1


def test_the_middle_ends_where_the_model_says_so(coder):
    tokens = fim_tokens(coder.tokenizer)
    prompt = fim_prompt(coder.tokenizer, tokens, LEFT, RIGHT)
    for end in ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"):
        bias = {coder.tokenizer.token_id(end): 100.0}
        draft = make_fim_request(coder, tokens, prompt, {"max_tokens": 5, "logit_bias": bias})
        written = draft.resume()
        assert (written.text, written.finish_reason) == ("", "stop"), end


def test_candidates_come_with_their_scores(coder):
    result = coder.fill(LEFT, gap(1, 6), RIGHT, drafts=4)
    assert result.by == "fim" and 1 < len(result.candidates) <= 4
    prompt = fim_prompt(coder.tokenizer, fim_tokens(coder.tokenizer), LEFT, RIGHT)
    for item in result.candidates:
        assert item.text == LEFT + item.texts[0] + RIGHT
        assert "".join(step.text for step in item.gap_steps[0]) == item.texts[0]
        written = [step.token for step in item.steps]
        scored = coder.score([*prompt, *written]).logprobs[len(prompt) :]
        assert item.score == pytest.approx(sum(scored), abs=1e-3)
    greedy = coder.generate(prompt, max_tokens=6, temperature=0).text
    assert greedy in [item.texts[0] for item in result.candidates]
    for item in result.candidates:
        assert item.is_cut == (len(item.gap_steps[0]) == 6 == len(item.steps))
        assert item.to_dict()["cut"] == item.is_cut
    assert pages_left(coder) == 0


def test_several_gaps_and_ranking_all_the_same(coder):
    result = coder.fill("a = ", gap(1, 3), "\nb = ", gap(1, 3), "\n", drafts=2)
    for item in result.candidates:
        assert item.text == f"a = {item.texts[0]}\nb = {item.texts[1]}\n"
    assert coder.fill(LEFT, gap, RIGHT, choices=["page", "3"]).by == "ranking"
