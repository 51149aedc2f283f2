"""Replicas under Ray and one bare server: python bench/replicas.py [MEASURE ...]

overhead   `unspool serve` and `unspool serve --replicas 1` on the same cores, in turns: tokens/s at
           16 clients, time to the first token at one. Goals: at most 5 % and 5 ms
scaling    one replica on one core and two replicas on one each, with 16 clients and with 16 per
           replica: at least 1.8 times the tokens
routing    chats with shared system prompts, several turns each, on two replicas: prompt tokens that
           were computed, by prefix and by round robin
killed     one of two replicas is killed under load: only its running requests fail, and each of
           these errors says that the request can be sent again

Only one server runs at a time, because Ray's idle processes use a few percent of a core. Writes
results.json to --out and prints a list.
"""

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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lib.arguments import add_options, make_parser, one_of
from lib.report import say, write_json
from lib.servers import RunningServer, client_figures, stat_words, unspool_server
from lib.stats import alternate, spread

MAX_LOSS, MAX_MS, MIN_SCALING = 0.05, 5.0, 1.8  # goals
CLIENTS = 16
EXAMPLES = """examples:
  python bench/replicas.py                              all of it: about ten minutes on two cores
  python bench/replicas.py overhead --rounds 5
  python bench/replicas.py routing killed --out results"""
PROSE = (
    "Rain had washed the road to the harbour, and whoever walked there in the evening could see "
    "the lamps twice. The keeper counted them, wrote the number into his book, and closed it. "
)


