"""Random load on one engine: python bench/stress.py --seconds 600 --device cuda

Texts of every kind (greedy, sampled, with penalties, ending early, explained, with a grammar,
guarded, drafted, without the cache), branches that are forked, read, observed, rewound and
released, and readers that disconnect, all from several threads. Each text is compared with the one
that was written alone. On a GPU, where sums may have another order in a batch, a few differ unless
the model was loaded with `--exact`; they are counted, and are an error with it.
"""

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

from lib.arguments import add_options, make_parser
from unspool.engine.engine import Engine
from unspool.engine.request import DraftTree, Limits, Request
from unspool.sampling import Grammar, GrammarSpec, GrammarVocabulary, SamplingSettings
from unspool.sampling.guards import GuardPolicy

GREEDY = {"temperature": 0.0}
FREE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": FREE,
    "default": {},
    "penalties": {**FREE, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "windowed": {**GREEDY, "presence_penalty": 1.0, "penalty_window": 6},
    "ending": FREE,
    "explained": FREE,
    "grammar": FREE,
    "guarded": {**FREE, "top_k": 3},
    "drafted": FREE,
    "tree-drafted": FREE,
    "uncached": GREEDY,
    "typical": {**FREE, "typical_p": 0.9},
}


class ImperfectDrafter:
    """Drafts the known text with mistakes, as a chain or as a tree."""

    def __init__(self, text: list[int], prompt: int, seed: int, tree: bool) -> None:
        self.text, self.prompt, self.random = text, prompt, random.Random(seed)
        self.tree = tree

    def propose(self, tokens: Any, most: int) -> list[int] | DraftTree:
        start = len(tokens) - self.prompt
        guess = self.text[start : start + min(most, self.random.randrange(6))]
        if not self.tree or not guess:
            return [self._with_mistakes(token) for token in guess]
        # Each node is a child of the root or of any node before it.
        draft, parents = list[int](), list[int]()
        for number in range(min(most, len(guess) + self.random.randrange(4))):
            parent = self.random.randint(-1, number - 1)
            depth, node = 0, parent
            while node >= 0:
                depth, node = depth + 1, parents[node]
            draft.append(self._with_mistakes(guess[min(depth, len(guess) - 1)]))
            parents.append(parent)
        return DraftTree(draft, parents)

    def _with_mistakes(self, token: int) -> int:
        return token if self.random.random() < 0.8 else self.random.choice(self.text)

    def learn(self, proposed: int, accepted: int, seconds: float) -> None: ...


@dataclass(slots=True)
class ReferenceText:
    """A request, and its text when it is written alone."""

    kind: str
    request: Request
    text: list[int] = field(default_factory=list)


def make_texts(vocab_size: int, context: int, count: int, seed: int) -> list[ReferenceText]:
    """Requests of all kinds, many of which share a prefix."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab_size) for _ in range(context // 3)] for _ in range(4)]
    letters = [b"%c" % (97 + token % 26) for token in range(vocab_size)]
    vocabulary = GrammarVocabulary(letters, [0])
    spec = GrammarSpec.regex("([a-m]{3}none[n-z]{2})+")
    texts = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        prompt = rng.choice(stems)[: rng.randint(1, context // 3)]
        prompt = [*prompt, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 8)))]
        limits: dict[str, Any] = {"max_tokens": rng.randint(1, context // 2)}
        options: dict[str, Any] = {}
        if kind == "ending":
            limits["end_ids"] = frozenset(range(0, vocab_size, 12))
        elif kind == "explained":
            limits.update(explain=True, top=3)
        elif kind == "grammar":
            options["grammar"] = Grammar.compile(spec, vocabulary)
        elif kind == "guarded":
            options["guards"] = GuardPolicy.parse(["loop"])
        elif kind == "uncached":
            options["cached"] = False
            limits["max_tokens"] = min(8, limits["max_tokens"])
        request = Request(
            prompt=tuple(prompt), settings=SamplingSettings(seed=number, **KINDS[kind]),
            limits=Limits(context=context, **limits), priority=rng.choice([0, 0, 0, 1]),
            **options,
        )  # fmt: skip
        texts.append(ReferenceText(kind, request))
    return texts


def write_alone(engine: Engine, texts: list[ReferenceText]) -> None:
    """Write the texts one after the other; then drafters can use them."""
    for reference in texts:
        reference.text = read_tokens(engine.submit(reference.request))
        if reference.kind in ("drafted", "tree-drafted"):
            prompt, tree = len(reference.request.prompt), reference.kind == "tree-drafted"
            make = partial(ImperfectDrafter, reference.text, prompt, 1, tree)
            drafter = lambda request, make=make: make()  # noqa: E731
            reference.request = replace(reference.request, drafter=drafter)


def read_tokens(stream: Any) -> list[int]:
    """A text's tokens, without those that a guard retracted."""
    tokens: list[int] = []
    for step in stream:
        del tokens[len(tokens) - step.retracts :]
        tokens.append(step.token)
    return tokens


