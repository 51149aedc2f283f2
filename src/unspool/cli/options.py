"""The options that several commands share, named once.

`model_options` gives a command the options that say which model is loaded and how, and hands it
one `ModelChoice`. Sampling has some twenty settings: `sampling_options` gives a command an option
for each of them, and hands it those that were given, as one dictionary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.completing import model_names
from unspool.errors import SettingsError, UnspoolWarning

if TYPE_CHECKING:
    from unspool.backends.placement import Placement
    from unspool.lm import LanguageModel

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="A short name (qwen3-0.6b), a folder, a GGUF file or a repo id (org/name).",
        autocompletion=model_names,
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        help="A short name, a folder, a GGUF file or a repo id. Several times: the first is loaded "
        "at once, the others when first asked for.",
        autocompletion=model_names,
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Apply the chat template, or continue the bare text."),
]
RunMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help="The most tokens to write. Default: 256; with --diffuse the model's own number of "
        "places, if it has one.",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to write.")]
System = Annotated[
    str | None, typer.Option("--system", "-s", help="A system message for the chat template.")
]
Probs = Annotated[bool, typer.Option("--probs", help="Colour tokens by probability.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", help="A LoRA adapter: a PEFT folder, or a training run.")
]
_THOUGHTS = "Thoughts (models that think before they answer)"
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Think first, or answer at once; by default as the model does.",
        rich_help_panel=_THOUGHTS,
    ),
]
Effort = Annotated[
    str | None,
    typer.Option(
        "--effort", help="How much to think: low, medium, high.", rich_help_panel=_THOUGHTS
    ),
]
ThinkBudget = Annotated[
    int | None,
    typer.Option(
        "--think-budget",
        metavar="N",
        help="Close a thought after so many tokens.",
        rich_help_panel=_THOUGHTS,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No closing lines.")]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model, and how it is to be loaded: what `unspool.load` takes."""

    model: str | None
    options: dict[str, Any]

    def check(self) -> None:
        """Refuse what cannot be, before anything is fetched."""
        self._placement()

    def device(self) -> str:
        """Where it will run."""
        return self._placement().resolve().device

    def _placement(self) -> Placement:
        from unspool.loading import check_load_options

        return check_load_options(**{n: v for n, v in self.options.items() if n != "offline"})

    def load(self, **instead: Any) -> LanguageModel:
        """The model; `instead` says what to take where the person left the choice to us."""
        from unspool.backends.torch.parallel import worker
        from unspool.loading import load

        options = {"tensor_parallel": None, **self.options}
        if options["tensor_parallel"] is None:
            options["tensor_parallel"] = worker.world_size()
        for name, value in instead.items():
            if options[name] in (None, "auto"):
                options[name] = value
        with warnings_said():
            lm = load(self.model, **options)
        packed = getattr(lm.model, "quantization_error", None)
        if packed:
            say(packed)
        return lm


