"""What clients of other servers send: taken under its own name, or ignored with a note."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.api_requests import MESSAGES, QUESTION, make_tool
from unspool.server.http.errors import ApiError
from unspool.server.runtime.aliases import keep_alive_seconds
from unspool.text.chat.template import ChatTemplate

BODY = {"messages": MESSAGES, "max_tokens": 12, "seed": 7}


FLAT: list[tuple[dict[str, Any], dict[str, Any]]] = [  # what is sent, what it means in Python
    ({"top_k": 3}, {"top_k": 3}),
    ({"top_k": -1, "min_p": 0.3}, {"top_k": 0, "min_p": 0.3}),
    ({"temperature": 2.5}, {"temperature": 2.5}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"repeat_penalty": 1.3, "repeat_last_n": 20},
     {"repetition_penalty": 1.3, "penalty_window": 20}),
    ({"typical_p": 0.5}, {"typical_p": 0.5}),
    ({"top_n_sigma": 1.0}, {"top_n_sigma": 1.0}),
    ({"xtc_probability": 0.9}, {"xtc_probability": 0.9}),
    ({"mirostat": 2, "mirostat_tau": 3.0}, {"mirostat_tau": 3.0}),
    ({"mirostat": 0, "mirostat_tau": 3.0}, {}),
    ({"dry_multiplier": 0.8, "dry_penalty_last_n": 64}, {"dry_multiplier": 0.8, "dry_window": 64}),
    ({"frequency_penalty": 1.0}, {"frequency_penalty": 1.0, "penalize_prompt": False}),
    ({"ignore_eos": True}, {"end": False}),
    ({"guided_choice": ["red", "blue"]}, {"choice": ["red", "blue"]}),
    ({"guided_regex": "[a-z]{4}"}, {"regex": "[a-z]{4}"}),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, {"choice": ["red", "blue"]}),
    ({"options": {"top_k": 3, "num_ctx": 99}}, {"top_k": 3}),
    ({"stages": ["top_k", "temperature"]}, {"stages": ("top_k", "temperature")}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FLAT)))
def test_settings_stand_beside_openais(http, lm, number):
    params, intended = FLAT[number]
    reply = http.post("/v1/chat/completions", json=BODY | params)
    assert reply.status_code == 200, reply.text
    expected = lm.chat(QUESTION, max_tokens=12, seed=7, **intended).text
    assert reply.json()["choices"][0]["message"]["content"] == expected


def test_in_completions_and_responses_too(http, lm):
    body = {"prompt": "The sky is", "n_predict": 6, "seed": 7, "top_k": 2, "temperature": 3}
    reply = http.post("/v1/completions", json=body).json()
    intended = {"max_tokens": 6, "seed": 7, "top_k": 2, "temperature": 3}
    assert reply["choices"][0]["text"] == lm.generate("The sky is", **intended).text
    body = {"input": QUESTION, "max_output_tokens": 6, "seed": 7, "top_k": 2, "temperature": 3}
    reply = http.post("/v1/responses", json=body).json()
    assert reply["output"][0]["content"][0]["text"] == lm.chat(QUESTION, **intended).text


def test_what_means_nothing_here_is_said(http, lm):
    params = {"store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto",
             "verbosity": "low", "reasoning_effort": "high", "cache_prompt": True,
             "prompt_cache_key": "k", "safety_identifier": "s", "skip_special_tokens": True,
             "num_ctx": None}  # fmt: skip
    reply = http.post("/v1/chat/completions", json=BODY | params)
    named = reply.headers["x-unspool-ignored"].split(", ")
    assert {*named} == {*params} - {"num_ctx"}
    plain = http.post("/v1/chat/completions", json=BODY)
    assert "x-unspool-ignored" not in plain.headers
    assert reply.json()["choices"][0]["message"] == plain.json()["choices"][0]["message"]
    streamed = http.post("/v1/chat/completions", json=BODY | {"stream": True, "store": True})
    assert streamed.headers["x-unspool-ignored"] == "store"
    body = {"input": "Hi", "max_output_tokens": 2, "reasoning": {"effort": "low"},
            "text": {"verbosity": "low"}}  # fmt: skip
    reply = http.post("/v1/responses", json=body)
    assert reply.headers["x-unspool-ignored"] == "text.verbosity, reasoning_effort"


def test_what_a_schema_asks_for_in_vain_is_said(http):
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    expected = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = http.post("/v1/chat/completions", json=BODY | {"response_format": expected})
    assert "'uniqueItems' is not enforced" in reply.headers["x-unspool-note"]
    never = {"properties": {"x": {"type": "boolean", "not": {"const": True}}}}
    body = BODY | {"tools": [make_tool(name="a", parameters=never)], "tool_choice": "required"}
    assert "'not'" in http.post("/v1/chat/completions", json=body).headers["x-unspool-note"]


def test_objects_are_closed_whoever_asks(http, lm):
    """Without `additionalProperties`, as most clients write it: the text ends by itself."""
    person = {"properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    expected = {"type": "json_schema", "json_schema": {"name": "p", "schema": person}}
    body = BODY | {"max_tokens": 60}
    for params in (
        {"response_format": expected},
        {"response_format": {"type": "json_object", "schema": person}},
        {"guided_json": person},
        {"unspool": {"json_schema": person}},
    ):
        reply = http.post("/v1/chat/completions", json=body | params).json()["choices"][0]
        assert reply["finish_reason"] == "stop"
        created = lm.chat(QUESTION, json_schema=person, seed=7, max_tokens=60)
        assert reply["message"]["content"] == created.text


@pytest.mark.parametrize(
    ("params", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("300ms", 0.3), (0, 0), ("0", 0), (10, 10), (-1, None),
     ("-1m", None), ("24h", 86400), (1e300, None), ("999999999h", None), ("inf", None)],
)  # fmt: skip
def test_how_long_a_model_stays(params, seconds):
    assert keep_alive_seconds(params) == seconds


@pytest.mark.parametrize("params", ["nan", "soon", ""])
def test_what_is_no_time_is_refused(params):
    with pytest.raises(ApiError, match="such as '5m'"):
        keep_alive_seconds(params)


STRICT = """
{%- set system, rest = '', messages %}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}[{{ message.role }}]{{ system if loop.first }}{{ message.content }}
{%- endfor %}"""
NO_SYSTEM = """
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
[{{ message.role }}]{{ message.content }}
{%- endfor %}"""


def said(*turns: str) -> list[dict[str, str]]:
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (STRICT, ("uA", "aB", "aC", "uD"), "[user]A[assistant]B\n\nC[user]D"),
        (STRICT, ("uA", "uB"), "[user]A\n\nB"),
        (STRICT, ("sA", "sB", "uC"), "[user]A\n\nBC"),
        (STRICT, ("uA", "aB", "sC", "uD"), "[user]A[assistant]B[user]C\n\nD"),
        (STRICT, ("uA", "aB", "uC"), "[user]A[assistant]B[user]C"),
        (NO_SYSTEM, ("sA", "uB"), "[user]A\n\nB"),
        (NO_SYSTEM, ("uA", "uB"), "[user]A[user]B"),
    ],
)
def test_turns_are_as_the_template_wants_them(lm, template, turns, expected):
    chat = ChatTemplate(template, lm.tokenizer)
    assert chat.render(said(*turns)) == expected
    assert chat.encode(said(*turns)).text == expected


def test_turns_that_cannot_be_are_refused_in_the_templates_words(lm):
    chat = ChatTemplate(STRICT, lm.tokenizer)
    with pytest.raises(ValueError, match="roles must alternate"):
        chat.encode(said("aA", "uB"))


TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/chat/completions", TALK, "temperature max_tokens seed top_k top_logprobs n"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, "top_p max_tokens seed best_of"),
        ("/v1/responses", {"input": "a"}, "temperature max_output_tokens seed"),
        ("/v1/messages", TALK, "temperature max_tokens top_k"),
        ("/api/chat", {"messages": TALK["messages"], "stream": False}, "keep_alive"),
        ("/completion", {"prompt": "a", "n_predict": 2}, "temperature n_predict seed n_probs"),
        ("/v1/tree", {"prompt": "a"}, "temperature max_tokens seed priority"),
        ("/v1/embeddings", {"input": "a"}, "dimensions"),
    ],
)
def test_a_boolean_is_no_number(http, path, body, names):
    for name in names.split():
        for value in (True, False):
            reply = http.post(path, json={**body, name: value})
            assert reply.status_code == 400 and "boolean" in reply.text, (name, value, reply.text)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/completions", {"prompt": [5, True]}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": True}}),
        ("/v1/chat/completions", {**TALK, "unspool": {"min_p": True}}),
        ("/v1/chat/completions", {**TALK, "reasoning": {"max_tokens": True}}),
        ("/api/chat", {"messages": TALK["messages"], "options": {"top_k": True}}),
        ("/v1/embeddings", {"input": [[5, False]]}),
        *(("/v1/completions", {"prompt": "a", "mirostat": value})
          for value in (True, False, 3, -1, 1.5, "2", [], {})),
    ],
)  # fmt: skip
def test_booleans_within_and_odd_mirostats_are_refused(http, path, params):
    assert http.post(path, json=params).status_code == 400


def test_whole_numbers_may_be_written_as_floats(http):
    for params in ({"max_tokens": 2.0}, {"seed": 3.0}, {"top_k": 4.0}, {"mirostat": 2.0}):
        body = {"prompt": "a", "max_tokens": 2, **params}
        assert http.post("/v1/completions", json=body).status_code == 200
