"""Errors for unknown options: option names of other libraries, and what to write here.

A name from transformers, vLLM, OpenAI or llama.cpp is answered with ours; any other name with the
most similar one.
"""

from __future__ import annotations

import difflib
from typing import Any

from unspool.engine.options import NAMES
from unspool.errors import SettingsError

_SYNONYMS = {
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens num_predict n_predict",
    "temperature": "temp",
    "seed": "random_seed manual_seed generator",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n repetition_penalty_range",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "typical_p": "typical",
    "eta": "eta_cutoff",
    "dry_breakers": "dry_sequence_breakers",
    "dry_window": "dry_penalty_last_n",
    "stop": "stop_sequences stop_strings stop_words",
    "stages": "samplers sampler_order",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice choices",
    "grammar": "guided_grammar",
    "cache": "use_cache",
}
_OUR_NAME = {alias: name for name, aliases in _SYNONYMS.items() for alias in aliases.split()}

_ADVICE = {
    "max_length max_context_length": "max_tokens counts new tokens only: write "
    "max_tokens={value!r} minus the length of the prompt",
    "min_tokens min_new_tokens min_length": "end=False ignores end tokens and writes up to "
    "max_tokens",
    "do_sample": "temperature=0 is greedy; above 0 tokens are sampled",
    "num_return_sequences n num_samples": "write lm.samples(prompt, {value!r})",
    "best_of": "write lm.best_of(prompt, {value!r})",
    "num_beams beams beam_width": "write lm.beam(prompt, beams={value!r})",
    "num_beam_groups": "write lm.beam(prompt, beams=4, groups={value!r})",
    "mirostat mirostat_mode": "mirostat_tau=5 turns it on (version 2)",
    "epsilon_cutoff tfs_z tfs top_a": "not supported; min_p does nearly the same",
    "eos_token_id eos_token stop_token_ids": "the model's own end tokens end a text (lm.end_ids); "
    "end=False ignores them, and stop= takes strings",
    "ignore_eos": "write end=False",
    "pad_token_id pad_token padding truncation attention_mask": "there is no padding: leave it out",
    "return_full_text echo": "a result has only the new text; put the prompt before it yourself",
    "top_logprobs logprobs n_probs output_scores output_logits return_dict_in_generate": "every "
    "step has its logprob; top=5 records candidates, explain=True how it was sampled",
    "stream streamer": "write lm.stream(prompt)",
    "logits_processor logits_processors": "write stages=[your_function, ...], a function of "
    "(tokens, logits)",
    "bad_words bad_words_ids": "guard='ban=word|another' bans words, logit_bias={{' word': "
    "float('-inf')}} bans a token",
    "response_format format": "write json=True, or json_schema= for JSON of a schema",
    "assistant_model draft_model prompt_lookup_num_tokens": "speculate='model:PATH' or "
    "speculate='lookup' turns on speculative decoding",
    "messages": "write lm.chat([{{'role': 'user', 'content': '...'}}])",
    "system system_prompt": "write lm.chat(question, system={value!r})",
    "batch_size": "pass a list of prompts: they are one batch",
    "tools": "lm.chat takes them",
    "device dtype n_ctx num_ctx context num_thread threads": "set it when loading: see "
    "help(unspool.load)",
}
_ADVICE_OF = {name: advice for names, advice in _ADVICE.items() for name in names.split()}


def unknown_option(name: str, value: Any) -> SettingsError:
    """Return the error for an unknown option, with what to write instead."""
    return SettingsError(f"there is no option {name!r}{_suggestion(name, value)}")


def _suggestion(name: str, value: Any) -> str:
    if name in _OUR_NAME:
        return f": write {_OUR_NAME[name]}={value!r}"
    if name in _ADVICE_OF:
        return f": {_ADVICE_OF[name].format(value=value)}"
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; help(lm.generate) lists all options"