@dataclass
class Tally:
    """Counts, shared by all threads."""

    texts: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)


class Driver:
    """The moves of one thread."""

    def __init__(
        self, engine: Engine, texts: list[ReferenceText], tally: Tally, seed: int, faults: bool
    ) -> None:
        self.engine, self.texts, self.tally, self.faults = engine, texts, tally, faults
        self.random = random.Random(seed)
        self.running: list[tuple[ReferenceText, Any]] = []
        self.branches: list[Any] = []

    def run(self, deadline: float, at_once: int) -> None:
        try:
            while time.monotonic() < deadline:
                name = self.random.choices(list(MOVES), list(MOVES.values()))[0]
                self.tally.moves[name] += 1
                self._run_move(getattr(self, name))
                while len(self.running) > at_once:
                    self._run_move(self.read_one)
            while self.running:
                self._run_move(self.read_one)
        except BaseException as error:
            self.tally.errors.append(error)
        finally:
            for _, stream in self.running:
                stream.close()
            for branch in self.branches:
                self.engine.release(branch)

    def _run_move(self, move: Callable[[], object]) -> None:
        try:
            move()
        except RuntimeError as error:  # injected by the device
            if not self.faults:
                raise
            self.tally.failed[str(error)] += 1

    def submit(self) -> None:
        reference = self.random.choice(self.texts)
        self.running.append((reference, self.engine.submit(reference.request)))

    def leave(self) -> None:
        if self.running:
            _, stream = self.running.pop(self.random.randrange(len(self.running)))
            for _ in range(self.random.randrange(4)):
                next(stream, None)
            stream.close()

    def read_one(self) -> None:
        reference, stream = self.running.pop(0)
        text = read_tokens(stream)
        self.tally.texts[reference.kind] += 1
        self.tally.tokens += len(text)
        self.tally.differing[reference.kind] += text != reference.text

    def open(self) -> None:
        if len(self.branches) < 3:
            self.branches.append(self.engine.open(self.random.choice(self.texts).request.prompt))

    def read_branch(self) -> None:
        """Compare a branch's logits with those of a new branch with the same tokens."""
        if not self.branches:
            return
        branch = self.random.choice(self.branches)
        if len(branch) + 1 >= self.engine.backend.context // 2:
            self.engine.rewind(branch, 1)
            return
        logits = as_floats(self.engine.extend(branch, [self.random.randrange(8)]))
        other = self.engine.open(branch.tokens)
        try:
            again = as_floats(self.engine.extend(other))
        finally:
            self.engine.release(other)
        difference = np.abs(logits - again).max()
        limit = 0.05 * (1 + np.abs(again).max())
        assert difference < limit, f"logits differ by {difference}"

    def look(self) -> None:
        if self.branches:
            branch = self.random.choice(self.branches)
            self.engine.look(branch, at=frozenset({len(branch) - 1}))

    def fork(self) -> None:
        if self.branches and len(self.branches) < 6:
            self.branches.append(self.engine.fork(self.random.choice(self.branches)))

    def rewind(self) -> None:
        if self.branches:
            branch = self.random.choice(self.branches)
            self.engine.rewind(branch, self.random.randint(1, len(branch)))

    def release(self) -> None:
        if self.branches:
            self.engine.release(self.branches.pop(self.random.randrange(len(self.branches))))

    def evict(self) -> None:
        self.engine.call(lambda: self.engine.tree.index.evict(8))


