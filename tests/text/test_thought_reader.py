"""Parsing of reasoning: tags and channels, in any split into tokens."""

from __future__ import annotations

import itertools

import pytest

from helpers.thought_families import GEMMA, HARMONY, MISTRAL, PLAIN, QWEN, QWEN_OPEN, STRIPS, Marked
from unspool.text.chat.template import ChatTemplate
from unspool.text.reasoning import (
    OutputStart,
    ReasoningFormat,
    TagReasoningParser,
    make_output_parser,
    prompt_tail,
    reasoning_format,
    split_reasoning,
)

ASKED = [{"role": "user", "content": "Is <think> a tag?"}]


def format_of(template: str | None, *words: str) -> ReasoningFormat:
    result = reasoning_format(template, Marked(template, *words))
    assert result is not None
    return result


def start_of(
    template: str, messages=ASKED, words=("<think>", "</think>"), **options
) -> OutputStart:
    tokenizer = Marked(template, *words)
    ids = ChatTemplate(template, tokenizer).encode(messages, **options).ids
    tail = "".join(map(tokenizer.token_text, prompt_tail(ids)))
    return format_of(template, *words).start(ids, tail)


def apart(template: str | None, text: str, start: OutputStart, words=()) -> tuple[str, str]:
    """Thought and answer of a text in which control tokens are spelled, however it is cut."""
    format, tokenizer = format_of(template, *words), Marked(template, *words)
    ids = tokenizer.encode(text, specials=True)
    result = set()
    for size in (1, 2, 3, 7, 1000):
        written: list[tuple[int, str]] = []
        for group in (ids[at : at + size] for at in range(0, len(ids), size)):
            # A step has one token; the text of those before it may come with it.
            controls = [at for at, token in enumerate(group) if token >= 0x110000]
            cuts = [0, *(at + 1 for at in controls), len(group)]
            for begin, end in itertools.pairwise(cuts):
                part = group[begin:end]
                if part:
                    written.append((part[-1], "".join(map(tokenizer.display_text, part))))
        reader = make_output_parser(format, start, None)
        assert reader is not None
        result.add(split_reasoning(reader, written))
    assert len(result) == 1
    return result.pop()


def test_the_marks_are_found() -> None:
    assert (format_of(QWEN).open, format_of(QWEN).switch) == ("<think>", "enable_thinking")
    assert format_of(QWEN).opening == "<think>\n"
    assert format_of(QWEN).closing == "\n</think>\n\n"  # as the template writes it
    assert format_of(GEMMA).close == "<channel|>" and format_of(GEMMA).head == "thought\n"
    assert format_of(GEMMA).closing == "<channel|>"
    assert format_of(HARMONY).uses_channels and format_of(HARMONY).has_efforts
    assert format_of(MISTRAL).open == "[THINK]"
    assert format_of(STRIPS).open == "<think>"
    assert reasoning_format(PLAIN, Marked(PLAIN)) is None
    assert reasoning_format(None, Marked(None)) is None
    assert format_of(PLAIN, "<think>", "</think>").closing == "</think>\n\n"  # by its vocabulary


def test_where_an_answer_begins() -> None:
    assert start_of(QWEN).state == "before"
    assert start_of(QWEN, enable_thinking=False).state == "behind"
    assert start_of(QWEN_OPEN).state == "inside"
    for words in ((), ("<think>", "</think>")):  # as letters, and as one token
        assert start_of(QWEN_OPEN, words=words).state == "inside"
        assert start_of(QWEN_OPEN, words=words, enable_thinking=False).state == "behind"
    assert start_of(GEMMA, words=()).state == "behind"
    assert start_of(GEMMA, words=(), enable_thinking=True).state == "before"
    assert start_of(HARMONY, words=()) == OutputStart(header="assistant")
    conversation = [*ASKED, {"role": "assistant", "content": "It"}]
    assert start_of(HARMONY, conversation, words=(), continue_final_message=True).state == "behind"
    assert start_of(QWEN, conversation, continue_final_message=True).state == "before"


