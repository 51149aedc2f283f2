"""`unspool think`: search for a better answer within a token budget, and show the search tree."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import hints, interrupt
from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from unspool.decoding.search.think import ThoughtStream
    from unspool.decoding.search.tree import BudgetUsed, SearchEvent, Thought

_REDRAW_S = 0.05


@o.sampling_options
@o.model_options
def think(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; - or none reads stdin.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            "-p",
            help="Search policy: best-of, vote, beam, dvts, mcts, restarts, think or compose.",
        ),
    ] = "best-of",
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            "-j",
            help="Verifier that scores texts: logprob, certainty, regex:PATTERN, "
            "python:FILE.py:FUNCTION, tests:FILE.py, reward:MODEL, process:MODEL, ask, ask:MODEL, "
            "vote, vote:PATTERN or vote+JUDGE.",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="Maximum tokens to compute: prompt, generated and judged.")
    ] = 2000,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the policy, such as n=16; repeatable.",
        ),
    ] = None,
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            help="Maximum tokens of each text. Default: 256; for think and compose, the budget.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines; the last is the result.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Save the search as JSON: all texts and scores.")
    ] = None,
    adapter: o.Adapter = None,
    quiet: o.Quiet = False,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Search for the answer with the highest score, within a token budget.

    The best answer goes to stdout; a terminal shows the search tree as it grows.

    [b]Examples[/b]

      unspool think "How many days are in a week?" --policy vote
      unspool think "Why is the sky blue? Answer in one sentence." --judge "regex:^[^.]{1,160}[.]$"
      unspool think "Write add(a, b) in Python." --judge tests:test_add.py
      unspool think "A haiku about rain" --judge python:haiku.py:check -o n=16
      unspool think "Name a bird." --judge ask --trace search.json
      unspool think "What is 17 * 24?" -m MODEL --policy beam --judge process:REWARD_MODEL
    """
    from unspool.decoding.search.think import (
        VerifierSpec,
        check_policy,
        default_max_tokens,
        make_verifier,
    )
    from unspool.decoding.search.tree import TokenBudget

    if message := hints.model_hint(prompt or ""):
        raise UnspoolError(message)
    text = o.read_prompt(prompt)
    o.check_system(system, chat)
    if trace is not None:
        o.check_output_file(trace, "--trace")
    policy_options = dict(map(_parse_option, option or ()))
    if judge is not None:
        VerifierSpec.parse(judge)
    check_policy(policy, policy_options)
    TokenBudget(budget)  # raises SettingsError
    options: dict[str, Any] = {
        "max_tokens": default_max_tokens(policy, max_tokens),
        "stop": (),
        **sampling,
    }
    o.check(options)
    lm = o.with_adapter(model_choice.load(), adapter)
    ids: str | list[int] = text
    messages = None
    if chat or (chat is None and lm.is_instruct):
        lead = [{"role": "system", "content": system}] if system is not None else []
        messages = [*lead, {"role": "user", "content": text}]
        reasons = True if policy == "think" and lm.thought_format is not None else None
        ids = lm.chat_prompt(messages, **lm.think_options(reasons, options)).ids
        options["stop"] += lm.chat_template.stops
    verifier = None if judge is None else make_verifier(lm, judge, conversation=messages)
    stream = lm.stream_think(
        ids, policy=policy, judge=verifier, budget=budget, **policy_options, **options
    )
    request = {
        "model": str(model_choice.model or "default"), "prompt": text, "judge": judge,
        **policy_options,
    }  # fmt: skip
    _run(stream, request, as_json=as_json, trace=trace, quiet=quiet)


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise SettingsError(f"--option must be NAME=VALUE, for example n=16, got {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:  # a string needs no quotes
        return name.replace("-", "_"), value


def _run(
    stream: ThoughtStream,
    request: dict[str, Any],
    *,
    as_json: bool,
    trace: Path | None,
    quiet: bool,
) -> None:
    events: list[SearchEvent] = []
    try:
        with interrupt.raise_on_signal(), stream:
            if as_json:
                for event in stream:
                    events.append(event)
                    out.print_json_line(event.to_dict())
                out.print_json_line({"thought": stream.result.to_dict()})
            elif sys.stderr.isatty() and not quiet:
                _draw(stream, events)
            else:
                events.extend(stream)
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.INTERRUPTED) from None
    finally:
        if trace is not None:
            _save(trace, request, events, stream)
    if as_json:
        return
    thought = stream.result
    if (spec := thought.best.request.thinking) is not None:
        out.print_reasoning(thought.best.steps, thought.best, spec)
    else:
        print(thought.text)
    if not quiet:
        _print_closing(thought, events)


def _draw(stream: ThoughtStream, events: list[SearchEvent]) -> None:
    """Redraw the search tree on stderr while it grows."""
    from rich.live import Live

    console, view, drawn_at = out.stderr_console(), TreeView(), 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for event in stream:
            events.append(event)
            view.add(event)
            if monotonic() > drawn_at + _REDRAW_S:
                drawn_at = monotonic()
                live.update(view.draw(console.width, console.height), refresh=True)
        live.update(view.draw(console.width, console.height), refresh=True)


