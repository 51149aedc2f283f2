"""What a request says about where it should go, and who gets it then."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.scale.replicas.asking import Asked, asked_by, replica_of
from unspool.scale.replicas.config import config_from
from unspool.scale.replicas.errors import ReplicaLostError
from unspool.scale.replicas.gathering import joined_branches, joined_metrics
from unspool.scale.replicas.request_router import PolicyRouter
from unspool.scale.routing import session_replica

HEX = "0123456789abcdef01234567"
SYSTEM = {"role": "system", "content": "You are a helpful assistant that answers in verse. " * 8}


def asked(path: str, body: Any = None, method: str = "POST", **headers: str) -> Asked:
    data = json.dumps(body).encode() if body is not None else b""
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return asked_by(method, path, given, data)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_id_of_what_is_kept_names_its_replica():
    assert replica_of(f"branch-ve1wt9qt-{HEX}") == "ve1wt9qt"
    assert replica_of(f"resp_ve1wt9qt_{HEX}") == "ve1wt9qt"
    assert replica_of(f"branch-{HEX}") == "" == replica_of("branch-../../x") == replica_of("")
    found = asked(f"/v1/tree/branch-ve1wt9qt-{HEX}/resume", {})
    assert (found.kind, found.replica) == ("kept", "ve1wt9qt")
    assert asked(f"/v1/responses/resp_ve1wt9qt_{HEX}", method="GET").replica == "ve1wt9qt"
    later = {"input": "and?", "previous_response_id": f"resp_ve1wt9qt_{HEX}"}
    assert asked("/v1/responses", later).replica == "ve1wt9qt"
    assert asked("/v1/responses", {**later, "previous_response_id": 7}).kind != "kept"
    assert asked("/v1/responses/input_tokens", later).replica == "ve1wt9qt"
    thread = {"type": "continue", "previous_message_id": f"msg_ve1wt9qt_{HEX}"}
    assert asked("/v1/messages", {"messages": [], "thread": thread}).replica == "ve1wt9qt"
    assert asked("/v1/tree/nonsense", method="GET").kind == "any"


def test_prompts_that_begin_alike_have_hashes_that_begin_alike():
    first = asked("/v1/chat/completions", {"messages": [SYSTEM, user("a")], "model": "m"})
    other = {"seed": 3, "model": "m", "temperature": 0.3, "messages": [SYSTEM, user("b" * 200)]}
    second = asked("/v1/chat/completions", other)
    common = len(first.hashes) - 1
    assert first.kind == "prompt" and common >= 5
    assert first.hashes[:common] == second.hashes[:common]
    assert len(second.hashes) > len(first.hashes)
    elsewhere = asked("/v1/chat/completions", {**other, "model": "n"})
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
    assert asked(path, body).hashes


def test_what_cannot_be_read_goes_anywhere():
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        assert asked_by("POST", "/v1/completions", {}, body).kind == "any"
    assert asked("/v1/models", method="GET").kind == "any"
    assert asked("/v1/runs", method="GET").kind == "shared"


def test_a_session_stays_where_it_is():
    body = {"messages": [user("hi")]}
    by_key = asked("/v1/chat/completions", {**body, "prompt_cache_key": "k"})
    by_header = asked("/v1/chat/completions", body, x_session_id="k")
    assert (by_key.kind, by_key.session) == (by_header.kind, by_header.session) == ("session", "k")
    policy = PolicyRouter()
    policy.update(["a", "b", "c"])
    favourite = policy.choose(by_key)
    assert {policy.choose(by_header) for _ in range(5)} == {favourite}
    by_key.load = {favourite: 100}
    assert policy.choose(by_key) != favourite


def test_sessions_spread_and_only_those_of_a_lost_replica_move():
    names = ["a", "b", "c", "d"]
    before = {f"s{n}": session_replica(f"s{n}", names) for n in range(200)}
    after = {session: session_replica(session, names[:3]) for session in before}
    assert set(before.values()) == set(names)
    assert all(after[s] == before[s] for s in before if before[s] != "d")


def test_the_policy_keeps_to_what_is_kept_and_avoids_who_was_tried():
    policy = PolicyRouter()
    policy.update(["a", "b"])
    assert policy.choose(Asked("kept", "a", avoid={"a"}, load={"a": 99})) == "a"
    with pytest.raises(ReplicaLostError):
        policy.choose(Asked("kept", "lost"))
    hashes = [1, 2, 3]
    first = policy.choose(Asked("prompt", hashes=hashes))
    assert policy.choose(Asked("prompt", hashes=hashes, load={first: 1})) == first
    (other,) = {"a", "b"} - {first}
    assert policy.choose(Asked("prompt", hashes=hashes, avoid={first})) == other
    assert policy.choose(Asked("prompt", hashes=hashes, avoid={"a", "b"})) in ("a", "b")
    policy.update([other])
    assert policy.choose(Asked("prompt", hashes=hashes)) == other


def test_round_robin_avoids_too():
    policy = PolicyRouter("round-robin")
    policy.update(["a", "b"])
    assert {policy.choose(Asked(avoid={"a"})) for _ in range(4)} == {"b"}
    assert {policy.choose(Asked()) for _ in range(4)} == {"a", "b"}


def test_counters_of_all_replicas_are_told_apart():
    text = (
        b"# HELP n_total Things\n# TYPE n_total counter\n"
        b'n_total{path="/a b",x="} 1"} 2.0\n# HELP g A gauge\n# TYPE g gauge\ng 1.0\n'
    )
    joined = joined_metrics({"one": text, "two": text}).decode().splitlines()
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
    assert [branch["id"] for branch in joined_branches(lists)["data"]] == ["c", "b", "a"]


def test_a_wrong_word_in_the_configuration_is_told():
    with pytest.raises(SettingsError, match="args has 'modles', which is none of models"):
        config_from({"modles": []})
    with pytest.raises(SettingsError, match="settings has 'prot'"):
        config_from({"settings": {"prot": 1}})
    with pytest.raises(SettingsError, match="max_replicas is 1, and replicas 2"):
        config_from({"replicas": 2, "max_replicas": 1})
    with pytest.raises(SettingsError, match="routing is 'random'; it may be prefix or round"):
        config_from({"routing": "random"})
