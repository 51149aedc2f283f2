"""Verifiers: by name, as reward models and yes/no questions, and failing in a search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unspool
from helpers import tiny
from helpers.decoding_support import PROMPT, pages_left
from helpers.search_support import metered
from helpers.word_model import save_chatty, save_worded
from unspool.decoding.search.checkers import CheckerLimits, FileVerifier, PatternVerifier
from unspool.decoding.search.think import VERIFIER_NAMES, VerifierSpec, make_verifier
from unspool.decoding.search.verifiers import AskVerifier, LogprobVerifier, RewardVerifier, _pieces
from unspool.errors import ModelFileError, SettingsError, UnspoolError


def reward_model(folder: Path, family: str, kind: str, labels: int) -> Any:
    """A random one, saved; and as transformers has it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**tiny._SHAPE, num_labels=labels)
    config._attn_implementation = "eager"
    model = tiny.filled(getattr(transformers, f"{family}For{kind}")(config))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A reward model's folder, and the model in transformers."""
    folder = tmp_path_factory.mktemp("reward")
    return folder, reward_model(folder, "Llama", "SequenceClassification", 1)


def rows(lm: Any, n: int = 4) -> Any:
    return lm.samples(PROMPT, n, max_tokens=12, seed=1)


@torch.inference_mode()
def logits(model: Any, text: Any) -> torch.Tensor:
    return model(torch.tensor([[*text.prompt, *text.tokens]])).logits[0]


@pytest.mark.parametrize(
    ("family", "kind", "labels"),
    [
        ("Qwen2", "SequenceClassification", 1),
        ("Qwen2", "SequenceClassification", 2),
        ("Llama", "TokenClassification", 2),
    ],
)
def test_rewards_are_those_of_transformers(
    tiny_lm: Any, tmp_path: Path, family: str, kind: str, labels: int
):
    oracle = reward_model(tmp_path, family, kind, labels)
    with unspool.load(tmp_path, backend="torch", memory=8 << 20) as model:
        judge = RewardVerifier(tiny_lm, model)
        texts = rows(tiny_lm)
        result = [verdict.score for verdict in judge.score(texts)]
    expected = [logits(oracle, text) for text in texts]
    if kind == "TokenClassification":
        expected = [entry[-1] for entry in expected]
    chances = [entry[0] if labels == 1 else entry.softmax(-1)[1] for entry in expected]
    assert result == pytest.approx([float(entry) for entry in chances], abs=1e-4)
    assert judge.partial == (kind == "TokenClassification")


def test_the_native_backend_gives_the_same(native: Any, reward: tuple[Path, Any]):
    folder, oracle = reward
    texts = rows(native)
    with unspool.load(folder, backend="native", memory=8 << 20) as model:
        result = [verdict.score for verdict in RewardVerifier(native, model).score(texts)]
    assert result == pytest.approx([float(logits(oracle, text)[0]) for text in texts], abs=0.05)


def test_what_begins_alike_is_read_once(tiny_lm: Any, reward: tuple[Path, Any]):
    with unspool.load(reward[0], backend="torch", memory=8 << 20) as model:
        judge, texts = RewardVerifier(tiny_lm, model), rows(tiny_lm, 3)
        page, length = model.engine.tree.page_size, len(PROMPT) + 12
        assert len(PROMPT) > page
        cost = judge.cost(texts)
        assert cost == length + 2 * (length - page)
        with metered(model) as meter:
            judge.score(texts)
        assert 0 < meter.tokens <= cost
        assert judge.cost(texts) == 0  # what was scored once is known
        with metered(model) as meter:
            judge.score(texts)
        assert meter.tokens == 0


