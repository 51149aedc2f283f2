"""Everything at once, at random, for a while: python bench/stress.py --seconds 600 --device cuda

Texts of every kind (greedy, drawn, with penalties, ending early, explained, by a grammar, guarded,
drafted, without the cache), branches that are forked, read, looked into, taken back and let go, and
readers that leave, all from several threads on one engine. Each text is compared with the one that
was written alone. On a GPU, where sums may be taken in another order among others, a few differ
unless the model was loaded with `--exact`; they are counted, and are an error with it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unspool.engine.engine import Engine
from unspool.engine.request import DraftTree, Limits, Request
from unspool.sampling import Grammar, GrammarSpec, GrammarVocabulary, SamplingSettings
from unspool.sampling.guards import GuardPolicy

_TELL = 10.0  # seconds between two lines about how far it is

GREEDY = {"temperature": 0.0}
FREE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "drawn": FREE,
    "usual": {},
    "penalties": {**FREE, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "windowed": {**GREEDY, "presence_penalty": 1.0, "penalty_window": 6},
    "ending": FREE,
    "explained": FREE,
    "grammar": FREE,
    "guarded": {**FREE, "top_k": 3},
    "drafted": FREE,
    "tree-drafted": FREE,
    "uncached": GREEDY,
    "unusual": {**FREE, "typical_p": 0.9},
}


class Guesses:
    """Drafts the text that is known to come, with mistakes, as a chain or as a tree."""

    def __init__(self, text: list[int], prompt: int, seed: int, tree: bool) -> None:
        self.text, self.prompt, self.chance = text, prompt, random.Random(seed)
        self.tree = tree

    def propose(self, tokens: Any, most: int) -> list[int] | DraftTree:
        written = len(tokens) - self.prompt
        guess = self.text[written : written + min(most, self.chance.randrange(6))]
        if not self.tree or not guess:
            return [self._mistaken(token) for token in guess]
        # Each node hangs at the start or at any node before it; the right token stands somewhere.
        draft, parents = list[int](), list[int]()
        for number in range(min(most, len(guess) + self.chance.randrange(4))):
            parent = self.chance.randint(-1, number - 1)
            depth, node = 0, parent
            while node >= 0:
                depth, node = depth + 1, parents[node]
            draft.append(self._mistaken(guess[min(depth, len(guess) - 1)]))
            parents.append(parent)
        return DraftTree(draft, parents)

    def _mistaken(self, token: int) -> int:
        return token if self.chance.random() < 0.8 else self.chance.choice(self.text)

    def learn(self, proposed: int, accepted: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Asked:
    """A text of some kind, and what it is when it is written alone."""

    kind: str
    request: Request
    text: list[int] = field(default_factory=list)


def palette(vocab_size: int, context: int, count: int, seed: int) -> list[Asked]:
    """Texts to ask for, of all kinds, many of which begin alike."""
    chance = random.Random(seed)
    stems = [[chance.randrange(vocab_size) for _ in range(context // 3)] for _ in range(4)]
    letters = [b"%c" % (97 + token % 26) for token in range(vocab_size)]
    vocabulary = GrammarVocabulary(letters, [0])
    spec = GrammarSpec.regex("([a-m]{3}none[n-z]{2})+")
    made = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        prompt = chance.choice(stems)[: chance.randint(1, context // 3)]
        prompt = [*prompt, *(chance.randrange(vocab_size) for _ in range(chance.randint(1, 8)))]
        limits: dict[str, Any] = {"max_tokens": chance.randint(1, context // 2)}
        more: dict[str, Any] = {}
        if kind == "ending":
            limits["end_ids"] = frozenset(range(0, vocab_size, 12))
        elif kind == "explained":
            limits.update(explain=True, top=3)
        elif kind == "grammar":
            more["grammar"] = Grammar.compile(spec, vocabulary)
        elif kind == "guarded":
            more["guards"] = GuardPolicy.parse(["loop"])
        elif kind == "uncached":
            more["cached"] = False
            limits["max_tokens"] = min(8, limits["max_tokens"])
        request = Request(
            prompt=tuple(prompt),
            settings=SamplingSettings(seed=number, **KINDS[kind]),
            limits=Limits(context=context, **limits),
            priority=chance.choice([0, 0, 0, 1]),
            **more,
        )
        made.append(Asked(kind, request))
    return made


def write_alone(engine: Engine, asked: list[Asked]) -> None:
    """One after the other; afterwards drafts can be made of what is known."""
    for one in asked:
        one.text = taken(engine.submit(one.request))
        if one.kind in ("drafted", "tree-drafted"):
            prompt, tree = len(one.request.prompt), one.kind == "tree-drafted"
            make_drafter = partial(Guesses, one.text, prompt, 1, tree)
            one.request = replace(one.request, drafter=lambda request, m=make_drafter: m())


def taken(stream: Any) -> list[int]:
    """A text's tokens, without those that a guard took back."""
    tokens: list[int] = []
    for step in stream:
        del tokens[len(tokens) - step.retracts :]
        tokens.append(step.token)
    return tokens


