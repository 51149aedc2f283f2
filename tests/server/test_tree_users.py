"""`/v1/tree` and `/v1/responses` with several users and concurrent requests: each user sees what is
theirs, no acknowledged change is lost, and memory is the sum of what is stored."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, running
from helpers.tree_client import Tree
from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.lm import LanguageModel
from unspool.sampling.chain import StageReport
from unspool.server.http.errors import ApiError
from unspool.server.runtime.registry import ModelEntry
from unspool.server.tree import library as stored
from unspool.server.tree.branch_json import branch_store
from unspool.server.tree.branches import (
    ExtraSettings,
    TreeBranch,
    TreePrompt,
    fork_branch,
    step_weight,
)
from unspool.server.tree.library import Branches
from unspool.server.tree.writing import BranchTexts, BranchWriting
from unspool.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from lib.models import VOCABULARY, NullLoaded, write_tokenizer

ALICE, BOB = "key-of-alice", "key-of-bob-too"
WORDS = ["abc", "de", "x"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that computes nothing, and so costs nothing."""
    folder = tmp_path_factory.mktemp("null")
    write_tokenizer(folder, VOCABULARY)
    loaded: Any = NullLoaded(0.001)
    return LanguageModel(loaded, Tokenizer.from_file(folder))


@pytest.fixture(scope="module")
def serving(small: Any) -> Iterator[Running]:
    with running([ModelEntry("small", lambda: small, 1)], api_keys=(ALICE, BOB)) as server:
        yield server


def tree_of(server: Running, key: str) -> Tree:
    tree = Tree(server.url)
    tree.http.headers["x-api-key"] = key
    return tree


# -- users -----------------------------------------------------------------------------------

BODIES = {  # what a verb needs besides the id
    "rewind": {"to": 0}, "choose": {"text": "x"}, "append": {"text": "x"},
    "fill": {"first": 0, "last": 1}, "replace": {"changes": [{"first": 0, "last": 1, "text": "x"}]},
    "edit": {"first": 9, "last": 10, "text": "x"}, "steer": {"changes": []},
}  # fmt: skip


def test_a_user_sees_only_their_own_branches_and_responses(serving, document):
    alice, bob = tree_of(serving, ALICE), tree_of(serving, BOB)
    branch = alice.ask("POST", "", json={"prompt": "The union"})
    alice.do("append", branch, text=" of states")
    request_body = {"input": "a secret", "max_output_tokens": 2}
    response = alice.http.post("/v1/responses", json=request_body).json()
    assert [item["id"] for item in alice.ask("GET", "")["data"]] == [branch["id"]]
    assert bob.ask("GET", "")["data"] == []
    routes = [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        if path.startswith(("/v1/tree/", "/v1/responses/")) and "{" in path
        for method in methods
    ]
    assert len(routes) > 15
    for method, path in routes:
        names = (branch["id"], "branch-0") if "tree" in path else (response["id"], "resp_0")
        body = BODIES.get(path.rpartition("/")[2], {}) if method in ("POST", "PATCH") else None
        answers = [
            bob.http.request(method, re.sub(r"\{.*\}", name, path), json=body) for name in names
        ]
        reply = [a.text.replace(name, "ID") for a, name in zip(answers, names, strict=True)]
        assert answers[0].status_code == 404 and reply[0] == reply[1], (method, path)
    extra = {"input": "more", "previous_response_id": response["id"], "max_output_tokens": 2}
    assert bob.http.post("/v1/responses", json=extra).status_code == 404
    assert alice.http.post("/v1/responses", json=extra).status_code == 200
    assert alice.get(branch)["length"] > 0
    alice.ask("DELETE", f"/{branch['id']}")


# -- memory ----------------------------------------------------------------------------------


def branch_of(lm: Any, *steps: Step) -> TreeBranch:
    generation = lm.prepare_generation([5, 6])
    generation.steps.extend(steps)
    prompt = TreePrompt(generation.prompt, "ab", lm.tokenizer, frozenset())
    return TreeBranch("small", prompt, generation, ExtraSettings(), None)


def step(stages: int = 0) -> Step:
    report = StageReport("top_p", 1, 2, 0.9, 0, ())
    return Step(7, b"a", "a", -1.0, 3, stages=(report,) * stages)


def add(store: Branches, *branches: TreeBranch) -> None:
    asyncio.run(store.add(*branches))


def delete(store: Branches, branch: TreeBranch) -> None:
    asyncio.run(store.delete(branch))


def kept_weight(store: Branches) -> int:
    """Memory of all that the store keeps, counted from nothing."""
    branches = list(store.all.values())
    steps = {id(step): step for branch in branches for step in branch.steps}
    prompts = {id(branch.prompt): branch.prompt for branch in branches}
    settings = {id(branch.extra_settings): branch.extra_settings for branch in branches}
    parts: list[Any] = [*prompts.values(), *settings.values(), *branches]
    return sum(map(step_weight, steps.values())) + sum(part.weight for part in parts)


