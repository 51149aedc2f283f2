"""Model class for lm-eval: runs its tasks on the engine, in this process.

    from lm_eval import simple_evaluate
    from unspool.train.evaluation.lm_eval import UnspoolLM
    simple_evaluate(UnspoolLM(lm), tasks=["hellaswag"], limit=100)

Scores equal those of lm-eval's own class for transformers: the same truncation of long texts, the
same token before a text without context. Diffusion models are scored by an estimate
(`diffusion_likelihood.py`), and generate by diffusion.

    UnspoolLM(lm, adapter="adapters/poet")     # the model with a LoRA adapter
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from unspool.errors import UnspoolError
from unspool.progress import progress_bar
from unspool.train.evaluation.bits_per_byte import score_continuations
from unspool.train.evaluation.diffusion_likelihood import (
    DEFAULT_SAMPLES,
    estimate_likelihoods,
    is_diffusion_model,
)

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from unspool.lm import LanguageModel

# Sampling options that lm-eval and `generate` share.
_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


class UnspoolLM(TemplateLM):  # type: ignore[misc]  # lm-eval's classes have no types
    """A loaded model with lm-eval's interface.

    Args:
        lm: A causal model or a diffusion model.
        adapter: LoRA adapter to use: the name of a loaded one, or a folder in PEFT's format.
        likelihood_samples: For diffusion models: sets of masked places in the estimate of each
            likelihood. More are slower and less noisy.
        max_gen_toks: Length of generated answers, where a task does not set it.
        progress: Show progress bars.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        adapter: str | Path | None = None,
        likelihood_samples: int = DEFAULT_SAMPLES,
        max_gen_toks: int = 256,
        progress: bool = True,
    ):
        super().__init__()
        self.lm = lm if adapter is None else _adapted(lm, adapter)
        self.likelihood_samples = likelihood_samples
        self.max_gen_toks, self.progress = max_gen_toks, progress
        self.is_diffusion = is_diffusion_model(lm)
        self.batch_size = 1  # the engine builds its own batches

    @property
    def max_length(self) -> int:
        return self.lm.context

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.lm.tokenizer
        token = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.bos_id
        if token is None:
            raise UnspoolError("the tokenizer has neither a BOS nor an EOS token")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.lm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        tokenizer = self.lm.tokenizer
        lead = tokenizer.token_bytes(self.prefix_token_id).decode("utf-8", "replace")
        has_lead = bool(lead) and string.startswith(lead)
        add_bos = not has_lead if add_special_tokens is None else add_special_tokens
        return tokenizer.encode(string, specials=True, bos=add_bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.lm.path)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.lm.tokenizer.chat_template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.lm.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, target) for _, context, target in requests]
        with progress_bar("evaluating", len(pairs), show=self.progress) as on_progress:
            if self.is_diffusion:
                results = estimate_likelihoods(
                    self.lm,
                    pairs,
                    num_samples=self.likelihood_samples,
                    check_greedy=any(request is not None for request, *_tokens in requests),
                    on_progress=on_progress,
                )
            else:
                results = score_continuations(self.lm, pairs, on_progress)
        answers = [(result.total, result.greedy) for result in results]
        for (request, *_tokens), answer in zip(requests, answers, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        parts: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(disjoint))
            parts += disjoint
        results = iter(self._loglikelihood_tokens(parts))
        totals = [sum(next(results)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts; requests with equal settings form one batch."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True, default=str)
            groups.setdefault(key, []).append(number)
        results: dict[int, str] = {}
        for numbers in groups.values():
            texts = self._generate([requests[n].args[0] for n in numbers], requests[numbers[0]])
            results.update(zip(numbers, texts, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, results[number])
        return [results[number] for number in range(len(requests))]

    def _generate(self, contexts: list[str], request: Instance) -> list[str]:
        settings = normalize_gen_kwargs(request.args[1], self.max_gen_toks)
        length = int(settings["max_gen_toks"])
        room = self.max_length - length
        if room < 1:
            raise UnspoolError(
                f"the task generates {length} tokens, but the model's context is "
                f"{self.max_length}; give --max-gen-tokens"
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        generate: Any = self.lm.diffuse if self.is_diffusion else self.lm.generate
        texts = generate(
            prompts,
            max_tokens=length,
            stop=[text for text in settings["until"] if text],
            progress=self.progress,
            **_sampling(settings),
        )
        return [text.text for text in texts]


def _adapted(lm: LanguageModel, adapter: str | Path) -> LanguageModel:
    """Return the model with an adapter: a loaded one, or one from a folder."""
    if str(adapter) not in lm.adapters and Path(adapter).is_dir():
        folder = Path(adapter)
        lm.load_adapter(folder.name, folder)
        return lm.adapted(folder.name)
    return lm.adapted(str(adapter))


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not settings.get("do_sample"):
        return {"temperature": 0.0}
    return {name: settings[name] for name in _SAMPLING_OPTIONS if name in settings}


def run_tasks(
    lm: LanguageModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    folder: Path | None = None,
    chat: bool = False,
    max_gen_toks: int = 256,
    adapter: str | Path | None = None,
    likelihood_samples: int = DEFAULT_SAMPLES,
) -> dict[str, dict[str, float]]:
    """Run lm-eval tasks.

    Args:
        lm: A causal model or a diffusion model.
        tasks: Their names in lm-eval, or in `folder`.
        limit: Maximum number of questions in a task.
        shots: Few-shot examples per question.
        folder: Folder of your own tasks (YAML files).
        chat: Apply the chat template.
        max_gen_toks: Length of generated answers, where a task does not set it.
        adapter: LoRA adapter: the name of a loaded one, or a folder.
        likelihood_samples: See `UnspoolLM`.

    Returns:
        The figures of each task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(folder) if folder else None, include_defaults=folder is None
    )
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UnspoolError(f"lm-eval has no task {unknown[0]!r}; see: lm-eval ls tasks")
    output = simple_evaluate(
        UnspoolLM(
            lm,
            adapter=adapter,
            likelihood_samples=likelihood_samples,
            max_gen_toks=max_gen_toks,
        ),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=shots,
        apply_chat_template=chat,
    )
    return {
        task: {name: value for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in (output or {"results": {}})["results"].items()
    }
