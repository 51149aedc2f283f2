"""The routing policy: prefixes, load, forgetting; no Ray."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest

from unspool.scale.replicas.routing import (
    NoReplicaError,
    PrefixRouter,
    RoundRobin,
    page_hashes,
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


def test_what_was_used_last_is_forgotten_last():
    router = PrefixRouter(["a"], capacity_pages=2)
    first, second, third = ([page] for page in (1, 2, 3))
    for pages in (first, second, first, third):
        router.record("a", pages)
    assert router.cached_pages(first) == {"a": 1} and router.cached_pages(second) == {}


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
