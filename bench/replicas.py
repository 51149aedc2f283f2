"""Replicas under Ray beside one bare server: python bench/replicas.py [MEASURE ...]

overhead   `unspool serve` and `unspool serve --replicas 1` on the same cores, in turns: tokens a
           second at 16 clients, time to the first token at one. Goals: at most 5 % and 5 ms
scaling    one replica kept to one core, and two kept to one each, for the same clients and for so
           many each: at least 1.8 times the tokens
routing    chats with shared system prompts, several turns each, to two replicas: tokens of prompts
           that had to be computed, by prefix and by turns (round robin)
killed     of two replicas under load one is killed: only what it was writing fails, and each of
           these errors says that the request can be sent again

Only one server runs at a time, because Ray's own processes take a few percent of a core even when
nobody asks anything. Writes results.json into --out and prints a table.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers.environments import say
from serving import servers
from serving.report import figures
from serving.servers import Running

MEASURES = ("overhead", "scaling", "routing", "killed")
MOST_LOST, MOST_MS, LEAST_TIMES = 0.05, 5.0, 1.8  # the goals
CLIENTS = 16
EXAMPLES = """examples:
  python bench/replicas.py                              all of it: about ten minutes on two cores
  python bench/replicas.py overhead --rounds 5
  python bench/replicas.py routing killed --out results"""
PROSE = (
    "Rain had washed the road to the harbour, and whoever walked there in the evening could see "
    "the lamps twice. The keeper counted them, wrote the number into his book, and closed it. "
)


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.results = given, dict[str, Any]()
        self.num_requests = 0

    @contextmanager
    def serving(self, *options: str) -> Iterator[Running]:
        """A server with these options, warmed up."""
        server = servers.ours(self.given.model, *options)
        running = Running(server, dict(os.environ), self.given.out / "server.stderr.txt")
        try:
            running.load([self.prompts(2) for _ in range(CLIENTS)], 4, 300, 600)
            yield running
        finally:
            running.close()

    def prompts(self, count: int) -> list[str]:
        """No two begin alike."""
        self.num_requests += count
        return [
            f"{number}: {PROSE}" for number in range(self.num_requests - count, self.num_requests)
        ]

    def load(self, running: Running, clients: int, each: int) -> dict[str, Any]:
        prompts = [self.prompts(each) for _ in range(clients)]
        found = figures(running.load(prompts, self.given.tokens, 300, 600))
        if found["failures"]:
            say(f"failed: {found['failures']}")
        return found

    # -- overhead, scaling -------------------------------------------------------------------

    def overhead(self) -> str:
        cores = str(self.given.cores)
        kinds = {
            "bare": ("--threads", cores),
            "ray": ("--threads", cores, "--replicas", "1", "--cores", cores),
        }
        found = self._in_turns(kinds)
        ratios = [r / b for b, r in zip(found["bare"]["speed"], found["ray"]["speed"], strict=True)]
        later = [
            (r - b) * 1e3
            for b, r in zip(found["bare"]["first"], found["ray"]["first"], strict=True)
        ]
        self.results["overhead"] = {**found, "ratio": median(ratios), "later_ms": median(later)}
        return (
            f"Ray's overhead: {1 - median(ratios):.1%} of the tokens/s at {CLIENTS} clients "
            f"({_spread([1 - r for r in ratios], '.1%')}; goal: at most {MOST_LOST:.0%}), "
            f"{median(later):.1f} ms to the first token ({_spread(later, '.1f')}; goal: at most "
            f"{MOST_MS:g} ms)"
        )

    def scaling(self) -> str:
        one = ("--threads", "1", "--cores", "1", "--replicas")
        found = self._in_turns({"one": (*one, "1"), "two": (*one, "2")}, {"two": 2})
        said = []
        self.results["scaling"] = dict(found)
        for clients, of_two in ((CLIENTS, "speed"), (2 * CLIENTS, "twice")):
            pairs = zip(found["one"]["speed"], found["two"][of_two], strict=True)
            times = [two / one for one, two in pairs]
            self.results["scaling"][f"times_{clients}"] = median(times)
            said.append(f"{median(times):.2f} for {clients} clients ({_spread(times, '.2f')})")
        return (
            f"two replicas on a core each: times the tokens/s of one on one core for {CLIENTS} "
            f"clients: {', '.join(said)}; goal: at least {LEAST_TIMES:g}"
        )

    def _in_turns(
        self, kinds: dict[str, tuple[str, ...]], times: dict[str, int] | None = None
    ) -> dict[str, dict[str, list[float]]]:
        """Of each kind of server, round by round: tokens/s of many, seconds to the first of one;
        and tokens/s of so many times as many clients."""
        found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
        for number in range(self.given.rounds):
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                with self.serving(*kinds[kind]) as running:
                    alone = self.load(running, 1, self.given.requests)
                    each = max(1, self.given.requests // 4)
                    many = self.load(running, CLIENTS, each)
                    if more := (times or {}).get(kind):
                        twice = self.load(running, more * CLIENTS, each)
                        found[kind].setdefault("twice", []).append(twice["tokens_s"])
                found[kind].setdefault("first", []).append(alone["first_s_p50"])
                found[kind].setdefault("alone", []).append(alone["tokens_s"])
                found[kind].setdefault("speed", []).append(many["tokens_s"])
                say(f"round {number + 1}: {kind}: {many['tokens_s']:.1f} tokens/s at {CLIENTS}, "
                    f"{alone['tokens_s']:.1f} at 1, {alone['first_s_p50'] * 1e3:.1f} ms to the "
                    "first token")  # fmt: skip
        return found

    # -- routing -----------------------------------------------------------------------------

    def routing(self) -> str:
        counted = {}
        for policy in ("round-robin", "prefix"):
            with self.serving("--replicas", "2", "--routing", policy) as running:
                before = _tokens(running.port)
                asked = self._chats(running.port)
                after = _tokens(running.port)
            read = after[0] - before[0]
            counted[policy] = {
                "requests": asked, "prompt_tokens": read,
                "computed": read - (after[1] - before[1]),
            }  # fmt: skip
            say(f"{policy}: {counted[policy]}")
        self.results["routing"] = counted
        computed = {policy: each["computed"] for policy, each in counted.items()}
        saved = 1 - computed["prefix"] / computed["round-robin"]
        return (
            "chats with shared system prompts: of "
            f"{counted['prefix']['prompt_tokens']:,.0f} tokens of prompts "
            f"{computed['prefix']:,.0f} were computed by prefix, "
            f"{computed['round-robin']:,.0f} by round robin ({saved:.0%} less)"
        )

    def _chats(self, port: int) -> int:
        """Six assistants, four people each, three turns; four people are served at a time."""
        assistants, people, turns = 6, 4, 3

        def chat(number: int) -> int:
            about = f"You are assistant {number % assistants}. " + PROSE * 3
            messages = [{"role": "system", "content": about}]
            for turn in range(turns):
                asks = f"Person {number} asks for the {turn + 1}. time: what does the keeper count?"
                messages.append({"role": "user", "content": asks})
                body = {"messages": messages, "max_tokens": 16, "temperature": 0}
                told = _ask(port, "/v1/chat/completions", body)
                if told.error:
                    raise SystemExit(f"a chat failed: {told.error} {told.text[:300]}")
                answer = json.loads(told.text)["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": answer or "-"})
            return turns

        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(chat, range(assistants * people)))

    # -- killed ------------------------------------------------------------------------------

    def killed(self) -> str:
        with self.serving("--replicas", "2") as running:
            told, enough = list[Told](), threading.Event()

            def ask(client: int) -> None:
                while not enough.is_set():
                    (prompt,) = self.prompts(1)
                    body = {"prompt": prompt, "max_tokens": 48, "stream": True, "temperature": 0,
                            "unspool": {"end": False}}  # fmt: skip
                    told.append(_ask(running.port, "/v1/completions", body))

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            _wait(lambda: len(told) >= 2 * len(threads))  # in the middle of the third of each
            victim = _replica_processes(running.process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            say(f"killed process {victim}")
            _wait(lambda: len(told) >= 6 * len(threads))
            enough.set()
            for thread in threads:
                thread.join()
        failed = [each for each in told if each.error]
        retryable = [each for each in failed if each.error in ("replica_lost",)]
        lost = {each.replica for each in failed}
        found = {"requests": len(told), "failed": len(failed), "retryable": len(retryable),
                 "replicas_of_failed": len(lost)}  # fmt: skip
        self.results["killed"] = found
        return (
            f"one of two replicas killed: of {len(told)} requests {len(failed)} failed, all of "
            f"{len(lost)} replica(s), {len(retryable)} with an error that says to ask again"
        )


class Told:
    """What a client was told: by whom, what, and how it failed, if it did."""

    def __init__(self, replica: str, text: str, error: str) -> None:
        self.replica, self.text, self.error = replica, text, error


def _ask(port: int, path: str, body: dict[str, Any]) -> Told:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        line.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = line.getresponse()
        text = answer.read().decode("utf-8", "replace")
        code = re.search(r'"error":\{.*?"code":"(\w+)"', text)
        error = code[1] if code else "" if answer.status == 200 else str(answer.status)
        return Told(answer.getheader("x-unspool-replica", ""), text, error)
    except (OSError, http.client.HTTPException) as error:
        return Told("", "", f"{type(error).__name__}: {error}")
    finally:
        line.close()


def _tokens(port: int) -> tuple[float, float]:
    """Tokens of prompts at all replicas so far, and how many of them had been computed before."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("GET", "/metrics")
    text = line.getresponse().read().decode()
    line.close()

    def total(name: str) -> float:
        found = re.findall(rf"^unspool_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    return total("prompt_tokens"), total("cached_prompt_tokens")


def _wait(happened: Callable[[], bool], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.05)


def _replica_processes(server: int) -> list[int]:
    """The replicas among all that a server has started."""
    parents, titles = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):
                after = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(folder.name)] = int(after[1])
                titles[int(folder.name)] = (folder / "cmdline").read_text()
    found, new = set[int](), {server}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return sorted(child for child in found if "ServeReplica" in titles[child])


def _spread(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=", ".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3, help="how often each server has its turn")
    parser.add_argument("--tokens", type=int, default=64, help="that each request asks for")
    parser.add_argument("--requests", type=int, default=12, help="of a client that is alone")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="of the machine")
    parser.add_argument("--model", type=Path, help="a model (the default model)")
    parser.add_argument("--out", type=Path, default=Path("bench-replicas"), metavar="FOLDER")
    given = parser.parse_args()
    if wrong := set(given.measures) - set(MEASURES):
        parser.error(f"{', '.join(wrong)}: not one of {', '.join(MEASURES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    given.out.mkdir(parents=True, exist_ok=True)
    bench, lines = Bench(given), []
    for name in given.measures or MEASURES:
        lines.append(f"- {getattr(bench, name)()}")
        say(lines[-1])
    (given.out / "results.json").write_text(json.dumps(bench.results, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
