"""The notebook widget, without a notebook: its state, and the messages of its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import SettingsError

pytest.importorskip("anywidget")

pytestmark = pytest.mark.real


def make(lm: Any, prompt: Any = "The sky is", **options: Any) -> Any:
    from unspool.widget import GenerationWidget

    widget = GenerationWidget(lm, prompt, **{"max_tokens": 8, "seed": 1, **options})
    widget.outbox = []
    widget.send = lambda content, buffers=None: widget.outbox.append(content)
    return widget


def send(widget: Any, **message: Any) -> None:
    """A message as the page sends it."""
    widget._on_message(widget, message, [])


def test_streams_a_text(small_lm: Any):
    widget = make(small_lm)
    text = widget.wait(60)
    expected = small_lm.generate("The sky is", max_tokens=8, seed=1)
    assert text.tokens == expected.tokens
    assert [token["token"] for token in widget.tokens] == expected.tokens
    assert "".join(token["text"] for token in widget.tokens) == expected.text
    assert all(token["style"].startswith("background:rgb(") for token in widget.tokens)
    assert widget.prompt_text == "The sky is"
    assert not widget.running and widget.status == "8 tokens, length, seed 1"


def test_candidates_and_rewriting(small_lm: Any):
    widget = make(small_lm)
    before = widget.wait(60)
    send(widget, kind="candidates", index=2)
    (answer,) = widget.outbox
    assert answer["index"] == 2 and len(answer["candidates"]) == 10
    token = answer["candidates"][-1]["token"]
    send(widget, kind="rewrite", index=2, token=token)
    text = widget.wait(60)
    assert text.tokens == before.rewind(2).choose(token).resume().tokens
    assert widget.tokens[2]["chosen"] and widget.num_versions == 2 and widget.version == 1
    send(widget, kind="rewrite", index=0, text=" green")
    assert widget.wait(60).text.startswith(" green")
    send(widget, kind="version", index=0)
    assert widget.generation is before
    assert [token["token"] for token in widget.tokens] == before.tokens
    send(widget, kind="resume")
    assert widget.wait(60).tokens[:8] == before.tokens


def test_stop(small_lm: Any):
    widget = make(small_lm, max_tokens=4000, end=False)
    send(widget, kind="stop")
    assert not widget.running
    assert len(widget.generation.steps) < 4000
    assert widget.generation.finish_reason == "interrupted"


def test_messages_and_a_finished_generation(small_lm: Any):
    from unspool.widget import GenerationWidget

    chat = make(small_lm, [{"role": "user", "content": "Hi"}]).wait(60)
    assert list(chat.prompt) == list(small_lm.chat_prompt("Hi").ids)
    view = GenerationWidget(small_lm, generation=chat)
    assert [token["token"] for token in view.tokens] == chat.tokens and not view.running
    with pytest.raises(SettingsError, match="either"):
        GenerationWidget(small_lm)


def test_wrong_messages_are_shown_or_ignored(small_lm: Any):
    widget = make(small_lm)
    widget.wait(60)
    send(widget, kind="rewrite", index=99, token=3)
    assert "cannot rewind to 99" in widget.status
    for message in ({}, {"kind": "rewrite"}, {"kind": "rewrite", "index": 1, "text": ""}):
        send(widget, **message)
    widget._on_message(widget, "nonsense", [])
    assert widget.num_versions == 1


def test_the_script_needs_no_network():
    from unspool.widget import GenerationWidget

    script = str(GenerationWidget._esm)
    assert "export default" in script
    assert "http" not in script and "import " not in script


def test_the_page_about_notebooks(
    small_lm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = Path(__file__).parent.parent / "docs" / "how-to" / "use-in-a-notebook.md"
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: small_lm)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    names["chat"].stop()
    output = capsys.readouterr().out
    assert " dragon" in output and output.endswith("2 True\n")
