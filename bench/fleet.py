"""Capacity planning: a fleet of replicas, simulated with measured step costs.

    python bench/fleet.py size --rate 20,40,80       how many replicas does this load need?
    python bench/fleet.py routing --rate 40 --replicas 2,4       what does routing by prefix save?
    python bench/fleet.py loss --rate 60 --replicas 2,3          what does a lost machine do?
    python bench/fleet.py scaling --rate 20 --replicas 1         how late is an autoscaler?
    python bench/fleet.py plan --out out             all of these, with tables and a chart
    python bench/fleet.py calibrate --out cpu.json   measure the steps of this machine
    python bench/fleet.py check                      the simulator against real replicas here

Step costs are those of an H200 with an 8B model (bench/fleets/costs/h200-8b.json) unless --costs
names others. A trace consists of sessions that share system prompts and documents and come in
bursts; everything follows from --seed.

check      measures the steps (unless --costs is given), then sends a short trace through real
           `unspool serve` processes, one on each core, and through the simulator, by each policy.
"""

import argparse
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fleets.simulate import (
    POLICIES,
    CostsError,
    Failures,
    Figures,
    Outcome,
    Scaling,
    Scenario,
    StepCosts,
    figures,
    load_costs,
    quantile,
    run_figures,
    simulate,
)
from fleets.trace import Arrivals, Mix, Request, Session, make_trace, requests_per_session
from lib import report
from lib.arguments import add_options, list_of, make_parser, one_of
from lib.report import say
from unspool.costs.part import Series

Row = dict[str, Any]
WARM = 1 / 3  # of a run, before anything counts: caches fill, chats reach their later turns
MANY = 12  # times the expected replicas: a fleet in which requests hardly wait
WINDOW_S = 10.0  # of the curves over time
MIX = Mix()
CACHE = 1 << 29  # KV-cache bytes of a real replica


@dataclass(frozen=True)
class Target:
    """Limits of the p99 latencies."""

    first_s: float = 0.5
    gap_s: float = 0.06

    def is_met(self, result: Figures) -> bool:
        complete = result.finished == result.requests
        return complete and result.first_p99 <= self.first_s and result.gap_p99 <= self.gap_s


@dataclass(frozen=True)
class Load:
    """Requests per second for a time, in bursts or not, and the machines lost meanwhile."""

    rate: float
    seconds: float
    seed: int = 1
    bursts: bool = True
    jump_at: float | None = None
    jump: float = 1.0
    failures: Failures = field(default_factory=Failures)

    def sessions(self) -> list[Session]:
        rate, burst = self.rate / requests_per_session(MIX), 3.0 if self.bursts else 1.0
        arrivals = Arrivals(rate, burst, jump_at=self.jump_at, jump=self.jump)
        return make_trace(self.seed, arrivals, self.seconds, MIX)

    def run(self, costs: StepCosts, replicas: int, policy: str, sessions: Any) -> Figures:
        scenario = Scenario(costs, replicas, policy, self.failures, seed=self.seed)
        return run_figures(simulate(scenario, sessions), self.seconds * WARM, self.seconds)

    def row(self, replicas: int, policy: str, result: Figures) -> Row:
        rate = result.requests / (self.seconds * (1 - WARM))
        counts = {"replicas": replicas, "policy": policy, "rate": rate}
        return {**counts, "cached": result.cached, **asdict(result)}


# -- studies ---------------------------------------------------------------------------------------


def study_size(args: argparse.Namespace, costs: StepCosts) -> list[Row]:
    """The fewest replicas that meet the target; each search starts at the previous result."""
    target = Target(args.first_ms / 1e3, args.gap_ms / 1e3)
    rows = []
    for policy in args.policy or ("round-robin", "prefix"):
        per_request = 0.0  # replicas for one request per second
        for rate in args.rate:
            load = Load(rate, args.seconds, args.seed, failures=failures_of(args))
            guess = max(1, round(rate * per_request))
            count, result = fewest_replicas(costs, load, policy, target, guess)
            per_request = count / rate
            rows.append(load.row(count, policy, result))
    return rows


