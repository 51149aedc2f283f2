"""`/v1/tree`: every verb over HTTP, beside the same verbs in process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers.tree_client import PROMPT, SAMPLING, Tree, read, tokens
from unspool.server.http.errors import ApiError
from unspool.server.tree import library as stored
from unspool.server.tree.branches import ExtraSettings, TreeBranch, TreePrompt
from unspool.server.tree.library import Branches


def test_the_tree_writes_what_the_library_writes(tree: Tree, lm: Any):
    alone = lm.generate(PROMPT, max_tokens=24, explain=True, top=5, **SAMPLING)
    branch = tree.new(max_tokens=10, name="storm")
    assert branch["steps"] == [] and branch["finish_reason"] is None and branch["name"] == "storm"
    assert [t["id"] for t in branch["prompt"]["tokens"]] == list(alone.prompt)
    tree.do("resume", branch)
    with tree.live(branch, max_tokens=14) as answer:
        observed = list(read(answer))
    assert [name for name, *_ in observed] == ["branch", *["step"] * 14, "done"]
    assert [data["index"] for name, data, _ in observed if name == "step"] == list(range(10, 24))
    complete = tree.get(branch)
    assert complete["text"] == alone.text and tokens(complete) == alone.tokens
    assert complete["finish_reason"] == "length" and complete["logprob"] == pytest.approx(
        alone.logprob
    )
    assert complete["last"]["reused_tokens"] == complete["last"]["tokens_before"] - 1
    step, local = complete["steps"][3], alone.steps[3].to_dict()
    assert {name: step[name] for name in local if name not in ("seconds", "stages", "draw")} == {
        name: value for name, value in local.items() if name not in ("seconds", "stages", "draw")
    } | {"candidates": [dict(c) for c in local["candidates"]]}
    assert step["draw"] == local["draw"]
    assert [s["name"] for s in step["stages"]] == [s["name"] for s in local["stages"]]
    assert tree.get(branch, steps=False).get("steps") is None
    assert tokens(tree.get(branch, since=20)) == alone.tokens[20:]


def test_the_tree_writes_what_chat_writes(tree: Tree, lm: Any, server: Any):
    messages = [{"role": "user", "content": "Name a colour."}]
    expected = {"messages": messages, "seed": 5, "temperature": 0.7, "max_tokens": 12}
    reply = server.http.post("/v1/chat/completions", json=expected).json()
    branch = tree.do("resume", tree.ask("POST", "", json=expected))
    assert branch["text"] == reply["choices"][0]["message"]["content"]
    assert branch["text"] == lm.chat(messages, seed=5, temperature=0.7, max_tokens=12).text
    prompt = branch["prompt"]
    written = [token["text"] for token in prompt["tokens"] if not token["added"]]
    assert "".join(written) == "Name a colour." and prompt["messages"] == messages
    assert [span["role"] for span in prompt["spans"]] == ["user", "assistant"]


@pytest.mark.parametrize("ended", [False, True])  # in mid-sentence, or by the model itself
def test_a_conversation_goes_on_in_its_branch(tree: Tree, lm: Any, ended: bool):
    question = {"role": "user", "content": "Name a colour."}
    extra = {"role": "user", "content": "And another one?"}
    body = {"messages": [question], "temperature": 0, "max_tokens": 6}
    branch = tree.do("append", tree.ask("POST", "", json=body), text="My colour is green")
    if ended:
        end = lm.tokenizer.special_tokens["<|im_end|>"]
        branch = tree.do("resume", branch, logit_bias={end: 100})
    assert (branch["finish_reason"] == "stop") == ended
    answer = {"role": "assistant", "content": branch["text"]}
    complete = lm.chat_template.encode([question, answer, extra]).ids
    result = tree.do("append", branch, message=extra)
    prompt = [token["id"] for token in result["prompt"]["tokens"]]
    assert prompt + tokens(result) == complete  # as one conversation
    assert tokens(result)[: branch["length"]] == tokens(branch)
    assert all(step["chosen"] for step in result["steps"][branch["length"] :])
    again = tree.do("resume", result, max_tokens=8, logit_bias=None)
    alone = lm.generate(complete, max_tokens=8, temperature=0)
    assert tokens(again)[-len(alone.tokens) :] == alone.tokens
    plain = tree.new()
    refused = tree.ask("POST", f"/{plain['id']}/append", 400, json={"message": extra})
    assert "the branch has no messages" in refused["error"]["message"]
    pair = {"message": extra, "tokens": [5]}
    tree.ask("POST", f"/{branch['id']}/append", 400, json=pair)


def test_several_at_once_share_a_seed(tree: Tree, lm: Any):
    branch = tree.do("resume", tree.new(max_tokens=4))
    result = tree.do("resume", branch, n=3, max_tokens=8)
    start = lm.generate(PROMPT, max_tokens=4, **SAMPLING)
    for number, item in enumerate(result):
        assert item["parent"] == branch["id"] and item["forked_at"] == 4
        assert item["text"] == start.resume(max_tokens=8, sample=number).text
    assert len(tree.get(branch)["steps"]) == 4
    with tree.live(branch, n=2, max_tokens=3) as answer:
        observed = list(read(answer))
    done = {data["branch"]: data["data"] for name, data, _ in observed if name == "done"}
    assert sorted(item["text"] for item in done.values()) == sorted(
        start.resume(max_tokens=3, sample=number).text for number in range(2)
    )
    tree.do("resume", branch, 400, n=1000)


def test_rewind_choose_and_append_reuse_what_stays(tree: Tree, lm: Any):
    branch = tree.do("resume", tree.new(max_tokens=12))
    alone = lm.generate(PROMPT, max_tokens=12, top=5, **SAMPLING)
    other = tree.do("choose", branch, at=5, text=" Bonn 🙂", name="detour")
    assert (
        other["parent"] == branch["id"] and other["forked_at"] == 5 and other["id"] != branch["id"]
    )
    assert other["steps"][5]["chosen"] and other["steps"][5]["rank"] > 0
    assert other["text"] == alone.rewind(5).text + " Bonn 🙂"
    length = len(other["steps"])
    gone_on = tree.do("resume", other, max_tokens=6)
    repeated = alone.rewind(5).choose(" Bonn 🙂").resume(max_tokens=6)
    assert gone_on["text"] == repeated.text
    assert gone_on["last"]["reused_tokens"] == len(alone.prompt) + length - 1
    assert tokens(tree.get(branch)) == alone.tokens  # nothing was lost
    # In place, by id; then words and ids at the end.
    second = alone.steps[2].candidates[1].token
    tree.do("choose", branch, at=2, token=second, fork=False)
    tree.do("append", branch, text=" very")
    result = tree.do("append", branch, tokens=[10, 11])
    assert tokens(result) == [*alone.tokens[:2], second, *lm.tokenizer.encode(" very"), 10, 11]
    assert result["finish_reason"] is None and all(s["logprob"] <= 0 for s in result["steps"])
    back = tree.do("rewind", branch, to=-3)
    assert len(back["steps"]) == len(result["steps"]) - 3
    tree.do("rewind", branch, to=0)
    again = tree.do("resume", branch, max_tokens=12)
    assert again["text"] == alone.text  # as if nothing had happened
    assert again["last"]["reused_tokens"] >= len(alone.prompt) - 1


def test_the_cache_can_be_turned_off_to_see_what_it_saves(tree: Tree):
    branch = tree.new(max_tokens=4)
    cached = tree.do("resume", branch)
    anew = tree.do("resume", tree.new(max_tokens=4), cache=False)
    assert anew["text"] == cached["text"] and anew["settings"]["cache"] is False
    assert anew["last"]["reused_tokens"] == 0 and cached["settings"]["cache"] is True
    on = tree.do("resume", anew, cache=True)
    assert on["last"]["reused_tokens"] > 0 and on["settings"]["cache"] is True


def test_a_long_prompt_has_events_for_its_progress(tree: Tree):
    long = tree.new(prompt=[7 + place % 90 for place in range(700)], max_tokens=2)
    with tree.live(long) as answer:
        events = [(name, data) for name, data, _ in read(answer)]
    progress = [data for name, data in events if name == "prompt"]
    assert progress and all(data["total"] == 700 for data in progress)
    computed = [data["computed"] for data in progress]
    assert computed == sorted(computed) and computed[-1] < 700
    names = [name for name, _ in events]
    assert max(i for i, name in enumerate(names) if name == "prompt") < names.index("step")


def test_forks_are_independent(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=6))
    item, two = tree.do("fork", branch, at=3, name="one"), tree.do("fork", branch)
    assert tokens(item) == tokens(branch)[:3] and tokens(two) == tokens(branch)
    tree.do("rewind", branch, to=1)
    tree.do("resume", item, max_tokens=2, temperature=0, seed=None)
    assert tokens(tree.get(two)) == tokens(branch)
    settings = tree.get(item)["settings"]
    assert settings["temperature"] == 0 and settings["seed"] != 11
    assert tree.get(two)["settings"]["temperature"] == 0.9
    inner = tree.do("fork", item, at=2)
    listed = tree.ask("GET", "")["data"]
    assert [entry["id"] for entry in listed[:3]] == [inner["id"], two["id"], item["id"]]
    tree.ask("DELETE", f"/{item['id']}")
    result = tree.get(inner)
    assert result["parent"] == branch["id"] and result["forked_at"] == 2
    assert tree.ask("PATCH", f"/{inner['id']}", json={"name": "left"})["name"] == "left"
    tree.get(item, 404)
    tree.ask("DELETE", f"/{item['id']}", 404)


def test_settings_change_while_going_on(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=3, mirostat_tau=3.0, top_p=None))
    result = tree.do("resume", branch, temperature=0.5, top=2, trace=False)
    assert len(result["steps"][-1]["candidates"]) == 2 and result["steps"][-1]["stages"] == []
    tree.do("rewind", branch, to=0)
    digits = tree.do("resume", branch, regex=r" \d\d\d", mirostat_tau=None, max_tokens=8)
    assert digits["text"].strip().isdigit() and digits["finish_reason"] == "stop"
    assert digits["settings"]["regex"] == r" \d\d\d"
    tree.do("append", branch, text=" words")
    assert "grammar" in tree.do("resume", branch, 400)["error"]["message"]
    assert not tree.get(branch)["writing"]
    tree.do("resume", branch, regex=None, max_tokens=1, think_budget=None)


def test_a_text_that_ended_at_a_stop_string_says_so(tree: Tree, lm: Any):
    (the,) = lm.tokenizer.encode(" the")
    branch = tree.new(temperature=0, max_tokens=30, stop=[" the"], logit_bias={the: 100})
    branch = tree.do("resume", tree.do("append", branch, text=" slowly"))
    assert branch["finish_reason"] == "stop" and branch["last"]["stopped_by"] == " the"
    assert tree.do("resume", branch, 400)["error"]["code"] == "text_ended"
    with tree.live(branch, stop=[], max_tokens=2) as answer:
        observed = [(name, data) for name, data, _ in read(answer)]
    # The text that the stop string had hidden is sent again.
    assert "rewind" in [name for name, _ in observed]
    visible = branch["text"]
    steps: list[str] = [step["text"] for step in branch["steps"]]
    for name, data in observed:
        if name == "rewind":
            del steps[data["to"] :]
        elif name == "step":
            steps.append(data["text"])
    assert "".join(steps) == tree.get(branch)["text"] and "".join(steps).startswith(
        visible + " the"
    )


OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 2, "min_p": 0.01},
    {**OFF, "top_k": 100, "temperature": 1.7},
    {**OFF, "stages": ["temperature", "top_k", "top_p"], "top_k": 50, "top_p": 0.9},
    {**OFF, "typical_p": 0.8, "top_n_sigma": 2},
    {**OFF, "xtc_probability": 1, "eta": 0.001},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "no_repeat_ngram": 2},
    {"regex": "(.|\\n)+"},
    {**OFF, "mirostat_tau": 3},
    {"stop": ["a", "e"], "guard": "loop", "speculate": "lookup", "max_tokens": 9},
]


def test_a_try_is_what_writing_would_have_been_and_changes_nothing(tree: Tree) -> None:
    branch = tree.do("resume", tree.new(max_tokens=8))
    before = tree.ask("GET", "")["data"]
    for settings in WAYS:
        tried = tree.ask("POST", f"/{branch['id']}/try", json={"at": 5, "top": 20, **settings})
        assert (tried["branch"], tried["at"]) == (branch["id"], 5)
        assert len(tried["step"]["candidates"]) == 20
        fork = tree.do("fork", branch, at=5)
        last = {**settings, "max_tokens": 1, "stop": [], "guard": None, "top": 20}
        wrote = tree.do("resume", fork, **last)["steps"][5]
        assert [_outline(tried["step"]), settings] == [_outline(wrote), settings]
        tree.ask("DELETE", f"/{fork['id']}")
    assert tree.ask("GET", "")["data"] == before
    assert tree.get(branch) == branch


def _outline(step: dict[str, Any]) -> list[Any]:
    stages = [(stage["name"], stage["kept"]) for stage in step["stages"]]
    return [step["token"], step["position"], (step["draw"] or {}).get("u"), stages]


def test_a_try_behind_the_end_and_what_is_refused(tree: Tree) -> None:
    branch = tree.do("resume", tree.new(max_tokens=3))
    tried = tree.ask("POST", f"/{branch['id']}/try", json={})
    assert tried["at"] == 3 and tried["step"]["index"] == 3
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"at": 4})
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"temperature": -1})
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"n": 2})
    tree.ask("POST", "/branch-nobody/try", 404, json={})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [10**8]},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "regex": "("},
        {"prompt": "a", "regex": "a", "choice": ["b"]},
        {"prompt": "a", "guard": []},
        {"prompt": "a", "speculate": "model:/etc/passwd"},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "word " * 20_000},
        {"messages": []},
        {"prompt": "a", "name": "x" * 1000},
    ],
)
def test_bad_branches_are_refused(tree: Tree, params: dict[str, Any]):
    tree.ask("POST", "", 400, json=params)


def test_bad_changes_are_refused_and_change_nothing(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=2))
    for verb, params in (
        ("append", {}),
        ("append", {"text": ""}),
        ("append", {"text": "a", "tokens": [1]}),
        ("append", {"tokens": [10**7]}),
        ("append", {"tokens": [5] * 9000}),
        ("fork", {"at": 3}),
        ("rewind", {"to": -3}),
        ("rewind", {}),
        ("choose", {"at": 0}),
        ("choose", {"at": 9, "token": 3}),
        ("resume", {"pace": 0}),
        ("resume", {"n": 0}),
        ("resume", {"top_p": 7}),
        ("resume", {"stages": ["soup"]}),
        ("resume", {"logit_bias": {"99999999": 1}}),
    ):
        tree.do(verb, branch, 400, **params)
    now = tree.get(branch)
    assert tokens(now) == tokens(branch) and not now["writing"] and now["settings"]["top_p"] == 0.9
    for verb in ("append", "fork", "rewind", "choose", "resume", "stop"):
        tree.do(verb, {"id": "branch-none"}, 404, **({"to": 0} if verb == "rewind" else {}))
    tree.ask("POST", "", 404, json={"prompt": "a", "model": "none"})


def test_a_store_is_bounded_and_its_oldest_branches_make_room(
    lm: Any, monkeypatch: pytest.MonkeyPatch
):
    def branch() -> TreeBranch:
        generation = lm.prepare_generation("a")
        prompt = TreePrompt(generation.prompt, "a", lm.tokenizer, frozenset())
        return TreeBranch("m", prompt, generation, ExtraSettings(), None)

    def added() -> TreeBranch:
        created = branch()
        asyncio.run(store.add(created))
        return created

    store = Branches(2)
    first, second = added(), added()
    second.origin, second.origin_at = first, 0
    first.touched -= 1
    with first.locked(), second.locked(), pytest.raises(ApiError) as full:
        added()
    assert full.value.status == 429 and "in use" in full.value.message
    third = added()
    assert set(store.all) == {second.id, third.id} and first.deleted and second.parent is None
    with pytest.raises(ApiError, match="removed to make room"):
        store.of_user("").get(first.id)
    asyncio.run(store.delete(second))
    monkeypatch.setattr(stored, "MAX_WEIGHT", 1)
    with third.locked(), pytest.raises(ApiError):
        added()