@dataclass
class Tally:
    """What was seen; shared by all threads."""

    texts: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)


class Driver:
    """One thread's share of the stress."""

    def __init__(self, engine: Engine, asked: list[Asked], tally: Tally, seed: int, faults: bool):
        self.engine, self.requests, self.tally, self.faults = engine, asked, tally, faults
        self.chance = random.Random(seed)
        self.running: list[tuple[Asked, Any]] = []
        self.branches: list[Any] = []

    def run(self, deadline: float, at_once: int) -> None:
        try:
            while time.monotonic() < deadline:
                name = self.chance.choices(*zip(*MOVES, strict=True))[0]
                self.tally.moves[name] += 1
                self._allowed_to_fail(getattr(self, name))
                while len(self.running) > at_once:
                    self._allowed_to_fail(self.read_one)
            while self.running:
                self._allowed_to_fail(self.read_one)
        except BaseException as error:
            self.tally.errors.append(error)
        finally:
            for _, stream in self.running:
                stream.close()
            for branch in self.branches:
                self.engine.release(branch)

    def _allowed_to_fail(self, move: Any) -> None:
        try:
            move()
        except RuntimeError as error:  # what the device was told to raise
            if not self.faults:
                raise
            self.tally.failed[str(error)] += 1

    # -- the moves ----------------------------------------------------------------------------

    def submit(self) -> None:
        one = self.chance.choice(self.requests)
        self.running.append((one, self.engine.submit(one.request)))

    def leave(self) -> None:
        if self.running:
            _, stream = self.running.pop(self.chance.randrange(len(self.running)))
            for _ in range(self.chance.randrange(4)):
                next(stream, None)
            stream.close()

    def read_one(self) -> None:
        one, stream = self.running.pop(0)
        text = taken(stream)
        self.tally.texts[one.kind] += 1
        self.tally.tokens += len(text)
        self.tally.differing[one.kind] += text != one.text

    def open(self) -> None:
        if len(self.branches) < 3:
            self.branches.append(self.engine.open(self.chance.choice(self.requests).request.prompt))

    def read_branch(self) -> None:
        """Its last logits are those of a branch that was opened with the same tokens."""
        if self.branches:
            branch = self.chance.choice(self.branches)
            if len(branch) + 1 >= self.engine.backend.context // 2:
                return self.engine.rewind(branch, 1)
            logits = self.engine.extend(branch, [self.chance.randrange(8)])
            other = self.engine.open(branch.tokens)
            try:
                again = self.engine.extend(other)
            finally:
                self.engine.release(other)
            near = np.abs(_numbers(logits) - _numbers(again)).max()
            assert near < 0.05 * (1 + np.abs(_numbers(again)).max()), f"logits are off by {near}"
        return None

    def look(self) -> None:
        if self.branches:
            branch = self.chance.choice(self.branches)
            self.engine.look(branch, at=frozenset({len(branch) - 1}))

    def fork(self) -> None:
        if self.branches and len(self.branches) < 6:
            self.branches.append(self.engine.fork(self.chance.choice(self.branches)))

    def rewind(self) -> None:
        if self.branches:
            branch = self.chance.choice(self.branches)
            self.engine.rewind(branch, self.chance.randint(1, len(branch)))

    def release(self) -> None:
        if self.branches:
            self.engine.release(self.branches.pop(self.chance.randrange(len(self.branches))))

    def forget(self) -> None:
        self.engine.call(lambda: self.engine.tree.index.evict(8))