MOVES = {
    "submit": 50, "leave": 8, "open": 5, "read_branch": 8, "look": 3, "fork": 4, "rewind": 4,
    "release": 5, "evict": 2,
}  # fmt: skip


def as_floats(logits: Any) -> Any:
    return np.asarray(logits.float().cpu() if hasattr(logits, "cpu") else logits, np.float64)


def stress(
    engine: Engine, texts: list[ReferenceText], *, seconds: float, threads: int = 3,
    at_once: int = 32, seed: int = 0, faults: bool = False,
    progress: Callable[[Tally, float], None] | None = None,
) -> Tally:  # fmt: skip
    """Run random moves in threads; afterwards the engine must hold no task and no page."""
    tally, deadline = Tally(), time.monotonic() + seconds
    drivers = [Driver(engine, texts, tally, seed + n, faults) for n in range(threads)]
    runners = [threading.Thread(target=d.run, args=(deadline, at_once)) for d in drivers]
    for runner in runners:
        runner.start()
    for runner in runners:
        while runner.is_alive():
            runner.join(10.0)
            if progress:
                progress(tally, deadline - time.monotonic())
    if tally.errors:
        raise tally.errors[0]

    def num_leaked() -> int:
        engine.tree.index.clear()
        return len(engine.scheduler.tasks()) + engine.tree.pool.used

    for _ in range(1000):
        if not engine.call(num_leaked):
            return tally
        time.sleep(0.01)
    raise AssertionError(f"{engine.call(num_leaked)} pages or tasks were leaked")


def print_progress(tally: Tally, remaining_s: float) -> None:
    """Print counts; a minute after the end, the stack of every thread, and exit."""
    print(
        f"  {max(0, remaining_s):.0f} s remain: {tally.texts.total():,} texts, {tally.tokens:,} "
        f"tokens, {tally.differing.total():,} differing, {tally.moves.total():,} moves",
        flush=True,
    )
    if remaining_s < -60:
        faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    parser = make_parser(__doc__)
    add_options(
        parser,
        ("--seconds", 60.0),
        ("--model", str, "folder or file; default: a tiny model with random weights"),
        ("--device", "auto"),
        ("--dtype", "auto"),
        ("--exact", False, "no text may differ"),
        ("--threads", 4),
        ("--at-once", 64, "texts of each thread"),
        ("--memory", 8.0, "MiB of KV cache"),
        ("--seed", 0),
    )
    args = parser.parse_args()
    import unspool

    folder = args.model
    if folder is None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from helpers import tiny

        folder = tempfile.mkdtemp()
        tiny.save("llama", Path(folder))
    options: dict[str, Any] = {"exact": True} if args.exact else {}
    options |= {"device": args.device, "dtype": args.dtype, "memory": int(args.memory * (1 << 20))}
    lm = unspool.load(folder, **options)
    print(f"{lm!r} on {lm.model.device}, {lm.model.precision}", flush=True)
    texts = make_texts(lm.vocab_size, min(lm.context, 400), 48, args.seed)
    start = time.monotonic()
    write_alone(lm.engine, texts)
    print(f"  {len(texts)} texts alone in {time.monotonic() - start:.1f} s", flush=True)
    tally = stress(
        lm.engine, texts, seconds=args.seconds, threads=args.threads, at_once=args.at_once,
        seed=args.seed, progress=print_progress,
    )  # fmt: skip
    print("  kind          texts   different from the text alone")
    for kind in KINDS:
        print(f"  {kind:<12} {tally.texts[kind]:>6}   {tally.differing[kind]}")
    print(f"  {tally.tokens / args.seconds:,.0f} tokens/s; {dict(tally.moves)}")
    print(f"  preempted {lm.engine.scheduler.preemptions} times; nothing was leaked")
    if args.exact and tally.differing.total():
        sys.exit("texts differ from those written alone")


if __name__ == "__main__":
    main()