@dataclass(frozen=True)
class Answer:
    replica: str
    text: str
    error: str  # code or status; empty if there was none


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results, self.num_requests = args, dict[str, Any](), 0

    @contextmanager
    def serve(self, *options: str) -> Iterator[RunningServer]:
        """A warm server with these options."""
        server, log = unspool_server(self.args.model, *options), self.args.out / "server.stderr.txt"
        running = RunningServer(server, dict(os.environ), log)
        try:
            running.load([self.prompts(2) for _ in range(CLIENTS)], 4, 300, 600)
            yield running
        finally:
            running.close()

    def prompts(self, count: int) -> list[str]:
        """Prompts without a shared prefix."""
        self.num_requests += count
        return [f"{n}: {PROSE}" for n in range(self.num_requests - count, self.num_requests)]

    def load(self, running: RunningServer, clients: int, count: int) -> dict[str, Any]:
        prompts = [self.prompts(count) for _ in range(clients)]
        figures = client_figures(running.load(prompts, self.args.tokens, 300, 600))
        if figures["failures"]:
            say(f"failed: {figures['failures']}")
        return figures

    # -- overhead, scaling -------------------------------------------------------------------------

    def overhead(self) -> str:
        cores = str(self.args.cores)
        bare = ("--threads", cores)
        speeds = self._in_turns({"bare": bare, "ray": (*bare, "--replicas", "1", "--cores", cores)})
        pairs = zip(speeds["bare"]["speed"], speeds["ray"]["speed"], strict=True)
        losses = [1 - ray / bare for bare, ray in pairs]
        pairs = zip(speeds["bare"]["first"], speeds["ray"]["first"], strict=True)
        delays = [(ray - bare) * 1e3 for bare, ray in pairs]
        figures = {"ratio": 1 - median(losses), "later_ms": median(delays)}
        self.results["overhead"] = {**speeds, **figures}
        return (
            f"Ray's overhead: {median(losses):.1%} of the tokens/s at {CLIENTS} clients "
            f"({spread(losses, '.1%')}; goal: at most {MAX_LOSS:.0%}), {median(delays):.1f} ms to "
            f"the first token ({spread(delays, '.1f')}; goal: at most {MAX_MS:g} ms)"
        )

    def scaling(self) -> str:
        options = ("--threads", "1", "--cores", "1", "--replicas")
        speeds = self._in_turns({"one": (*options, "1"), "two": (*options, "2")}, doubled="two")
        self.results["scaling"] = dict(speeds)
        texts = []
        for clients, name in ((CLIENTS, "speed"), (2 * CLIENTS, "twice")):
            pairs = zip(speeds["one"]["speed"], speeds["two"][name], strict=True)
            ratios = [two / single for single, two in pairs]
            self.results["scaling"][f"times_{clients}"] = median(ratios)
            texts.append(f"{median(ratios):.2f} for {clients} clients ({spread(ratios)})")
        return (
            f"two replicas on one core each: times the tokens/s of one replica for {CLIENTS} "
            f"clients: {', '.join(texts)}; goal: at least {MIN_SCALING:g}"
        )

    def _in_turns(
        self, kinds: dict[str, tuple[str, ...]], doubled: str = ""
    ) -> dict[str, dict[str, list[float]]]:
        """Tokens/s at many clients, and seconds to the first token at one, in each round; of the
        doubled kind also tokens/s of twice as many clients."""
        results: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
        for number in range(self.args.rounds):
            for kind in alternate(list(kinds), number):
                with self.serve(*kinds[kind]) as running:
                    alone = self.load(running, 1, self.args.requests)
                    count = max(1, self.args.requests // 4)
                    many = self.load(running, CLIENTS, count)
                    figures = {"first": alone["first_s_p50"], "alone": alone["tokens_s"]}
                    figures["speed"] = many["tokens_s"]
                    if kind == doubled:
                        twice = self.load(running, 2 * CLIENTS, count)
                        figures["twice"] = twice["tokens_s"]
                for name, value in figures.items():
                    results[kind].setdefault(name, []).append(value)
                say(
                    f"round {number + 1}: {kind}: {many['tokens_s']:.1f} tokens/s at {CLIENTS}, "
                    f"{figures['alone']:.1f} at 1, {figures['first'] * 1e3:.1f} ms to the first"
                )
        return results

    # -- routing -----------------------------------------------------------------------------------

    def routing(self) -> str:
        counts = {}
        for policy in ("round-robin", "prefix"):
            with self.serve("--replicas", "2", "--routing", policy) as running:
                before = prompt_tokens(running)
                requests = self._run_chats(running.port)
                prompt, cached = (
                    b - a for a, b in zip(before, prompt_tokens(running), strict=True)
                )
            computed = prompt - cached
            counts[policy] = {"requests": requests, "prompt_tokens": prompt, "computed": computed}
            say(f"{policy}: {counts[policy]}")
        self.results["routing"] = counts
        prefix, robin = counts["prefix"]["computed"], counts["round-robin"]["computed"]
        return (
            f"chats with shared system prompts: of {counts['prefix']['prompt_tokens']:,.0f} prompt "
            f"tokens {prefix:,.0f} were computed by prefix, {robin:,.0f} by round robin "
            f"({1 - prefix / robin:.0%} less)"
        )

    def _run_chats(self, port: int) -> int:
        """Six assistants, four users each, three turns; four users in parallel."""
        assistants, users, turns = 6, 4, 3

        def chat(number: int) -> int:
            system = f"You are assistant {number % assistants}. " + PROSE * 3
            messages = [{"role": "system", "content": system}]
            for turn in range(turns):
                text = f"Person {number} asks for the {turn + 1}. time: what does the keeper count?"
                messages.append({"role": "user", "content": text})
                body = {"messages": messages, "max_tokens": 16, "temperature": 0}
                answer = ask(port, "/v1/chat/completions", body)
                if answer.error:
                    raise SystemExit(f"a chat failed: {answer.error} {answer.text[:300]}")
                content = json.loads(answer.text)["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": content or "-"})
            return turns

        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(chat, range(assistants * users)))

    # -- killed ------------------------------------------------------------------------------------

    def killed(self) -> str:
        answers, stop = list[Answer](), threading.Event()
        with self.serve("--replicas", "2") as running:

            def send_requests() -> None:
                while not stop.is_set():
                    (prompt,) = self.prompts(1)
                    body = {"prompt": prompt, "max_tokens": 48, "stream": True, "temperature": 0,
                            "unspool": {"end": False}}  # fmt: skip
                    answers.append(ask(running.port, "/v1/completions", body))

            threads = [threading.Thread(target=send_requests) for _ in range(8)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(answers) >= 2 * len(threads))  # during the third of each
            victim = find_replicas(running.process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            say(f"killed process {victim}")
            wait_until(lambda: len(answers) >= 6 * len(threads))
            stop.set()
            for thread in threads:
                thread.join()
        failed = [answer for answer in answers if answer.error]
        counts = {
            "requests": len(answers), "failed": len(failed),
            "retryable": sum(answer.error == "replica_lost" for answer in failed),
            "replicas_of_failed": len({answer.replica for answer in failed}),
        }  # fmt: skip
        self.results["killed"] = counts
        return (
            "one of two replicas killed: of {requests} requests {failed} failed, all of "
            "{replicas_of_failed} replica(s), {retryable} with an error that says to ask again"
        ).format(**counts)


MEASURES = ("overhead", "scaling", "routing", "killed")


def ask(port: int, path: str, body: dict[str, Any]) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        code = re.search(r'"error":\{.*?"code":"(\w+)"', text)
        error = code[1] if code else "" if response.status == 200 else str(response.status)
        return Answer(response.getheader("x-unspool-replica", ""), text, error)
    except (OSError, http.client.HTTPException) as error:
        return Answer("", "", f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def prompt_tokens(running: RunningServer) -> tuple[float, float]:
    """Prompt tokens of all replicas so far, and how many of them were cached."""
    text = running.http("GET", "/metrics", None, 60)[1].decode()

    def total(name: str) -> float:
        values = re.findall(rf"^unspool_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    return total("prompt_tokens"), total("cached_prompt_tokens")


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def find_replicas(server: int) -> list[int]:
    """Replica processes among the descendants of a server."""
    parents, titles = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(folder.name)] = int(stat_words(f"{folder}/stat", ")")[1])
                titles[int(folder.name)] = (folder / "cmdline").read_text()
    descendants, new = set[int](), {server}
    while new := {child for child, parent in parents.items() if parent in new} - descendants:
        descendants |= new
    return sorted(pid for pid in descendants if "ServeReplica" in titles.get(pid, ""))


def main() -> int:
    parser = make_parser(__doc__, EXAMPLES)
    text = ", ".join(MEASURES)
    parser.add_argument("measures", nargs="*", type=one_of(MEASURES), metavar="MEASURE", help=text)
    add_options(
        parser,
        ("--rounds", 3, "turns of each server"),
        ("--tokens", 64, "tokens per request"),
        ("--requests", 12, "requests of a single client"),
        ("--cores", os.cpu_count() or 1, "cores of the machine"),
        ("--model", Path, "model (the default model)"),
        ("--out", Path("bench-replicas")),
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    args.out.mkdir(parents=True, exist_ok=True)
    bench, lines = Bench(args), []
    for name in args.measures or MEASURES:
        lines.append(f"- {getattr(bench, name)()}")
        say(lines[-1])
    write_json(args.out / "results.json", bench.results)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