def test_memory_counts_every_step_by_itself(small: Any) -> None:
    store = Branches(10)
    branch = branch_of(small, *(step(stages=8) for _ in range(100)))
    add(store, branch)
    before = store.weight
    assert before > 100 * 8 and before == kept_weight(store)
    branch.replace_text(small.attach(branch.generation).choose([9]), 100, "append")
    assert before < store.weight < before + 100 and store.weight == kept_weight(store)
    # What a fork still keeps is not free when its parent lets it go.
    fork = fork_branch(branch, branch.generation.rewind(90), 90)
    add(store, fork)
    shared = store.weight
    assert shared < before + 1000 and shared == kept_weight(store)
    branch.replace_text(branch.generation.rewind(0), 0, "rewind")
    assert before * 0.8 < store.weight < shared and store.weight == kept_weight(store)
    delete(store, branch)
    assert store.weight == kept_weight(store) > before * 0.8
    delete(store, fork)
    assert store.weight == 0 == store.memory.weight


def test_memory_counts_settings_and_is_checked_by_every_verb(small, serving, monkeypatch):
    store = Branches(10)
    branch = branch_of(small)
    branch.extra_settings = ExtraSettings({"grammar": "x" * 1_000_000})
    add(store, branch, fork_branch(branch, branch.generation, 0))
    assert 10_000 <= store.weight < 11_000  # once, though two branches have it
    alice = tree_of(serving, ALICE)
    created = alice.ask("POST", "", json={"prompt": "The union"})
    alice.do("append", created, text=" of states")
    monkeypatch.setattr(stored, "MAX_WEIGHT", 1)
    for verb in ("append", "fork", "choose", "replace", "resume"):
        reply = alice.do(verb, created, 429, **BODIES.get(verb, {}))
        assert reply["error"]["code"] == "branches_full"
    alice.do("choose", created, 429, text="x", fork=False)
    alice.do("rewind", created, to=0)
    alice.ask("DELETE", f"/{created['id']}")


# -- deleted meanwhile -----------------------------------------------------------------------


def test_a_fork_of_a_branch_that_was_deleted_meanwhile_has_a_parent_that_exists(small: Any) -> None:
    store = Branches(10)
    root = branch_of(small, *(step() for _ in range(9)))
    add(store, root)
    inner = fork_branch(root, root.generation.rewind(5), 5)
    add(store, inner)
    late, later = (fork_branch(inner, inner.generation.rewind(4), 4) for _ in range(2))
    delete(store, inner)
    add(store, late)
    assert late.parent == root.id and late.forked_at == 4
    delete(store, root)
    assert late.parent is None and late.forked_at is None
    add(store, later)
    assert later.parent is None and later.forked_at is None


def test_branches_are_stored_all_or_none(small: Any) -> None:
    store = Branches(3)
    first, second = branch_of(small), branch_of(small)
    add(store, first, second)
    with first.locked(), second.locked(), pytest.raises(ApiError):
        add(store, branch_of(small), branch_of(small))
    assert len(store.all) == 2 and store.weight == kept_weight(store)


def test_what_could_not_begin_is_seen_by_nobody(serving, monkeypatch):
    """While the texts of a resume start, and when that fails, no half-made branch is listed."""
    alice = tree_of(serving, ALICE)
    created = alice.ask("POST", "", json={"prompt": "The union"})
    listed: list[int] = []

    async def fails(self: BranchTexts) -> None:
        listed.append(len(branch_store(serving.state).all))
        raise ApiError(503, "no")

    with monkeypatch.context() as patch:
        patch.setattr(BranchTexts, "start", fails)
        alice.do("resume", created, 503, n=3)
    assert listed == [1] and [item["id"] for item in alice.ask("GET", "")["data"]] == [
        created["id"]
    ]
    forks = alice.do("resume", created, n=3, max_tokens=1)
    assert {item["parent"] for item in forks} == {created["id"]}
    for item in (created, *forks):
        alice.ask("DELETE", f"/{item['id']}")


