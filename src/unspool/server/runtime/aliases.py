"""Parameters of other servers (llama.cpp, Ollama, vLLM, ...), translated to Unspool's names.

A setting with another name elsewhere is accepted under both. A parameter without meaning here is
dropped and reported in the header `x-unspool-ignored`. One that would change the text but is not
supported stays, and is rejected by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from unspool.sampling.settings import DEFAULT_STAGES, MIROSTAT_STAGES, STAGE_SETTINGS
from unspool.server.http.errors import bad_request

_ALIASES_OF_OTHERS = {  # their name: Unspool's name
    # llama.cpp, Ollama
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "dry_penalty_last_n": "dry_window",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "typ_p": "typical_p",
    # transformers, text-generation-inference
    "max_new_tokens": "max_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "typical": "typical_p",
    "eta_cutoff": "eta",
    # vLLM, SGLang
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "random_seed": "seed",
    "mirostat_mode": "mirostat",
    # llama.cpp: tokens of a thought
    "thinking_budget_tokens": "thinking_budget",
    "reasoning_budget_tokens": "thinking_budget",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}

IGNORED = {
    # OpenAI: notes of the caller, and settings of OpenAI's service
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity",
    # llama.cpp, Ollama: how the model is loaded, where it runs, what the cache may drop
    "cache_prompt", "id_slot", "slot_id", "n_keep", "num_keep", "n_discard", "n_cache_reuse",
    "n_indent", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
    "f16_kv", "vocab_only", "use_mmap", "use_mlock", "draft_num_predict",
    "logits_all", "embedding_only", "penalize_nl",
    "penalize_newline", "tfs_z", "min_keep", "timings_per_token", "return_progress",
    "response_fields", "verbose", "sse_ping_interval", "reasoning_format",
    "thinking_forced_open", "parse_tool_calls", "speculative.n_max", "speculative.n_min",
    "speculative.p_min", "speculative.types",
    # llama.cpp: time limits for editors; a text is limited by its tokens and by --deadline
    "t_max_prompt_ms", "t_max_predict_ms",
    # llama.cpp: where it samples, and what its own parts tell each other about a chat; these come
    # sent back by clients that reuse the settings of an answer
    "backend_sampling", "adaptive_decay", "chat_format", "reasoning_in_content",
    "generation_prompt", "preserved_tokens", "reasoning_control", "n_ctx",
    # vLLM, SGLang: how tokens are shown, and which library enforces the grammar
    "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning",
    "guided_decoding_backend", "guided_whitespace_pattern", "request_id", "separate_reasoning",
    "add_special_tokens", "truncate_prompt_tokens",
    # proxies: their own settings
    "drop_params", "api_base", "base_url", "custom_llm_provider", "num_retries", "timeout",
    "max_retries", "mock_response", "litellm_metadata",
}  # fmt: skip


def translate_names(
    params: dict[str, Any], keep: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Translate a request to Unspool's names.

    Args:
        keep: Fields of the request class: neither renamed nor dropped.

    Returns:
        The translated request, and the names of the parameters that are ignored.
    """
    result = dict(params)
    nested_options = (
        None if "options" in keep else result.pop("options", None)
    )  # Ollama's, sent elsewhere
    if isinstance(nested_options, dict):
        result = nested_options | result
    dropped = [name for name in result if name in IGNORED and name not in keep]
    ignored = [name for name in dropped if result.pop(name) is not None]
    for other_name, our_name in _ALIASES_OF_OTHERS.items():
        if other_name not in keep:
            _rename(result, other_name, our_name)
    structured = result.pop("structured_outputs", None)  # vLLM's newer way
    for other_name, our_name in _STRUCTURED.items():
        if isinstance(structured, dict) and structured.get(other_name) is not None:
            result[our_name] = structured[other_name]
    if result.get("max_tokens") in (-1, -2):
        del result["max_tokens"]  # elsewhere: no limit, or the rest of the context
    if result.get("top_k") == -1:
        result["top_k"] = 0  # all of them
    if result.pop("ignore_eos", None) is True:
        result["end"] = False
    _drop_disabled(result)
    switched_on = result.get("mirostat") in (1, 2)
    _set_mirostat(result)
    samplers = result.pop("samplers", None)
    if switched_on and result.get("stages") is None:
        # Mirostat replaces the truncating samplers, regardless of their settings and order.
        result[UNUSED] = _settings_without(MIROSTAT_STAGES)
    elif samplers is not None:
        ignored += _set_samplers(result, samplers)
    return result, ignored


