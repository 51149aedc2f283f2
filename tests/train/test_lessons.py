"""Which tokens of a conversation count: transformers' mask, and spans worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import DataError
from unspool.text.chat.template import ChatTemplate, mask_conversation
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import PackedBatches
from unspool.train.data.prepared import DocumentEncoder, prepare
from unspool.train.data.sources import Document
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe

WORDS = Path(__file__).parents[1].joinpath("data", "training_text.md").read_text(encoding="utf-8")

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    (said(("user", "Hi"), ("assistant", "Hello there")), None),
    (said(("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"),
          ("assistant", "d\n\ne 🍁")), None),
    (said(("user", "a <|im_end|> b"), ("assistant", "spelled <|im_start|>assistant\nhere")), None),
    (said(("assistant", "I begin."), ("user", ""), ("assistant", " spaces ")), None),
    ([*said(("system", "Be kind."), ("user", "2+2?")),
      {"role": "assistant", "content": "", "tool_calls": [CALL]},
      *said(("tool", "4"), ("assistant", "It is 4."))], TOOLS),
    ([*said(("user", "2+2?")),
      {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}], TOOLS),
]  # fmt: skip


def folder_with(folder: Path, template: str | None, *specials: str) -> Path:
    every = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials)
    selected = TokenizerSettings(400 + len(every), specials=every, chat_template=template)
    save_tokenizer_files(train_bpe([WORDS], selected), selected, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("chat"), TokenizerSettings().chat_template)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def learned(tokenizer: Tokenizer, messages: Any, tools: Any = None) -> str:
    """What counts, as text, with a bar between stretches."""
    chat = ChatTemplate(tokenizer.chat_template, tokenizer)
    lesson = mask_conversation(chat, messages, tools, tokenizer.end_ids)
    assert lesson.ids == chat.encode(messages, tools=tools, add_generation_prompt=False).ids
    stretches: list[list[int]] = [[]]
    for token, counts in zip(lesson.ids, lesson.loss_mask, strict=True):
        if counts:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return "|".join(tokenizer.decode(item) for item in stretches if item)


@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
def test_equal_to_transformers_mask(
    folder: Path, reference: Any, messages: list[dict[str, Any]], tools: Any
) -> None:
    tokenizer = Tokenizer.from_file(folder)
    chat = ChatTemplate(tokenizer.chat_template, tokenizer)
    lesson = mask_conversation(chat, messages, tools, tokenizer.end_ids)
    expected = reference.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    if "<|im_" in str(messages):  # for transformers a control token in a message is one
        assert lesson.ids != expected["input_ids"]
        assert learned(tokenizer, messages) == messages[-1]["content"] + "<|im_end|>"
        return
    assert lesson.ids == expected["input_ids"]
    assert lesson.loss_mask == [bool(item) for item in expected["assistant_masks"]]
    assert any(lesson.loss_mask) and not all(lesson.loss_mask)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3: the last answer gets an empty thought, which the model must write
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO = said(("user", "One?"), ("assistant", "Two."), ("user", "Three?"), ("assistant", "Four."))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "Two.<|im_end|>|Four.<|im_end|>"),
        (LLAMA2, " Two.<|endoftext|>| Four.<|endoftext|>"),
        (THINKING, "Two.<|im_end|>|<think>\n\n</think>\n\nFour.<|im_end|>"),
        (None, " Two.\n| Four.\n"),
    ],
    ids=["chatml", "llama2", "thinking", "plain"],
)
def test_templates_without_tags(tmp_path: Path, template: str | None, expected: str) -> None:
    assert learned(Tokenizer.from_file(folder_with(tmp_path, template)), TWO) == expected


def test_tags_decide_where_there_are_some(tmp_path: Path) -> None:
    """The template's tags exclude the end of the turn, and that is respected."""
    template = CHATML.replace(
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}",
    )
    assert "endgeneration" in template
    assert learned(Tokenizer.from_file(folder_with(tmp_path, template)), TWO) == "Two.|Four."


def test_a_message_of_no_weight(folder: Path) -> None:
    for weight, expected in ((0, ""), (1, "Two.<|im_end|>|")):
        turns = [TWO[0], {**TWO[1], "weight": weight}, *TWO[2:]]
        assert learned(Tokenizer.from_file(folder), turns) == f"{expected}Four.<|im_end|>"


@pytest.mark.real
def test_the_default_models_template(default_model: Path) -> None:
    from unspool.model.files.gguf import GGUFFile

    tokenizer = Tokenizer.from_gguf(GGUFFile(default_model).metadata)
    assert learned(tokenizer, TWO) == "Two.<|im_end|>|Four.<|im_end|>"


def test_prompts_with_completions(folder: Path, tmp_path: Path) -> None:
    document = Document(pieces=(("One?", False), ("Two.", True)))

    def encoded(tokenizer: Tokenizer) -> tuple[str, str]:
        ((result, place),) = DocumentEncoder(tokenizer).encode([(document, 1)])
        assert place == 1 and result.loss_mask is not None
        return (
            tokenizer.decode(result.ids.tolist()),
            tokenizer.decode(result.ids[result.loss_mask].tolist()),
        )

    chat = encoded(Tokenizer.from_file(folder))
    assert chat == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n",
        "Two.<|im_end|>",
    )
    plain = Tokenizer.from_file(folder_with(tmp_path, None))  # a model that knows no turns
    assert encoded(plain) == ("One?Two.<|endoftext|>", "Two.<|endoftext|>")


def test_from_a_file_to_batches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.from_file(folder)
    rows: list[dict[str, Any]] = [
        {"messages": said(("user", f"Question {n}?"), ("assistant", f"Answer {n}."))}
        for n in range(20)
    ]
    rows += [{"prompt": "Last?", "completion": "Yes."}, {"text": "Only text."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(tmp_path / "a.jsonl", tokenizer, held_out=0)
    assert prepared.card.kind == "chat" and prepared.card.documents == 22
    assert 0 < prepared.card.counted_tokens < prepared.card.tokens
    batches = PackedBatches(prepared.train, 2, 64)
    assert batches.rows == 22
    observed = set()
    for step in range(11):
        batch = batches.batch(step)
        assert batch.loss_mask is not None
        for ids, loss_mask in zip(batch.targets, batch.loss_mask, strict=True):
            observed.add(tokenizer.decode(ids[loss_mask].tolist()))
    answers = {f"Answer {n}.<|im_end|>" for n in range(20)}
    full = {text for text in observed if "endoftext" in text}  # of a text all but its first token
    assert observed - full == {*answers, "Yes.<|im_end|>"} and len(full) == 1


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    template = (
        CHATML + "{% if messages[0].role == 'assistant' %}{{ raise_exception('no!') }}{% endif %}"
    )
    encoder = DocumentEncoder(Tokenizer.from_file(folder_with(tmp_path, template)))
    document = Document(messages=said(("assistant", "I begin.")))
    with pytest.raises(DataError, match=r"starts with 'I begin\.'.*no!"):
        list(encoder.encode([(document, 0)]))
