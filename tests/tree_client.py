"""A client of `/v1/tree` for tests: it speaks of branches, and reads events as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

PROMPT = "The old lighthouse keeper climbed the stairs every evening, and when the storm came"
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "end": False}  # of the length asked for


class Tree:
    """A client that speaks of branches."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, method: str, path: str, status: int = 200, **given: Any) -> dict[str, Any]:
        answer = self.http.request(method, f"/v1/tree{path}", **given)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        if status >= 400:
            assert found["error"]["message"] and found["error"]["type"]
        return found

    def new(self, **given: Any) -> dict[str, Any]:
        return self.ask("POST", "", json={"prompt": PROMPT, **SAMPLING, **given})

    def do(self, verb: str, branch: dict[str, Any], status: int = 200, **given: Any) -> Any:
        """The branch as a whole after a verb, which itself tells only what is new."""
        found = self.ask("POST", f"/{branch['id']}/{verb}", status, json=given)
        if status != 200 or verb == "stop":
            return found
        told = found.get("data", [found])
        whole = [self.get(each) for each in told]
        for new, each in zip(told, whole, strict=True):
            assert new["steps"] == each["steps"][new["since"] :] and "prompt" not in new
        return whole if "data" in found else whole[0]

    def get(self, branch: dict[str, Any], status: int = 200, **params: Any) -> dict[str, Any]:
        return self.ask("GET", f"/{branch['id']}", status, params=params)

    def see(self, branch: dict[str, Any], what: str, status: int = 200, **params: Any) -> Any:
        return self.ask("GET", f"/{branch['id']}/{what}", status, params=params)

    def live(self, branch: dict[str, Any], **given: Any) -> Any:
        """A resume that is streamed."""
        path, body = f"/v1/tree/{branch['id']}/resume", {"stream": True, **given}
        return self.http.stream("POST", path, json=body)

    def events(self, branch: dict[str, Any], **given: Any) -> Any:
        return self.http.stream("GET", f"/v1/tree/{branch['id']}/events", **given)


def read(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(event, data, id) of a stream, as they come."""
    assert answer.status_code == 200
    name = mark = ""
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "id":
            mark = value
        elif field == "data":
            yield name, json.loads(value), mark


def tokens(branch: dict[str, Any]) -> list[int]:
    return [step["token"] for step in branch["steps"]]
