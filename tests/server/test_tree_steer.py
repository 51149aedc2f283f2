"""`steer` of `/v1/tree`: texts with changes inside the model, kept branches, and their end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.running_server import settled
from helpers.tree_client import Tree, read, tokens
from unspool.backends.interventions import Add, Intervention, Scale
from unspool.lens.steering import SteeringVector


@pytest.fixture(scope="module")
def token(lm: Any) -> int:
    """The token with the longest row: its own direction raises no other one more."""
    rows = lm.model.rows("head.weight", 0, lm.vocab_size).astype(np.float64)
    return int(np.linalg.norm(rows, axis=1).argmax())


@pytest.fixture(scope="module")
def strong(token: int) -> dict[str, Any]:
    """A change under which nothing but this token is written."""
    return {"token": token, "strength": 900.0, "layers": [3]}


@pytest.fixture(scope="module")
def vector(server: Any) -> SteeringVector:
    """Registered with the model that is served."""
    lm = server.state.registry.loaded[server.model].lm
    direction = np.linspace(-3, 3, lm.config.width, dtype=np.float32)
    return lm.load_steering_vector(SteeringVector({1: direction}, name="ramp"))


@pytest.fixture
def branch(tree: Tree) -> Any:
    return tree.do("resume", tree.new(), max_tokens=6)


def steer(tree: Tree, branch: Any, status: int = 200, **body: Any) -> Any:
    return tree.ask("POST", f"/{branch['id']}/steer", status, json=body)


def test_what_can_be_steered(tree: Tree, branch: Any, vector: SteeringVector) -> None:
    offers = tree.see(branch, "steer")
    parts = {part["site"]: part for part in offers["parts"]}
    assert {"resid_post", "attn_out", "head_out", "mlp_out"} == parts.keys()
    assert parts["head_out"] == {"site": "head_out", "layers": [0, 1, 2, 3], "heads": [4] * 4}
    assert {"name": "ramp", "layers": [1]} in offers["vectors"]


def test_previews_have_the_seed_of_the_branch_and_store_nothing(
    tree: Tree, branch: Any, lm: Any, vector: SteeringVector
) -> None:
    first = branch["prompt_tokens"] + 1
    plain = steer(tree, branch, changes=[], at=2, max_tokens=4)
    assert [step["token"] for step in plain["steps"]] == tokens(branch)[2:]
    head = Intervention("head_out", Scale(0.0), (0,), slice(first, None), (1, 2))
    ramp = Intervention("resid_post", Add(vector.directions[1], 2.0), (1,), slice(first, None))
    ids = [item["id"] for item in branch["prompt"]["tokens"]]
    knock_out = {"scale": True, "strength": 0, "site": "head_out", "layers": [0], "heads": [1, 2]}
    cases = [(knock_out, head), ({"vector": "ramp", "strength": 2.0}, ramp)]
    for change, intervention in cases:
        result = steer(tree, branch, changes=[change], at=2, max_tokens=4)
        complete = lm.generate(
            ids, max_tokens=6, temperature=0.9, top_p=0.9, seed=11, end=False,
            interventions=[intervention],
        )  # fmt: skip
        assert complete.tokens[:2] == tokens(branch)[:2]  # not touched
        assert [step["token"] for step in result["steps"]] == complete.tokens[2:]
    assert tree.get(branch) == branch


def test_the_direction_of_a_token_raises_it(
    tree: Tree, branch: Any, strong: Any, token: int
) -> None:
    result = steer(tree, branch, changes=[strong], at=1, max_tokens=5)
    assert {step["token"] for step in result["steps"]} == {token}
    ((label, shape),) = {
        (item["label"], tuple(item["op"]["vector"]["shape"])) for item in result["interventions"]
    }
    assert label and shape == (1, 64)


def test_a_kept_branch_carries_its_changes(
    tree: Tree, branch: Any, strong: Any, token: int
) -> None:
    preview = steer(tree, branch, changes=[strong], at=2, max_tokens=3)
    kept = steer(tree, branch, changes=[strong], at=2, max_tokens=3, keep=True, name="steered")
    assert (kept["parent"], kept["forked_at"], kept["name"]) == (branch["id"], 2, "steered")
    assert [s["token"] for s in kept["steps"]] == [s["token"] for s in preview["steps"]]
    assert kept["steps"][0]["stages"] and tree.get(branch) == branch
    (item,) = kept["settings"]["interventions"]
    assert item["positions"] == [branch["prompt_tokens"] + 1, None]
    fork = tree.do("fork", tree.do("resume", kept, max_tokens=2), at=5)
    assert fork["settings"]["interventions"] == [item]
    assert set(tokens(tree.do("resume", fork, max_tokens=2))[2:]) == {token}
    # As a file has it: the same text from its interventions.
    (complete,) = tree.see(kept, "interventions")["data"]
    again = tree.new(interventions=[complete])
    assert tokens(tree.do("resume", again, max_tokens=5)) == tokens(tree.get(kept))[:5]


def test_the_end_of_interventions(tree: Tree, branch: Any, strong: Any, token: int) -> None:
    changes = [strong, {"scale": True, "site": "mlp_out", "strength": 1}]
    kept = steer(tree, branch, changes=changes, at=2, max_tokens=3, keep=True)
    path = f"/{kept['id']}/interventions"
    tree.ask("DELETE", path, 400, params={"index": 2})
    shortened = tree.ask("DELETE", path, params={"index": 0})
    first, last = branch["prompt_tokens"] + 1, branch["prompt_tokens"] + 4
    ended, other = shortened["settings"]["interventions"]
    assert (ended["positions"], other["positions"]) == ([first, last], [first, None])
    assert (
        shortened["finish_reason"] == kept["finish_reason"]
        and shortened["length"] == kept["length"]
    )
    tree.ask("DELETE", path)
    after = tree.do("resume", kept, max_tokens=4)
    assert (
        tokens(after)[:5] == tokens(branch)[:2] + [token] * 3 and tokens(after)[5:] != [token] * 4
    )
    # Without any text under them they are gone.
    none = steer(tree, branch, changes=[strong], max_tokens=1, keep=True)
    rewound = tree.do("rewind", none, to=len(tokens(branch)))
    assert tree.ask("DELETE", f"/{rewound['id']}/interventions")["settings"]["interventions"] == []


def test_events_and_a_client_that_leaves(
    tree: Tree, branch: Any, server: Any, strong: Any, token: int
) -> None:
    body = {"changes": [strong], "at": 2, "max_tokens": 5, "stream": True}
    path = f"/v1/tree/{branch['id']}/steer"
    with tree.http.stream("POST", path, json=body) as answer:
        events = [(name, data.get("token")) for name, data, _ in read(answer)]
    assert events == [*[("step", token)] * 5, ("done", None)]
    with tree.http.stream("POST", path, json={**body, "max_tokens": 256}) as answer:
        next(read(answer))
    settled(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"changes": [{"vector": "a", "token": 1}]}, "exactly one of"),
        ({"changes": [{"vector": "a"}]}, "no steering vector 'a'"),
        ({"changes": [{"token": 10**6}]}, "token must be 0 to"),
        ({"changes": [{"token": "not one token"}]}, "must be one token"),
        ({"changes": [{"token": 1, "layers": [4]}]}, "got 4"),
        ({"changes": [{"token": 1, "site": "head_out"}]}, "head_out can be scaled"),
        ({"changes": [{"scale": True, "site": "head_out", "heads": [4]}]}, "heads of head_out"),
        ({"changes": [{"scale": True, "site": "recurrent_out"}]}, "no layer of this model has"),
        ({"changes": [{"scale": True, "site": "logits"}]}, "site"),
        ({"changes": [{"scale": True, "strength": 1e9}]}, "strength"),
        ({"changes": [{"scale": True}], "first": 10**6}, "first must be"),
        ({"changes": [{"scale": True}] * 9}, "changes"),
        ({"changes": [], "keep": True}, "keep needs changes"),
        ({"changes": [], "max_tokens": 257}, "max_tokens"),
        ({"changes": [], "at": 99}, "at must be"),
    ],
)
def test_bad_changes(tree: Tree, branch: Any, body: dict[str, Any], message: str) -> None:
    assert message in steer(tree, branch, 400, **body)["error"]["message"]