@pytest.mark.parametrize("words", [(), ("<think>", "</think>")])
def test_think_tags(words: tuple[str, ...]) -> None:
    def read(text: str, place: str = "before") -> tuple[str, str]:
        return apart(QWEN, text, OutputStart(place), words)  # type: ignore[arg-type]

    assert read("<think>\nHm, 2 < 3.\n</think>\n\nYes.") == ("Hm, 2 < 3.", "Yes.")
    assert read("\n <think>a</think>b") == ("a", "b")
    assert read("Hm.\n</think>\n\n Yes.", "inside") == ("Hm.", "Yes.")
    assert read("Hm. </thin", "inside") == ("Hm. </thin", "")
    assert read("<think>\nHm.\n") == ("Hm.", "")  # cut short
    assert read("<think>\n\n</think>\n\nYes.") == ("", "Yes.")
    assert read("  Yes, 1 <th 2 </p> \n") == ("", "  Yes, 1 <th 2 </p> \n")  # not a letter changed
    assert read(" \n") == ("", " \n")
    assert read("<think>a</think>\n<think>b</think>c") == ("a\n\nb", "c")
    # A quoted tag is text, and so is one in an answer without reasoning.
    assert read("It is </think>.", "behind") == ("", "It is </think>.")
    if not words:
        assert read("Write <think> first.") == ("", "Write <think> first.")


def test_a_thought_that_was_never_opened() -> None:
    for words in ((), ("<think>", "</think>")):
        reader = make_output_parser(format_of(STRIPS, *words), OutputStart(), None)
        assert reader is not None
        assert split_reasoning(reader, [(0, "Hm."), (0, "\n</think>"), (0, "\n\nYes.")]) == (
            "",
            "Hm.\nYes.",  # a stream cannot correct what it has shown, but shows no tag
        )
        assert reader.has_stray_close
        assert apart(STRIPS, "Hm.\n</think>\n\nYes.", OutputStart("inside"), words) == (
            "Hm.",
            "Yes.",
        )


def test_another_turn_in_the_same_text() -> None:
    tokenizer = Marked(QWEN, "<think>", "</think>")
    reader = TagReasoningParser(format_of(QWEN, "<think>", "</think>"), OutputStart("inside"))
    turn, again = "Hm.</think>Say <think>!", "\nuser Hi\nassistant <think>So."
    for token in tokenizer.encode(turn):
        reader.push(token, tokenizer.display_text(token))
    assert not reader.in_reasoning  # quoted in an answer, it is text
    reader.end_turn()
    for token in tokenizer.encode(again):
        reader.push(token, tokenizer.display_text(token))
    assert reader.in_reasoning


def test_control_tokens() -> None:
    text = "<|channel>thought\nSay <channel|> hi.<channel|>Hello."
    assert apart(GEMMA, text, OutputStart())[0].startswith("Say")
    assert apart(GEMMA, "<|channel>thought\nHm.<channel|>Hello.", OutputStart()) == (
        "Hm.",
        "Hello.",
    )
    assert apart(GEMMA, "<|channel><channel|>Hello.", OutputStart()) == ("", "Hello.")
    assert apart(GEMMA, "Hello.", OutputStart("behind")) == ("", "Hello.")
    assert apart(MISTRAL, "[THINK]a\n[/THINK]b", OutputStart()) == ("a", "b")
    # Letters that spell a control token are letters.
    reader = make_output_parser(format_of(MISTRAL), OutputStart(), None)
    assert reader is not None and split_reasoning(reader, [(0, "[THINK]a[/THINK]")])[0] == ""


def test_channels() -> None:
    header = OutputStart(header="assistant")
    end = (
        "<|channel|>analysis<|message|>Greets.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>So I do.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>"
    )
    assert apart(HARMONY, end, header) == ("Greets.\n\nSo I do.", "Hi!")
    assert apart(HARMONY, "<|channel|>final<|message|>Hi!", header) == ("", "Hi!")
    assert apart(HARMONY, "<|channel|>commentary<|message|>I look.<|end|>", header) == (
        "",
        "I look.",
    )
    assert apart(HARMONY, " to=python<|channel|>analysis<|message|>1+1<|call|>", header)[1] == ""
    assert apart(HARMONY, "there.<|return|>", OutputStart("behind")) == ("", "there.")
    assert apart(HARMONY, "Hm.<|end|>", OutputStart("inside")) == ("Hm.", "")


def test_what_templates_are_told() -> None:
    assert format_of(QWEN).template_options(True, 9) == ({"enable_thinking": True}, 9)
    assert format_of(QWEN).template_options("none", None) == ({"enable_thinking": False}, 0)
    assert format_of(QWEN).template_options("high", None) == ({"enable_thinking": True}, None)
    assert format_of(HARMONY).template_options("high", None) == ({"reasoning_effort": "high"}, None)
    # What cannot be switched off has no tokens to think with.
    assert format_of(HARMONY).template_options(False, None) == ({"reasoning_effort": "low"}, 0)
    assert format_of(STRIPS).template_options(False, None) == ({}, 0)
    assert format_of(STRIPS).template_options(None, 5) == ({}, 5)