@contextmanager
def warnings_said() -> Iterator[None]:
    """In here our own warnings are remarks to the person."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always", UnspoolWarning)
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, UnspoolWarning):
                say(str(message))
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def thinking(think: bool | None, effort: str | None) -> bool | str | None:
    """Whether to think, or how much."""
    if think is False and effort is not None:
        raise SettingsError("--no-think and --effort contradict each other; give one")
    return effort or think


def with_adapter(lm: LanguageModel, folder: Path | None) -> LanguageModel:
    """The model, writing with the adapter in a folder, if there is one."""
    if folder is None:
        return lm
    lm.load_adapter("adapter", folder)
    return lm.adapted("adapter")


def check(options: dict[str, Any]) -> None:
    """Refuse what no model could do, before one is loaded or even fetched."""
    from unspool.engine.request_builder import check_options

    given = dict(options)
    if speculate := given.pop("speculate", None):
        from unspool.decoding.speculative.drafters import check_drafter

        check_drafter(speculate)
    check_options(given)


def say(message: str) -> None:
    from unspool.cli import show  # brings rich along, so only when there is something to say

    show.say(message)


# Option of `unspool.load` -> (type, usual value, help).
_MODEL: dict[str, tuple[Any, Any, str]] = {
    "context": (int | None, None, "The most tokens a text may have; by default the model's own."),
    "backend": (str, "auto", "native (on a CPU), cuda (on a GPU), torch, or auto."),
    "device": (str, "auto", "cpu, cuda, or auto."),
    "dtype": (str, "auto", "float32, bfloat16, float16, or auto."),
    "quantize": (int | None, None, "Pack the weights into 4 or 8 bits while loading."),
    "kv_bits": (
        int | None, None,
        "Bits of a number in the KV cache: 8, 16 or 32; 32 with --dtype float32, else 16 (native).",
    ),
    "threads": (int | None, None, "How many threads work; by default one a core (native)."),
    "exact": (bool, False, "On a GPU: the same text alone and in any batch, a little slower."),
    "tensor_parallel": (
        int | None, None, "Split the model over so many processes, one a GPU (torch)."
    ),
    "devices": (str | None, None, "Put its layers onto these: cuda:0,cuda:1, or auto (torch)."),
}  # fmt: skip


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command`, which takes `chosen: ModelChoice`, the options of loading a model."""

    def gathered(given: dict[str, Any]) -> ModelChoice:
        return ModelChoice(given.pop("model"), given)

    return _with_options(command, "chosen", _model_parameters(Model), gathered)


def several_models_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`model_options` for a command that takes `chosen: list[ModelChoice]`, at least one."""

    def gathered(given: dict[str, Any]) -> list[ModelChoice]:
        return [ModelChoice(model, given) for model in given.pop("model") or [None]]

    return _with_options(command, "chosen", _model_parameters(Models), gathered)


def _model_parameters(kind: Any) -> list[inspect.Parameter]:
    added = [_parameter("model", kind, None)]
    for name, (kind, usual, text) in _MODEL.items():
        option = typer.Option(_flag(name), help=text, rich_help_panel="Model")
        added.append(_parameter(name, Annotated[kind, option], usual))
    added.append(_parameter("offline", Offline, False))
    return added


# Setting -> (type, help, further names of the option).
_SAMPLING: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "seed": (int, "Same seed, same text; random by default.", ()),
    "stop": (list[str], "Stop before this string; may be given several times.", ()),
    "temperature": (float, "0: always the likeliest. Default: 0.8.", ("-t",)),
    "top_k": (int, "Keep the k likeliest; 0: off. Default: 40.", ()),
    "top_p": (float, "Keep the likeliest that sum to p; 1: off. Default: 0.95.", ()),
    "min_p": (float, "Keep what has p times the best's chance; 0: off. Default: 0.05.", ()),
    "typical_p": (float, "Keep the most typical that sum to p; 1: off.", ()),
    "eta": (float, "Eta sampling's epsilon; 0: off.", ()),
    "top_n_sigma": (float, "Keep logits within n deviations of the best; 0: off.", ()),
    "xtc_probability": (float, "How often to exclude the top choices; 0: off.", ()),
    "xtc_threshold": (float, "From which chance on a token is a top choice. Default: 0.1.", ()),
    "dynatemp_range": (float, "Let temperature vary by this with entropy; 0: off.", ()),
    "dynatemp_exponent": (float, "How it follows the entropy. Default: 1.", ()),
    "mirostat_tau": (float, "Aim at this surprise in bits (mirostat 2); 0: off.", ()),
    "mirostat_eta": (float, "How fast mirostat corrects. Default: 0.1.", ()),
    "repetition_penalty": (float, "Divide the logits of tokens that occurred; 1: off.", ()),
    "frequency_penalty": (float, "Subtract this for every occurrence.", ()),
    "presence_penalty": (float, "Subtract this once if it occurred.", ()),
    "penalty_window": (int, "How many last tokens penalties see; -1: all.", ()),
    "no_repeat_ngram": (int, "Never repeat this many tokens in a row; 0: off.", ()),
    "dry_multiplier": (float, "Penalize continuing a repetition (DRY); 0: off.", ()),
    "dry_base": (float, "How DRY grows with the length. Default: 1.75.", ()),
    "dry_allowed_length": (int, "Repetitions up to this are free. Default: 2.", ()),
    "logit_bias": (list[str], "TOKEN_ID=AMOUNT added to a logit; -inf bans it. Several times.", ()),
    "stages": (str, "The stages in your own order, separated by commas.", ()),
}


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command`, which takes `sampling: dict`, an option for every sampling setting, for the
    seed and for stop strings."""
    added = []
    for name, (kind, text, more) in _SAMPLING.items():
        option = typer.Option(
            _flag(name), *more, help=text, show_default=False, rich_help_panel="Sampling"
        )
        added.append(_parameter(name, Annotated[kind | None, option], None))
    return _with_options(command, "sampling", added, _settings)


