"""`unspool batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from unspool.cli import options as o
from unspool.errors import SettingsError, UnspoolError, count

_CLUSTER = "On a Ray cluster"


@o.sampling_options
@o.model_options
def batch(
    rows: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Prompts: a .jsonl or .parquet file.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Where the answers go: .jsonl or .parquet.")
    ],
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help="The most tokens of an answer; 256, as the API in requests."
        ),
    ] = None,
    carry: Annotated[
        list[str] | None,
        typer.Option(help="A column of INPUT that the answers shall have too. Several times."),
    ] = None,
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Answer requests that name another model all the same."),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, whatever is there already.")
    ] = False,
    think: o.Think = None,
    effort: o.Effort = None,
    think_budget: o.ThinkBudget = None,
    adapter: o.Adapter = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Divide the work among the machines of a cluster: RAY_ADDRESS, this machine's, "
            "or a new one here.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Of the cluster; implies --ray.", rich_help_panel=_CLUSTER
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Models that work side by side; one a GPU, or one a machine.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None, typer.Option(min=1, help="Cores of each.", rich_help_panel=_CLUSTER)
    ] = None,
    quiet: o.Quiet = False,
    *,
    chosen: o.ModelChoice,
    sampling: dict[str, Any],
) -> int:
    """Answer a file of prompts.

    A row is [b]{"prompt": "..."}[/b] or [b]{"messages": [...]}[/b], with an [b]id[/b] and settings
    of its own if it likes (max_tokens, temperature, seed, stop, json_schema, ...), or a request in
    OpenAI's batch format (custom_id, method, url, body).

    Whatever ends the work (Ctrl-C, a crash, a lost machine), the same command goes on where it
    was: no row is lost and none written twice. Rows that cannot be answered are set aside, with
    the reason, in OUTPUT's .errors.jsonl, and the exit code is 1.

    [b]Examples[/b]

      unspool batch prompts.jsonl answers.jsonl
      unspool batch prompts.parquet answers.parquet -m qwen3-0.6b -n 200 --seed 7 --carry topic
      unspool batch openai-requests.jsonl results.jsonl --any-model
      unspool batch prompts.jsonl answers.jsonl --ray --workers 8
      unspool batch prompts.jsonl answers.jsonl --address 10.0.0.1:6379
    """
    on_cluster = ray or address is not None
    if not on_cluster and (workers is not None or worker_cpus is not None):
        raise SettingsError("--workers and --worker-cpus are for a cluster; add --ray")
    if system is not None and chat is False:
        raise SettingsError("--system needs the chat template; leave --raw out")
    options = {**sampling, "max_tokens": max_tokens, "think_budget": think_budget}
    options = {name: value for name, value in options.items() if value is not None}
    o.check(options)
    chosen.check()
    from unspool.scale import require_ray
    from unspool.scale.batch.job import LocalPool, WorkerPool, job_identity
    from unspool.scale.batch.journal import Journal, finished_job, is_unfinished
    from unspool.scale.batch.rows import BatchSettings, check_file_type, scan_input
    from unspool.scale.batch.worker import WorkerPlan

    check_file_type(rows, "INPUT")
    check_file_type(output, "OUTPUT")
    if on_cluster:
        require_ray("a batch on a cluster")
    facts = scan_input(rows)
    _check_output(rows, output, restart)
    with Journal(output) as journal:
        seed = options.pop("seed", None)
        record = None if restart or is_unfinished(output) else finished_job(output)
        if seed is None and not restart:
            seed = record["settings"]["seed"] if record else journal.unfinished_seed()
        settings = BatchSettings(
            seed=secrets.randbits(32) if seed is None else seed,
            options=options,
            chat=chat,
            system=system,
            think=o.thinking(think, effort),
            carry=tuple(carry or ()),
            any_model=any_model,
        )
        plan = WorkerPlan(_whole_path(chosen.model), chosen.options, settings, _whole_path(adapter))
        job = job_identity(facts, plan)
        if record is not None:
            return _say_finished(output, record, job)
        journal.open(job, restart=restart)

        def hire() -> WorkerPool:
            if not on_cluster:
                return LocalPool(plan.worker())
            from unspool.scale.batch.job import RayPool

            return RayPool(plan, address=address, workers=workers, cpus=worker_cpus)

        from unspool.cli.batch_progress import answer

        return answer(rows, journal, hire, quiet=quiet)


def _check_output(rows: Path, output: Path, restart: bool) -> None:
    from unspool.scale.batch.journal import errors_file, finished_job, is_unfinished

    if not output.absolute().parent.is_dir():
        raise UnspoolError(f"OUTPUT: there is no folder {output.parent}; make it first")
    if output.is_dir():
        raise UnspoolError(f"OUTPUT: {output} is a folder; give the name of a file")
    if rows.resolve() in (output.resolve(), errors_file(output).resolve()):
        raise UnspoolError(f"{rows} is both INPUT and OUTPUT; give the answers another name")
    if output.exists() and not (restart or is_unfinished(output) or finished_job(output)):
        raise UnspoolError(
            f"{output} is there already; give another name, or begin anew with --restart"
        )


def _say_finished(output: Path, record: dict[str, Any], job: dict[str, Any]) -> int:
    """The exit code of a batch that was finished before; UnspoolError if it was another one."""
    from unspool.cli.batch_progress import SET_ASIDE
    from unspool.scale.batch.journal import describe_changes, errors_file

    differences = describe_changes(record, job)
    if record["model_name"] != job["model_name"]:
        differences = f"model {record['model_name']!r} (now {job['model_name']!r})"
    if differences:
        raise UnspoolError(
            f"{output} was written with {differences}; give another name, or answer all rows "
            "again with --restart"
        )
    rows, failed = count(record["rows"], "row"), ""
    if record["failed"]:
        failed = f", {record['failed']:,} of them failed: {errors_file(output)}"
    o.say(f"nothing to do: {rows} in {output} already{failed}; --restart answers them again")
    return SET_ASIDE if record["failed"] else 0


def _whole_path(given: str | Path | None) -> str | None:
    """A path that means the same in every worker, if it is one."""
    if given is None or not Path(given).expanduser().exists():
        return None if given is None else str(given)
    return str(Path(given).expanduser().resolve())
