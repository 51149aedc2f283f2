"""`unspool think`: spend more tokens on an answer, and watch the search for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import hints, interrupt
from unspool.cli import options as o
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.decoding.search.think import ThoughtStream
    from unspool.decoding.search.tree import SearchEvent, Thought

_REDRAW = 0.05  # seconds between two pictures of the tree


@o.sampling_options
@o.model_options
def think(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; - or nothing reads stdin.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            "-p",
            help="How to search: best-of, vote, beam, dvts, mcts, restarts, think or compose.",
        ),
    ] = "best-of",
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            "-j",
            help="Who says what is better: logprob, certainty, regex:PATTERN, "
            "python:FILE.py:FUNCTION, tests:FILE.py, reward:MODEL, process:MODEL, ask, ask:MODEL, "
            "vote, vote:PATTERN or vote+JUDGE.",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="The most tokens to compute: read, written and judged.")
    ] = 2000,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the policy, such as n=16; several times.",
        ),
    ] = None,
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            help="The most tokens of each text. Default: 256; for think and compose, the budget.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Events as JSON lines; the last is the thought.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Save the whole search as JSON: every text, every score.")
    ] = None,
    adapter: o.Adapter = None,
    quiet: o.Quiet = False,
    *,
    chosen: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Think longer: search for the answer that a judge likes best, within a budget of tokens.

    The winner goes to stdout; on a screen the tree of texts grows meanwhile.

    [b]Examples[/b]

      unspool think "How many days are in a week?" --policy vote
      unspool think "Why is the sky blue? Answer in one sentence." --judge "regex:^[^.]{1,160}[.]$"
      unspool think "Write add(a, b) in Python." --judge tests:test_add.py
      unspool think "A haiku about rain" --judge python:haiku.py:check -o n=16
      unspool think "Name a bird." --judge ask --trace search.json
      unspool think "What is 17 * 24?" -m MODEL --policy beam --judge process:REWARD_MODEL
    """
    from unspool.cli.run import _check_trace, read_prompt
    from unspool.decoding.search.think import default_max_tokens

    if mistaken := hints.model_hint(prompt or ""):
        raise UnspoolError(mistaken)
    text = read_prompt(prompt)
    if system is not None and chat is False:
        raise SettingsError("--system needs the chat template; leave --raw out")
    if trace is not None:
        _check_trace(trace)
    own = dict(map(_named_value, option or ()))
    _check(policy, judge, own, budget)
    options: dict[str, Any] = {
        "max_tokens": default_max_tokens(policy, max_tokens),
        "stop": (),
        **sampling,
    }
    o.check(options)
    lm = o.with_adapter(chosen.load(), adapter)
    ids: str | list[int] = text
    messages = None
    if chat or (chat is None and lm.is_instruct):
        lead = [{"role": "system", "content": system}] if system is not None else []
        messages = [*lead, {"role": "user", "content": text}]
        thinks = True if policy == "think" and lm.thought_format is not None else None
        ids = lm.chat_prompt(messages, **lm.think_options(thinks, options)).ids
        options["stop"] += lm.chat_template.stops
    from unspool.decoding.search.think import make_verifier

    judged = None if judge is None else make_verifier(lm, judge, conversation=messages)
    stream = lm.stream_think(ids, policy=policy, judge=judged, budget=budget, **own, **options)
    asked = {"model": str(chosen.model or "default"), "prompt": text, "judge": judge, **own}
    _run(stream, asked, as_json=as_json, trace=trace, quiet=quiet)


def _check(policy: str, judge: str | None, own: dict[str, Any], budget: int) -> None:
    """Refuse what cannot be, before a model is loaded."""
    from unspool.decoding.search.think import VerifierSpec, check_policy
    from unspool.decoding.search.tree import TokenBudget

    if judge is not None:
        VerifierSpec.parse(judge)
    check_policy(policy, own)
    TokenBudget(budget)


def _named_value(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not (name and equals):
        raise SettingsError(f"--option is {given!r}; it may be NAME=VALUE, for example n=16")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:  # words need no quotes
        return name.replace("-", "_"), value


def _run(
    stream: ThoughtStream, asked: dict[str, Any], *, as_json: bool, trace: Path | None, quiet: bool
) -> None:
    events: list[SearchEvent] = []
    try:
        with interrupt.raised(), stream:
            if as_json:
                _json_lines(stream, events)
            elif sys.stderr.isatty() and not quiet:
                _live(stream, events)
            else:
                events.extend(stream)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        if trace is not None:
            _save(trace, asked, events, stream)
    if as_json:
        return
    thought = stream.result
    if (thinking := thought.best.request.thinking) is not None:
        from unspool.cli.thoughts import show_answer

        show_answer(thought.best.steps, thought.best, thinking)
    else:
        print(thought.text)
    if not quiet:
        _close(thought, events)


def _json_lines(stream: ThoughtStream, events: list[SearchEvent]) -> None:
    for event in stream:
        events.append(event)
        print(json.dumps(event.to_dict(), ensure_ascii=False), flush=True)
    print(json.dumps({"thought": stream.result.to_dict()}, ensure_ascii=False), flush=True)


def _live(stream: ThoughtStream, events: list[SearchEvent]) -> None:
    """The tree on stderr, drawn again as it grows, and left there when it is done."""
    from rich.live import Live

    from unspool.cli.show import err
    from unspool.cli.think_view import TreeView

    console, view, drawn = err(), TreeView(), 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for event in stream:
            events.append(event)
            view.take(event)
            if monotonic() > drawn + _REDRAW:
                drawn = monotonic()
                live.update(view.rich(console.width, console.height), refresh=True)
        live.update(view.rich(console.width, console.height), refresh=True)


def _save(
    file: Path, asked: dict[str, Any], events: list[SearchEvent], stream: ThoughtStream
) -> None:
    told = [event.to_dict() for event in events]
    thought = stream.result.to_dict() if stream.is_finished else None
    content = {"version": 1, **asked, "events": told, "thought": thought}
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _close(thought: Thought, events: list[SearchEvent]) -> None:
    from unspool.cli.think_view import TreeView

    view = TreeView()
    for event in events:
        view.take(event)
    for answer, votes in list(thought.answers.items())[:5]:
        o.say(f"{votes:.3g} for {answer}")
    failed = [node.why for node in view.nodes.values() if node.fate == "failed"]
    if failed:
        o.say(f"the judge failed on {len(failed)} texts; the first: {failed[0]}")
    why = f" ({thought.tree.leaf.why})" if thought.tree.leaf.why else ""
    score = "" if thought.score is None else f", score {thought.score:.4g}"
    o.say(
        f"{thought.policy}: best of {len(view.nodes) - 1} texts{score}{why}; "
        f"{view.spent()}, {thought.seconds:.1f} s, seed {thought.best.seed}"
    )
