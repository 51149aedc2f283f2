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
        self.http = httpx.Client(base_url=url, timeout=60, verify=False)

    def ask(self, method: str, path: str, status: int = 200, **params: Any) -> dict[str, Any]:
        answer = self.http.request(method, f"/v1/tree{path}", **params)
        assert answer.status_code == status, answer.text
        result: dict[str, Any] = answer.json()
        if status >= 400:
            assert result["error"]["message"] and result["error"]["type"]
        return result

    def new(self, **params: Any) -> dict[str, Any]:
        return self.ask("POST", "", json={"prompt": PROMPT, **SAMPLING, **params})

    def do(self, verb: str, branch: dict[str, Any], status: int = 200, **params: Any) -> Any:
        """The branch as a whole after a verb, which itself tells only what is new."""
        result = self.ask("POST", f"/{branch['id']}/{verb}", status, json=params)
        if status != 200 or verb == "stop":
            return result
        reply = result.get("data", [result])
        complete = [self.get(item) for item in reply]
        for new, item in zip(reply, complete, strict=True):
            assert new["steps"] == item["steps"][new["since"] :] and "prompt" not in new
        return complete if "data" in result else complete[0]

    def get(self, branch: dict[str, Any], status: int = 200, **params: Any) -> dict[str, Any]:
        return self.ask("GET", f"/{branch['id']}", status, params=params)

    def see(self, branch: dict[str, Any], what: str, status: int = 200, **params: Any) -> Any:
        return self.ask("GET", f"/{branch['id']}/{what}", status, params=params)

    def live(self, branch: dict[str, Any], **params: Any) -> Any:
        """A resume that is streamed."""
        path, body = f"/v1/tree/{branch['id']}/resume", {"stream": True, **params}
        return self.http.stream("POST", path, json=body)

    def events(self, branch: dict[str, Any], **params: Any) -> Any:
        return self.http.stream("GET", f"/v1/tree/{branch['id']}/events", **params)


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
