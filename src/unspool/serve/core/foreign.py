"""The words that clients bring along from other servers: what they mean here.

Three kinds. A setting that has another name elsewhere is taken under both. What asks for nothing
that this server does is left out, and the answer says so in its header `x-unspool-ignored`. What
means something that cannot be had here stays in, and is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

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
    "penalize_newline", "tfs_z", "min_keep", "t_max_predict_ms", "timings_per_token",
    "return_progress", "sse_ping_interval", "reasoning_format", "thinking_forced_open",
    "parse_tool_calls", "speculative.n_max", "speculative.n_min", "speculative.p_min",
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
    _set_mirostat(found)
    return found, ignored


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
