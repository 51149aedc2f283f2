"""TextStream against the answer that a reader of the whole text would give."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unspool.errors import SettingsError
from unspool.text.tokenizer.stream import TextStream


def whole_answer(data: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The specification, by brute force: read on until some stop string is complete."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[bytes], stops: list[str]) -> tuple[str, str | None]:
    stream = TextStream(stops)
    text = "".join(stream.push(piece) for piece in pieces) + stream.finish()
    return text, stream.matched_stop


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


letters = st.text(alphabet="abé€😀\ufffd\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé€😀\ufffd", min_size=1, max_size=5), max_size=5)
raw = st.one_of(
    letters.map(str.encode),
    st.lists(st.sampled_from([b"a", b"b", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98", b"\xff",
                              b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xc0\x80"])).map(b"".join),
    st.binary(max_size=20),
)  # fmt: skip
cuts = st.lists(st.integers(0, 200), max_size=20)


@settings(max_examples=300, deadline=None)
@given(raw, stop_lists, cuts)
@example(b"abc", ["abcd", "bc"], [1, 2])
@example(b"ab\xe2\x82", ["b\ufffd"], [3])
@example(b"\xff\xc3\xa9\xf0\x9f plain", [], [1, 2, 4])
def test_any_cut_gives_the_whole_answer(data: bytes, stops: list[str], places: list[int]) -> None:
    assert run(cut(data, places), stops) == whole_answer(data, stops)


@settings(max_examples=150, deadline=None)
@given(raw, stop_lists)
def test_byte_by_byte_never_takes_back(data: bytes, stops: list[str]) -> None:
    answer, _ = whole_answer(data, stops)
    stream, given_out = TextStream(stops), ""
    for byte in data:
        given_out += stream.push(bytes([byte]))
        assert answer.startswith(given_out)


@settings(max_examples=200, deadline=None)
@given(letters, stop_lists)
def test_holds_only_what_can_become_a_stop(text: str, stops: list[str]) -> None:
    """Some continuation makes the pending text the beginning of the stop that ends the text."""
    stream = TextStream(stops)
    for character in text:
        stream.push(character.encode())
        pending = stream.pending_text
        if not pending or stream.matched_stop:
            continue
        ends = []
        for stop in stops:
            twin = stream.copy()
            if stop.startswith(pending) and twin.push(stop[len(pending) :].encode()) == "":
                ends.append(twin.matched_stop)
        assert any(end and end.startswith(pending) for end in ends), (pending, stops)


def test_half_a_character_is_held_and_lets_go_of_what_it_cannot_complete() -> None:
    stream = TextStream(["ab"])
    assert stream.push(b"a") == ""
    assert stream.push("€".encode()[:1]) == "a"  # the next character cannot be a "b" any more
    assert stream.pending_text == "\ufffd"
    assert stream.push("€".encode()[1:]) == "€"
    assert stream.pending_text == ""


def test_stop_inside_a_token_and_across_tokens() -> None:
    stream = TextStream(["###", "</end>"])
    assert stream.push(b"one ## two ") == "one ## two "
    assert stream.push(b"three<") == "three"
    assert stream.push(b"/en") == ""
    assert stream.pending_text == "</en"
    assert stream.push(b"t ") == "</ent "
    assert stream.push(b"four###five") == "four"
    assert stream.matched_stop == "###"
    assert stream.push(b"six") == "" and stream.finish() == "" and stream.pending_text == ""


def test_finish_gives_what_was_held_even_half_characters() -> None:
    stream = TextStream(["abcd"])
    assert stream.push(b"abc\xf0\x9f") == "abc"
    assert stream.finish() == "\ufffd"
    stream = TextStream(["abcd"])
    assert stream.push(b"abc") == "" and stream.finish() == "abc" and stream.finish() == ""


def test_prefix_of_another_and_ties() -> None:
    assert run([b"xabcd"], ["ab", "abc"]) == ("x", "ab")
    assert run([b"xabc"], ["bc", "abc", "c"]) == ("x", "abc")
    assert run([b"xabc"], ["abcd", "bc"]) == ("xa", "bc")


def test_a_copy_goes_its_own_way() -> None:
    stream = TextStream(["stop"])
    assert stream.push(b"a st") == "a "
    twin = stream.copy()
    assert stream.push(b"op") == "" and stream.matched_stop == "stop"
    assert twin.push(b"ep") == "step" and twin.matched_stop is None


def test_one_string_is_one_stop() -> None:
    assert run([b"a stop b"], "stop") == ("a ", "stop")  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["\ud800"], [3]])
def test_impossible_stops(stops: list[str]) -> None:
    with pytest.raises(SettingsError):
        TextStream(stops)


def test_cost_is_linear() -> None:
    """A text that nearly matches all the time: quadratic rescanning would take minutes."""
    stop = "a" * 20_000 + "b"
    stream, start = TextStream([stop]), time.perf_counter()
    total = sum(len(stream.push(b"a" * 10)) for _ in range(20_000)) + len(stream.finish())
    assert total == 200_000
    assert time.perf_counter() - start < 60
