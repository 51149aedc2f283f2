"""`/v1/messages`, as the `anthropic` client uses it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from helpers.api_requests import CITY
from unspool.server.dialects.anthropic import thread_store

SEED = {"unspool": {"seed": 7}}
ENDLESS = {"unspool": {"seed": 7, "regex": "[a-z ]{900}"}}  # ends for want of tokens only
HELLO = [{"role": "user", "content": "Say hi."}]
TOOL = {"name": "weather", "description": "The weather of a city", "input_schema": CITY}


class Person(BaseModel):
    adult: bool  # the client sends no bounds of numbers, and a number may have any length


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The package, imported when it is used: that takes three seconds."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: Any, server: Any) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(client: Any, **params: Any) -> Any:
    usual = {"model": "smollm", "messages": HELLO, "max_tokens": 8, "extra_body": SEED}
    return client.messages.create(**{**usual, **params})


def test_a_stream_tells_the_same_as_the_whole(client: Any) -> None:
    params = {
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
        "extra_body": ENDLESS,
    }
    complete = ask(client, **params)
    (block,) = complete.content
    assert block.text and complete.stop_reason == "max_tokens" and complete.stop_sequence is None
    assert complete.usage.output_tokens == 8
    assert complete.to_dict()["unspool"]["choices"][0]["seed"] == 7
    events = list(ask(client, stream=True, **params))
    deltas = [event for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *(event.type for event in deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in deltas) == block.text
    start, end = events[0].message, events[-2]
    assert start.content == [] and start.stop_reason is None
    used, again = start.usage, end.usage
    assert used.cache_read_input_tokens > 0 and used.cache_creation_input_tokens == 0
    assert again.input_tokens == used.input_tokens and again.output_tokens == 8
    assert end.delta.stop_reason == "max_tokens"
    total = used.input_tokens + used.cache_read_input_tokens
    counted = client.messages.count_tokens(model="smollm", messages=HELLO, system=params["system"])
    assert counted.input_tokens == total
    with client.messages.stream(
        model="smollm", messages=HELLO, max_tokens=8, system=params["system"], extra_body=ENDLESS
    ) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens == 8


def test_stop_sequences_and_a_beginning_to_go_on_with(client: Any) -> None:
    started = [
        {"role": "user", "content": "Count to nine."},
        {"role": "assistant", "content": "1, 2,"},
    ]
    result = ask(
        client,
        messages=started,
        stop_sequences=["5", "6"],
        max_tokens=30,
        extra_body={"top_k": 1, "top_p": 0.9, "unspool": {"regex": " 3, 4, 5, 6, 7"}},
    )
    assert result.content[0].text == " 3, 4, "
    assert (result.stop_reason, result.stop_sequence) == ("stop_sequence", "5")
    halves = [{"role": "user", "content": "Count"}, {"role": "user", "content": "to nine."}]
    assert ask(client, messages=halves, extra_body=ENDLESS).usage.output_tokens == 8


def test_a_tool_is_used_and_its_result_read(client: Any, anthropic: Any) -> None:
    body = {"role": "user", "content": "Weather in Ulm?"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    params = {"messages": [body], "tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    complete = ask(client, **params)
    (use,) = complete.content
    assert use.type == "tool_use" and use.name == "weather" and {*use.input} == {"city"}
    assert complete.stop_reason == "tool_use"
    with client.messages.stream(model="smollm", extra_body=SEED, **params) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds.count("input_json") > 1
    assert final.content[0].input == use.input and final.stop_reason == "tool_use"
    long = {"type": "object", "properties": {"city": {"type": "string", "minLength": 900}},
            "required": ["city"]}  # fmt: skip
    named = {"tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60}
    cut = ask(client, **params | named | {"tools": [TOOL | {"input_schema": long}]})
    assert cut.content[0].name == "weather" and cut.stop_reason == "max_tokens"
    result = {"type": "tool_result", "tool_use_id": use.id, "is_error": True,
              "content": [{"type": "text", "text": "no such city"}]}  # fmt: skip
    turns = [body, {"role": "assistant", "content": complete.content},
             {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]  # fmt: skip
    assert ask(client, messages=turns, tools=[TOOL]).content[0].type == "text"
    with pytest.raises(anthropic.BadRequestError, match="in no message before it"):
        ask(client, messages=[body, turns[2]])


def test_structured_output(client: Any) -> None:
    result = client.messages.parse(
        model="smollm", messages=HELLO, max_tokens=60, output_format=Person, extra_body=SEED
    )
    assert isinstance(result.parsed_output, Person)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"thinking": {"type": "often"}}, "thinking"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document'"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context"),
        ({"seed": 3}, "parameter 'seed'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(client, anthropic, params, named):
    with pytest.raises(anthropic.BadRequestError, match=named) as caught:
        ask(client, extra_body=SEED | params)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_model_without_thoughts_is_asked_for_them_in_vain(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    reply = client.messages.with_raw_response.create(
        model="smollm", messages=HELLO, max_tokens=2, extra_body=SEED | {"thinking": thinking}
    )
    assert reply.headers["x-unspool-ignored"] == "thinking"
    assert [block.type for block in reply.parse().content] == ["text"]


def test_a_model_that_is_not_there(client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        ask(client, model="claude-9")


def test_an_error_on_the_way_is_an_event(client, anthropic, server, monkeypatch):
    monkeypatch.setattr(server.state, "settings", replace(server.state.settings, deadline=0.3))
    endless = {"max_tokens": 8000, "extra_body": {"unspool": {"end": False}}}
    with pytest.raises(anthropic.APIStatusError, match="timed out"):
        list(ask(client, stream=True, **endless))


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_goes_on_with_its_thread(client: Any, anthropic: Any, stream: bool) -> None:
    """The client keeps its conversation here, and sends only what is new."""

    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return f"sunny in {city}"

    runner = client.beta.messages.tool_runner(
        model="smollm", max_tokens=1000, tools=[weather], messages=HELLO, max_iterations=2,
        tool_choice={"type": "tool", "name": "weather"}, stream=stream,
    )  # fmt: skip
    words = [item.get_final_message() if stream else item for item in runner]
    assert [message.stop_reason for message in words] == ["tool_use"] * 2
    read = [m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in words]
    assert read[0] < read[1]


def test_a_thread_holds_what_was_said(client: Any, anthropic: Any) -> None:
    thread = client.beta.messages.thread(model="smollm", max_tokens=6, system="Be brief.")
    first, extra = thread.send(HELLO[0]), {"role": "user", "content": "More."}
    second = thread.send(extra)
    complete = [HELLO[0], {"role": "assistant", "content": first.content}, extra]
    counted = client.messages.count_tokens(model="smollm", system="Be brief.", messages=complete)
    read = second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    assert read == counted.input_tokens
    going_on = {"type": "continue", "previous_message_id": first.id}
    with pytest.raises(anthropic.BadRequestError, match="system cannot change"):
        ask(client, system="Be kind.", extra_body={"thread": going_on})
    assert ask(client, extra_body={"context_management": {"edits": []}}).content
    lost = {"type": "continue", "previous_message_id": "msg_0"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, extra_body={"thread": lost})
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


def test_a_tool_runner_whose_thread_is_lost_sends_all_of_it_again(
    client: Any, anthropic: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_store(server.state), "_limit", 0)  # nothing stays
    test_a_tool_runner_goes_on_with_its_thread(client, anthropic, stream=False)
