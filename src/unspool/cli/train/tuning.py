"""Fine-tuning commands: `unspool train tune`, `dpo`, `grpo`, `twin`, `merge`, `task`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.output import say
from unspool.cli.train import options as s
from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.train.running.runs import Run

_LORA, _STEPS = "LoRA", "Training"

Data = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", help="Files, folders, patterns or hub data sets; repeatable."),
]
Task = Annotated[
    str | None, typer.Option(help="A task of reasoning-gym, instead of data: leg_counting, ...")
]
Examples = Annotated[int, typer.Option(min=1, help="Number of questions of the task.")]
Lora = Annotated[
    int,
    typer.Option("--lora", min=0, help="LoRA rank; 0 trains all weights.", rich_help_panel=_LORA),
]
Alpha = Annotated[
    float | None,
    typer.Option(help="LoRA alpha: scale x rank. Default: twice the rank.", rich_help_panel=_LORA),
]
Dropout = Annotated[float, typer.Option(help="LoRA dropout.", rich_help_panel=_LORA)]
Targets = Annotated[
    str,
    typer.Option(help="Target matrices, of q,k,v,o,gate,up,down.", rich_help_panel=_LORA),
]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Only in the last n layers.", rich_help_panel=_LORA),
]
From = Annotated[
    Path | None,
    typer.Option("--adapter", help="Start from this adapter.", rich_help_panel=_LORA),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Number of steps. Default: from --epochs.", rich_help_panel=_STEPS),
]
Epochs = Annotated[float, typer.Option(min=0, help="Passes over the data.", rich_help_panel=_STEPS)]
Batch = Annotated[int, typer.Option(min=1, help="Rows per batch.", rich_help_panel=_STEPS)]
Length = Annotated[
    int, typer.Option(min=2, help="Maximum tokens of a row.", rich_help_panel=_STEPS)
]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches per step.", rich_help_panel=_STEPS)]
Rate = Annotated[
    float | None, typer.Option("--rate", help="Learning rate.", rich_help_panel=_STEPS)
]
Seed = Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_STEPS)]
SaveEvery = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between evaluations and checkpoints.", rich_help_panel=_STEPS),
]
Patience = Annotated[
    int,
    typer.Option(
        min=0, help="Stop after this many evaluations without a new best; 0: never.",
        rich_help_panel=_STEPS,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option(help="cpu, cuda, ...", rich_help_panel=_STEPS)]
Shard = Annotated[
    bool,
    typer.Option(
        "--shard", help="With torchrun: shard the model over the processes (FSDP).",
        rich_help_panel=_STEPS,
    ),
]  # fmt: skip
Report = Annotated[
    list[str] | None, typer.Option(help="Also log to tensorboard, wandb or trackio.")
]
Name = Annotated[str | None, typer.Option(help="Name of the run folder.")]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="Resume an interrupted run.")]


def run_tuning(
    context: typer.Context, settings: dict[str, Any], name: str | None, resume: str | None,
    quiet: bool, reports: list[str] | None, shard: bool = False,
) -> None:  # fmt: skip
    """Create or resume a run, and train it."""
    from unspool.backends.placement import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.cli.train.display import TuningDisplay
    from unspool.train.running.events import Listener, combine_listeners
    from unspool.train.running.parallel import Parallel, open_run_everywhere
    from unspool.train.tuning.tune import settings_of, tune

    with Parallel.from_environment(settings["device"], shard=shard) as parallel:
        folder, trackers = None, list[Listener]()
        with parallel.all_succeed():
            if parallel.is_first:
                run = _open_run(settings, name, resume)
                folder, trackers = run.folder, s.open_trackers(reports or (), run)
        run = open_run_everywhere(folder, parallel)
        stored = settings_of(run)
        with TuningDisplay(run, quiet or not parallel.is_first) as display:
            tune(stored, run, combine_listeners(display, *trackers), parallel=parallel)
        if parallel.is_first:
            _print_result(run, bool(stored.lora), stored.model)
            s.exit_if_signalled(run)


def _open_run(settings: dict[str, Any], name: str | None, resume: str | None) -> Run:
    """The run to resume, or a new one."""
    from unspool.model.hub.find import runs_folder
    from unspool.train.running.parallel import find_restarted_run
    from unspool.train.running.runs import Run
    from unspool.train.tuning.tune import TuneSettings, new_run

    if resume is not None:
        run = Run.open(resume)
        run.resume_here()
        return run
    tune_settings = TuneSettings(**settings)
    if (restarted := find_restarted_run(tune_settings)) is not None:
        restarted.resume_here()
        return restarted
    return new_run(tune_settings, runs_folder() / name if name else None)


def _print_result(run: Run, adapter: bool, model: str | None) -> None:
    """Print the result and what to do with it."""
    if run.state == "stopped":
        say(f"stopped; resume with: unspool train {run.facts['kind']} --resume {run.folder}")
        return
    best_step, last_step = run.best_step, run.checkpoints()[-1].step
    if best_step is None or best_step == last_step:
        say(f"done: {run.final}")
    else:
        early = (
            "" if last_step >= run.steps else f"stopped early at step {last_step} of {run.steps}; "
        )
        say(f"done: {early}the best on held-out data is step {best_step}: {run.final}")
    option = f" --model {model}" if model else ""
    if adapter:
        say(f'generate:  unspool "..."{option} --adapter {run.folder}')
        say(f"merge into the base model:  unspool train merge {run.folder} FOLDER")
    else:
        say(f'generate:  unspool "..." --model {run.folder}')


# -- tune ------------------------------------------------------------------------------------------


def tune(
    context: typer.Context,
    model: o.Model = None,
    data: Data = None,
    task: Task = None,
    examples: Examples = 2000,
    lora: Lora = 16,
    alpha: Alpha = None,
    dropout: Dropout = 0.0,
    targets: Targets = "q,k,v,o,gate,up,down",
    layers: Layers = None,
    adapter: From = None,
    steps: Steps = None,
    epochs: Epochs = 3.0,
    batch: Batch = 8,
    length: Length = 512,
    accumulate: Accumulate = 1,
    rate: Rate = None,
    seed: Seed = 0,
    save_every: SaveEvery = None,
    patience: Patience = 3,
    device: Device = "auto",
    shard: Shard = False,
    report: Report = None,
    name: Name = None,
    resume: Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Fine-tune a model on your data: a LoRA adapter, or all weights (--lora 0).

    Conversations ({"messages": ...}) and {"prompt": ..., "completion": ...} rows are trained on
    their answers only, texts on all tokens. Training stops when the loss on held-out data no longer
    improves; the best checkpoint is the result. Load it with peft, or with --adapter.

    [b]Examples[/b]

      unspool train tune --data chats.jsonl
      unspool train tune --model qwen3-0.6b --data letters/ --lora 32 --epochs 5
      unspool train tune --task family_relationships --lora 16 --layers 20
      unspool train tune --data chats.jsonl --lora 0 --rate 2e-5
      unspool train tune --resume runs/tune-chats
      torchrun --nproc-per-node 4 -m unspool train tune --data chats.jsonl --batch 32
    """
    settings = {
        "kind": "tune", "model": model, "data": tuple(data or ()), "task": task,
        "examples": examples, "lora": lora, "alpha": alpha, "dropout": dropout,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "batch": batch, "length": length, "accumulate": accumulate, "rate": rate, "seed": seed,
        "save_every": save_every, "patience": patience, "device": device,
    }  # fmt: skip
    run_tuning(context, settings, name, resume, quiet, report, shard)