def test_a_change_of_a_branch_that_is_deleted_meanwhile_is_not_acknowledged(serving, monkeypatch):
    alice = tree_of(serving, ALICE)
    for verb, params in (
        ("append", {"text": "x"}),
        ("choose", {"text": "x", "fork": False}),
        ("replace", {**BODIES["replace"], "fork": False}),
        ("edit", {**BODIES["edit"], "fork": False}),
    ):
        created = alice.ask("POST", "", json={"prompt": "The union"})
        alice.do("append", created, text=" of states")

        method = "edited" if verb in ("replace", "edit") else "choose"
        change = getattr(Generation, method)

        def deletes(*args: Any, run: Any = change, name: str = created["id"], **kw: Any) -> Any:
            tree_of(serving, ALICE).ask("DELETE", f"/{name}")
            return run(*args, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(Generation, method, deletes)
            assert alice.do(verb, created, 404, **params)["error"]["code"] == "branch_not_found"
    assert branch_store(serving.state).weight == 0


def test_a_text_that_has_finished_is_not_interrupted_by_a_stop(small: Any) -> None:
    """A stop may come between the last step and the news that the engine is done."""
    last = replace(step(), finish_reason="length")

    async def finish_reason(*steps: Step) -> str | None:
        delivered = asyncio.Event()

        stream = SimpleNamespace(
            notes=[], stopped_by=None, drafted=0, accepted=0, close=lambda: None
        )

        class Endless:
            def __init__(self) -> None:
                self.drafts = [branch.generation]
                self.texts = {0: SimpleNamespace(stream=stream, ended=False, reused=0)}
                self.drafts = [branch.generation]

            def watch_progress(self, report: Any) -> None: ...

            async def start(self) -> None:
                await self.started(0, branch.generation)

            async def deliver(self, sink: Any) -> None:
                sink([(0, item) for item in steps])
                delivered.set()
                await asyncio.Event().wait()

            def close(self) -> None: ...

        branch = branch_of(small, step())
        texts: Any = Endless()
        async with BranchWriting(texts, [branch], None, Branches(10)) as writing:
            await delivered.wait()
            while len(branch.steps) <= len(steps):
                await asyncio.sleep(0)
            writing.stop(branch)
            await writing.over()
        assert [*branch.steps[1:]] == [*steps]
        return branch.finish_reason

    assert asyncio.run(finish_reason(step(), last)) == "length"
    assert asyncio.run(finish_reason(step(), step())) == "interrupted"


# -- concurrent random operations ------------------------------------------------------------


class Model:
    """A branch of the sequential model, and what every verb makes of it."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] | None = tokens  # None: deleted

    def apply(self, verb: str, params: dict[str, Any], reply: Any, encode: Any) -> bool:
        """Do what was acknowledged; False if it cannot have happened in this state."""
        tokens = self.tokens
        (change,) = params.get("changes", [{"first": 0, "last": 0, "text": ""}])
        first, last = change["first"], change["last"]
        places = [params.get("at", 0), params.get("to", 0), last]
        if tokens is None or max(places) > len(tokens):
            return False
        if verb == "delete":
            self.tokens = None
            return True
        if verb == "resume" and len(reply) != len(tokens) + params["written"]:
            return False
        created = {
            "append": [*tokens, *params.get("tokens", ())],
            "rewind": tokens[: params.get("to")],
            "choose": [*tokens[: params.get("at")], params.get("token")],
            "replace": tokens[:first] + encode(change["text"]) + tokens[last:],
            "fork": tokens[: params.get("at")],
            "resume": [*tokens, *reply[len(tokens) :]],
        }[verb]
        if created != reply:
            return False
        if not params.get("fork", verb == "fork"):
            self.tokens = created
        return True


def random_request(rng: random.Random, length: int) -> tuple[str, dict[str, Any]]:
    """A verb and its body, for a branch of about this length."""
    verb = rng.choice(["append", "append", "rewind", "rewind", "choose", "replace", "replace",
                       "fork", "resume", "delete"])  # fmt: skip
    at = rng.randint(0, length)
    fork = rng.random() < 0.3
    if verb == "append":
        return verb, {"tokens": [rng.randint(10, 200) for _ in range(rng.randint(1, 3))]}
    if verb == "rewind":
        return verb, {"to": at}
    if verb == "choose":
        return verb, {"at": at, "token": rng.randint(10, 200), "fork": fork}
    if verb == "replace" and length:
        first = rng.randrange(length)
        last = rng.randint(first + 1, length)
        change = {"first": first, "last": last, "text": rng.choice(WORDS)}
        return verb, {"changes": [change], "fork": fork}
    if verb == "fork":
        return verb, {"at": at}
    if verb == "delete" and rng.random() < 0.5:
        return verb, {}
    return "resume", {"max_tokens": 1, "temperature": 0, "end": False}


class Users:
    """Two users who send random requests at the same time, and what they must then see."""

    def __init__(self, server: Running, seed: int, encode: Any) -> None:
        self.rng, self.server, self.encode = random.Random(seed), server, encode
        self.tokens: dict[str, list[int]] = {}  # of each branch
        self.owners: dict[str, str] = {}
        self.statuses: list[int] = []

    async def ask(self, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"x-api-key": key}
        answer = await self.http.request(method, f"/v1/tree{path}", json=body, headers=headers)
        assert answer.status_code in (200, 400, 404, 409), answer.text
        self.statuses.append(answer.status_code)
        return answer

    async def tokens_of(self, identity: str, key: str) -> list[int]:
        answer = await self.ask(key, "GET", f"/{identity}")
        assert answer.status_code == 200
        return [step["token"] for step in answer.json()["steps"]]

    async def play(self, rounds: int) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as self.http:
            for _ in range(rounds):
                while len(self.tokens) < 3:
                    await self.create()
                await self.round()
            for identity, key in list(self.owners.items()):
                await self.ask(key, "DELETE", f"/{identity}")
        assert branch_store(self.server.state).weight == 0

    async def create(self) -> None:
        key = self.rng.choice([ALICE, BOB])
        created = (await self.ask(key, "POST", "", {"prompt": [11, 12, 13]})).json()
        tokens = [self.rng.randint(10, 200) for _ in range(8)]
        await self.ask(key, "POST", f"/{created['id']}/append", {"tokens": tokens})
        self.tokens[created["id"]], self.owners[created["id"]] = tokens, key

    async def round(self) -> None:
        """Send parallel requests for two branches; then all replies must be explained."""
        names = self.rng.sample(sorted(self.tokens), 2)
        body = [
            (name, *random_request(self.rng, len(self.tokens[name])))
            for name in names
            for _ in range(self.rng.randint(2, 4))
        ]
        self.rng.shuffle(body)
        listing = [self.ask(key, "GET", "") for key in (ALICE, BOB)]
        stranger = {ALICE: BOB, BOB: ALICE}[self.owners[names[0]]]
        answers = await asyncio.gather(
            *(self.send(*item) for item in body),
            *listing,
            self.ask(stranger, "DELETE", f"/{names[0]}"),
        )
        assert answers[-1].status_code == 404
        acknowledged: dict[str, list[tuple[str, Any, Any]]] = {name: [] for name in names}
        for (name, verb, params), answer in zip(body, answers, strict=False):
            if answer.status_code != 200:
                continue
            reply = answer.json()
            result: list[int] = []
            if verb != "delete":
                if reply["id"] != name:
                    self.owners[reply["id"]] = self.owners[name]
                    result = self.tokens[reply["id"]] = await self.tokens_of(
                        reply["id"], self.owners[name]
                    )
                else:
                    result = [step["token"] for step in reply["steps"]]
            acknowledged[name].append((verb, params, (reply, result)))
        for name, done in acknowledged.items():
            await self.check(name, done)
        await self.check_lists()
        store = branch_store(self.server.state)
        assert store.weight == kept_weight(store)

    async def send(self, name: str, verb: str, params: dict[str, Any]) -> httpx.Response:
        if verb == "delete":
            return await self.ask(self.owners[name], "DELETE", f"/{name}")
        return await self.ask(self.owners[name], "POST", f"/{name}/{verb}", params)

    async def check(self, name: str, done: list[tuple[str, Any, Any]]) -> None:
        """Some order of what was acknowledged leads to every answer and to what stands there."""
        is_deleted = any(verb == "delete" for verb, *_ in done)
        now = None if is_deleted else await self.tokens_of(name, self.owners[name])
        for order in itertools.permutations(done):
            model = Model(self.tokens[name])
            if all(self.explained(model, name, *item) for item in order) and model.tokens == now:
                break
        else:
            observed = [
                (verb, params, reply.get("since"), new) for verb, params, (reply, new) in done
            ]
            raise AssertionError(f"{self.tokens[name]} became {now} by {observed}")
        if now is None:
            del self.tokens[name], self.owners[name]
        else:
            self.tokens[name] = now

    def explained(self, model: Model, name: str, verb: str, params: Any, outcome: Any) -> bool:
        reply, result = outcome
        if verb != "delete" and reply["id"] == name:  # the reply has only the new steps
            before = model.tokens
            if before is None or reply["since"] > len(before):
                return False
            result = [*before[: reply["since"]], *result]
            if verb == "resume":  # one token, unless a delete has stopped it
                params = {"written": 0 if reply["finish_reason"] == "interrupted" else 1}
        return model.apply(verb, params, result, self.encode)

    async def check_lists(self) -> None:
        for key in (ALICE, BOB):
            listed = (await self.ask(key, "GET", "")).json()["data"]
            names = {item["id"] for item in listed}
            assert names == {name for name, owner in self.owners.items() if owner == key}
            assert {item["parent"] for item in listed} <= {None, *names}
            assert all(item["length"] == len(self.tokens[item["id"]]) for item in listed)


def test_concurrent_random_operations_are_as_if_in_some_order(serving: Running, small: Any) -> None:
    assert not branch_store(serving.state).all
    users = Users(serving, 0, small.tokenizer.encode)
    asyncio.run(users.play(rounds=25))
    assert {200, 409} <= {*users.statuses}