def _drop_disabled(result: dict[str, Any]) -> None:
    """Remove settings of llama.cpp whose value turns off what this server does not have.

    Any other value stays, and is refused by name.
    """
    for name, value in _DISABLED.items():
        if name in result and (result[name] in (None, [], "") or result[name] == value):
            del result[name]
    target = result.get("adaptive_target")
    if isinstance(target, int | float) and not isinstance(target, bool) and target < 0:
        del result["adaptive_target"]
    if result.get("top_n_sigma") == -1:
        result["top_n_sigma"] = 0.0  # off
    if result.get("thinking_budget") == -1:
        del result["thinking_budget"]  # no limit


_DISABLED: dict[str, Any] = {
    "image_data": [],
    "grammar_lazy": False,
    "grammar_triggers": [],
    "speculative": False,
}


UNUSED = " unused"
"""Key in a translated request: names of settings to validate but not to use."""

_SAMPLER_STAGES: dict[str, tuple[str, ...]] = {  # llama.cpp's samplers, in its default order
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc",),
    "temperature": ("dynamic_temperature", "temperature"),
}
_SAMPLER_LETTERS = dict(
    e="penalties", d="dry", s="top_n_sigma", k="top_k", y="typ_p", p="top_p", m="min_p", x="xtc",
    t="temperature", i="infill", a="adaptive_p",
)  # fmt: skip
_SAMPLER_ALIASES = {
    "nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "topk": "top_k", "topp": "top_p",
    "minp": "min_p", "typp": "typ_p", "topnsigma": "top_n_sigma", "adaptivep": "adaptive_p",
    "typical_p": "typ_p",
}  # fmt: skip
_ABSENT_SAMPLERS = ("infill", "adaptive_p", "tfs_z")  # accepted in a list, and reported as ignored


def sampler_names(stages: Iterable[Any]) -> list[str]:
    """The order of sampling stages as llama.cpp's `samplers`; a stage it lacks keeps its name.

    `_set_samplers` turns the result into the same stages again.
    """
    order = list(stages)
    if tuple(order) in (DEFAULT_STAGES, MIROSTAT_STAGES):
        return list(_SAMPLER_STAGES)
    sampler_of = {stage: name for name, group in _SAMPLER_STAGES.items() for stage in group}
    names = [sampler_of.get(stage, str(stage)) for stage in order if stage != "logit_bias"]
    return list(dict.fromkeys(names))


