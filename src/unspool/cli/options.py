"""Options and arguments that several commands share.

`model_options` adds the options that select and load a model, and passes them as one
`ModelChoice`. `sampling_options` adds an option for every sampling setting, and passes those that
were set as one dictionary. `diffusion_options` does the same for diffusion.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.output import say
from unspool.errors import SettingsError, UnspoolError, UnspoolWarning
from unspool.store.folder import default_folder

if TYPE_CHECKING:
    from unspool.backends.placement import Placement
    from unspool.lm import LanguageModel


def complete_model(incomplete: str) -> list[str]:
    """Shell completion: short names, and the models on this machine."""
    from unspool.model.hub.stores import cached_repos, stored_models
    from unspool.model.shipped import shipped_models

    names = list(shipped_models())
    names += [name for repo in cached_repos() for name, _ in repo.models()]
    names += [model.name for model in stored_models() if not model.problem]
    return complete_download(incomplete) + _with_prefix(names, incomplete)


def complete_download(incomplete: str) -> list[str]:
    """Shell completion: short names of the catalogue."""
    from unspool.model.hub.catalogue import catalogue

    return _with_prefix(list(catalogue()), incomplete)


def _with_prefix(names: list[str], prefix: str) -> list[str]:
    return [name for name in names if name.lower().startswith(prefix.lower())]


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="A short name (qwen3-0.6b), a folder, a GGUF file or a repo id (org/name).",
        autocompletion=complete_model,
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        help="A short name, a folder, a GGUF file or a repo id. Repeatable: the first is loaded at "
        "startup, the others on their first request.",
        autocompletion=complete_model,
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Do not use the network.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Apply the chat template, or continue the bare text."),
]
RunMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help="Maximum number of tokens to generate. Default: 256; with --diffuse the canvas length "
        "of the model, if it has one.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.")
]
System = Annotated[str | None, typer.Option("--system", "-s", help="System message of the chat.")]
Probs = Annotated[bool, typer.Option("--probs", help="Colour tokens by probability.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", help="A LoRA adapter: a PEFT folder, or a training run.")
]
Steer = Annotated[
    list[str] | None,
    typer.Option(
        "--steer",
        metavar="NAME|FILE=STRENGTH",
        help="Add a steering vector: one of the model's, or a GGUF control vector. Repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no statistics at the end.")]
_REASONING = "Reasoning (models that think before they answer)"
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Turn reasoning on or off. Default: as the model does.",
        rich_help_panel=_REASONING,
    ),
]
Effort = Annotated[
    str | None,
    typer.Option(
        "--effort", help="Reasoning effort: low, medium or high.", rich_help_panel=_REASONING
    ),
]
ThinkBudget = Annotated[
    int | None,
    typer.Option(
        "--think-budget",
        metavar="N",
        help="Maximum number of reasoning tokens.",
        rich_help_panel=_REASONING,
    ),
]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model and the options of `unspool.load` for it."""

    model: str | None
    options: dict[str, Any]

    def check(self) -> None:
        """Raise SettingsError for invalid options, before anything is downloaded."""
        self._placement()

    def device(self) -> str:
        """The device it will run on."""
        return self._placement().resolve().device

    def _placement(self) -> Placement:
        from unspool.loading import check_load_options

        return check_load_options(**{n: v for n, v in self.options.items() if n != "offline"})

    def load(self, **defaults: Any) -> LanguageModel:
        """Load the model; `defaults` replace options that are None or "auto"."""
        from unspool.backends.torch.parallel import worker
        from unspool.loading import load

        options = {"tensor_parallel": None, **self.options}
        if options["tensor_parallel"] is None:
            options["tensor_parallel"] = worker.world_size()
        for name, value in defaults.items():
            if options[name] in (None, "auto"):
                options[name] = value
        with print_warnings():
            lm = load(self.model, **options)
        if error := getattr(lm.model, "quantization_error", None):
            say(error)
        return lm


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print Unspool's own warnings as plain lines on stderr."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always", UnspoolWarning)
        default = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, UnspoolWarning):
                say(str(message))
            else:
                default(message, category, *place, **options)

        warnings.showwarning = show
        yield