MOVES = [
    ("submit", 50), ("leave", 8), ("open", 5), ("read_branch", 8), ("look", 3), ("fork", 4),
    ("rewind", 4), ("release", 5), ("forget", 2),
]  # fmt: skip


def _numbers(logits: Any) -> Any:
    return np.asarray(logits.float().cpu() if hasattr(logits, "cpu") else logits, np.float64)


def stress(
    engine: Engine,
    asked: list[Asked],
    *,
    seconds: float,
    threads: int = 3,
    at_once: int = 32,
    seed: int = 0,
    faults: bool = False,
    tell: Callable[[Tally, float], None] | None = None,
) -> Tally:
    """All of it; afterwards nothing may be left in the engine. `tell` hears of it meanwhile."""
    tally, deadline = Tally(), time.monotonic() + seconds
    drivers = [
        threading.Thread(
            target=Driver(engine, asked, tally, seed + n, faults).run, args=(deadline, at_once)
        )
        for n in range(threads)
    ]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        while driver.is_alive():
            driver.join(_TELL)
            if tell:
                tell(tally, deadline - time.monotonic())
    if tally.errors:
        raise tally.errors[0]

    def left() -> int:
        engine.tree.index.clear()
        return len(engine.scheduler.tasks()) + engine.tree.pool.used

    for _ in range(1000):
        if not engine.call(left):
            return tally
        time.sleep(0.01)
    raise AssertionError(f"{engine.call(left)} pages or tasks were left behind")


def said(tally: Tally, left: float) -> None:
    """How far it is; a minute after the end, what every thread is waiting for."""
    print(
        f"  {max(0, left):.0f} s left: {tally.texts.total():,} texts, {tally.tokens:,} tokens, "
        f"{tally.differing.total():,} differing, {tally.moves.total():,} moves",
        flush=True,
    )
    if left < -60:
        faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", help="a folder or file; without it a tiny one of random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exact", action="store_true", help="no text may differ")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=64, help="texts of each thread")
    parser.add_argument("--memory", type=float, default=8, help="MiB for keys and values")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    import unspool

    folder = given.model
    if folder is None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from helpers import tiny

        folder = tempfile.mkdtemp()
        tiny.save("llama", Path(folder))
    memory = int(given.memory * (1 << 20))
    more: dict[str, Any] = {"exact": True} if given.exact else {}
    lm = unspool.load(folder, device=given.device, dtype=given.dtype, memory=memory, **more)
    print(f"{lm!r} on {lm.model.device}, {lm.model.precision}", flush=True)
    asked = palette(lm.vocab_size, min(lm.context, 400), 48, given.seed)
    began = time.monotonic()
    write_alone(lm.engine, asked)
    print(f"  {len(asked)} texts alone in {time.monotonic() - began:.1f} s", flush=True)
    tally = stress(
        lm.engine, asked, seconds=given.seconds, threads=given.threads, at_once=given.at_once,
        seed=given.seed, tell=said,
    )  # fmt: skip
    print("  kind          texts   differing from the text alone")
    for kind in KINDS:
        print(f"  {kind:<12} {tally.texts[kind]:>6}   {tally.differing[kind]}")
    print(f"  {tally.tokens / given.seconds:,.0f} tokens/s; {dict(tally.moves)}")
    print(f"  preempted {lm.engine.scheduler.preemptions} times; nothing was left behind")
    if given.exact and tally.differing.total():
        sys.exit("texts differ from those written alone")


if __name__ == "__main__":
    main()
