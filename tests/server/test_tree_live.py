"""`/v1/tree`: watching, stopping, leaving, and looking inside."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.running_server import wait_until
from helpers.tree_client import PROMPT, SAMPLING, Tree, read, tokens
from unspool.lens.activations import get_activations
from unspool.server.tree.look import MAX_CELL, MAX_CELLS, _position_json, _vectors


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
        with tree.events(branch, **params) as answer:
            return list(itertools.islice(read(answer), count))

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
    engine = server.state.registry.loaded[server.model].lm.engine
    wait_until(lambda: not (tree.get(branch, steps=False)["writing"] or len(engine.scheduler)))
    result = tree.get(branch)
    assert result["finish_reason"] == "interrupted" and 4 <= len(result["steps"]) < 2000
    assert server.state.admission.running == 0
    # Pages still in use are the prefix cache.
    engine.call(engine.tree.index.clear)
    assert server.pool.used == 0
    assert tree.do("resume", branch, max_tokens=1)["last"]["reused_tokens"] == 0


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


@pytest.fixture(scope="module")
def written(tree: Tree) -> dict[str, Any]:
    result: dict[str, Any] = tree.do("resume", tree.new(max_tokens=4))
    return result


def token_ids(written: dict[str, Any]) -> list[int]:
    return [token["id"] for token in written["prompt"]["tokens"]] + tokens(written)


def test_vectors_and_the_head_are_those_of_the_run(tree: Tree, written: dict[str, Any], lm: Any):
    result, step = tree.see(written, "look", step=2, include="vectors", top=3), written["steps"][2]
    observed = get_activations(lm, token_ids(written), result["position"])
    vectors, head = result["vectors"], result["head"]
    assert vectors["every"] == 1 and vectors["width"] == lm.config.width
    cells, scales = np.array(vectors["cells"]), np.array(vectors["scales"])
    assert cells.shape == observed.residuals.shape and abs(cells).max() == MAX_CELL
    # Half a cell off at most, up to what the server's other arithmetic leaves.
    apart = abs(cells * scales[:, None] - observed.residuals)
    assert (apart <= scales[:, None] * 0.51 + abs(observed.residuals).max(1)[:, None] * 0.01).all()
    assert len(str(vectors)) < 100_000 and "attention" not in result
    # The head ends where the step began.
    assert head["followed"]["id"] == step["token"] and head["followed"]["rank"] == step["rank"]
    chance = math.exp(step["logprob"])
    assert head["followed"]["probability"] == pytest.approx(chance, rel=1e-2)
    assert [c["id"] for c in head["candidates"]] == [c["token"] for c in step["candidates"][:3]]
    first, second, _ = head["candidates"]
    odds = math.log(first["probability"] / second["probability"])
    assert odds == pytest.approx(first["logit"] - second["logit"], abs=1e-4)
    assert head["vocabulary"] == 49152 and head["norm"] > 0
    # At the end of the text nothing was picked: the likeliest is followed.
    last = tree.see(written, "look", include="vectors", top=1)
    assert last["picked"] is None and last["head"]["followed"]["rank"] == 0


def test_dials_tell_the_position(tree: Tree, written: dict[str, Any]):
    far = tree.see(written, "look", at=6, include="vectors")["position_told"]
    near = tree.see(written, "look", at=0, include="vectors")["position_told"]
    assert far["way"] == "rotary" and far["pairs"] == 8
    assert [dial["pair"] for dial in far["dials"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    angles = [dial["angle"] for dial in far["dials"]]
    assert angles[0] == 6 and angles == sorted(angles, reverse=True)
    assert all(dial["angle"] == 0 for dial in near["dials"])


def test_the_map_without_the_first_token(tree: Tree, written: dict[str, Any]):
    result = tree.see(written, "look", step=1, include="attention", heads=True)["attention"]
    reply = result["map_without_first"]
    places, weights = np.array(reply["place"]), np.array(reply["weight"])
    assert places.min() >= 1
    others = np.array(result["by_head"])[..., 1:]
    sums = others.sum(-1)
    clear = sums > 0.05  # elsewhere too few digits are sent to divide by
    at_place = np.take_along_axis(others, places[..., None] - 1, -1)[..., 0]
    for mine in (others.max(-1), at_place):
        assert clear.any() and np.allclose(weights[clear], mine[clear] / sums[clear], atol=1e-3)
    first = tree.see(written, "look", at=0, include="attention")["attention"]
    assert first["map_without_first"] is None and first["mean"] == [1]


def test_wide_vectors_are_told_by_their_furthest_numbers(lm: Any, written: dict[str, Any]):
    observed = get_activations(lm, token_ids(written), 3)
    wide = replace(observed, residuals=np.tile(observed.residuals, (1, 79))[:, :5001])
    reply = _vectors(wide)
    cells = np.array(reply["cells"]) * np.array(reply["scales"])[:, None]
    step = reply["every"]
    assert step > 1 and cells.size <= MAX_CELLS < 2 * cells.size and reply["width"] == 5001
    run = wide.residuals[3, step : 2 * step]
    assert cells[3, 1] == pytest.approx(run[abs(run).argmax()], abs=reply["scales"][3])


def test_positions_that_are_no_angles(lm: Any):
    learned = SimpleNamespace(config=replace(lm.config, positions="learned", rotary=None))
    assert _position_json(learned, 2) == {"way": "learned", "pairs": 0, "dials": []}