def fewest_replicas(
    costs: StepCosts, load: Load, policy: str, target: Target, count: int
) -> tuple[int, Figures]:
    """Search from a guess, down or up: adding replicas never makes it worse."""
    sessions = load.sessions()
    result = load.run(costs, count, policy, sessions)
    if target.is_met(result):
        while count > 1:
            smaller = load.run(costs, count - 1, policy, sessions)
            if not target.is_met(smaller):
                break
            count, result = count - 1, smaller
        return count, result
    best = load.run(costs, MANY * count, policy, sessions)
    if not target.is_met(best):
        raise CostsError(
            f"no number of replicas meets p99 targets of {target.first_s * 1e3:.0f} ms and "
            f"{target.gap_s * 1e3:.0f} ms: with an empty queue they are "
            f"{best.first_p99 * 1e3:.0f} ms and {best.gap_p99 * 1e3:.0f} ms; allow longer "
            "latencies or shorten the requests"
        )
    while not target.is_met(result):
        count += 1
        result = load.run(costs, count, policy, sessions)
    return count, result


def study_routing(args: argparse.Namespace, costs: StepCosts) -> list[Row]:
    """The same requests on the same fleet, by each policy."""
    load = Load(args.rate[0], args.seconds, args.seed, failures=failures_of(args))
    sessions = load.sessions()
    return [
        load.row(count, policy, load.run(costs, count, policy, sessions))
        for count in args.replicas
        for policy in args.policy or POLICIES
    ]


def study_loss(args: argparse.Namespace, costs: StepCosts) -> list[Row]:
    """One machine is lost: the p99 before, at its worst, and the time until it has recovered."""
    moment = args.seconds * WARM
    failures = failures_of(args, moment)
    load = Load(args.rate[0], args.seconds, args.seed, bursts=False, failures=failures)
    sessions, rows = load.sessions(), []
    for count in args.replicas:
        for policy in args.policy or ("prefix",):
            outcome = simulate(Scenario(costs, count, policy, failures, seed=load.seed), sessions)
            retried = [r for r in outcome.requests if r.attempts > 1]
            rows.append({
                "replicas": count, "policy": policy, "retried": len(retried),
                "lost": sum(r.outcome == "lost" for r in outcome.requests),
                "longest_pause": max((gap for r in retried for gap in r.gaps), default=0.0),
                **disturbance(outcome, load, moment),
            })  # fmt: skip
    return rows


def study_scaling(args: argparse.Namespace, costs: StepCosts) -> list[Row]:
    """The load triples and replicas are started: how long the p99 is worse, by settings."""
    moment, least, rows = args.seconds * WARM, args.replicas[0], []
    load = Load(args.rate[0], args.seconds, args.seed, bursts=False, jump_at=moment, jump=3.0)
    sessions = load.sessions()
    for up_delay_s, start_s in ((30.0, None), (10.0, None), (10.0, 5.0)):
        shape = replace(costs.shape, start_s=start_s or costs.shape.start_s)
        scaling = Scaling(least, 8 * least, args.target, up_delay_s=up_delay_s)
        scenario = Scenario(replace(costs, shape=shape), least, "prefix", scaling=scaling)
        outcome = simulate(scenario, sessions)
        before = max((size for time, size in outcome.sizes if time <= moment), default=0)
        starts = (t - moment for t, size in outcome.sizes if t > moment and size > before)
        rows.append({
            "up_delay_s": up_delay_s, "start_s": shape.start_s, "target": scaling.target,
            "refused": sum(r.outcome == "refused" for r in outcome.requests),
            "most": max(size for _, size in outcome.sizes),
            "first_new_s": next(starts, math.inf), "sizes": outcome.sizes,
            **disturbance(outcome, load, moment),
        })  # fmt: skip
    return rows


def disturbance(outcome: Outcome, load: Load, moment: float) -> Row:
    """The p99 to the first token over time, before and after an event."""
    curve = p99_over_time(outcome.requests, load.seconds)
    before = figures(outcome.requests, load.seconds * WARM / 2, moment).first_p99
    worst = max((p for t, p in curve if t >= moment), default=0.0)
    seconds = recovery_time(curve, 1.5 * before, moment) - moment
    return {"p99_before": before, "p99_worst": worst, "seconds": seconds, "curve": curve}


def p99_over_time(requests: Sequence[Request], seconds: float) -> list[tuple[float, float]]:
    """The p99 to the first token by time of arrival, at the end of each window."""
    windows: list[list[float]] = [[] for _ in range(math.ceil(seconds / WINDOW_S))]
    for request in requests:
        if request.outcome == "finished" and request.arrival < seconds:
            windows[int(request.arrival / WINDOW_S)].append(request.first_token_s)
    ends = ((number + 1) * WINDOW_S for number in range(len(windows)))
    return [(end, quantile(w, 99)) for end, w in zip(ends, windows, strict=True) if w]


def recovery_time(curve: Sequence[tuple[float, float]], limit: float, since: float) -> float:
    """Last time above a limit before the curve stays below it for three windows."""
    below, last = 0, since
    for moment, value in curve:
        if moment > since:
            below, last = (0, moment) if value > limit else (below + 1, last)
        if below == 3:
            break
    return last


