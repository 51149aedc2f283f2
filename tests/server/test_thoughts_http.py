"""Reasoning through every API: separate from the answer, complete and streamed, within budgets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.running_server import Running, running
from helpers.thought_families import GEMMA, HARMONY, QWEN_OPEN, save_thinker
from helpers.tree_client import Tree
from unspool.server.runtime.registry import ModelEntry

ASKED = [{"role": "user", "content": "A node?"}]
# Control tokens of these vocabularies; a random model would write them anywhere.
NO_MARKS = {str(token): -50 for token in range(9)}
SEED = {"seed": 5, "max_tokens": 24, "logit_bias": NO_MARKS}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Three tiny models that think in three ways."""
    import unspool

    def entry(name: str, template: str) -> ModelEntry:
        folder = save_thinker(tmp_path_factory.mktemp(name), template)
        return ModelEntry(name, lambda: unspool.load(folder, memory=8 << 20), 1 << 20)

    kinds = {"tags": QWEN_OPEN, "harmony": HARMONY, "gemma": GEMMA}
    with running([entry(name, template) for name, template in kinds.items()]) as result:
        yield result


@pytest.fixture(scope="module")
def client(openai: Any, thinkers: Running) -> Any:
    return openai.OpenAI(base_url=f"{thinkers.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("model", ["tags", "harmony"])
def test_chats(client: Any, model: str) -> None:
    # The grammar makes the model open and close its reasoning.
    body = {**SEED, "model": model, "messages": ASKED, "max_tokens": 40}
    extra = {"extra_body": {"thinking_budget": 6, "regex": "(node|page)"}}
    complete = client.chat.completions.create(**body, **extra)
    message = complete.choices[0].message
    assert message.content in ("node", "page")
    assert message.reasoning_content and message.reasoning == message.reasoning_content
    assert "think" not in message.reasoning_content and "analysis" not in message.reasoning_content
    assert complete.usage.completion_tokens_details.reasoning_tokens >= 6
    reasoning, answer, first_answer, last_thought = "", "", None, 0
    for number, chunk in enumerate(client.chat.completions.create(**body, **extra, stream=True)):
        delta = chunk.choices[0].delta
        if getattr(delta, "reasoning_content", None):
            reasoning, last_thought = reasoning + delta.reasoning_content, number
        if delta.content:
            answer, first_answer = answer + delta.content, first_answer or number
    assert (reasoning, answer) == (message.reasoning_content, message.content)
    assert last_thought < (first_answer or 0)
    hidden = {"extra_body": {**extra["extra_body"], "reasoning": {"exclude": True}}}
    visible = client.chat.completions.create(**body, **hidden).choices[0].message
    assert visible.content == message.content and not hasattr(visible, "reasoning_content")


def test_thoughts_are_switched(client: Any, thinkers: Running) -> None:
    body = {**SEED, "messages": ASKED}
    for off in ({"reasoning_effort": "none"}, {"extra_body": {"reasoning": {"enabled": False}}},
                {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):  # fmt: skip
        answer = client.chat.completions.create(**body, model="tags", **off)
        assert not hasattr(answer.choices[0].message, "reasoning_content")
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    on = client.chat.completions.create(**body, model="tags")
    assert on.choices[0].message.content == ""  # no end to it in so few tokens
    assert on.choices[0].message.reasoning_content
    assert on.usage.completion_tokens_details.reasoning_tokens == 24
    lengths = [
        client.chat.completions.create(
            **body, model="harmony", reasoning_effort=effort
        ).usage.prompt_tokens
        for effort in ("low", "medium")
    ]
    assert lengths[0] != lengths[1]  # the template sees the effort


@pytest.mark.parametrize("model", ["tags", "harmony"])
def test_a_required_call_comes_behind_the_thought(client: Any, model: str) -> None:
    answer = client.chat.completions.create(
        **{**SEED, "max_tokens": 120}, model=model, messages=ASKED, tools=[CLOCK],
        tool_choice="required", extra_body={"thinking_budget": 4},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {})
    assert answer.choices[0].message.reasoning_content


def test_responses(client: Any) -> None:
    body = {"model": "tags", "input": "A node?", "max_output_tokens": 40,
            "extra_body": {"seed": 5, "regex": "(node|page)", "top_k": 1}}  # fmt: skip
    cut = client.responses.create(**body)
    assert [item.type for item in cut.output] == ["reasoning", "message"]
    assert cut.status == "incomplete" and cut.output_text == ""
    events = list(client.responses.create(**body, stream=True))
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.delta") < kinds.index(
        "response.reasoning_text.done"
    )
    reply = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert reply == cut.output[0].content[0].text
    used = cut.usage.output_tokens_details.reasoning_tokens
    assert used == 40
    # A thought that is given back is taken, and the template decides.
    again = client.responses.create(
        model="tags", max_output_tokens=2,
        input=[*ASKED, cut.output[0].model_dump(), {"role": "assistant", "content": "Yes."},
               {"role": "user", "content": "And?"}],
    )  # fmt: skip
    assert again.status == "incomplete"


def test_messages(thinkers: Running) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=thinkers.url, api_key="none", max_retries=0)
    # A text that must not end, and whose marks are the grammar's.
    local = {"seed": 5, "end": False, "regex": "(node|page)", "top_k": 1}
    body: dict[str, Any] = {"model": "tags", "messages": ASKED, "max_tokens": 40,
                            "thinking": {"type": "enabled", "budget_tokens": 3},
                            "extra_body": {"unspool": local}}  # fmt: skip
    complete = client.messages.create(**body)
    assert [block.type for block in complete.content][-1] == "text"
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert final.model_dump()["content"] == complete.model_dump()["content"]
    assert complete.content[-1].text in ("node", "page")
    off = client.messages.create(**{**body, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]
    reasoning = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    message = {"role": "assistant", "content": [reasoning, {"type": "text", "text": "Yes."}]}
    assert client.messages.create(**{**body, "messages": [*ASKED, message, *ASKED]}).content


def test_ollama(thinkers: Running) -> None:
    body = {"model": "tags", "messages": ASKED, "options": {"num_predict": 20, "seed": 5}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}

    def ask(path: str = "chat", **extra: Any) -> list[dict[str, Any]]:
        answer = thinkers.http.post(f"/api/{path}", json={**body, **extra})
        return [json.loads(line) for line in answer.text.splitlines()]

    for model in ("gemma", "tags"):
        (off,) = ask(stream=False, think=False, model=model, format=nothing)
        assert "thinking" not in off["message"] and json.loads(off["message"]["content"]) == {}
    (complete,) = ask(stream=False, think=True)
    lines = ask(think=True)
    for field in ("thinking", "content"):
        reply = "".join(line["message"].get(field, "") for line in lines)
        assert reply == complete["message"].get(field, "")
    assert complete["message"]["thinking"]
    del body["messages"]
    (item,) = ask("generate", prompt="A node?", stream=False)
    assert item["thinking"] == complete["message"]["thinking"]
    (visible,) = ask("show")
    assert "thinking" in visible["capabilities"]


def test_the_tree(thinkers: Running) -> None:
    """Steps say whether they are thought, also when words are chosen and when a turn follows."""
    tree = Tree(thinkers.url)
    body = {"model": "tags", "messages": ASKED, "seed": 5, "max_tokens": 30, "end": False,
             "think_budget": 4, "logit_bias": NO_MARKS}  # fmt: skip
    branch = tree.do("resume", tree.ask("POST", "", json=body))
    flags = [step.get("thought", False) for step in branch["steps"]]
    assert flags == [True] * 8 + [False] * 22 and branch["settings"]["think_budget"] == 4
    selected = tree.do("choose", branch, at=2, text="node")
    assert all(step.get("thought") for step in selected["steps"])
    # A reply follows the text, and another thought begins.
    turned = tree.do("append", branch, message={"role": "user", "content": "And?"})
    stored = [step["token"] for step in turned["steps"][:30]]
    assert stored == [step["token"] for step in branch["steps"]]
    extra = [step.get("thought", False) for step in turned["steps"][30:]]
    assert not extra[0] and extra[-1]  # the template has opened it
