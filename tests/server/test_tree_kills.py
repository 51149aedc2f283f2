"""The server is killed (`kill -9`) at random moments: all that it has acknowledged is there after a
restart, and each text continues as one that was never interrupted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.killed_server import KilledServers, killed_servers
from helpers.tree_client import Tree, read

PROMPT = [11, 12, 13, 14]
OPTIONS = {"temperature": 0.9, "end": False, "top": 2}


class Client:
    """Sends random changes, and knows what each branch may be by what was acknowledged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokens: dict[str, list[int]] = {}  # acknowledged, by branch
        self.seeds: dict[str, int | None] = {}  # of branches that were not edited; else None
        self.names: dict[str, str] = {}
        self.titles: dict[str, str] = {}  # of sessions
        self.pending: tuple[str, str, Any] | None = None  # the change that was not acknowledged yet
        self.num_changes = self.num_tokens = 0

    def play(self, tree: Tree) -> None:
        """Send changes until the server is killed."""
        try:
            while True:
                self.change(tree)
                self.pending = None
                self.num_changes += 1
        except httpx.HTTPError:
            pass

    def change(self, tree: Tree) -> None:
        rng = self.rng
        verb = rng.choice(["create", "resume", "resume", "resume", "append", "rewind", "fork",
                           "name", "title", "delete"])  # fmt: skip
        if len(self.tokens) > 20:  # so that a round stays short
            verb = "delete"
        if verb == "create" or not self.tokens:
            seed = rng.randrange(1 << 16)
            session = rng.choice([None, *self.titles])
            body = {"prompt": PROMPT, "seed": seed, "session": session, **OPTIONS}
            branch = tree.ask("POST", "", json=body)
            self.tokens[branch["id"]], self.seeds[branch["id"]] = [], seed
            return
        name = rng.choice(sorted(self.tokens))
        tokens = self.tokens[name]
        if verb == "title":
            title = f"title {rng.random()}"
            session = tree.ask("POST", "/sessions", json={"title": title})
            self.titles[session["id"]] = title
        elif verb == "resume":
            self.pending = (name, "resume", None)
            with tree.live({"id": name}, max_tokens=rng.randint(1, 30)) as answer:
                for event, data, _ in read(answer):
                    if event == "step":
                        tokens.append(data["token"])
                        self.num_tokens += 1
                    elif event == "rewind":
                        del tokens[data["to"] :]
        elif verb == "append":
            added = [rng.randint(10, 200) for _ in range(3)]
            self.pending = (name, "edit", [*tokens, *added])
            tree.ask("POST", f"/{name}/append", json={"tokens": added})
            self.tokens[name], self.seeds[name] = [*tokens, *added], None
        elif verb == "rewind":
            to = rng.randint(0, len(tokens))
            self.pending = (name, "edit", tokens[:to])
            tree.ask("POST", f"/{name}/rewind", json={"to": to})
            self.tokens[name] = tokens[:to]
        elif verb == "fork":
            at = rng.randint(0, len(tokens))
            fork = tree.ask("POST", f"/{name}/fork", json={"at": at})
            self.tokens[fork["id"]], self.seeds[fork["id"]] = tokens[:at], self.seeds[name]
        elif verb == "name":
            self.names.pop(name, None)
            label = f"name {rng.random()}"
            tree.ask("PATCH", f"/{name}", json={"name": label})
            self.names[name] = label
        elif len(self.tokens) > 6:
            self.pending = (name, "delete", None)
            tree.ask("DELETE", f"/{name}")
            del self.tokens[name]
            self.names.pop(name, None)

    def check(self, tree: Tree, lm: Any) -> None:
        """Compare everything with what was acknowledged, and continue from what is there."""
        pending, self.pending = self.pending, None
        stored = {item["id"]: item for item in tree.ask("GET", "", params={"limit": 1000})["data"]}
        for name in list(self.tokens):
            expected = self.tokens[name]
            if name not in stored:
                assert pending is not None and pending[:2] == (name, "delete"), name
                del self.tokens[name]
                self.names.pop(name, None)
                continue
            branch = tree.get({"id": name})
            tokens = [step["token"] for step in branch["steps"]]
            if pending is not None and pending[0] == name and tokens != expected:
                if pending[1] == "resume":  # stored, and not yet sent
                    assert tokens[: len(expected)] == expected
                else:
                    assert tokens == pending[2]
                    if len(tokens) > len(expected):
                        self.seeds[name] = None
            else:
                assert tokens == expected, name
            self.tokens[name] = tokens
            if name in self.names:
                assert branch["name"] == self.names[name]
            seed = self.seeds[name]
            if seed is not None and tokens:
                complete = lm.generate(PROMPT, max_tokens=len(tokens), seed=seed, **OPTIONS)
                assert tokens == complete.tokens, "not the text of an uninterrupted run"
        for identity, title in self.titles.items():
            assert tree.ask("GET", f"/sessions/{identity}")["title"] == title


def kill_rounds(servers: KilledServers, lm: Any, rounds: int, seed: int) -> Client:
    client = Client(seed)
    for _ in range(rounds):
        pid, url = servers.start()
        tree = Tree(url)
        client.check(tree, lm)
        delay = client.rng.random() ** 2 * 0.9

        def kill(pid: int = pid, delay: float = delay) -> None:
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):  # the test has failed meanwhile
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        client.play(tree)
        killer.join()
        tree.http.close()
    _, url = servers.start()
    tree = Tree(url)
    client.check(tree, lm)
    tree.http.close()
    assert client.num_changes and client.num_tokens
    return client


_MANY = pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("rounds", [4, _MANY])
def test_nothing_acknowledged_is_lost(rounds: int, small_model: Path, lm_of_folder: Any, tmp_path):
    seed = int(os.environ.get("UNSPOOL_TEST_SEED", rounds))
    rounds = int(os.environ.get("UNSPOOL_TEST_KILLS", rounds))
    with killed_servers(small_model, tmp_path / "state") as servers:
        client = kill_rounds(servers, lm_of_folder, rounds, seed)
    print(
        f"{rounds} kills: {client.num_changes} changes and {client.num_tokens} tokens were "
        "acknowledged, and all of them are there"
    )


@pytest.fixture(scope="module")
def lm_of_folder(small_model: Path) -> Any:
    import unspool

    with unspool.load(small_model, memory=8 << 20, threads=1) as lm:
        yield lm
