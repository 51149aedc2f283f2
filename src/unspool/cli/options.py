"""The options that several commands share, named once.

Sampling has some twenty settings. `sampling_options` gives a command an option for each of them,
and hands the command those that were given, as one dictionary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from unspool.errors import SettingsError

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="PATH|REPO", help="A folder, a GGUF file or a repo id (org/name)."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")]
Context = Annotated[
    int | None, typer.Option(help="The most tokens a text may have; by default the model's own.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to write.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text; random by default.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop before this string; may be given several times.")
]
System = Annotated[
    str | None, typer.Option("--system", "-s", help="A system message for the chat template.")
]

# Setting -> (type, help, further names of the option).
_SAMPLING: dict[str, tuple[Any, str, tuple[str, ...]]] = {
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
    """Give `command`, which takes `sampling: dict`, an option for every sampling setting."""

    @wraps(command)
    def with_settings(**given: Any) -> Any:
        values = {name: given.pop(name) for name in _SAMPLING}
        return command(**given, sampling=_settings(values))

    own = inspect.signature(command, eval_str=True)
    kept = [parameter for name, parameter in own.parameters.items() if name != "sampling"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                typer.Option(
                    f"--{name.replace('_', '-')}",
                    *more,
                    help=text,
                    show_default=False,
                    rich_help_panel="Sampling",
                ),
            ],
        )
        for name, (kind, text, more) in _SAMPLING.items()
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept] + added
    with_settings.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_settings


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those that were given, in the types that the settings have."""
    found = {name: value for name, value in given.items() if value not in (None, [])}
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