def _set_samplers(result: dict[str, Any], samplers: Any) -> list[str]:
    """Set `stages` from llama.cpp's `samplers`: names in order, or a string of their letters.

    A sampler that is not listed is not used: settings that only it reads go under `UNUSED`.
    Returns the samplers that this server lacks, to be reported as ignored.
    """
    if isinstance(samplers, str):
        unknown = [letter for letter in samplers if letter not in _SAMPLER_LETTERS]
        if unknown:
            letters = "".join(_SAMPLER_LETTERS)
            raise bad_request(
                f"samplers must have letters of {letters}, got {unknown[0]!r}", "samplers"
            )
        names = [_SAMPLER_LETTERS[letter] for letter in samplers]
    elif isinstance(samplers, list) and all(isinstance(name, str) for name in samplers):
        names = [name.lower().replace("-", "_") for name in samplers]
        names = [_SAMPLER_ALIASES.get(name, name) for name in names]
    else:
        message = "samplers must be a list of names or a string of letters such as 'edkypmxt'"
        raise bad_request(f"{message}, got {str(samplers)[:60]!r}", "samplers")
    stages_by_name = {**_SAMPLER_STAGES, **{stage: (stage,) for stage in STAGE_SETTINGS}}
    for name in names:
        if name not in stages_by_name and name not in _ABSENT_SAMPLERS:
            listed = ", ".join([*_SAMPLER_STAGES, "infill"])
            raise bad_request(f"samplers must be of {listed}, got {name[:40]!r}", "samplers")
    if result.get("stages") is not None:
        raise bad_request("samplers and stages are the same parameter; give one", "samplers")
    if names == list(_SAMPLER_STAGES):
        result.pop("stages", None)  # llama.cpp's default order is the default here too
        return []
    # llama.cpp always applies logit_bias, and applies it first.
    stages = ["logit_bias", *(stage for name in names for stage in stages_by_name.get(name, ()))]
    result["stages"] = list(dict.fromkeys(stages))
    result[UNUSED] = _settings_without(result["stages"])
    return [f"samplers.{name}" for name in names if name in _ABSENT_SAMPLERS]


def _settings_without(stages: Iterable[str]) -> list[str]:
    """The settings that only stages outside `stages` read."""
    used = set(stages)
    names = [
        name for stage in STAGE_SETTINGS if stage not in used for name in STAGE_SETTINGS[stage]
    ]
    return names if "dry" in used else [*names, "dry_sequence_breakers"]


def _rename(result: dict[str, Any], other_name: str, name: str) -> None:
    value = result.pop(other_name, None)
    if value is None:
        return
    if result.get(name) not in (None, value):
        raise bad_request(f"{other_name} and {name} are the same parameter; give one", other_name)
    result[name] = value


def _set_mirostat(result: dict[str, Any]) -> None:
    """Translate `mirostat`, which elsewhere is a version: 0 (off), 1 or 2 (here always 2)."""
    if "mirostat" not in result:
        return
    version = result.pop("mirostat")
    if isinstance(version, bool) or version not in (None, 0, 1, 2):
        raise bad_request(f"mirostat must be 0, 1 or 2, got {version!r:.60}", "mirostat")
    if version:
        result["mirostat_tau"] = (
            5.0 if result.get("mirostat_tau") is None else result["mirostat_tau"]
        )
    else:
        result.pop("mirostat_tau", None)
        result.pop("mirostat_eta", None)


PENALTY_WINDOW = 64  # tokens that penalties look back, the default of llama.cpp and Ollama


def llama_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Apply the defaults of llama.cpp and Ollama where Unspool's differ."""
    result = {name: value for name, value in options.items() if value is not None}
    if result.get("seed") == -1:
        del result["seed"]  # random
    if "mirostat_tau" in result or "mirostat_eta" in result:
        result.setdefault("mirostat", 0)
    if any(name in result for name in ("repeat_penalty", "presence_penalty", "frequency_penalty")):
        result = {"repeat_last_n": PENALTY_WINDOW, "penalize_prompt": True, **result}
    return result


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
FOREVER = 9_000_000_000  # seconds; Ollama's clients show this as "Forever"


def keep_alive_seconds(keep_alive: float | str) -> float | None:
    """Seconds that an idle model stays loaded, from a number or `5m`; None: no limit."""
    text = str(keep_alive).strip()
    parts = _DURATION.findall(text)
    if parts and "".join(map("".join, parts)) == text.lstrip("-+"):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        seconds = -seconds if text.startswith("-") else seconds
    else:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
    if math.isnan(seconds):
        message = f"keep_alive must be seconds, or a time such as '5m', got {text[:40]!r}"
        raise bad_request(message, "keep_alive")
    return seconds if 0 <= seconds < FOREVER else None
