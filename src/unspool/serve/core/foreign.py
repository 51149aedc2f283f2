"""The words that clients bring along from other servers: what they mean here.

Three kinds. A setting that has another name elsewhere is taken under both. What asks for nothing
that this server does is left out, and the answer says so in its header `x-unspool-ignored`. What
means something that cannot be had here stays in, and is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from unspool.sampling.settings import DEFAULT_STAGES, MIROSTAT_STAGES, STAGE_SETTINGS
from unspool.serve.http.errors import bad_request

_OTHER_NAMES = {  # theirs: ours
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
    # llama.cpp: how long a thought may be, in tokens
    "thinking_budget_tokens": "thinking_budget",
    "reasoning_budget_tokens": "thinking_budget",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}

IGNORED = {
    # OpenAI: notes of the caller's own, and settings of services that are none of ours
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity",
    # llama.cpp, Ollama: how the model was loaded, where it runs, what it may forget
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
    # back from clients that send the settings of one answer with the next request
    "backend_sampling", "adaptive_decay", "chat_format", "reasoning_in_content",
    "generation_prompt", "preserved_tokens", "reasoning_control", "n_ctx",
    # vLLM, SGLang: how tokens are shown, and by whom the grammar is kept
    "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning",
    "guided_decoding_backend", "guided_whitespace_pattern", "request_id", "separate_reasoning",
    "add_special_tokens", "truncate_prompt_tokens",
    # proxies: how to reach a server, told to the server
    "drop_params", "api_base", "base_url", "custom_llm_provider", "num_retries", "timeout",
    "max_retries", "mock_response", "litellm_metadata",
}  # fmt: skip


def in_our_words(
    given: dict[str, Any], keep: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """A request with our names for its settings; and those that are left out of it. Those of
    `keep` mean something where it is going."""
    found = dict(given)
    nested = None if "options" in keep else found.pop("options", None)  # Ollama's, sent elsewhere
    if isinstance(nested, dict):
        found = nested | found
    dropped = [name for name in found if name in IGNORED and name not in keep]
    ignored = [name for name in dropped if found.pop(name) is not None]
    for theirs, ours in _OTHER_NAMES.items():
        if theirs not in keep:
            _rename(found, theirs, ours)
    structured = found.pop("structured_outputs", None)  # vLLM's newer way
    for theirs, ours in _STRUCTURED.items():
        if isinstance(structured, dict) and structured.get(theirs) is not None:
            found[ours] = structured[theirs]
    if isinstance(found.get("max_tokens"), int) and found["max_tokens"] < 0:
        del found["max_tokens"]  # elsewhere, as many as there is room for
    if found.get("top_k") == -1:
        found["top_k"] = 0  # all of them
    if found.pop("ignore_eos", None) is True:
        found["end"] = False
    _drop_disabled(found)
    switched_on = found.get("mirostat") in (1, 2)
    _set_mirostat(found)
    samplers = found.pop("samplers", None)
    if switched_on and found.get("stages") is None:
        # Mirostat replaces the truncating samplers, whatever their settings and order.
        found[UNUSED] = _settings_without(MIROSTAT_STAGES)
    elif samplers is not None:
        ignored += _set_samplers(found, samplers)
    return found, ignored


def _drop_disabled(found: dict[str, Any]) -> None:
    """Remove settings of llama.cpp whose value turns off what this server does not have.

    Any other value stays, and is refused by name.
    """
    for name, value in _DISABLED.items():
        if name in found and (found[name] in (None, [], "") or found[name] == value):
            del found[name]
    target = found.get("adaptive_target")
    if isinstance(target, int | float) and not isinstance(target, bool) and target < 0:
        del found["adaptive_target"]
    if found.get("top_n_sigma") == -1:
        found["top_n_sigma"] = 0.0  # off
    if found.get("thinking_budget") == -1:
        del found["thinking_budget"]  # no limit


_DISABLED: dict[str, Any] = {
    "image_data": [],
    "grammar_lazy": False,
    "grammar_triggers": [],
    "speculative": False,
}


# -- samplers ------------------------------------------------------------------------------------

UNUSED = " unused"
"""The key of translated requests with names of settings to validate and then leave out."""

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
    """The order of our stages as llama.cpp's `samplers`; a stage it lacks keeps its own name.

    `_set_samplers` turns the result into the same stages again.
    """
    order = list(stages)
    if tuple(order) in (DEFAULT_STAGES, MIROSTAT_STAGES):
        return list(_SAMPLER_STAGES)
    sampler_of = {stage: name for name, own in _SAMPLER_STAGES.items() for stage in own}
    names = [sampler_of.get(stage, str(stage)) for stage in order if stage != "logit_bias"]
    return list(dict.fromkeys(names))


def _set_samplers(found: dict[str, Any], samplers: Any) -> list[str]:
    """Set `stages` from llama.cpp's `samplers`: names in order, or a string of their letters.

    A sampler that is not listed is not used: settings that only it reads stand under `UNUSED`.
    Returns the samplers that this server does not have, to be reported as ignored.
    """
    if isinstance(samplers, str):
        unknown = [letter for letter in samplers if letter not in _SAMPLER_LETTERS]
        if unknown:
            letters = "".join(_SAMPLER_LETTERS)
            raise bad_request(
                f"samplers holds {unknown[0]!r}; its letters are {letters}", "samplers"
            )
        names = [_SAMPLER_LETTERS[letter] for letter in samplers]
    elif isinstance(samplers, list) and all(isinstance(name, str) for name in samplers):
        names = [name.lower().replace("-", "_") for name in samplers]
        names = [_SAMPLER_ALIASES.get(name, name) for name in names]
    else:
        message = "samplers must be a list of names or a string of letters such as 'edkypmxt'"
        raise bad_request(f"{message}, got {str(samplers)[:60]!r}", "samplers")
    known = {**_SAMPLER_STAGES, **{stage: (stage,) for stage in STAGE_SETTINGS}}
    for name in names:
        if name not in known and name not in _ABSENT_SAMPLERS:
            listed = ", ".join([*_SAMPLER_STAGES, "infill"])
            raise bad_request(f"samplers names {name[:40]!r}; allowed: {listed}", "samplers")
    if found.get("stages") is not None:
        raise bad_request("samplers and stages are the same; give one", "samplers")
    if names == list(_SAMPLER_STAGES):
        found.pop("stages", None)  # llama.cpp's default order is ours
        return []
    # llama.cpp always applies logit_bias, and applies it first.
    stages = ["logit_bias", *(stage for name in names for stage in known.get(name, ()))]
    found["stages"] = list(dict.fromkeys(stages))
    found[UNUSED] = _settings_without(found["stages"])
    return [f"samplers.{name}" for name in names if name in _ABSENT_SAMPLERS]


def _settings_without(stages: Iterable[str]) -> list[str]:
    """The settings that only stages outside `stages` read."""
    used = set(stages)
    names = [
        name for stage in STAGE_SETTINGS if stage not in used for name in STAGE_SETTINGS[stage]
    ]
    return names if "dry" in used else [*names, "dry_sequence_breakers"]


def _rename(found: dict[str, Any], theirs: str, ours: str) -> None:
    value = found.pop(theirs, None)
    if value is None:
        return
    if found.get(ours) not in (None, value):
        raise bad_request(f"{theirs} and {ours} are the same; give one", theirs)
    found[ours] = value


def _set_mirostat(found: dict[str, Any]) -> None:
    """Elsewhere `mirostat` turns it on (1 or 2; there is only the second here), not its target."""
    if "mirostat" not in found:
        return
    version = found.pop("mirostat")
    if isinstance(version, bool) or version not in (None, 0, 1, 2):
        raise bad_request(f"mirostat must be 0, 1 or 2, got {version!r:.60}", "mirostat")
    if version:
        found["mirostat_tau"] = 5.0 if found.get("mirostat_tau") is None else found["mirostat_tau"]
    else:
        found.pop("mirostat_tau", None)
        found.pop("mirostat_eta", None)


PENALTY_WINDOW = 64  # how far back penalties look in llama.cpp and Ollama, unless told


def llama_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Options as llama.cpp and Ollama mean them where our own words mean something else."""
    found = {name: value for name, value in options.items() if value is not None}
    if found.get("seed") == -1:
        del found["seed"]  # one by chance
    if "mirostat_tau" in found or "mirostat_eta" in found:
        found.setdefault("mirostat", 0)
    if any(name in found for name in ("repeat_penalty", "presence_penalty", "frequency_penalty")):
        found = {"repeat_last_n": PENALTY_WINDOW, "penalize_prompt": True, **found}
    return found


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
FOREVER = 9_000_000_000  # seconds; what Ollama's clients show as "Forever"


def keep_alive_seconds(given: float | str) -> float | None:
    """How long a model stays when nobody uses it: seconds, or `5m`; None: as long as may be."""
    text = str(given).strip()
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
        message = f"keep_alive is {text[:40]!r}; it may be seconds, or a time such as '5m'"
        raise bad_request(message, "keep_alive")
    return seconds if 0 <= seconds < FOREVER else None