def test_a_head_of_two_matrices(tiny_lm: Any, tmp_path: Path):
    """As Qwen's process-reward models have it."""
    oracle = reward_model(tmp_path, "Qwen2", "TokenClassification", 2)
    weights, width = load_file(tmp_path / "model.safetensors"), tiny._SHAPE["hidden_size"]
    del weights["score.weight"], weights["score.bias"]
    head = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    )
    weights |= {f"score.{name}": tensor.detach() for name, tensor in head.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    oracle.score = head
    text = rows(tiny_lm, 1)[0]
    with unspool.load(tmp_path, backend="torch", memory=8 << 20) as model:
        (result,) = RewardVerifier(tiny_lm, model).score([text])
    assert result.score == pytest.approx(float(logits(oracle, text)[-1].softmax(-1)[1]), abs=1e-4)


def test_what_is_no_reward_model_is_told(tiny_lm: Any, tmp_path: Path):
    with pytest.raises(ModelFileError, match="no score head"):
        RewardVerifier(tiny_lm, tiny_lm)
    reward_model(tmp_path, "Llama", "SequenceClassification", 5)
    model = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    with model, pytest.raises(SettingsError, match="5 labels"):
        RewardVerifier(tiny_lm, model)


def test_a_text_that_does_not_fit_fails_alone(tiny_lm: Any, reward: tuple[Path, Any]):
    long = tiny_lm.generate(PROMPT, max_tokens=40, seed=1)
    with unspool.load(reward[0], backend="torch", memory=8 << 20, context=40) as model:
        result = RewardVerifier(tiny_lm, model).score([long, rows(tiny_lm, 1)[0]])
    assert result[0].score is None and "exceed the reward model's context of 40" in result[0].why
    assert result[1].score is not None


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = save_chatty(tmp_path_factory.mktemp("chatty"))
    with unspool.load(folder, backend="torch", memory=16 << 20) as lm:
        yield lm


def test_steps_are_scored_at_their_ends(chatty: Any, tmp_path: Path):
    import shutil

    import transformers

    shape = {**tiny._SHAPE, "vocab_size": 512, "max_position_embeddings": 512, "num_labels": 2}
    config = transformers.LlamaConfig(**{**shape, "eos_token_id": 0})
    oracle = tiny.filled(transformers.LlamaForTokenClassification(config))
    oracle.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chatty.path / name, tmp_path / name)
    ids = chatty.chat_prompt("Plan the rows").ids
    text = chatty.prepare_generation(ids).choose("The tree\n\nis one page\n\nof tokens")
    request = [{"role": "user", "content": "Plan the rows"}]
    with unspool.load(tmp_path, backend="torch", memory=8 << 20) as model:
        judge = RewardVerifier(chatty, model, conversation=request)
        row, places = judge._row(text)
        mark = chatty.tokenizer.special_tokens["<extra_0>"]
        assert [row[place] for place in places] == [mark] * 3 and places[-1] == len(row) - 1
        assert row[: len(ids)] == ids
        with torch.inference_mode():
            steps = oracle(torch.tensor([row])).logits[0].softmax(-1)[places, 1].tolist()
        assert judge.score([text])[0].score == pytest.approx(min(steps), abs=1e-4)
        for gather, expected in (("last", steps[-1]), ("product", math.prod(steps))):
            other = RewardVerifier(chatty, model, gather=gather, conversation=request)
            assert other.score([text])[0].score == pytest.approx(expected, abs=1e-4)
        # What was a beginning is not read again when it has grown.
        longer = chatty.prepare_generation(ids).choose(
            "The tree\n\nis one page\n\nof tokens\n\nbefore it"
        )
        assert judge.cost([longer]) < len(row)
        assert judge.score([longer])[0].why.count(" ") == 4


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a\n\nb", ["a\n\n", "b"]),
        ("a\n\n", ["a\n\n"]),
        ("a", ["a"]),
        ("a\n\n\n\nb\n\n", ["a\n\n\n\n", "b\n\n"]),
        ("\n\na", ["\n\n", "a"]),
    ],
)
def test_pieces(text: str, pieces: list[str]):
    assert _pieces(text, "\n\n") == pieces and "".join(pieces) == text


def test_p_yes_is_what_the_model_says(chatty: Any):
    """Behind the very conversation, against logits that are computed from its text."""
    request = [{"role": "user", "content": "Plan the rows"}]
    texts = chatty.samples(chatty.chat_prompt(request).ids, 3, max_tokens=8, seed=5)
    judge = AskVerifier(chatty, question="Is it so?")
    for text, verdict in zip(texts, judge.score(texts), strict=True):
        ended = text.tokens[-1] in chatty.end_ids
        output = chatty.tokenizer.decode(text.tokens[:-1] if ended else text.tokens)
        full = f"<|turn|>user\nPlan the rows<|endoftext|>\n<|turn|>assistant\n{output}"
        full += "<|endoftext|>\n<|turn|>user\nIs it so?<|endoftext|>\n<|turn|>assistant\n"
        row = judge._row(text)
        assert chatty.tokenizer.decode(row) == full
        with chatty.open_branch(row) as branch:
            probabilities = torch.tensor(chatty.engine.extend(branch)[-1]).double().softmax(-1)
        yes, no = (float(probabilities[sorted(ids)].sum()) for ids in (judge._yes, judge._no))
        assert verdict.score == pytest.approx(yes / (yes + no), abs=1e-5)


def test_the_writer_reads_only_the_question(chatty: Any):
    texts = chatty.samples(chatty.chat_prompt("Plan the rows of the tree").ids, 3, max_tokens=40)
    judge = AskVerifier(chatty)
    cost = judge.cost(texts)
    assert judge._turn is not None
    page = chatty.engine.tree.page_size
    assert cost <= 3 * (len(judge._turn) + page)
    with metered(chatty) as meter:
        judge.score(texts)
    assert meter.tokens <= cost


def test_another_model_is_told_the_conversation(chatty: Any, tmp_path: Path):
    folder = save_worded(tmp_path / "other", seed=4)
    text = chatty.generate(chatty.chat_prompt("Plan the rows").ids, max_tokens=8, seed=5)
    with unspool.load(folder, backend="torch", memory=8 << 20) as other:
        judge = AskVerifier(chatty, other, question="Is it so?")
        read = other.tokenizer.decode(judge._row(text))
        (result,) = judge.score([text])
    assert "Plan the rows" in read and text.text in read and read.endswith("Is it so?\nAnswer:")
    assert result.score is not None and 0 <= result.score <= 1