# Option of `lm.diffuse` -> (type, help).
_DIFFUSION: dict[str, tuple[Any, str]] = {
    "order": (str, "threshold, factor, entropy, left, fixed, margin or random."),
    "threshold": (float, "Set what is at least so likely. Default: 0.9."),
    "factor": (float, "How much a pass may risk (order factor). Default: 1."),
    "entropy_bound": (float, "The same in nats (order entropy). Default: 0.1."),
    "block": (int, "Fill so many places before the next; by default the model's own."),
    "steps": (int, "The most passes a block may take; 1: all at once."),
    "k": (int, "Set at least so many places a pass. Default: 1."),
    "remask": (float, "Take a token back that has become less likely than this."),
    "edit": (float, "Replace one by another that is likelier than this."),
    "guidance": (float, "Go by the prompt so much more; 0: off."),
    "cache": (str, "none, or approximate: prefix, dual."),
    "twin": (Path, "A folder with the adapter that fills the places."),
    "mask": (str, "The mask token, where the model does not say."),
}


def diffusion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command`, which takes `diffusion: dict`, the options of filling a text in any order."""
    panel = "In any order (diffusion models)"
    switch = typer.Option("--diffuse", help="Fill masked places.", rich_help_panel=panel)
    added = [_parameter("diffuse", Annotated[bool, switch], False)]
    for name, (kind, text) in _DIFFUSION.items():
        option = typer.Option(_flag(name), help=text, show_default=False, rich_help_panel=panel)
        added.append(_parameter(name, Annotated[kind | None, option], None))

    def gathered(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if value not in (None, False)}

    return _with_options(command, "diffusion", added, gathered)


def _with_options(
    command: Callable[..., Any],
    place: str,
    added: list[inspect.Parameter],
    gathered: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """`command` with more options, which reach it together, as its parameter `place`."""

    @wraps(command)
    def with_more(**given: Any) -> Any:
        own = {parameter.name: given.pop(parameter.name) for parameter in added}
        return command(**given, **{place: gathered(own)})

    own = inspect.signature(command, eval_str=True)
    unchanged = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != place
    ]
    parameters = unchanged + added
    with_more.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_more.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_more


def _parameter(name: str, annotation: Any, usual: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=usual, annotation=annotation)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those that were given, in the types that the settings have."""
    found = {name: value for name, value in given.items() if value not in (None, [])}
    if "stop" in found:
        found["stop"] = tuple(found["stop"])
    if "stages" in found:
        found["stages"] = tuple(name.strip() for name in found["stages"].split(","))
    if "logit_bias" in found:
        found["logit_bias"] = dict(_bias(text) for text in found["logit_bias"])
    return found


def _bias(text: str) -> tuple[int, float]:
    token, _, amount = text.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise SettingsError(
            f"--logit-bias is {text!r}; it may be TOKEN_ID=AMOUNT, for example 42=-5"
        ) from None