def _save(
    file: Path, request: dict[str, Any], events: list[SearchEvent], stream: ThoughtStream
) -> None:
    thought = stream.result.to_dict() if stream.is_finished else None
    lines = [event.to_dict() for event in events]
    content = {"version": 1, **request, "events": lines, "thought": thought}
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _print_closing(thought: Thought, events: list[SearchEvent]) -> None:
    view = TreeView()
    for event in events:
        view.add(event)
    for answer, votes in list(thought.answers.items())[:5]:
        out.say(f"{votes:.3g} for {answer}")
    failed = [node.why for node in view.nodes.values() if node.state == "failed"]
    if failed:
        out.say(f"the judge failed on {len(failed)} texts; the first error: {failed[0]}")
    why = f" ({thought.tree.leaf.why})" if thought.tree.leaf.why else ""
    score = "" if thought.score is None else f", score {thought.score:.4g}"
    out.say(
        f"{thought.policy}: best of {len(view.nodes) - 1} texts{score}{why}; "
        f"{view.usage()}, {thought.seconds:.1f} s, seed {thought.best.seed}"
    )


# -- the search tree -------------------------------------------------------------------------------


@dataclass(slots=True)
class _TreeNode:
    text: str = ""
    score: float | None = None
    why: str = ""
    state: str = ""  # ended, pruned, failed, best
    children: list[int] = field(default_factory=list)
    parent: int | None = None


class TreeView:
    """The search tree, built from events and drawn for a terminal."""

    def __init__(self) -> None:
        self.nodes: dict[int, _TreeNode] = {0: _TreeNode()}
        self.budget: BudgetUsed | None = None

    def add(self, event: SearchEvent) -> None:
        """Update the tree by one event."""
        from unspool.decoding.search import tree as e

        if isinstance(event, e.NodeAdded):
            state = "ended" if event.finished else ""
            self.nodes[event.node] = _TreeNode(event.text, state=state, parent=event.parent)
            self.nodes[event.parent].children.append(event.node)
        elif isinstance(event, e.NodeScored):
            node = self.nodes[event.node]
            node.score, node.why = event.score, event.why
            node.state = "failed" if event.score is None else node.state
        elif isinstance(event, e.NodePruned):
            node = self.nodes[event.node]
            node.state = node.state if node.state == "failed" else "pruned"
        elif isinstance(event, e.SearchFinished):
            self.nodes[event.node].state = "best"
        elif isinstance(event, e.BudgetUsed):
            self.budget = event

    def usage(self) -> str:
        """The tokens used so far, in one line."""
        used = self.budget
        if used is None:
            return "computing the prompt"
        total = used.prompt + used.written + used.judged
        limit = "" if used.limit is None else f" of {used.limit:,}"
        judged = f", {used.judged:,} judged" if used.judged else ""
        return (
            f"{total:,}{limit} tokens: {used.prompt:,} prompt, {used.written:,} generated{judged}"
        )

    def draw(self, width: int, height: int) -> Tree:
        """The tree in at most `height` lines; pruned nodes are hidden first."""
        from rich.text import Text
        from rich.tree import Tree

        path, root = self._best_path(), Tree(Text(self.usage(), "dim"))
        hidden = self._hidden(height - 2)

        def add(tree: Tree, number: int, columns: int) -> None:
            children = self.nodes[number].children
            visible = [child for child in children if child not in hidden]
            for child in visible:
                add(tree.add(self._label(child, child in path, columns)), child, columns - 4)
            if num_hidden := len(children) - len(visible):
                tree.add(Text(f"{num_hidden} more", "dim"))

        add(root, 0, width - 6)
        return root

    def _hidden(self, max_lines: int) -> set[int]:
        """Nodes to hide: subtrees of pruned and failed nodes, oldest first, then other old ones.

        The path to the best node is never hidden.
        """
        num_lines, path = len(self.nodes) - 1, self._best_path()
        hidden, cut_parents = set[int](), set[int | None]()
        for states in (("pruned", "failed"), ("", "ended")):
            for number, node in self.nodes.items():
                if num_lines <= max_lines:
                    return hidden
                if number and node.state in states and number not in hidden | path:
                    subtree = self._subtree(number) - hidden
                    hidden |= subtree
                    # The first hidden child of a node adds a line "n more".
                    num_lines -= len(subtree) - (node.parent not in cut_parents)
                    cut_parents = (cut_parents | {node.parent}) - hidden
        return hidden

    def _subtree(self, number: int) -> set[int]:
        return {number}.union(*map(self._subtree, self.nodes[number].children))

    def _best_path(self) -> set[int]:
        """The best node and its ancestors."""
        node = next((n for n, node in self.nodes.items() if node.state == "best"), None)
        path: set[int] = set()
        while node is not None:
            path.add(node)
            node = self.nodes[node].parent
        return path

    def _label(self, number: int, is_on_path: bool, columns: int) -> Text:
        from rich.text import Text

        from unspool.engine.results import brief

        node = self.nodes[number]
        score = "" if node.score is None else f"{node.score:.3f} "
        label = f"{score}{brief(node.text, max(8, columns - len(score) - len(node.state) - 3))}"
        if node.state:
            label += f" ({node.state})"
        if node.state == "failed":
            label = f"{label}: {node.why}"[:columns]
        is_dim = node.state in ("pruned", "failed")
        style = "bold green" if is_on_path else "dim" if is_dim else ""
        return Text(label, style, no_wrap=True)
