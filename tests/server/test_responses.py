"""`/v1/responses`, as the `openai` client uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.api_requests import WEATHER, Person
from unspool.engine.results import Step
from unspool.server.dialects.answers import BlockClosed, BlockParser, Change
from unspool.server.dialects.response_store import ResponseStore
from unspool.text.tools.formats import ToolFormat
from unspool.text.tools.parser import ToolCallParser

SEED = {"unspool": {"seed": 7}}
ENDLESS = {"unspool": {"seed": 7, "regex": "[a-z ]{900}"}}  # ends for want of tokens only
TOOL = {"type": "function", **WEATHER, "strict": True}
CLOCK = {**TOOL, "name": "clock"}


def ask(openai_client: Any, **params: Any) -> Any:
    usual = {"model": "smollm", "input": "Say hi.", "max_output_tokens": 8, "extra_body": SEED}
    return openai_client.responses.create(**{**usual, **params})


def test_a_stream_tells_the_same_as_the_whole(openai_client: Any) -> None:
    params = {"include": ["message.output_text.logprobs"], "top_logprobs": 2,
              "metadata": {"a": "b"}, "truncation": "disabled", "service_tier": "auto",
              "user": "u", "extra_body": ENDLESS}  # fmt: skip
    complete = ask(openai_client, instructions="Be brief.", **params)
    assert (
        complete.output_text and complete.status == "incomplete" and complete.metadata == {"a": "b"}
    )
    assert complete.incomplete_details.reason == "max_output_tokens"
    assert complete.usage.output_tokens == 8
    assert complete.usage.total_tokens == complete.usage.input_tokens + 8
    assert complete.to_dict()["unspool"]["choices"][0]["seed"] == 7
    events = list(ask(openai_client, instructions="Be brief.", stream=True, **params))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *(event.type for event in deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in deltas) == complete.output_text
    done, last = events[-4], events[-1].response
    assert done.text == last.output_text == complete.output_text
    assert last.usage.input_tokens_details.cached_tokens > 0
    reply = [token.to_dict() for token in complete.output[0].content[0].logprobs]
    assert len(reply) == 8 and all(len(token["top_logprobs"]) == 2 for token in reply)
    assert [token.to_dict() for token in done.logprobs] == reply
    assert sum(len(event.logprobs) for event in deltas) <= 8


def test_a_function_is_called_and_its_result_read(openai: Any, openai_client: Any) -> None:
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    body = {"role": "user", "content": [{"type": "input_text", "text": "Weather in Ulm?"}]}
    params = {"input": [body], "max_output_tokens": 200, **tools}
    complete = ask(openai_client, **params)
    assert complete.status == "completed"
    (call,) = complete.output
    assert call.type == "function_call" and call.name == "weather"
    assert {*json.loads(call.arguments)} == {"city"}
    events = list(ask(openai_client, stream=True, **params))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments
    assert [e.type for e in events if "delta" not in e.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    by_hand = ask(openai_client, input=[body, call, result], tools=[TOOL])
    stored = ask(openai_client, input=[result], previous_response_id=complete.id, tools=[TOOL])
    assert by_hand.output_text == stored.output_text
    assert by_hand.usage.input_tokens == stored.usage.input_tokens
    # A format is that of words; a call has none.
    form = {"type": "json_schema", "name": "p", "schema": Person.model_json_schema()}
    named = {"tool_choice": {"type": "function", "name": "weather"}, "text": {"format": form}}
    assert ask(openai_client, **params | named).output[0].arguments == call.arguments
    with pytest.raises(openai.BadRequestError, match="has no result"):
        ask(openai_client, input=[body, call])


def test_structured_output_and_the_stream_helper(openai_client: Any) -> None:
    params: dict[str, Any] = {"model": "smollm", "input": "How old are you?", "extra_body": SEED}
    parsed = openai_client.responses.parse(**params, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.to_dict()["text"]["format"]["schema"]["required"] == ["name", "age"]
    with openai_client.responses.stream(**params, text_format=Person) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.done" in kinds and final.output_parsed == parsed.output_parsed
    again = openai_client.responses.parse(**params | {"input": [*parsed.output, {"role": "user",
        "content": "Again."}]}, text_format=Person)  # fmt: skip
    assert isinstance(again.output_parsed, Person)
    free = ask(openai_client, text={"format": {"type": "json_object"}}, max_output_tokens=60)
    assert free.output_text.lstrip().startswith("{")


def test_what_is_kept_can_be_read_gone_on_with_and_forgotten(openai, openai_client):
    first = ask(openai_client, input="My name is Ada.", max_output_tokens=4, extra_body=ENDLESS)
    second = ask(openai_client, input="And yours?", previous_response_id=first.id, store=False)
    history = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And yours?"},
    ]
    assert second.output_text == ask(openai_client, input=history).output_text
    assert openai_client.responses.retrieve(first.id).output_text == first.output_text
    items = list(openai_client.responses.input_items.list(first.id, order="asc"))
    assert items[0].content[0].text == "My name is Ada."
    third = ask(openai_client, input="Bye.", previous_response_id=first.id)
    pages = list(openai_client.responses.input_items.list(third.id, limit=2))
    assert [item.role for item in pages] == ["user", "assistant", "user"]
    openai_client.responses.delete(first.id)
    for closed in (first.id, second.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="not found"):
            openai_client.responses.retrieve(closed)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(openai_client, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_the_oldest_responses_go_first() -> None:
    store = ResponseStore(limit=2, max_bytes=1000)
    for name in "abc":
        store.add({"id": name, "output": []}, [{"type": "message", "id": name}])
    assert len(store) == 2 and store.items("c")[0]["id"] == "c"
    with pytest.raises(Exception, match="not found"):
        store.response("a")
    store.add({"id": "large", "output": [{"text": "x" * 960}]}, [])
    assert len(store) == 1
    store.delete("large")
    assert len(store) == 0


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"background": True}, "background"),
        ({"reasoning": {"budget": 5}}, "reasoning.budget"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search'"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice of type 'mcp'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        (
            {"input": [{"type": "computer_call", "id": "cc"}]},
            "input of type 'computer_call'",
        ),
        ({"input": [{"role": "user", "content": "hi", "what": 1}]}, "input.0.what"),
        ({"include": ["file_search_call.results"]}, "include of 'file_search_call.results'"),
        ({"text": {"verbose": "low"}}, "did you mean 'verbosity'"),
        ({"top_logprobs": 3}, "top_logprobs needs include"),
        ({"input": "word " * 9000}, "context"),
        ({"unspool": {"seed": 1, "regex": "a", "choice": ["b"]}}, "only one"),
        ({"nonsense": 1}, "parameter 'nonsense'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(openai, openai_client, params, named):
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        ask(openai_client, extra_body=SEED | params)
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_model_that_is_not_there(openai: Any, openai_client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(openai_client, model="gpt-9")
    assert caught.value.code == "model_not_found"


def test_words_that_a_guard_takes_back_are_never_sent(openai_client: Any) -> None:
    """Two words are possible: without the one that the model prefers it is the other."""
    local: dict[str, Any] = {"regex": "My colour is (red|blue)"}
    params: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}
    first = ask(openai_client, **params, extra_body={"unspool": local}).output_text.split()[-1]
    params["extra_body"] = {"unspool": local | {"guard": [f"ban={first}"]}}
    events = ask(openai_client, stream=True, **params)
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(words) == f"My colour is {'blue' if first == 'red' else 'red'}"


def test_an_error_on_the_way_is_an_event(openai_client, server, monkeypatch):
    monkeypatch.setattr(server.state, "settings", replace(server.state.settings, deadline=0.3))
    endless = {"max_output_tokens": 8000, "extra_body": {"unspool": {"end": False}}}
    last = list(ask(openai_client, stream=True, **endless))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "timed out" in last.response.error.message
    assert all(item.status == "incomplete" for item in last.response.output)


@pytest.mark.parametrize("one_call", [False, True])
def test_words_and_calls_are_blocks(one_call: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text = f"Sure. {call}{call}"
    blocks = BlockParser(lambda _: ToolCallParser(ToolFormat("hermes")), one_call=one_call)
    changes: list[Change] = []
    for place, character in enumerate(text):
        end = "stop" if place == len(text) - 1 else None
        step = Step(10**6, character.encode(), character, -1.0, 0, finish_reason=end)
        changes += blocks.push(step)  # its id is no control token's
    result = [(block.name, block.text, block.is_complete) for block in blocks.all]
    calls = [("f", '{"x": 1}', True)] * (1 if one_call else 2)
    assert result == [(None, "Sure. ", True), *calls]
    assert sum(isinstance(change, BlockClosed) for change in changes) == len(result)


def test_the_tokens_of_an_input_are_counted(openai_client: Any) -> None:
    params = {"instructions": "Be brief.", "tools": [TOOL]}
    first = ask(openai_client, **params)
    counted = openai_client.responses.input_tokens.count(model="smollm", input="Say hi.", **params)
    assert counted.input_tokens == first.usage.input_tokens
    extra = {"input": "More.", "previous_response_id": first.id}
    assert openai_client.responses.input_tokens.count(**extra).input_tokens == (
        ask(openai_client, **extra).usage.input_tokens
    )


@pytest.mark.parametrize("params", [{}, {"tools": [TOOL], "tool_choice": "required"}])
def test_a_stored_response_is_told_again_as_events(openai, openai_client, params):
    body = {"include": ["message.output_text.logprobs"], "max_output_tokens": 40, **params}
    reply = [event.to_dict() for event in ask(openai_client, stream=True, **body)]
    last = reply[-1]["response"]
    again = [event.to_dict() for event in openai_client.responses.retrieve(last["id"], stream=True)]
    kinds = list(dict.fromkeys(event["type"] for event in reply))
    assert [event["type"] for event in again] == kinds  # each text in one piece
    assert again[-1]["response"] == {k: v for k, v in last.items() if k != "unspool"}
    words = ["".join(e["delta"] for e in item if "delta" in e) for item in (reply, again)]
    assert words[0] == words[1] != ""
    done = [[e for e in item if e["type"].endswith(".done")] for item in (reply, again)]
    for event in (*done[0], *done[1]):
        event.pop("sequence_number")
    assert done[0] == done[1]
    remaining = list(openai_client.responses.retrieve(last["id"], stream=True, starting_after=3))
    included = openai_client.responses.retrieve(
        last["id"], include=["message.output_text.logprobs"]
    )
    assert included.to_dict() == again[-1]["response"]
    with pytest.raises(openai.BadRequestError, match="include of"):
        openai_client.responses.retrieve(last["id"], include=["file_search_call.results"])
    assert [event.sequence_number for event in remaining] == list(range(4, len(again)))


def test_a_response_is_cancelled_while_it_is_written(openai: Any, openai_client: Any) -> None:
    endless = {"unspool": {"regex": "[a-z ]{9000}"}}
    events = iter(ask(openai_client, stream=True, max_output_tokens=4000, extra_body=endless))
    identity = next(events).response.id
    assert openai_client.responses.retrieve(identity).status == "in_progress"
    with pytest.raises(openai.ConflictError):
        openai_client.responses.retrieve(identity, stream=True)
    assert openai_client.responses.cancel(identity).status == "cancelled"
    last = list(events)[-1]
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    assert last.response.usage.output_tokens < 4000
    stored = openai_client.responses.retrieve(identity)
    assert stored.status == "cancelled" and stored.output_text == last.response.output_text
    assert openai_client.responses.cancel(identity).output_text == stored.output_text
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.cancel("resp_0")


def test_truncation_drops_the_oldest_items(openai: Any, openai_client: Any, lm: Any) -> None:
    words = "word " * (lm.context // 8)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i} {words}"} for i in range(19)]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        *turns[:1],
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        *turns,
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, input=items)
    assert caught.value.code == "context_length_exceeded"
    count = openai_client.responses.input_tokens
    raw = count.with_raw_response.count(input=items, truncation="auto")
    assert "items were dropped" in raw.headers["x-unspool-note"]
    # As much as fits with room for an answer: one turn more would not.
    room, turn = lm.context // 4, lm.context // 8
    assert lm.context - room - 2 * turn < raw.parse().input_tokens <= lm.context - room
    alone = count.count(input=[items[0], *items[-1:]]).input_tokens
    assert count.count(input=items[:1] + items[-1:], truncation="auto").input_tokens == alone
    assert ask(openai_client, truncation="auto").truncation == "auto"
    too_long = "word " * 2 * lm.context
    with pytest.raises(openai.BadRequestError):
        ask(openai_client, input=too_long, truncation="auto")  # the last item always stays


def test_only_allowed_tools_are_called(openai: Any, openai_client: Any) -> None:
    allowed = {"type": "allowed_tools", "mode": "required",
               "tools": [{"type": "function", "name": "clock"}]}  # fmt: skip
    params = {"tools": [TOOL, CLOCK], "max_output_tokens": 60}
    answer = ask(openai_client, tool_choice=allowed, **params)
    assert answer.output[0].name == "clock" and answer.tool_choice.to_dict() == allowed
    alone = ask(openai_client, tools=[CLOCK], tool_choice="required", max_output_tokens=60)
    assert alone.usage.input_tokens == answer.usage.input_tokens  # others are not told of
    wrong = {**allowed, "tools": [{"type": "function", "name": "radio"}]}
    with pytest.raises(openai.BadRequestError, match="radio"):
        ask(openai_client, tool_choice=wrong, **params)
    with pytest.raises(openai.BadRequestError, match="mode and tools"):
        ask(openai_client, tool_choice={"type": "allowed_tools"}, **params)