def test_a_plain_prompt_is_asked_about_plainly(chatty: Any):
    text = chatty.generate("The tree", max_tokens=8, seed=5)
    judge = AskVerifier(chatty)
    assert chatty.tokenizer.decode(judge._row(text)).startswith("The tree")
    assert judge.score([text])[0].score is not None


USUAL: dict[str, Any] = {"n": 4, "max_tokens": 10, "budget": 400, "seed": 3}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("logprob", ("logprob", "", None)),
        ("regex:a:b+", ("regex", "a:b+", None)),
        ("ask", ("ask", "", None)),
        ("vote:(\\d+)+x", ("vote", "(\\d+)+x", None)),
        ("vote+reward:a/b", ("vote", "", VerifierSpec("reward", "a/b"))),
    ],
)
def test_names_are_taken_apart(name: str, parts: tuple[str, str, Any]):
    assert VerifierSpec.parse(name) == VerifierSpec(*parts)


@pytest.mark.parametrize(
    "name", ["", "magic", "regex", "regex:", "python:", "tests", "reward", "logprob:x", "vote+",
             "vote+vote", "vote+magic", ":", "Regex:a"]
)  # fmt: skip
def test_names_that_are_none(name: str):
    with pytest.raises(SettingsError):
        VerifierSpec.parse(name)


def test_what_a_name_needs():
    needed = {"reward:m": "m", "ask:m": "m", "ask": None, "vote+process:m": "m", "vote:m": None}
    assert {name: VerifierSpec.parse(name).model for name in needed} == needed
    code = {"python:f.py": True, "vote+tests:f.py": True, "regex:python:": False}
    assert {name: VerifierSpec.parse(name).runs_code for name in code} == code


def test_every_name_can_be_made(chatty: Any, tmp_path: Path):
    import transformers

    shape = {**tiny._SHAPE, "vocab_size": 512, "eos_token_id": 0, "num_labels": 1}
    config = transformers.LlamaConfig(**shape)
    tiny.filled(transformers.LlamaForSequenceClassification(config)).save_pretrained(tmp_path)
    file = tmp_path / "file.py"
    file.write_text("def check(text):\n    return 1\n")
    for name in VERIFIER_NAMES:
        filled = name.replace("FILE.py", str(file)).replace("FUNCTION", "check")
        filled = filled.replace("JUDGE", "logprob").replace("PATTERN", "a")
        if name != "ask:MODEL":  # the reward model here has no words to be asked in
            assert make_verifier(chatty, filled.replace("MODEL", str(tmp_path)))
    request: list[str] = []
    make_verifier(chatty, "ask:other", load=lambda other: request.append(other) or chatty)
    assert request == ["other"]


def test_a_checker_that_hangs_does_not_hang_the_search(chatty: Any, tmp_path: Path):
    file = tmp_path / "hangs.py"
    file.write_text(
        "import time\nasked = []\n"
        "def check(text):\n    asked.append(text)\n    time.sleep(600 * (len(asked) == 2))\n"
        "    return len(text)\n"
    )
    judge = FileVerifier(chatty, file, limits=CheckerLimits(seconds=1))
    result = chatty.think("The tree", judge=judge, **{**USUAL, "n": 3})
    scores = [node.score for node in result.tree.root.children]
    assert scores[1] is None and None not in (scores[0], scores[2])
    assert result.score == max(score for score in scores if score is not None)


def test_a_vote_without_answers_is_a_clear_error(chatty: Any):
    with pytest.raises(UnspoolError, match="matches never there"):
        chatty.think("The tree", judge="vote:never there", **USUAL)
    assert pages_left(chatty) == 0


def test_what_judges_read_is_counted_and_bounded(chatty: Any):
    prompt = chatty.chat_prompt("Plan the rows of the tree").ids
    free = chatty.think(prompt, judge="ask", **{**USUAL, "budget": None})
    assert free.spent.judged > 0
    for budget in (free.spent.total, free.spent.total - 1, free.spent.total * 2 // 3):
        result = chatty.think(prompt, judge="ask", **{**USUAL, "budget": budget})
        assert result.spent.total <= budget
    twice = chatty.think(prompt, judge="ask", **{**USUAL, "budget": None})
    assert [node.score for node in twice.tree.root.walk()] == pytest.approx(
        [node.score for node in free.tree.root.walk()]
    )


@pytest.mark.parametrize("judge", ["regex:e", "vote:(\\w)", "vote+ask", "vote+regex:e"])
def test_a_winner_has_the_best_score(chatty: Any, judge: str):
    result = chatty.think("The tree", judge=judge, **USUAL)
    scores = [node.score for node in result.tree.root.children if node.score is not None]
    assert result.score == max(scores)
    if judge.startswith("vote"):
        assert result.answers and sum(result.answers.values()) <= 1.0001


def test_a_pattern_for_whole_texts_is_refused_where_pieces_are_judged(chatty: Any):
    assert LogprobVerifier().partial and not PatternVerifier(chatty, "a").partial
    with pytest.raises(SettingsError, match=r"unfinished|not finished|partial|whole"):
        chatty.think("The tree", policy="beam", judge="regex:e", budget=400, max_tokens=10)
