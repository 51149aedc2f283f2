"""`/v1/tree`: watching, stopping, leaving, and looking inside."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.tree_client import PROMPT, SAMPLING, Tree, read, tokens


@pytest.fixture(scope="module")
def tree(server: Any) -> Iterator[Tree]:
    result = Tree(server.url)
    yield result
    result.http.close()


# -- live ------------------------------------------------------------------------------------


def test_watchers_see_what_happens(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=3))
    observed: list[tuple[str, dict[str, Any], str]] = []
    ready = threading.Event()

    def look_on() -> None:
        with tree.events(branch) as answer:
            for entry in read(answer):
                observed.append(entry)
                if len(observed) == 4:
                    ready.set()

    watcher = threading.Thread(target=look_on)
    watcher.start()
    assert ready.wait(10)
    with tree.live(branch, max_tokens=5) as answer:
        local = [data for name, data, _ in read(answer) if name == "step"]
    tree.do("rewind", branch, to=4)
    tree.do("choose", branch, at=2, text=" a", fork=False)
    tree.ask("DELETE", f"/{branch['id']}")
    watcher.join(10)
    assert not watcher.is_alive()
    names = [name for name, *_ in observed]
    assert names[:4] == ["branch", "step", "step", "step"] and names[-1] == "delete"
    steps = [data for name, data, _ in observed if name == "step"]
    assert steps[3:8] == local and "done" in names
    assert [data["to"] for name, data, _ in observed if name == "rewind"] == [4]
    assert [data["to"] for name, data, _ in observed if name == "choose"] == [2]
    assert steps[-1]["index"] == 2 and steps[-1]["text"] == " a"


def test_a_watcher_that_comes_back_is_told_what_it_missed(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=6))

    def next_steps(count: int, **params: Any) -> list[tuple[str, Any, str]]:
        result = []
        with tree.events(branch, **params) as answer:
            for entry in read(answer):
                result.append(entry)
                if len(result) == count:
                    return result
        return result

    first = next_steps(7)
    assert [data["index"] for name, data, _ in first if name == "step"] == [0, 1, 2, 3, 4, 5]
    assert [data["index"] for _, data, _ in next_steps(3, params={"since": 4})[1:]] == [4, 5]
    tree.do("rewind", branch, to=3)
    tree.do("resume", branch, max_tokens=2, seed=99)
    missed = next_steps(4, headers={"last-event-id": first[5][2]})  # it had read five steps
    assert [name for name, *_ in missed] == ["branch", "rewind", "step", "step"]
    assert missed[1][1]["to"] == 3 and [data["index"] for _, data, _ in missed[2:]] == [3, 4]
    tree.see(branch, "events", 400, since=1000)


def test_a_guard_takes_steps_back(tree: Tree):
    """Two words are possible: without the one that the model prefers it is the other."""
    local = {"temperature": 0, "max_tokens": 24, "regex": " (the|her) light"}
    first = tree.do("resume", tree.new(**local))["text"].split()[0]
    branch = tree.new(**local, guard=[f"ban={first}"])
    steps: list[dict[str, Any]] = []
    with tree.live(branch) as answer:
        for name, data, _ in read(answer):
            if name == "retract":
                del steps[data["to"] :]
            elif name == "step":
                steps.append(data)
            elif name == "done":
                assert data["data"]["notes"]
    complete = tree.get(branch)
    assert [step["token"] for step in steps] == tokens(complete)
    assert complete["text"] == f" {'her' if first == 'the' else 'the'} light"
    assert complete["settings"]["guard"] == [f"ban={first}"]


def test_one_writes_at_a_time_and_can_be_stopped(tree: Tree, lm: Any):
    branch = tree.new(max_tokens=2000)
    with tree.live(branch, pace=20) as answer:
        events = read(answer)
        for name, _, _ in events:
            if name == "step":
                break
        for verb, params in (
            ("resume", {}),
            ("append", {"text": "x"}),
            ("rewind", {"to": 0}),
            ("choose", {"text": "x", "fork": False}),
        ):
            assert tree.do(verb, branch, 409, **params)["error"]["code"] == "branch_busy"
        assert tree.get(branch)["writing"]
        fork = tree.do("fork", branch)
        tree.ask("PATCH", f"/{branch['id']}", json={"pace": 40})
        stopped = tree.do("stop", branch)
        assert not stopped["writing"] and stopped["finish_reason"] == "interrupted"
        assert [name for name, *_ in events][-1] == "done"
    complete = tree.get(branch)
    assert 0 < len(complete["steps"]) < 2000
    alone = lm.generate(PROMPT, max_tokens=len(complete["steps"]), **SAMPLING)
    assert tokens(complete) == alone.tokens and tokens(fork) == alone.tokens[: len(fork["steps"])]
    tree.do("stop", branch)  # nothing to stop is no error


def test_a_client_that_leaves_stops_the_writing(tree: Tree, server: Any):
    branch = tree.new(max_tokens=2000)
    with tree.live(branch) as answer:
        for name, data, _ in read(answer):
            if name == "step" and data["index"] == 3:
                break
    deadline = time.monotonic() + 60
    engine = server.state.registry.loaded[server.model].lm.engine
    while tree.get(branch, steps=False)["writing"] or len(engine.scheduler):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    result = tree.get(branch)
    assert result["finish_reason"] == "interrupted" and 4 <= len(result["steps"]) < 2000
    assert server.state.admission.running == 0
    # Whatever is still used is kept for whoever begins alike, and goes when room is needed.
    engine.call(engine.tree.index.clear)
    assert server.pool.used == 0
    assert tree.do("resume", branch, max_tokens=1)["last"]["reused_tokens"] == 0


# -- looking ---------------------------------------------------------------------------------


def test_alternatives_are_the_distribution(tree: Tree, lm: Any):
    branch = tree.do("resume", tree.new(max_tokens=5, temperature=0.5))
    result = tree.see(branch, "alternatives", at=3, top=500)
    step = branch["steps"][3]
    mine = lm.generate(PROMPT, max_tokens=5, **SAMPLING | {"temperature": 0.5}).alternatives(3, 10)
    assert [c["token"] for c in result["candidates"][:10]] == [c.token for c in mine]
    assert result["picked"]["token"] == step["token"]
    assert result["picked"]["logprob"] == pytest.approx(step["logprob"], abs=1e-4)
    assert result["entropy"] == pytest.approx(step["entropy"], abs=1e-4)
    mass = sum(c["probability"] for c in result["candidates"]) + result["rest"]["mass"]
    assert mass == pytest.approx(1, abs=1e-6)
    assert len(result["candidates"]) + result["rest"]["tokens"] == lm.vocab_size
    # Enough to work out another temperature without asking again.
    remaining = dict(result["rest"]["log_sums"])[2.0]
    parts = [c["logprob"] / 2 for c in result["candidates"]]
    total = math.log(sum(map(math.exp, parts)) + math.exp(remaining))
    hot = tree.do("resume", tree.do("fork", branch, at=3), max_tokens=1, temperature=2.0,
                  top_k=0, top_p=1, min_p=0)["steps"][3]["candidates"][0]  # fmt: skip
    assert math.exp(parts[0] - total) == pytest.approx(hot["probability"], rel=1e-3)
    assert tree.see(branch, "alternatives")["picked"] is None
    tree.see(branch, "alternatives", 400, at=6)
    tree.see(branch, "alternatives", 400, top=501)


def test_look_inside(tree: Tree):
    branch = tree.do("resume", tree.new(max_tokens=4))
    prompt = branch["usage"]["prompt_tokens"]
    result = tree.see(branch, "look", step=2, heads=True, against="mean")
    assert result["position"] == prompt + 1 and result["picked"]["id"] == tokens(branch)[2]
    assert len(result["tokens"]) == prompt + 2  # nothing beyond the position
    attention = result["attention"]
    assert len(attention["by_layer"]) == result["layers"] and len(attention["mean"]) == prompt + 2
    for rows in ([attention["mean"]], attention["by_layer"], *attention["by_head"]):
        for row in rows:
            assert sum(row) == pytest.approx(1, abs=1e-3) and len(row) == prompt + 2
    last = result["lens"]["layers"][-1]
    assert len(result["lens"]["layers"]) == result["layers"] + 1
    assert last["logprob"] == pytest.approx(branch["steps"][2]["logprob"], abs=1e-3)
    parts = result["attribution"]
    assert math.fsum(part["value"] for part in parts["parts"]) == pytest.approx(
        parts["logit"] - parts["rest"]
    )
    assert len(result["neighbours"]) == 5
    small = tree.see(
        branch, "look", at=prompt + 1, include="attention", layer=3, head=2, heads=True
    )
    assert small["attention"]["by_head"] == [[attention["by_head"][2][1]]]
    assert small["attention"]["layers"] == [3] and "lens" not in small
    assert tree.see(branch, "look", include="lens")["position"] == prompt + 3
    for wrong in ({"at": 1000}, {"step": 9}, {"include": "soul"}, {"layer": 0, "heads": True},
                  {"at": 1, "step": 1}, {"token": 10**6}, {"against": "me"}):  # fmt: skip
        tree.see(branch, "look", 400, **wrong)