def thinking(think: bool | None, effort: str | None) -> bool | str | None:
    """Combine --think and --effort."""
    if think is False and effort is not None:
        raise SettingsError("--no-think and --effort contradict each other; give one of them")
    return effort or think


def check_system(system: str | None, chat: bool | None) -> None:
    if system is not None and chat is False:
        raise SettingsError("--system needs the chat template; leave --raw out")


def with_adapter(lm: LanguageModel, folder: Path | None) -> LanguageModel:
    """The model with the adapter of --adapter, if there is one."""
    if folder is None:
        return lm
    lm.load_adapter("adapter", folder)
    return lm.adapted("adapter")


def parse_steer(lm: LanguageModel, values: list[str] | None) -> list[tuple[Any, float]] | None:
    """The steering vectors of --steer; a file is loaded, and a name must be one of the model's."""
    vectors: list[tuple[Any, float]] = []
    for value in values or ():
        name, equals, strength = value.rpartition("=")
        try:
            number = float(strength) if equals else 1.0
        except ValueError:
            raise SettingsError(
                f"--steer must be NAME=STRENGTH, for example happy=1.5, got {value!r}"
            ) from None
        label = name if equals else value
        if label in lm.steering_vectors:
            vectors.append((label, number))
            continue
        path = Path(label).expanduser()
        if not path.is_file():
            names = ", ".join(lm.steering_vectors) or "none"
            raise SettingsError(
                f"--steer: there is no steering vector or file {label!r} (the model's: {names})"
            )
        vectors.append((lm.load_steering_vector(path), number))
    return vectors or None


def load_helper(model: str | None) -> LanguageModel | None:
    """Load the second model of --twin, if there is one."""
    if model is None:
        return None
    from unspool.loading import load

    return load(model)


def check(options: dict[str, Any]) -> None:
    """Raise SettingsError for invalid request options, before a model is loaded."""
    from unspool.engine.request_builder import check_options

    others = dict(options)
    if speculate := others.pop("speculate", None):
        from unspool.decoding.speculative.drafters import check_drafter

        check_drafter(speculate)
    check_options(others)


# -- text from arguments, files and stdin ----------------------------------------------------------


def read_prompt(argument: str | None) -> str:
    """The argument, standard input, or both: an instruction and the text it is about."""
    piped = ""
    if argument in (None, "-") or not sys.stdin.isatty():
        piped = _read_stdin(wait=argument in (None, "-"))
    text = "" if argument in (None, "-") else str(argument)
    if piped.strip() or not text:
        text = f"{text}\n\n{piped}" if text else piped
    if not text:
        raise UnspoolError('the prompt is empty; for example: unspool "Once upon a time"')
    return text


def _read_stdin(wait: bool) -> str:
    if not wait and not _has_input():
        return ""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnspoolError(
            f"standard input is not UTF-8 text (byte {error.start}); convert it first"
        ) from None


def _has_input() -> bool:
    """Whether text is piped in, without waiting for a writer that never writes."""
    import select
    import stat
    from os import fstat

    try:
        mode = fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISREG(mode):
            return True
        return stat.S_ISFIFO(mode) and bool(select.select([sys.stdin], [], [], 0.2)[0])
    except (OSError, ValueError):
        return False


def read_text_file(name: str) -> str:
    """Read a UTF-8 text file; line ends are not changed."""
    try:
        return Path(name).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UnspoolError(f"there is no file {name!r} in {Path.cwd()}") from None
    except UnicodeDecodeError as error:
        raise UnspoolError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    except OSError as error:
        raise UnspoolError(f"{name} cannot be read: {error.strerror or error}") from error


def check_output_file(file: Path, option: str) -> None:
    """Check an output path before minutes of work would be lost."""
    if file.is_dir():
        raise UnspoolError(f"{option}: {file} is a folder; give the name of a file")
    if not file.absolute().parent.is_dir():
        raise UnspoolError(f"{option}: there is no folder {file.parent}; create it first")


# -- groups of options -----------------------------------------------------------------------------