# -- dpo -------------------------------------------------------------------------------------------


def dpo(
    context: typer.Context,
    model: o.Model = None,
    data: Data = None,
    beta: Annotated[
        float, typer.Option(help="Strength of the constraint to the base model.")
    ] = 0.1,
    smoothing: Annotated[
        float, typer.Option(help="Assumed share of wrongly labelled pairs.")
    ] = 0.0,
    lora: Lora = 16,
    alpha: Alpha = None,
    dropout: Dropout = 0.0,
    targets: Targets = "q,k,v,o,gate,up,down",
    layers: Layers = None,
    adapter: From = None,
    steps: Steps = None,
    epochs: Epochs = 1.0,
    batch: Batch = 4,
    length: Length = 512,
    accumulate: Accumulate = 1,
    rate: Rate = None,
    seed: Seed = 0,
    save_every: SaveEvery = 100,
    device: Device = "auto",
    shard: Shard = False,
    report: Report = None,
    name: Name = None,
    resume: Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Direct preference optimization, on lines of {"prompt": ..., "chosen": ..., "rejected": ...}.

    [b]Examples[/b]

      unspool train dpo --data pairs.jsonl
      unspool train dpo --model qwen3-0.6b --data pairs.jsonl --beta 0.3 --lora 32
    """
    settings = {
        "kind": "dpo", "model": model, "data": tuple(data or ()), "beta": beta,
        "smoothing": smoothing, "lora": lora, "alpha": alpha, "dropout": dropout,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "batch": batch, "length": length, "accumulate": accumulate, "rate": rate, "seed": seed,
        "save_every": save_every, "device": device,
    }  # fmt: skip
    run_tuning(context, settings, name, resume, quiet, report, shard)


# -- grpo ------------------------------------------------------------------------------------------


def grpo(
    context: typer.Context,
    model: o.Model = None,
    data: Data = None,
    task: Task = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Reward function: (prompt, answer, data row) -> number.",
        ),
    ] = None,
    examples: Examples = 2000,
    groups: Annotated[int, typer.Option(min=1, help="Questions per step.")] = 4,
    answers: Annotated[int, typer.Option(min=2, help="Answers per question.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of answers.")] = 1.0,
    updates: Annotated[int, typer.Option(min=1, help="Steps per rollout.")] = 1,
    kl: Annotated[float, typer.Option(help="Weight of the KL penalty to the base model.")] = 0.0,
    lora: Lora = 16,
    alpha: Alpha = None,
    targets: Targets = "q,k,v,o,gate,up,down",
    layers: Layers = None,
    adapter: From = None,
    steps: Steps = None,
    epochs: Epochs = 1.0,
    rate: Rate = None,
    seed: Seed = 0,
    save_every: SaveEvery = 20,
    device: Device = "auto",
    report: Report = None,
    name: Name = None,
    resume: Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Group relative policy optimization (GRPO): reinforce answers with above-average reward.

    The questions are those of a task, or the prompts of {"prompt": ...} rows with your own reward
    function: def judge(prompt, answer, row): return 1.0 if ... else 0.0

    [b]Examples[/b]

      unspool train grpo --task leg_counting --adapter runs/tune-leg_counting/checkpoints/000300
      unspool train grpo --data prompts.jsonl --judge my_judge:short_and_kind
    """
    sys.path.insert(0, "")  # the reward function may be in the current folder
    settings = {
        "kind": "grpo", "model": model, "data": tuple(data or ()), "task": task, "judge": judge,
        "examples": examples, "groups": groups, "answers": answers, "max_tokens": max_tokens,
        "temperature": temperature, "updates": updates, "kl": kl, "lora": lora, "alpha": alpha,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "rate": rate, "seed": seed, "save_every": save_every, "device": device,
    }  # fmt: skip
    run_tuning(context, settings, name, resume, quiet, report)


# -- twin ------------------------------------------------------------------------------------------


_TEXT, _PUZZLE, _TRAINING = "Twin of a text model", "Puzzle model", "Training"
_opt = s.panel_option


def twin(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            "-k",
            help="block, fill; or a puzzle: sudoku, sudoku:48, countdown, countdown:3.",
        ),
    ] = "block",
    model: o.Model = None,
    data: Annotated[
        list[str] | None,
        _opt(_TEXT, "Files, folders, patterns or hub data sets; repeatable.", "--data", "-d"),
    ] = None,
    share: Annotated[
        list[float] | None, _opt(_TEXT, "Share of each source, in order. Default: equal.")
    ] = None,
    chat: Annotated[int, _opt(_TEXT, "Number of texts the model generates.", min=0)] = 16000,
    chat_share: Annotated[float, _opt(_TEXT, "Share of generated texts.", min=0, max=1)] = 0.6,
    chat_tokens: Annotated[int, _opt(_TEXT, "Maximum tokens of each.", min=1)] = 256,
    questions: Annotated[
        str | None, _opt(_TEXT, "File with one question for the model per line.", metavar="FILE")
    ] = None,
    start: Annotated[
        str | None,
        _opt(
            _TEXT,
            "fill: start from this twin (a run or its folder).",
            "--from",
            metavar="TWIN",
        ),
    ] = None,
    lora: Annotated[int, _opt(_TEXT, "LoRA rank; 0 trains all weights.", min=0)] = 0,
    mask: Annotated[int | None, _opt(_TEXT, "Id of the mask token.", min=0)] = None,
    block: Annotated[int, _opt(_TEXT, "Default block size.", min=1)] = 8,
    sight: Annotated[str, _opt(_PUZZLE, "Attention: whole (any order) or causal.")] = "whole",
    depth: Annotated[int, _opt(_PUZZLE, "Layers.", min=1)] = 6,
    width: Annotated[int, _opt(_PUZZLE, "Hidden size.", min=8)] = 224,
    heads: Annotated[int, _opt(_PUZZLE, "Attention heads.", min=1)] = 7,
    minutes: Annotated[float | None, _opt(_TRAINING, "Time budget.", min=0)] = None,
    steps: Annotated[int | None, _opt(_TRAINING, "Number of steps. Default: 1000.", min=1)] = None,
    batch: Annotated[int | None, _opt(_TRAINING, "Rows per batch.", min=1)] = None,
    length: Annotated[int | None, _opt(_TRAINING, "Tokens per row.", min=8)] = None,
    accumulate: Accumulate = 1,
    rate: Rate = None,
    optimizer: Annotated[
        str | None, _opt(_TRAINING, "muon or adamw. Default: adamw for block and fill.")
    ] = None,
    seed: Seed = 0,
    save_every: Annotated[int | None, _opt(_TRAINING, "Steps between checkpoints.", min=1)] = None,
    device: Device = "auto",
    name: Name = None,
    resume: Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Train a twin for infilling, or a puzzle model.

    The model itself is not changed. It first generates texts for its twin to train on (cached);
    --data adds other texts.

    [b]Examples[/b]

      unspool train twin --kind block --data books/ --minutes 20
      unspool train twin --kind block --lora 64 --data books/
      unspool train twin --kind fill --from runs/twin-block --data books/
      unspool train twin --kind sudoku:48 --sight causal --steps 2000
      unspool train twin --resume runs/twin-block
    """
    from unspool.backends.placement import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.model.hub.find import runs_folder
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.running.runs import Run
    from unspool.train.twins.settings import TwinSettings
    from unspool.train.twins.twin import new_run, settings_of, train_twin

    if resume is not None:
        run = Run.open(resume)
        run.resume_here()
        settings = settings_of(run)
    else:
        settings = TwinSettings(
            kind=kind, model=model, start=start, data=tuple(data or (DEFAULT_SOURCE,)),
            shares=tuple(share or ()), chat=chat, chat_share=chat_share, chat_tokens=chat_tokens,
            questions=questions, mask=mask, block=block, lora=lora, sight=sight, depth=depth,
            width=width, heads=heads, steps=steps, minutes=minutes, batch=batch, length=length,
            accumulate=accumulate, rate=rate, optimizer=optimizer, seed=seed,
            save_every=save_every, device=device,
        )  # fmt: skip
        run = new_run(settings, runs_folder() / name if name else None)
    from unspool.cli.train.display import TuningDisplay
    from unspool.progress import progress_bar

    with (
        progress_bar("generating texts", settings.chat, show=not quiet) as on_text,
        TuningDisplay(run, quiet) as display,
    ):
        train_twin(settings, run, display, on_text=on_text)
    if run.state == "stopped":
        say(f"stopped; resume with: unspool train twin --resume {run.folder}")
    else:
        say(f"done: {run.final}")
        say(f"open the page:  unspool page --run {run.folder}")
    s.exit_if_signalled(run)


# -- merge -----------------------------------------------------------------------------------------


def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    folder: Annotated[Path, typer.Argument(help="Output folder of the merged model.")],
    model: o.Model = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    offline: o.Offline = False,
) -> None:
    """Merge an adapter into its base model and save the result as a model folder.

    The base model is the one the adapter was trained on, unless --model names another. Quantized
    weights are saved as floats.

    [b]Examples[/b]

      unspool train merge runs/tune-chats/checkpoints/000300 merged/
      unspool train merge poet/ merged/ --model qwen3-0.6b --dtype bfloat16
    """
    from unspool.backends.placement import check_torch

    check_torch()
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder}: is not empty; name a new folder")
    from unspool.backends.placement import DTYPES
    from unspool.train.export import merge_adapter

    if dtype not in DTYPES:
        raise SettingsError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    merge_adapter(adapter, folder, model, dtype=dtype, offline=offline)
    say(f'merged: {folder}; generate with:  unspool "..." --model {folder}')


# -- task ------------------------------------------------------------------------------------------


@o.model_options
def task(
    name: Annotated[str, typer.Argument(help="A task of reasoning-gym: leg_counting, ...")],
    adapter: o.Adapter = None,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 100,
    seed: Annotated[
        int, typer.Option(help="Seed of the questions; use another than in training.")
    ] = 1_000_000,
    max_tokens: o.MaxTokens = 128,
    show: Annotated[int, typer.Option(min=0, help="Number of answers to show.")] = 3,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Share of a task's questions that a model answers correctly, at temperature 0.

    [b]Examples[/b]

      unspool train task family_relationships
      unspool train task family_relationships --adapter runs/tune-family_relationships/...
    """
    from unspool.train.tuning.tasks import Task, accuracy

    gym_task = Task(name)
    lm = o.with_adapter(model_choice.load(), adapter)
    answers: list[tuple[Any, str, float]] = []
    share = accuracy(
        lm,
        gym_task.entries(count, seed),
        gym_task,
        max_tokens=max_tokens,
        on_answer=lambda *answer: answers.append(answer),
    )
    for entry, answer, score in answers[:show]:
        print(f"{'right' if score >= 1 else 'wrong'}: {answer.strip()!r} ({entry['answer']!r})")
    print(f"{share:.1%} of {count} questions of {name} are answered correctly")
