"""Chats through the real `openai` client, against a running server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.api_requests import MESSAGES, NOTHING, WEATHER, Person, make_tool

CLOCK = make_tool(name="clock", parameters=NOTHING)


@pytest.fixture(scope="module")
def ask(openai_client: Any) -> Any:
    def body(**params: Any) -> Any:
        usual = {"model": "smollm", "messages": MESSAGES, "seed": 7, "max_tokens": 24}
        return openai_client.chat.completions.create(**{**usual, **params})

    return body


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    every = list(chunks)
    result = [c.choices[0].delta.content or "" for c in every if c.choices]
    return "".join(result), every


def test_an_answer_and_its_stream(ask, lm, go_on):
    answer = ask(**go_on)
    complete = lm.chat(MESSAGES, seed=7, max_tokens=24, **go_on).text
    assert answer.choices[0].message.content == complete
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "smollm"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.system_fingerprint == ask(max_tokens=1).system_fingerprint
    text, chunks = streamed(ask(stream=True, **go_on))
    assert text == complete
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices[0].delta.content is None
    assert {chunk.id for chunk in chunks} == {first.id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_what_was_read_before_is_told_as_cached(ask):
    messages = [{"role": "user", "content": "A rare question about xylophones, asked twice."}]
    first = ask(messages=messages).usage
    again = ask(messages=messages).usage
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens - 5  # the system message
    assert again.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1


def test_choices_share_a_seed_and_differ(ask, lm, go_on):
    answer = ask(n=3, **go_on)
    texts = [choice.message.content for choice in answer.choices]
    prompt = lm.chat_prompt(MESSAGES).ids
    expected = [
        lm.generate(prompt, seed=7, max_tokens=24, sample=i, **go_on).text for i in range(3)
    ]
    assert texts == expected and len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 72
    result = {0: "", 1: "", 2: ""}
    for chunk in ask(n=3, stream=True, **go_on):
        result[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [*result.values()] == texts


def test_logprobs(ask, lm):
    answer = ask(logprobs=True, top_logprobs=3, max_tokens=6)
    content = answer.choices[0].logprobs.content
    steps = lm.chat(MESSAGES, seed=7, max_tokens=6, top=3).steps
    assert [token.logprob for token in content] == pytest.approx([step.logprob for step in steps])
    assert b"".join(bytes(token.bytes) for token in content).decode() == "".join(
        step.text for step in steps
    )
    assert all(len(token.top_logprobs) == 3 for token in content)
    reply = [t for c in ask(logprobs=True, max_tokens=6, stream=True) if c.choices[0].logprobs
            for t in c.choices[0].logprobs.content]  # fmt: skip
    assert [token.token for token in reply] == [token.token for token in content]


def test_stops_bias_and_penalties(ask, lm):
    complete = ask(temperature=0).choices[0].message.content
    stop = complete[40:46]
    stopped = ask(stop=[stop, "never"], temperature=0).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == complete[: complete.index(stop)]
    token = lm.tokenizer.encode(" leaves")[0]
    only = ask(logit_bias={str(token): 100}, max_tokens=3).choices[0].message.content
    assert only == " leaves" * 3
    never = ask(logit_bias={str(token): -100}, temperature=0).choices[0].message.content
    assert " leaves" not in never
    free = ask(logit_bias={str(token): 90.0}, max_tokens=4).choices[0].message.content
    less = ask(logit_bias={str(token): 90.0}, max_tokens=4, frequency_penalty=2, presence_penalty=2)
    assert free == " leaves" * 4 and less.choices[0].message.content  # 2 + 2 * count < 90


def test_without_a_seed_texts_differ_and_say_how_to_get_them_again(openai_client, ask):
    body = {"unspool": {}}
    item = openai_client.chat.completions.create(
        model="smollm", messages=MESSAGES, max_tokens=24, extra_body=body
    )
    seed = item.unspool["choices"][0]["seed"]
    assert ask(seed=seed).choices[0].message.content == item.choices[0].message.content
    other = openai_client.chat.completions.create(model="smollm", messages=MESSAGES, max_tokens=24)
    assert other.choices[0].message.content != item.choices[0].message.content


def test_structured_output_with_a_pydantic_model(openai_client, ask):
    schema = {"name": "p", "strict": True, "schema": Person.model_json_schema()}
    expected = {"type": "json_schema", "json_schema": schema}
    messages = [{"role": "user", "content": "Invent a person."}]
    for seed in range(3):
        text = ask(messages=messages, response_format=expected, seed=seed, max_tokens=100)
        assert text.choices[0].finish_reason == "stop"
        Person.model_validate_json(text.choices[0].message.content)
    parsed = openai_client.chat.completions.parse(
        model="smollm",
        messages=[{"role": "user", "content": "A person named Ada, 36 years old."}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_a_named_tool_is_called_with_arguments_of_its_schema(ask):
    choice = {"tools": [CLOCK, make_tool(**WEATHER)], "tool_choice": make_tool(name="weather")}
    options = {**choice, "max_tokens": 100, "parallel_tool_calls": False}
    complete = ask(**options).choices[0].message.tool_calls[0].function
    assert complete.name == "weather" and {*json.loads(complete.arguments)} == {"city"}
    name, reply, reasons, ids = "", "", [], []
    for chunk in ask(**options, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            ids.append(call.id)
            name += call.function.name or ""
            reply += call.function.arguments or ""
    assert (name, reply) == ("weather", complete.arguments)
    assert reasons[-1] == "tool_calls" and ids[0] and not any(ids[1:])


def test_the_extension(ask, lm):
    local = {"top_k": 3, "min_p": 0.2, "stages": ["top_k", "min_p", "temperature"], "trace": True}
    answer = ask(extra_body={"unspool": local}, temperature=0.9, max_tokens=8)
    expected = lm.chat(MESSAGES, seed=7, max_tokens=8, temperature=0.9, top_k=3, min_p=0.2,
                     stages=("top_k", "min_p", "temperature"))  # fmt: skip
    assert answer.choices[0].message.content == expected.text
    steps = answer.unspool["choices"][0]["steps"]
    assert [step["token"] for step in steps] == expected.tokens
    assert [stage["name"] for stage in steps[0]["stages"]] == ["top_k", "min_p", "temperature"]
    assert len(steps[0]["candidates"]) == 5 and steps[0]["draw"]["low"] <= steps[0]["draw"]["u"]
    reply = [c.unspool for c in ask(extra_body={"unspool": local}, temperature=0.9, max_tokens=8,
            stream=True) if getattr(c, "unspool", None)]  # fmt: skip
    assert [step["token"] for step in reply[:-1]] == expected.tokens
    assert reply[-1]["choices"][0]["seed"] == 7


def test_regex_choice_and_guard(ask):
    text = ask(extra_body={"unspool": {"regex": "[0-9]{3}-[a-z]{2}"}}).choices[0].message.content
    assert len(text) == 6 and text[3] == "-"
    yes = ask(extra_body={"unspool": {"choice": ["yes", "no"]}}).choices[0].message.content
    assert yes in ("yes", "no")
    # Two words are possible: without the one that the model prefers it is the other.
    local: dict[str, Any] = {"regex": "The (leaves|birds) fall"}
    first = ask(extra_body={"unspool": local}, temperature=0).choices[0].message.content.split()[1]
    body = {"unspool": local | {"guard": [f"ban={first}"]}}
    guarded = ask(extra_body=body, temperature=0, max_tokens=60)
    other = "birds" if first == "leaves" else "leaves"
    assert guarded.choices[0].message.content == f"The {other} fall"
    assert any("rewound" in note for note in guarded.unspool["choices"][0]["notes"])
    # A stream sends no retracted text ...
    text, _ = streamed(ask(extra_body=body, temperature=0, max_tokens=60, stream=True))
    assert text == guarded.choices[0].message.content
    # ... unless the request asks for a trace of every step.
    body["unspool"]["trace"] = True
    steps: list[Any] = []
    for chunk in ask(extra_body=body, temperature=0, max_tokens=60, stream=True):
        reply = getattr(chunk, "unspool", None) or {}
        if "token" in reply:
            del steps[len(steps) - reply["retracts"] :]
            steps.append(reply["text"])
    assert "".join(steps) == guarded.choices[0].message.content


def test_a_prediction_is_a_draft_and_changes_nothing(ask):
    plain = ask(temperature=0, max_tokens=64)
    text = plain.choices[0].message.content
    drafted = ask(temperature=0, max_tokens=64, prediction={"type": "content", "content": text})
    assert drafted.choices[0].message.content == text
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    wrong = ask(temperature=0, max_tokens=64, prediction={"type": "content", "content": "No. " * 9})
    assert wrong.choices[0].message.content == text


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"n": 99}, "n", "at most 16"),
        ({"temperature": -1}, "temperature", "must be >= 0"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": []}, "messages", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "by id"),
        ({"extra_body": {"min_p": 1.5}}, "min_p", "must be from 0 to 1"),
        ({"extra_body": {"top_k": 4, "unspool": {"top_k": 5}}}, "unspool.top_k", "given twice"),
        ({"extra_body": {"repeat_penalty": 1.1, "repetition_penalty": 1.2}}, None, "give one"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, None, "a separate parameter"),
        ({"extra_body": {"keep_alive": "soon"}}, "keep_alive", "such as '5m'"),
        ({"extra_body": {"functions": [{}]}}, "functions", "use tools"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "unsupported"),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'?"),
        ({"extra_body": {"unspool": {"stages": ["nonsense"]}}}, None, "unknown stage"),
        ({"extra_body": {"top_k": 3, "unspool": {"stages": ["temperature"]}}}, None, "top_k"),
        ({"extra_body": {"unspool": {"guard": "nonsense"}}}, None, "unknown guard"),
        ({"extra_body": {"unspool": {"speculate": "model:/etc/passwd"}}}, "unspool.speculate", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"stop": [""]}, None, "empty stop string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "only text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "no content"),
    ],
)
def test_what_cannot_be_is_refused_by_name(openai, ask, params, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(**params)
    error = caught.value
    assert words in error.message and error.type == "invalid_request_error"
    if param is not None:
        assert error.param == param


def test_what_is_nested_too_deep_is_refused(server):

    deep = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
    body = (
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"strict": true, "schema": {deep}}}}}}}'
    )
    answer = server.http.post("/v1/chat/completions", content=body,
                        headers={"content-type": "application/json"})  # fmt: skip
    assert answer.status_code == 400
    many = [{"role": "user", "content": "a"}] * 9000
    answer = server.http.post("/v1/chat/completions", json={"messages": many})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_unknown_model_and_a_prompt_that_is_too_long(openai, ask):
    with pytest.raises(openai.NotFoundError, match="available: smollm"):
        ask(model="gpt-4")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="characters") as caught:
        ask(messages=[{"role": "user", "content": "a" * 1_000_000}])
    assert caught.value.code == "context_length_exceeded"


def test_only_allowed_tools_are_called(ask: Any) -> None:
    allowed = {"mode": "required", "tools": [make_tool(name="clock")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = ask(tools=[make_tool(**WEATHER), CLOCK], tool_choice=choice, max_tokens=100)
    called = answer.choices[0].message.tool_calls
    assert [call.function.name for call in called] == ["clock"]


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
def test_with_tools_and_a_format_the_answer_is_a_call_or_of_that_form(ask, lm, form):
    """Neither is ruled out, and nothing else is written."""
    params = {"tools": [make_tool(**WEATHER)], "max_tokens": 60, "response_format": {"type": form}}
    if form == "json_schema":
        schema = {"name": "p", "schema": Person.model_json_schema()}
        params["response_format"]["json_schema"] = schema
    (brace,), (mark,) = lm.tokenizer.encode("{"), lm.tokenizer.encode("<")
    words = ask(**params, logit_bias={str(brace): 50, str(mark): -100}).choices[0].message
    assert not words.tool_calls and words.content.startswith("{")
    call = ask(**params, logit_bias={str(mark): 50, str(brace): -50}).choices[0].message
    assert call.content is None and call.tool_calls[0].function.name == "weather"
    forced = ask(**params, tool_choice=make_tool(name="weather")).choices[0].message
    assert forced.tool_calls[0].function.name == "weather"
