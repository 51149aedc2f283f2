"""Guards: what they find and where, and that rewinding is exact."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import SettingsError, UnspoolError
from unspool.sampling import guards as g
from unspool.sampling import monitors
from unspool.sampling.monitors import (
    GuardError,
    LoopFinder,
    MonitoredText,
    PredicateGuard,
    repetition_rate,
)

ENGLISH = """
The rain, which had fallen all night, had stopped at last, and the street was full of people who
wanted to be somewhere else. "I know," she said, "I know, I know, I know." There is a time to weep
and a time to laugh, a time to build and a time to tear down, a time to speak and a time to be
silent. They laughed, ha ha ha ha ha! And the day went on, and on, and on.
"""
CODE = """
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z
        if x is None:
            return None
        if y is None:
            return None
        for i in range(10):
            for j in range(10):
                for k in range(10):
                    print(i, j, k)
"""
TABLE = """
| Name      | Price     | Stock     | Color     |
|-----------|-----------|-----------|-----------|
| Banana    | 0.80      | 0         | yellow    |
| Cherry    | 7.10      | 0         | red       |
| ---- | ---- | ---- | ---- | ---- | ---- | ---- | ---- | ---- | ---- | ---- | ---- |
==================================================================================
1. Milk
2. Bread
3. Butter
- [ ] call the bank
- [ ] call the doctor
- [ ] call the school
{"id": 1, "x": 5, "y": 9}, {"id": 2, "x": 3, "y": 1}, {"id": 3, "x": 8, "y": 4}, {"id": 4, "x": 2}
Counting: 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
"""
PIECES = st.sampled_from(
    [b" a", b"b", b" B", b"1", b"2", b". ", b"\n", "é".encode()[:1], "é".encode()[1:], b"\xff", b""]
)


def cut(text: str) -> list[bytes]:
    """Text as a tokenizer would cut it, more or less: a word with its space, digits one by one."""
    return [m.encode() for m in re.findall(r" ?[^\W\d]+|\d|\n| {1,4}|[^\w\s]{1,4}|_", text)]


def numbered(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    ids: dict[bytes, int] = {}
    return [(ids.setdefault(piece, len(ids)), piece) for piece in pieces]


def first_violation(guard: g.Guard, pieces: list[bytes]) -> g.Violation | None:
    monitor = guard.start()
    for token, piece in numbered(pieces):
        violation = monitor.push(token, piece, -1.0, 1.0)
        if violation:
            return violation
    return monitor.finish()


GUARDS: list[g.Guard] = [
    g.LoopGuard(repeats=2, min_tokens=4, min_words=3),
    g.LoopGuard(repeats=3, min_tokens=3, min_words=3, longest=4),
    g.LoopGuard(repeats=3, min_tokens=6, keep=0),
    g.BannedGuard(words=("ab", "a b", "b2")),
    g.BannedGuard(words=("ab",), whole_words=False, ignore_case=False),
    g.BannedGuard(patterns=(r"\bb+\b", r"^ a", "é[ab]"), window=5),
    g.SurpriseGuard(spike=5, mean=2, window=3),
    g.SurpriseGuard(spike=None, mean=1, window=2, beyond_entropy=True),
    PredicateGuard(lambda text, tokens: len(text) % 7 == 3 or None),
]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 1), PIECES, st.floats(-8, 0), st.floats(0, 3)),
        st.integers(1, 9),  # number of tokens to rewind
    ),
    max_size=60,
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
@given(moves=MOVES)
@settings(max_examples=40, deadline=None)
def test_a_rewound_watch_is_that_of_the_shorter_text(guard: g.Guard, moves: list[Any]):
    monitor, text = guard.start(), []
    for move in moves:
        if isinstance(move, int):
            del text[max(0, len(text) - move) :]
            monitor.rewind(len(text))
            continue
        text.append(move)
        fresh = guard.start()
        expected = [fresh.push(*step) for step in text][-1]
        assert monitor.push(*move) == expected
        assert monitor.finish() == fresh.finish()


@given(st.lists(PIECES, max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_text_watched_is_that_of_its_bytes(pieces: list[bytes]):
    watched, joined = MonitoredText(), b""
    for number, piece in enumerate(pieces):
        watched.push(number, piece)
        joined += piece
        whole_word = "".join(watched.parts)
        assert joined.decode("utf-8", "replace").startswith(whole_word)
        assert watched.length == len(whole_word)
        text, begin = watched.tail(3)
        assert whole_word[begin:] == text and (len(text) >= 3 or begin == 0)
    for at in range(watched.length):
        assert 0 <= watched.token_at(at) < len(pieces)


def test_a_character_belongs_to_the_token_that_began_it():
    watched = MonitoredText()
    for token, piece in enumerate([b"x", b"\xf0\x9f", b"\x98", b"\x80y", b"z"]):
        watched.push(token, piece)
    assert "".join(watched.parts) == "x😀yz"
    assert [watched.token_at(at) for at in range(4)] == [0, 1, 3, 4]


@given(seed=st.integers(0, 10**6), period=st.integers(1, 60), keep=st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_a_planted_loop_is_found_at_its_start(seed: int, period: int, keep: int):
    rng = random.Random(seed)
    before = [rng.randrange(1000, 2000) for _ in range(rng.randrange(80))]
    unit = rng.sample(range(1000), period)  # shares nothing with what is before
    guard = g.LoopGuard(keep=keep)
    monitor = guard.start()
    for number, token in enumerate(before + unit * 40):
        violation = monitor.push(token, b"", -1.0, 1.0)
        if violation:
            assert violation.start == len(before) + keep * period
            # Seen at the very token that makes it a loop.
            assert number + 1 == len(before) + max(3 * period, 24)
            return
    raise AssertionError("the loop was not seen")


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(2, 3), st.integers(2, 9))
@settings(max_examples=80, deadline=None)
def test_a_loop_is_one_by_the_plain_definition(items: list[int], repeats: int, least: int):
    finder = LoopFinder(repeats, least, 256)

    def plain(end: int) -> set[int]:
        def loops(period: int) -> bool:
            need = max(repeats * period, least)
            return need <= end and all(
                items[at] == items[at - period] for at in range(end - need + period, end)
            )

        return {period for period in range(1, end) if loops(period)}

    for end in range(1, len(items) + 1):
        violations, expected = finder.push(items[end - 1]), plain(end)
        assert (violations is not None) == bool(expected)
        if violations:
            first, period = violations
            assert period in expected
            assert all(items[at] == items[at - period] for at in range(first + period, end))
            assert first == 0 or items[first - 1] != items[first - 1 + period]


@pytest.mark.parametrize("text", [ENGLISH, CODE, TABLE], ids=["english", "code", "table"])
def test_plain_text_is_no_loop(text: str):
    assert first_violation(g.LoopGuard(), cut(text)) is None
    assert first_violation(g.LoopGuard(), [bytes([byte]) for byte in text.encode()]) is None


def test_numbering_and_spacing_do_not_hide_a_loop():
    pieces = cut("Things I like:\n" + "".join(f"{n}. A New watch\n" for n in range(1, 12)))
    violation = first_violation(g.LoopGuard(), pieces)
    assert violation is not None and "a new watch" in violation.reason
    # The second item keeps its number; what is forbidden there is that it says the same.
    assert b"".join(pieces[: violation.start]).decode() == "Things I like:\n1. A New watch\n2."
    shout = "so it goes. So it  goes.\nSO IT GOES! so  it goes, So it Goes; so it goes\n"
    assert first_violation(g.LoopGuard(), cut(shout)) is not None
    assert first_violation(g.LoopGuard(words=False), cut(shout)) is None


def test_numbers_that_are_data_are_no_numbering():
    rng = random.Random(2)
    repeated = cut("".join("price: 13 euro, " for _ in range(12)))
    data = cut("".join(f"price: {rng.randrange(10, 99)} euro, " for _ in range(12)))
    assert first_violation(g.LoopGuard(), repeated) is not None
    assert first_violation(g.LoopGuard(), data) is None
    assert (
        first_violation(g.LoopGuard(), cut("".join(f"{n} by {n} " for n in range(0, 60, 2))))
        is None
    )


def test_a_long_rule_ends_too():
    assert first_violation(g.LoopGuard(), [b"-"] * 80) is None
    assert first_violation(g.LoopGuard(), [b"-"] * 200) is not None


def test_chinese_loops_are_seen():
    unit = "我不知道该说什么。"
    pieces = [character.encode()[n : n + 1] for character in unit * 5 for n in range(3)]
    violation = first_violation(g.LoopGuard(), pieces)
    assert violation is not None and violation.start == 27


def test_repetition_rate():
    assert repetition_rate([1, 2, 3]) == 0
    assert repetition_rate(range(100)) == 0
    assert repetition_rate([7] * 103) == pytest.approx(0.99)
    assert repetition_rate([1, 2, 1, 2, 1], n=2) == pytest.approx(0.5)


def test_a_ban_reaches_across_tokens():
    guard = g.BannedGuard(words=("delve", "rich tapestry"))
    for pieces, start in [
        ([b"We", b" del", b"ve", b" in"], 1),
        ([b"We", b" DE", b"L", b"Ve", b"."], 1),
        ([b"a rich", b" tap", b"estry", b"!"], 0),
        ([b"We", b" d", b"elve"], 1),  # at the end of the text: by finish
    ]:
        violation = first_violation(guard, pieces)
        assert violation is not None and violation.start == start, pieces
        assert "banned" in violation.reason
    for pieces in ([b" del", b"ved"], [b"un", b"delve", b" "], [b"rich", b"  tapestry "]):
        assert first_violation(guard, pieces) is None, pieces
    inside = g.BannedGuard(words=("delve",), whole_words=False, ignore_case=False)
    assert first_violation(inside, [b"un", b"del", b"ved"]) is not None
    assert first_violation(inside, [b"De", b"lve"]) is None
    odd = g.BannedGuard(words=("C++", "(a|b", "é"))
    assert first_violation(odd, [b"in C", b"++", b"11"]) is not None
    assert first_violation(odd, [b"in (a", b"|b", b" "]) is not None
    assert first_violation(odd, [b"x ", b"\xc3", b"\xa9", b" y"]) == g.Violation(
        "ban", 1, "'é' is banned"
    )


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_ban_does_not_depend_on_the_cuts(seed: int):
    rng = random.Random(seed)
    filler = "".join(rng.choices("ab cdé\n", k=rng.randrange(600)))
    data = f"{filler} foo-BAR {filler}".encode()
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(99)))})
    pieces = [data[a:b] for a, b in pairwise(cuts)]
    begin = len(f"{filler} ".encode())
    expected = next(n for n, end in enumerate(cuts[1:]) if end > begin)
    for guard in (g.BannedGuard(words=("FOO-bar",)), g.BannedGuard(patterns=(r"\bfo+-bar\b",))):
        violation = first_violation(guard, pieces)
        assert violation is not None and violation.start == expected


def test_patterns():
    phone = g.BannedGuard(patterns=(r"\d{3}-\d{4}",))
    violation = first_violation(phone, [b"call ", b"55", b"5-12", b"34", b" now"])
    assert violation is not None and violation.start == 1 and "555-1234" in violation.reason
    start = g.BannedGuard(patterns=("^sure",), window=8)
    assert first_violation(start, [b"Sure", b",", b" I"]) is not None
    assert first_violation(start, [b"I am not ", *[b"un", b"sure"] * 9, b"."]) is None
    whole_word = g.BannedGuard(patterns=(r"\bcat\b",))
    assert first_violation(whole_word, [b"a cat", b"alog"]) is None
    assert first_violation(whole_word, [b"a cat", b" sat"]) is not None
    assert first_violation(whole_word, [b"a cat"]) is not None


@pytest.mark.parametrize("pattern", ["(", "[a", "a*", "x{2,1}", "(?P<a", "*a", "", "a" * 2000])
def test_a_bad_pattern_is_refused(pattern: str):
    with pytest.raises(SettingsError) as caught:
        g.BannedGuard(patterns=(pattern,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?s).*.*.*.*.*.*ZQX", r"(?:\w{1,16}){1,16}!", "(a+)+b", "(a*)*b", "(?:a|ab|b)+c",
        r"(\w+\s?)*#", "(.*a){20}x", "((a{1,9}){2,99})!", "(x+x+)+y",
    ],
)  # fmt: skip
def test_no_pattern_takes_longer_than_its_text(pattern: str):
    """An engine that tries one way after another would not come back from most of these."""
    guard = g.BannedGuard(patterns=(pattern,))
    assert first_violation(guard, [b"aaaa aaaa"] * 120) is None
    assert first_violation(guard, [b"xxxxxxxx"] * 120) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"foo(?=bar)", "look-around"),
        (r"(?<!un)sure", "look-around"),
        (r"(a+)\1", "back references"),
        (r"a++b", "possessive"),
        (r"(?>a+)b", "atomic"),
        (r"end\Z", r"write \z"),
        (r"\pL{200}\pN{200}", "too large"),
        (r".{1,1000}!", "instructions"),
        (r"\bcafé\b", "non-ASCII"),
        ("a\ud800", "lone surrogate"),
    ],
)
def test_what_cannot_run_in_linear_time_is_refused_in_words(pattern: str, reason: str):
    with pytest.raises(SettingsError) as caught:
        g.BannedGuard(patterns=(pattern,))
    assert reason in str(caught.value)


def test_the_patterns_of_a_text_are_bounded_together():
    letters = [f"pattern=\\pL{n}x" for n in range(9)]
    assert g.GuardPolicy.parse(letters[:2])
    with pytest.raises(SettingsError, match="maximum is 8,192"):
        g.GuardPolicy.parse(letters)


def test_banned_words_are_looked_up_however_many_there_are(monkeypatch: pytest.MonkeyPatch):
    """Counted in characters that are compared, not in seconds."""
    words = [f"w{number}x" for number in range(9000)]
    many, few = g.BannedGuard(words=("ab c", "ab", *words)), g.BannedGuard(words=("ab c", "ab"))
    compared: list[int] = []
    real = monitors.BannedPhrases._fold

    def fold(self: monitors.BannedPhrases, text: str) -> str:
        compared.append(len(text))
        return real(self, text)

    monkeypatch.setattr(monitors.BannedPhrases, "_fold", fold)
    for guard in (many, few):
        violation = first_violation(guard, [b"to ", b"ab ", b"cd"])
        assert violation == g.Violation("ban", 1, "'ab' is banned"), "the longer one has no border"
    assert max(compared) < 20
    with pytest.raises(SettingsError, match="maximum is"):
        g.BannedGuard(words=("a" * 1001,))
    with pytest.raises(SettingsError, match="maximum is"):
        g.BannedGuard(words=tuple(f"{number:06}" for number in range(20_000)))


@given(st.text("ab c+é_", max_size=40), st.lists(st.text("ab c+é_", min_size=1, max_size=4)))
@settings(max_examples=100, deadline=None)
def test_words_are_found_as_python_s_re_finds_them(text: str, words: list[str]):
    """The leftmost, and of those the longest, between borders."""
    words = [*words, "ab"]

    def bounded(word: str) -> str:
        before = r"(?<!\w)" if re.match(r"\w", word) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
        return before + re.escape(word) + after

    ordered = sorted(words, key=len, reverse=True)
    text += "\n"  # behind which everything is certain
    match = re.compile("|".join(map(bounded, ordered)), re.IGNORECASE).search(text)
    violation = g.BannedGuard(words=tuple(words)).start().push(0, text.encode(), 0.0, 0.0)
    assert (violation is None) == (match is None)
    if violation is not None and match is not None:
        assert violation.reason == f"{match.group()!r} is banned"


def test_surprise():
    monitor = g.SurpriseGuard(spike=8).start()
    assert monitor.push(0, b"", -7.9, 1) is None
    violation = monitor.push(1, b"", -8.1, 1)
    assert violation == g.Violation("surprise", 1, "a surprise of 8.1 nats, above 8")
    monitor = g.SurpriseGuard(spike=None, mean=3, window=4).start()
    violations = [monitor.push(n, b"", -float(n), 0) for n in range(6)]
    assert [violation and violation.start for violation in violations] == [None] * 5 + [2]
    relative = g.SurpriseGuard(spike=4, beyond_entropy=True).start()
    assert relative.push(0, b"", -9, 6) is None
    assert relative.push(0, b"", -9, 1) is not None
    assert relative.push(0, b"", float("nan"), 1) is None
    assert relative.push(0, b"", -float("inf"), 1) is not None


def test_predicates():
    answers: list[Any] = [None, False, True, 1, "too rude"]
    monitor = PredicateGuard(lambda text, tokens: answers[len(tokens) - 1]).start()
    violations = [monitor.push(n, b"x", -1, 1) for n in range(5)]
    assert [violation and violation.start for violation in violations] == [None, None, 2, 1, 4]
    assert violations[4] is not None and violations[4].reason == "too rude"
    calls: list[Any] = []
    monitor = PredicateGuard(lambda *args: calls.append(args)).start()
    for token, piece in enumerate([b"a", b"\xc3", b"\xa9"]):
        monitor.push(token, piece, -1, 1)
    assert calls == [("a", (0,)), ("a", (0, 1)), ("aé", (0, 1, 2))]


def test_a_predicate_that_fails_says_so():
    def broken(text: str, tokens: Any) -> None:
        raise KeyError("oh")

    run = g.GuardRun(g.GuardPolicy((PredicateGuard(broken, name="mine"),)))
    with pytest.raises(GuardError, match="'mine' failed at token 0: KeyError") as caught:
        run.push(1, b"x", -1, 1)
    assert isinstance(caught.value, UnspoolError)
    assert isinstance(caught.value.__cause__, KeyError)
    for answer in (-1, 1, 2.5, object()):
        monitor = PredicateGuard(lambda text, tokens, answer=answer: answer).start()
        with pytest.raises(GuardError, match="it must return"):
            monitor.push(1, b"x", -1, 1)