# Option of `unspool.load` -> (type, default, help).
_MODEL: dict[str, tuple[Any, Any, str]] = {
    "context": (int | None, None, "Maximum context length in tokens. Default: the model's own."),
    "backend": (str, "auto", "native (CPU), cuda (GPU), torch, or auto."),
    "device": (str, "auto", "cpu, cuda, or auto."),
    "dtype": (str, "auto", "float32, bfloat16, float16, or auto."),
    "quantize": (int | None, None, "Quantize the weights to 4 or 8 bits while loading."),
    "kv_bits": (
        int | None, None,
        "Bits per KV cache value: 8, 16 or 32. Default: 16; 32 with --dtype float32 (native).",
    ),
    "threads": (int | None, None, "Number of threads. Default: one per core (native)."),
    "exact": (bool, False, "On a GPU: the same text alone and in any batch; slower (8B: 5 %)."),
    "tensor_parallel": (
        int | None, None, "Split the model over this many processes, one GPU each (torch)."
    ),
    "devices": (
        str | None, None, "Split the layers over these devices: cuda:0,cuda:1, or auto (torch)."
    ),
}  # fmt: skip


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the model options to a command with the parameter `model_choice: ModelChoice`."""

    def gather(values: dict[str, Any]) -> ModelChoice:
        return ModelChoice(values.pop("model"), values)

    return _with_options(command, "model_choice", _model_parameters(Model), gather)


def several_models_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the model options to a command with the parameter `model_choices: list[ModelChoice]`."""

    def gather(values: dict[str, Any]) -> list[ModelChoice]:
        return [ModelChoice(model, values) for model in values.pop("model") or [None]]

    return _with_options(command, "model_choices", _model_parameters(Models), gather)


def _model_parameters(kind: Any) -> list[inspect.Parameter]:
    parameters = [_parameter("model", kind, None)]
    for name, (kind, default, text) in _MODEL.items():
        option = typer.Option(_flag(name), help=text, rich_help_panel="Model")
        parameters.append(_parameter(name, Annotated[kind, option], default))
    parameters.append(_parameter("offline", Offline, False))
    return parameters