def failures_of(args: argparse.Namespace, *moments: float) -> Failures:
    return Failures(args.mtbf, moments, args.notice, args.restart)


# -- report ----------------------------------------------------------------------------------------

Column = tuple[str, str, Callable[[Any], str]]


def _ms(value: float) -> str:
    return f"{value * 1e3:,.0f}"


def _s(value: float) -> str:
    return "–" if math.isinf(value) else f"{value:,.0f}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}"


_LATENCIES: tuple[Column, ...] = (
    ("first token p50, ms", "first_p50", _ms),
    ("p99", "first_p99", _ms),
    ("between tokens p50, ms", "gap_p50", _ms),
    ("p99", "gap_p99", _ms),
)
_RECOVERY: tuple[Column, ...] = (
    ("p99 before, ms", "p99_before", _ms),
    ("worst 10 s, ms", "p99_worst", _ms),
    ("s until as before", "seconds", _s),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "size": (
        ("requests/s", "rate", "{:.0f}".format),
        ("routing", "policy", _plain),
        ("**replicas**", "replicas", "**{}**".format),
        ("texts in a step", "rows", "{:.0f}".format),
        ("prompts cached", "cached", "{:.0%}".format),
        *_LATENCIES,
    ),
    "routing": (
        ("replicas", "replicas", _plain),
        ("routing", "policy", _plain),
        ("prompt tokens computed", "prefill_tokens", _plain),
        ("cached", "cached", "{:.0%}".format),
        ("texts in a step", "rows", "{:.0f}".format),
        *_LATENCIES,
    ),
    "loss": (
        ("replicas", "replicas", _plain),
        ("routing", "policy", _plain),
        *_RECOVERY,
        ("requests sent again", "retried", _plain),
        ("longest pause in a text, s", "longest_pause", "{:.1f}".format),
        ("lost", "lost", _plain),
    ),
    "scaling": (
        ("up delay, s", "up_delay_s", _s),
        ("start, s", "start_s", _s),
        ("first new replica after, s", "first_new_s", _s),
        *_RECOVERY,
        ("refused", "refused", _plain),
        ("most replicas", "most", _plain),
    ),
}


def make_table(study: str, rows: Sequence[Row]) -> str:
    columns = COLUMNS[study]
    cells = [[form(row[name]) for _, name, form in columns] for row in rows]
    return report.table([title for title, _, _ in columns], cells)


def draw(results: dict[str, list[Row]]) -> str:
    """One chart of all studies but routing."""
    panels: list[report.Panel] = []
    if sizes := results.get("size"):
        lines = []
        for policy in dict.fromkeys(row["policy"] for row in sizes):
            mine = [row for row in sizes if row["policy"] == policy]
            x, y = [row["rate"] for row in mine], [row["replicas"] for row in mine]
            lines.append(Series(policy, x, y, x_label="requests a second", y_label="replicas"))
        panels.append(("Replicas for a p99 within the targets", lines))
    for study, title, name in (
        ("loss", "A machine is lost", "{replicas} replicas, {policy}"),
        ("scaling", "The load triples", "up after {up_delay_s:g} s, start {start_s:g} s"),
    ):
        labels = {"x_label": "seconds", "y_label": "p99 to the first token, s"}
        lines = [
            Series(name.format(**row), *zip(*row["curve"], strict=True), **labels)
            for row in results.get(study, [])
        ]
        if lines:
            panels.append((title, lines))
    return report.sheet(panels)


def savings(rows: Sequence[Row]) -> list[str]:
    """What policies save compared with the first one on the same fleet."""
    base: dict[int, Row] = {}
    lines = []
    for row in rows:
        first = base.setdefault(row["replicas"], row)
        if row is not first:
            change = {n: row[n] / first[n] - 1 for n in ("prefill_tokens", "first_p99")}
            lines.append(
                f"{row['replicas']} replicas, {row['policy']} against {first['policy']}: prompt "
                f"tokens computed {change['prefill_tokens']:+.0%}, p99 to the first token "
                f"{change['first_p99']:+.0%}"
            )
    return lines


# -- commands --------------------------------------------------------------------------------------

STUDIES = {
    "size": study_size,
    "routing": study_routing,
    "loss": study_loss,
    "scaling": study_scaling,
}
# What `plan` runs: the figures of docs/research/scale.md.
PLAN = {
    "size": ["--rate", "20,40,80", "--seconds", "90"],
    "routing": ["--rate", "40", "--replicas", "2,4", "--seconds", "90"],
    "loss": ["--rate", "60", "--replicas", "2,3", "--seconds", "180"],
    "scaling": ["--rate", "20", "--replicas", "1", "--seconds", "180"],
}


