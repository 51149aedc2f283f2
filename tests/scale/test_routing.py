"""The routing policy: prefixes, load, forgetting; no Ray."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.scale import RayMissingError, require_ray
from unspool.scale.replicas.config import replicas_config_from
from unspool.scale.replicas.gateway import ReplicaLostError, merge_branches, merge_metrics
from unspool.scale.replicas.routing import (
    NoReplicaError,
    PrefixRouter,
    RoundRobin,
    RouteHints,
    page_hashes,
    read_hints,
    replica_of,
    session_replica,
    text_hashes,
)

SYSTEM = list(range(100))


def test_hashes_are_of_whole_pages_and_all_before_them():
    first = page_hashes(SYSTEM)
    assert len(first) == 6  # 100 tokens are six pages of 16, and a rest
    assert page_hashes([*SYSTEM[:64], 7, *SYSTEM[65:]])[:4] == first[:4]
    changed = page_hashes([7, *SYSTEM[1:]])
    assert not set(changed) & set(first)  # the same later pages after another beginning
    assert page_hashes([]) == [] == page_hashes([1] * 15)
    assert page_hashes([-1] * 16) != page_hashes([1] * 16)
    assert text_hashes("a" * 130) == text_hashes(b"a" * 130)
    assert len(text_hashes("ä" * 64)) == 2  # bytes, not letters
    assert text_hashes("\ud800" * 64)  # half a pair, as JSON may hold


def test_hashes_are_the_same_in_every_process():
    code = "from unspool.scale.replicas.routing import page_hashes; print(page_hashes(range(32)))"
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert runs == {f"{page_hashes(range(32))}\n"}


def test_the_longest_prefix_wins():
    router = PrefixRouter(["a", "b", "c"])
    router.record("a", page_hashes(SYSTEM[:32]))
    router.record("b", page_hashes(SYSTEM[:64]))
    assert router.choose(page_hashes(SYSTEM), {}) == "b"
    assert router.cached_pages(page_hashes(SYSTEM)) == {"a": 2, "b": 4}
    assert router.choose(page_hashes([*SYSTEM[:32], *range(500, 532)]), {"b": 1}) == "a"


def test_a_loaded_replica_loses_even_with_the_prefix():
    router = PrefixRouter(["a", "b"])
    prompt = page_hashes(SYSTEM)
    router.record("a", prompt)
    assert router.choose(prompt, {"a": 1, "b": 0}) == "a"
    assert router.choose(prompt, {"a": 3, "b": 0}) == "b"
    assert router.choose(prompt, {"a": 5, "b": 2}) == "a"
    assert router.choose(prompt, {"a": 50, "b": 30}) == "a"
    assert router.choose(prompt, {"a": 90, "b": 20}) == "b"
    assert PrefixRouter(["a", "b"], slack=0).choose(prompt, {"a": 1, "b": 0}) == "b"


def test_a_few_words_in_common_pull_nothing_together():
    router = PrefixRouter(["a", "b"])
    router.record("a", page_hashes(SYSTEM[:16]))
    long = page_hashes([*SYSTEM[:16], *range(1000, 1000 + 16 * 19)])
    assert router.choose(long, {"a": 1, "b": 0}) == "b"


def test_without_a_prefix_the_least_loaded_and_then_the_emptiest():
    router = PrefixRouter(["a", "b", "c"])
    new = page_hashes(range(200, 300))
    assert router.choose(new, {"a": 2, "b": 1, "c": 4}) == "b"
    router.record("a", page_hashes(SYSTEM))
    router.record("b", page_hashes(SYSTEM[:16]))
    assert router.choose(new, {}) == "c"


def test_new_conversations_spread_and_stay():
    """Sixteen chats over four replicas, one turn after the other: each stays where it started."""
    router = PrefixRouter(map(str, range(4)))
    where: dict[int, set[str]] = {}
    for turn in range(1, 6):
        for chat in range(16):
            prompt = page_hashes([chat * 1000 + token for token in range(turn * 40)])
            replica = router.choose(prompt, {})
            router.record(replica, prompt)
            where.setdefault(chat, set()).add(replica)
    assert all(len(replicas) == 1 for replicas in where.values())
    assert len(set().union(*where.values())) == 4


def test_a_new_replica_is_not_sent_all_that_comes():
    router = PrefixRouter(["old", "older"])
    prompt = page_hashes(SYSTEM)
    for _ in range(200):
        router.choose(prompt, {})
    router.add("new")
    load = Counter(old=10, older=10)
    for _ in range(12):
        load[router.choose(prompt, load)] += 1
    assert 1 <= load["new"] <= 4, load  # and not the first ten of them
    for _ in range(100):  # as its requests are answered, it becomes one like the others
        assert router.choose(prompt, {"old": 10, "older": 10}) == "new"
    assert router.choose(prompt, {"old": 10, "older": 10, "new": 8}) == "new"


def test_forgetting_begins_at_the_ends():
    router = PrefixRouter(["a"], capacity_pages=4)
    first, second = page_hashes(range(64)), page_hashes(range(100, 132))
    router.record("a", first)
    router.record("a", second)
    assert router.cached_pages(first) == {"a": 2}
    assert router.cached_pages(second) == {"a": 2}
    router.record("a", page_hashes(range(160)))  # longer than all that is remembered
    assert router.cached_pages(page_hashes(range(160))) == {"a": 4}
    router = PrefixRouter(["a"], capacity_pages=2)
    for page in (1, 2, 1, 3):  # what was used last is forgotten last
        router.record("a", [page])
    assert router.cached_pages([1]) == {"a": 1} and router.cached_pages([2]) == {}


def test_a_lost_replica_is_never_chosen_and_knows_nothing_when_it_comes_back():
    router = PrefixRouter(["a", "b"])
    prompt = page_hashes(SYSTEM)
    router.record("a", prompt)
    router.remove("a")
    router.remove("a")
    router.record("a", prompt)
    assert router.choose(prompt, {"b": 99}) == "b"
    router.add("a")
    assert router.cached_pages(prompt) == {}
    router.remove("a")
    router.remove("b")
    with pytest.raises(NoReplicaError):
        router.choose(prompt, {})


def test_the_books_agree_after_many_changes():
    """Pages by replica and replicas by page agree after random changes."""
    draw = random.Random(1)
    router = PrefixRouter(["a", "b", "c"], capacity_pages=50)
    for _ in range(2000):
        replica = draw.choice("abc")
        match draw.randrange(20):
            case 0:
                router.remove(replica)
            case 1:
                router.add(replica)
            case _:
                family = draw.randrange(8)
                length = draw.randrange(1, 12)
                router.record(replica, page_hashes([family] * (16 * length)))
    pages, holders = router._pages, router._holders
    assert all(len(cached) <= 50 for cached in pages.values())
    assert {(r, p) for r, cached in pages.items() for p in cached} == {
        (r, p) for p, replicas in holders.items() for r in replicas
    }


def test_round_robin_goes_around():
    router = RoundRobin(["a", "b"])
    router.add("c")
    router.add("c")
    assert [router.choose([], {}) for _ in range(4)] == ["a", "b", "c", "a"]
    router.remove("b")
    router.remove("x")
    assert {router.choose([], {}) for _ in range(2)} == {"a", "c"}
    router.record("a", [1])
    with pytest.raises(NoReplicaError):
        RoundRobin().choose([], {})
    policy = make_policy("a", "b", routing="round-robin")
    assert {policy.choose(RouteHints(avoid={"a"})) for _ in range(4)} == {"b"}
    assert {policy.choose(RouteHints()) for _ in range(4)} == {"a", "b"}


# -- Routing hints of requests, and the routing policy --------------------------------------------


HEX = "0123456789abcdef01234567"
VERSE = {"role": "system", "content": "You are a helpful assistant that answers in verse. " * 8}


def hints_of(path: str, body: Any = None, method: str = "POST", **headers: str) -> RouteHints:
    data = json.dumps(body).encode() if body is not None else b""
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return read_hints(method, path, fields, data)


def make_policy(*replicas: str, routing: str = "prefix") -> Any:
    from unspool.scale.replicas.request_router import PolicyRouter  # imports Ray: seconds

    policy = PolicyRouter(routing)
    policy.update(replicas)
    return policy


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
    first = hints_of("/v1/chat/completions", {"messages": [VERSE, user("a")], "model": "m"})
    messages = [VERSE, user("b" * 200)]
    other = {"seed": 3, "model": "m", "temperature": 0.3, "messages": messages}
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
    policy = make_policy("a", "b", "c")
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
    policy = make_policy("a", "b")
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
    first = [{"id": "b", "created": 2}, {"id": "a", "created": 1}]
    last = {"data": [{"id": "c", "created": 3}], "next": None}
    lists = [json.dumps(part).encode() for part in ({"data": first, "next": None}, last)]
    merged = merge_branches(lists, 3)
    assert [branch["id"] for branch in merged["data"]] == ["c", "b", "a"]
    assert merged["next"] is None
    page = merge_branches(lists, 2)
    assert [branch["id"] for branch in page["data"]] == ["c", "b"] and page["next"] == "2:b"
    longer = json.dumps({"data": first, "next": "1:a"}).encode()
    assert merge_branches([longer, lists[1]], 3)["next"] == "1:a"


def test_an_unknown_name_in_the_configuration_is_refused():
    for wrong, message in (
        ({"modles": []}, "args has unknown name 'modles'; choose from models"),
        ({"settings": {"prot": 1}}, "settings has unknown name 'prot'"),
        ({"replicas": 2, "max_replicas": 1}, r"max_replicas must be >= replicas \(2\), got 1"),
        ({"routing": "random"}, "routing must be prefix or round-robin, got 'random'"),
    ):
        with pytest.raises(SettingsError, match=message):
            replicas_config_from(wrong)


# -- Without Ray everything else works, and an error message says what to install -----------------


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    require_ray()
    monkeypatch.setattr("unspool.scale.find_spec", lambda name: None)
    message = r"--replicas needs Ray.*pip install 'unspool\[ray\]'"
    with pytest.raises(RayMissingError, match=message):
        require_ray("--replicas")


def test_ray_is_not_imported_before_use():
    code = (
        "import sys, unspool; from unspool.cli.main import _exit_code; _exit_code(['--help']); "
        "sys.exit('ray' in sys.modules or 'unspool.scale.replicas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
