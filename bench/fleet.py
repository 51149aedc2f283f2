"""A plan for many users: a fleet of replicas, simulated with step costs that were measured.

    python bench/fleet.py size --rate 20,40,80       how many replicas does this load need?
    python bench/fleet.py routing --rate 40 --replicas 2,4       what does routing by prefix save?
    python bench/fleet.py loss --rate 60 --replicas 2,3          what does a lost machine do?
    python bench/fleet.py scaling --rate 20 --replicas 1         how late is an autoscaler?
    python bench/fleet.py plan --out out             all of these, with tables and a picture
    python bench/fleet.py calibrate --out cpu.json   measure the steps of this machine
    python bench/fleet.py check                      the simulator against real replicas here

Step costs are those of an H200 with a model of 8B (bench/fleets/costs/h200-8b.json) unless --costs
names others. A trace is made of sessions that share system prompts and documents and come in
bursts; everything follows from --seed.

check      measures the steps (unless --costs is given), then sends a short trace through real
           `unspool serve` processes, one on each core, and through the simulator, by each policy.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fleets import report, studies
from fleets.costs import CostsError, StepCosts, load
from fleets.failures import Failures
from fleets.simulate import POLICIES
from fleets.studies import Load, Row, Target

CACHE = 1 << 29  # bytes for keys and values of a real replica
JUMP = 3.0


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def size(given: argparse.Namespace, costs: StepCosts) -> list[Row]:
    lost = _failures(given)
    loads = [Load(rate, given.seconds, given.seed, failures=lost) for rate in given.rate]
    target = Target(given.first_ms / 1e3, given.gap_ms / 1e3)
    return studies.size(costs, loads, given.policy or ("round-robin", "prefix"), target)


def routing(given: argparse.Namespace, costs: StepCosts) -> list[Row]:
    wanted = Load(given.rate[0], given.seconds, given.seed, failures=_failures(given))
    return studies.routing(costs, wanted, given.replicas, given.policy or POLICIES)


def loss(given: argparse.Namespace, costs: StepCosts) -> list[Row]:
    lost = _failures(given, given.seconds * studies.WARM)
    wanted = Load(given.rate[0], given.seconds, given.seed, bursts=False, failures=lost)
    return studies.loss(costs, wanted, given.replicas, given.policy or ("prefix",))


def _failures(given: argparse.Namespace, *moments: float) -> Failures:
    return Failures(given.mtbf, moments, given.notice, given.restart)


def scaling(given: argparse.Namespace, costs: StepCosts) -> list[Row]:
    moment = given.seconds * studies.WARM
    wanted = Load(given.rate[0], given.seconds, given.seed, bursts=False, jump_at=moment, jump=JUMP)
    least = given.replicas[0]
    usual = {"most": 8 * least, "target": given.target}
    tried: list[Row] = [
        {**usual, "up_delay_s": 30.0},
        {**usual, "up_delay_s": 10.0},
        {**usual, "up_delay_s": 10.0, "start_s": 5.0},
    ]
    return studies.scaling(costs, wanted, least, tried)


STUDIES = {"size": size, "routing": routing, "loss": loss, "scaling": scaling}


def study(given: argparse.Namespace) -> int:
    """One of the questions, or with `plan` all of them."""
    costs = load(given.costs or "h200-8b")
    names = list(STUDIES) if given.command == "plan" else [given.command]
    found: dict[str, list[Row]] = {}
    for name in names:
        asked = parser().parse_args([name, *_PLANNED[name]]) if len(names) > 1 else given
        asked.seed = given.seed
        began = time.perf_counter()
        found[name] = STUDIES[name](asked, costs)
        say(f"{name}: {time.perf_counter() - began:.0f} s")
        print(f"\n{name}\n\n{report.table(name, found[name])}")
        if name == "routing":
            print("\n".join(report.savings(found[name])) + "\n")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"costs": costs.name, "seed": given.seed, **found}, indent=1)
        (given.out / "fleet.json").write_text(text + "\n", encoding="utf-8")
        if any(name != "routing" for name in found):
            (given.out / "fleet.svg").write_text(report.pictures(found), encoding="utf-8")
    return 0


# What `plan` runs: the figures of docs/scale.md.
_PLANNED = {
    "size": ["--rate", "20,40,80", "--seconds", "90"],
    "routing": ["--rate", "40", "--replicas", "2,4", "--seconds", "90"],
    "loss": ["--rate", "60", "--replicas", "2,3", "--seconds", "180"],
    "scaling": ["--rate", "20", "--replicas", "1", "--seconds", "180"],
}


def calibrate(given: argparse.Namespace) -> int:
    from fleets.calibrate import calibrate as measure

    with tempfile.TemporaryDirectory() as folder:
        costs = measure(
            given.name, Path(folder), given.replicas[0], _server_options(given), given.rounds
        )
    file = given.out or Path("costs.json")
    costs.save(file)
    print(f"{file}: {costs.source}")
    return 0


def check(given: argparse.Namespace) -> int:
    from fleets import checking
    from fleets.calibrate import calibrate as measure

    count, options = given.replicas[0], _server_options(given)
    with tempfile.TemporaryDirectory() as folder:
        if given.costs:
            costs = load(given.costs)
        else:
            say(f"the steps of {count} replicas at once are measured")
            costs = measure("this machine", Path(folder), count, options, given.rounds)
            say(costs.source)
        sessions = checking.small_trace(given.seed, given.rate[0], given.seconds)
        asked = sum(len(session.turns) for session in sessions)
        say(f"{asked} requests in {len(sessions)} sessions go through each policy")
        policies: Sequence[str] = given.policy or ("round-robin", "prefix")
        found, others = checking.check(costs, sessions, Path(folder), policies, count, options)
    print(checking.table(found))
    for policy, share in others.items():
        print(f"{policy}: others took {share:.0%} of all cores meanwhile")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        costs.save(given.out / "costs.json")
        text = json.dumps({"figures": checking.as_json(found), "others": others}, indent=1)
        (given.out / "check.json").write_text(text + "\n", encoding="utf-8")
    return 0


def _server_options(given: argparse.Namespace) -> list[str]:
    options = ["--cache-memory", str(CACHE)]
    return options if given.model is None else [*options, "--model", given.model]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name in (*STUDIES, "plan", "calibrate", "check"):
        one = commands.add_parser(name)
        add = one.add_argument
        real = name in ("calibrate", "check")
        add("--seed", type=int, default=1)
        add("--out", type=Path, help="a folder for results; of calibrate, a file")
        add("--costs", help="a file of step costs, or the name of one in bench/fleets/costs")
        add("--replicas", type=_ints, default=[2])
        add("--rate", type=_floats, default=[3.0] if real else [40.0], help="requests a second")
        add("--seconds", type=float, default=40.0 if real else 90.0)
        add("--policy", type=_policies, help=", ".join(POLICIES))
        if real:
            add("--model", help="as `unspool serve --model`; the default model where none is given")
            add("--rounds", type=int, default=2, help="of calibration")
            add("--name", default="this machine")
        else:
            add("--first-ms", type=float, default=500.0, help="p99 to the first token")
            add("--gap-ms", type=float, default=60.0, help="p99 between tokens")
            add("--mtbf", type=float, help="s between failures of a machine; none where not given")
            add("--notice", type=float, default=5.0, help="s until a lost machine is noticed")
            add("--restart", type=float, default=60.0, help="s until there is another one")
            add("--target", type=float, default=48.0, help="requests in flight for a replica")
    return made


def _ints(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def _floats(words: str) -> list[float]:
    return [float(word) for word in words.split(",")]


def _policies(words: str) -> list[str]:
    names = words.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(POLICIES)}")
    return names


def main(words: Sequence[str] | None = None) -> int:
    given: Any = parser().parse_args(words)
    work = {"calibrate": calibrate, "check": check}.get(given.command, study)
    try:
        return work(given)
    except CostsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that real replicas are ended too
    sys.exit(main())
