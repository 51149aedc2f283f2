"""Routing hints of requests, and the routing policy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.scale.replicas.config import replicas_config_from
from unspool.scale.replicas.gateway import ReplicaLostError, merge_branches, merge_metrics
from unspool.scale.replicas.request_router import PolicyRouter
from unspool.scale.replicas.routing import RouteHints, read_hints, replica_of, session_replica

HEX = "0123456789abcdef01234567"
SYSTEM = {"role": "system", "content": "You are a helpful assistant that answers in verse. " * 8}


def hints_of(path: str, body: Any = None, method: str = "POST", **headers: str) -> RouteHints:
    data = json.dumps(body).encode() if body is not None else b""
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return read_hints(method, path, fields, data)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_id_of_what_is_kept_names_its_replica():
    assert replica_of(f"branch-ve1wt9qt-{HEX}") == "ve1wt9qt"
    assert replica_of(f"resp_ve1wt9qt_{HEX}") == "ve1wt9qt"
    assert replica_of(f"branch-{HEX}") == "" == replica_of("branch-../../x") == replica_of("")
    hints = hints_of(f"/v1/tree/branch-ve1wt9qt-{HEX}/resume", {})
    assert (hints.kind, hints.replica) == ("kept", "ve1wt9qt")
    assert hints_of(f"/v1/responses/resp_ve1wt9qt_{HEX}", method="GET").replica == "ve1wt9qt"
    later = {"input": "and?", "previous_response_id": f"resp_ve1wt9qt_{HEX}"}
    assert hints_of("/v1/responses", later).replica == "ve1wt9qt"
    assert hints_of("/v1/responses", {**later, "previous_response_id": 7}).kind != "kept"
    assert hints_of("/v1/responses/input_tokens", later).replica == "ve1wt9qt"
    thread = {"type": "continue", "previous_message_id": f"msg_ve1wt9qt_{HEX}"}
    assert hints_of("/v1/messages", {"messages": [], "thread": thread}).replica == "ve1wt9qt"
    assert hints_of("/v1/tree/nonsense", method="GET").kind == "any"


def test_prompts_that_begin_alike_have_hashes_that_begin_alike():
    first = hints_of("/v1/chat/completions", {"messages": [SYSTEM, user("a")], "model": "m"})
    other = {"seed": 3, "model": "m", "temperature": 0.3, "messages": [SYSTEM, user("b" * 200)]}
    second = hints_of("/v1/chat/completions", other)
    common = len(first.hashes) - 1
    assert first.kind == "prompt" and common >= 5
    assert first.hashes[:common] == second.hashes[:common]
    assert len(second.hashes) > len(first.hashes)
    elsewhere = hints_of("/v1/chat/completions", {**other, "model": "n"})
    assert not set(elsewhere.hashes) & set(second.hashes)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "word " * 40}),
        ("/v1/completions", {"prompt": [*range(100)]}),
        ("/v1/messages", {"system": "word " * 40, "messages": [user("hi")]}),
        ("/api/generate", {"prompt": "word " * 40}),
        ("/api/chat", {"messages": [user("word " * 40)]}),
        ("/v1/responses", {"instructions": "word " * 40, "input": "hi"}),
        ("/v1/tree", {"prompt": "word " * 40}),
    ],
)
def test_every_api_has_its_prompt_found(path: str, body: dict[str, Any]):
    assert hints_of(path, body).hashes


def test_an_unreadable_request_goes_to_any_replica():
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        assert read_hints("POST", "/v1/completions", {}, body).kind == "any"
    assert hints_of("/v1/models", method="GET").kind == "any"
    assert hints_of("/v1/runs", method="GET").kind == "shared"


def test_a_session_stays_where_it_is():
    body = {"messages": [user("hi")]}
    by_key = hints_of("/v1/chat/completions", {**body, "prompt_cache_key": "k"})
    by_header = hints_of("/v1/chat/completions", body, x_session_id="k")
    assert (by_key.kind, by_key.session) == (by_header.kind, by_header.session) == ("session", "k")
    policy = PolicyRouter()
    policy.update(["a", "b", "c"])
    replica = policy.choose(by_key)
    assert {policy.choose(by_header) for _ in range(5)} == {replica}
    by_key.load = {replica: 100}
    assert policy.choose(by_key) != replica


def test_sessions_spread_and_only_those_of_a_lost_replica_move():
    names = ["a", "b", "c", "d"]
    before = {f"s{n}": session_replica(f"s{n}", names) for n in range(200)}
    after = {session: session_replica(session, names[:3]) for session in before}
    assert set(before.values()) == set(names)
    assert all(after[s] == before[s] for s in before if before[s] != "d")


def test_the_policy_keeps_to_what_is_kept_and_avoids_who_was_tried():
    policy = PolicyRouter()
    policy.update(["a", "b"])
    assert policy.choose(RouteHints("kept", "a", avoid={"a"}, load={"a": 99})) == "a"
    with pytest.raises(ReplicaLostError):
        policy.choose(RouteHints("kept", "lost"))
    hashes = [1, 2, 3]
    first = policy.choose(RouteHints("prompt", hashes=hashes))
    assert policy.choose(RouteHints("prompt", hashes=hashes, load={first: 1})) == first
    (other,) = {"a", "b"} - {first}
    assert policy.choose(RouteHints("prompt", hashes=hashes, avoid={first})) == other
    assert policy.choose(RouteHints("prompt", hashes=hashes, avoid={"a", "b"})) in ("a", "b")
    policy.update([other])
    assert policy.choose(RouteHints("prompt", hashes=hashes)) == other


def test_round_robin_avoids_too():
    policy = PolicyRouter("round-robin")
    policy.update(["a", "b"])
    assert {policy.choose(RouteHints(avoid={"a"})) for _ in range(4)} == {"b"}
    assert {policy.choose(RouteHints()) for _ in range(4)} == {"a", "b"}


def test_metrics_are_labelled_by_replica():
    text = (
        b"# HELP n_total Things\n# TYPE n_total counter\n"
        b'n_total{path="/a b",x="} 1"} 2.0\n# HELP g A gauge\n# TYPE g gauge\ng 1.0\n'
    )
    joined = merge_metrics({"one": text, "two": text}).decode().splitlines()
    assert joined == [
        "# HELP n_total Things",
        "# TYPE n_total counter",
        'n_total{replica="one",path="/a b",x="} 1"} 2.0',
        'n_total{replica="two",path="/a b",x="} 1"} 2.0',
        "# HELP g A gauge",
        "# TYPE g gauge",
        'g{replica="one"} 1.0',
        'g{replica="two"} 1.0',
    ]


def test_branches_of_all_replicas_the_newest_first():
    lists = [
        json.dumps({"data": [{"id": "b", "created": 2}, {"id": "a", "created": 1}]}).encode(),
        json.dumps({"data": [{"id": "c", "created": 3}]}).encode(),
    ]
    assert [branch["id"] for branch in merge_branches(lists)["data"]] == ["c", "b", "a"]


def test_an_unknown_name_in_the_configuration_is_refused():
    with pytest.raises(SettingsError, match="args has unknown name 'modles'; choose from models"):
        replicas_config_from({"modles": []})
    with pytest.raises(SettingsError, match="settings has unknown name 'prot'"):
        replicas_config_from({"settings": {"prot": 1}})
    with pytest.raises(SettingsError, match=r"max_replicas must be >= replicas \(2\), got 1"):
        replicas_config_from({"replicas": 2, "max_replicas": 1})
    with pytest.raises(SettingsError, match="routing must be prefix or round-robin, got 'random'"):
        replicas_config_from({"routing": "random"})