# Setting -> (type, help, short names of the option).
_SAMPLING: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "seed": (int, "Random seed: the same seed gives the same text. Default: random.", ()),
    "stop": (list[str], "Stop before this string; repeatable.", ()),
    "temperature": (float, "0 always takes the most likely token. Default: 0.8.", ("-t",)),
    "top_k": (int, "Keep the k most likely tokens; 0: off. Default: 40.", ()),
    "top_p": (
        float, "Keep the top tokens up to this total probability; 1: off. Default: 0.95.", ()
    ),
    "min_p": (
        float, "Drop tokens below min_p × the top probability; 0: off. Default: 0.05.", ()
    ),
    "typical_p": (float, "Keep the most typical tokens up to this total probability; 1: off.", ()),
    "eta": (float, "Epsilon of eta sampling; 0: off.", ()),
    "top_n_sigma": (
        float, "Drop logits more than n standard deviations below the maximum; 0: off.", ()
    ),
    "xtc_probability": (float, "XTC: probability of excluding the top choices; 0: off.", ()),
    "xtc_threshold": (float, "XTC: minimum probability of a top choice. Default: 0.1.", ()),
    "dynatemp_range": (
        float, "Dynamic temperature: vary it by this much with entropy; 0: off.", ()
    ),
    "dynatemp_exponent": (float, "Dynamic temperature: exponent of the entropy. Default: 1.", ()),
    "mirostat_tau": (float, "Mirostat 2: target surprise in bits; 0: off.", ()),
    "mirostat_eta": (float, "Mirostat 2: learning rate. Default: 0.1.", ()),
    "repetition_penalty": (float, "Divide the logits of tokens that occurred; 1: off.", ()),
    "frequency_penalty": (float, "Subtract this from a logit for every occurrence.", ()),
    "presence_penalty": (float, "Subtract this from a logit once if the token occurred.", ()),
    "penalty_window": (int, "Number of last tokens that penalties look at; -1: all.", ()),
    "no_repeat_ngram": (int, "Never repeat this many tokens in a row; 0: off.", ()),
    "dry_multiplier": (float, "DRY: penalty for continuing a repetition; 0: off.", ()),
    "dry_base": (float, "DRY: growth of the penalty per repeated token. Default: 1.75.", ()),
    "dry_allowed_length": (int, "DRY: longest repetition without penalty. Default: 2.", ()),
    "logit_bias": (
        list[str], "TOKEN_ID=AMOUNT added to a logit; -inf bans the token. Repeatable.", ()
    ),
    "stages": (str, "The sampling stages in this order, comma-separated.", ()),
}  # fmt: skip


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all sampling settings, seed and stop to a command with the parameter `sampling: dict`."""
    parameters = []
    for name, (kind, text, short_names) in _SAMPLING.items():
        option = typer.Option(
            _flag(name), *short_names, help=text, show_default=False, rich_help_panel="Sampling"
        )
        parameters.append(_parameter(name, Annotated[kind | None, option], None))
    return _with_options(command, "sampling", parameters, _sampling_settings)


# Option of `lm.diffuse` -> (type, help).
_DIFFUSION: dict[str, tuple[Any, str]] = {
    "order": (
        str, "Positions to fill first: threshold, factor, entropy, left, fixed, margin or random."
    ),
    "threshold": (float, "Fill positions with at least this probability. Default: 0.9."),
    "factor": (float, "Order factor: risk allowed per pass. Default: 1."),
    "entropy_bound": (float, "Order entropy: entropy allowed per pass, in nats. Default: 0.1."),
    "block": (int, "Block size: positions to fill before the next. Default: the model's own."),
    "steps": (int, "Maximum passes per block; 1 fills it in a single pass."),
    "k": (int, "Minimum positions to fill per pass. Default: 1."),
    "remask": (float, "Remask a token when its probability falls below this."),
    "edit": (float, "Replace a token by another with a probability above this."),
    "guidance": (float, "Strength of classifier-free guidance; 0: off."),
    "cache": (str, "none, or approximate: prefix, dual."),
    "twin": (Path, "Folder of the adapter that fills the positions."),
    "mask": (str, "The mask token, if the model does not name one."),
}  # fmt: skip


def diffusion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the diffusion options to a command with the parameter `diffusion: dict`."""
    panel = "Diffusion (text in any order)"
    switch = typer.Option(
        "--diffuse", help="Fill masked positions in any order.", rich_help_panel=panel
    )
    parameters = [_parameter("diffuse", Annotated[bool, switch], False)]
    for name, (kind, text) in _DIFFUSION.items():
        option = typer.Option(_flag(name), help=text, show_default=False, rich_help_panel=panel)
        parameters.append(_parameter(name, Annotated[kind | None, option], None))

    def gather(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value not in (None, False)}

    return _with_options(command, "diffusion", parameters, gather)


def _with_options(
    command: Callable[..., Any],
    target: str,
    added: list[inspect.Parameter],
    gather: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """Replace the parameter `target` of a command by the `added` ones, combined by `gather`."""

    @wraps(command)
    def wrapper(**values: Any) -> Any:
        added_values = {parameter.name: values.pop(parameter.name) for parameter in added}
        return command(**values, **{target: gather(added_values)})

    signature = inspect.signature(command, eval_str=True)
    unchanged = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != target
    ]
    parameters = unchanged + added
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sampling_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, in the types of the engine."""
    settings = {name: value for name, value in values.items() if value not in (None, [])}
    if "stop" in settings:
        settings["stop"] = tuple(settings["stop"])
    if "stages" in settings:
        settings["stages"] = tuple(name.strip() for name in settings["stages"].split(","))
    if "logit_bias" in settings:
        settings["logit_bias"] = dict(_parse_bias(text) for text in settings["logit_bias"])
    return settings


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, amount = text.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise SettingsError(
            f"--logit-bias must be TOKEN_ID=AMOUNT, for example 42=-5, got {text!r}"
        ) from None


def state_folder(state: Path | None, no_state: bool) -> Path | None:
    """The folder of stored texts; None: they are not stored."""
    if no_state and state is not None:
        raise SettingsError("give either --state or --no-state")
    return None if no_state else state or default_folder()