def run_studies(args: argparse.Namespace) -> int:
    """Run one study, or all of them with `plan`."""
    costs = load_costs(args.costs or "h200-8b")
    results: dict[str, list[Row]] = {}
    for name in STUDIES if args.command == "plan" else [args.command]:
        planned = parser().parse_args([name, *PLAN[name]]) if args.command == "plan" else args
        planned.seed = args.seed
        start = time.perf_counter()
        results[name] = STUDIES[name](planned, costs)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
        print(f"\n{name}\n\n{make_table(name, results[name])}\n")
        if name == "routing":
            print("\n".join(savings(results[name])) + "\n")
    if args.out is not None:
        report.write_json(
            args.out / "fleet.json", {"costs": costs.name, "seed": args.seed, **results}
        )
        if results.keys() - {"routing"}:
            (args.out / "fleet.svg").write_text(draw(results), encoding="utf-8")
    return 0


def calibrate(args: argparse.Namespace) -> int:
    from fleets import real

    with tempfile.TemporaryDirectory() as folder:
        options = server_options(args)
        costs = real.calibrate(args.name, Path(folder), args.replicas[0], options, args.rounds)
    file = args.out or Path("costs.json")
    costs.save(file)
    print(f"{file}: {costs.source}")
    return 0


def check(args: argparse.Namespace) -> int:
    from fleets import real

    count, options = args.replicas[0], server_options(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.costs:
            costs = load_costs(args.costs)
        else:
            say(f"measuring the steps of {count} replicas")
            costs = real.calibrate(args.name, folder, count, options, args.rounds)
            say(costs.source)
        sessions = real.small_trace(args.seed, args.rate[0], args.seconds)
        requests = sum(len(session.turns) for session in sessions)
        say(f"{requests} requests in {len(sessions)} sessions for each policy")
        policies: Sequence[str] = args.policy or ("round-robin", "prefix")
        rows, others = real.check(costs, sessions, folder, policies, count, options)
    form = "{policy} | {name} | {real:,.1f} | {predicted:,.1f} | {error:+.0%}"
    header = ["policy", "figure", "real", "predicted", "error"]
    print(report.table(header, [form.format(**row).split(" | ") for row in rows]) + "\n")
    for policy, share in others.items():
        print(f"{policy}: other processes used {share:.0%} of all cores")
    if args.out is not None:
        costs.save(args.out / "costs.json")
        report.write_json(args.out / "check.json", {"figures": rows, "others": others})
    return 0


def server_options(args: argparse.Namespace) -> list[str]:
    options = ["--cache-memory", str(CACHE)]
    return options if args.model is None else [*options, "--model", args.model]


def parser() -> argparse.ArgumentParser:
    result = make_parser(__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    for name in (*STUDIES, "plan", "calibrate", "check"):
        command, is_real = commands.add_parser(name), name in ("calibrate", "check")
        rate = [3.0] if is_real else [40.0]
        command.add_argument("--replicas", type=list_of(int), default=[2])
        command.add_argument(
            "--rate", type=list_of(float), default=rate, help="requests per second"
        )
        policies, text = list_of(one_of(POLICIES)), ", ".join(POLICIES)
        command.add_argument("--policy", type=policies, help=text)
        add_options(
            command,
            ("--seed", 1),
            ("--out", Path, "folder for results; of calibrate, a file"),
            ("--costs", str, "file of step costs, or the name of one in bench/fleets/costs"),
            ("--seconds", 40.0 if is_real else 90.0),
        )
        if is_real:
            add_options(
                command,
                ("--model", str, "as `unspool serve --model`; the default model if not given"),
                ("--rounds", 2, "rounds of calibration"),
                ("--name", "this machine"),
            )
        else:
            add_options(
                command,
                ("--first-ms", 500.0, "target: p99 to the first token"),
                ("--gap-ms", 60.0, "target: p99 between tokens"),
                ("--mtbf", float, "seconds between failures of a machine; none if not given"),
                ("--notice", 5.0, "seconds until a lost machine is noticed"),
                ("--restart", 60.0, "seconds until there is another one"),
                ("--target", 48.0, "requests in flight for a replica"),
            )
    return result


def main(words: Sequence[str] | None = None) -> int:
    args = parser().parse_args(words)
    command = {"calibrate": calibrate, "check": check}.get(args.command, run_studies)
    try:
        return command(args)
    except CostsError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that real replicas are ended too
    sys.exit(main())
