"""Runs lm-eval on the tasks of one folder, and prints what it found as JSON.

Its command line would do the same, but reads thousands of built-in tasks first, which takes half a
minute. The server itself is its tokenizer. Usage: lm_eval_client.py FOLDER URL MODEL
"""

from __future__ import annotations

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder, url, model = sys.argv[1:]
arguments = {
    "model": model,
    "base_url": f"{url}/v1/completions",
    "tokenizer_backend": "remote",
    "num_concurrent": 2,
    "max_retries": 1,
}
manager = TaskManager(include_path=folder, include_defaults=False)
evaluated = simple_evaluate(
    "local-completions",
    model_args=arguments,
    tasks=sorted(manager.all_tasks),
    task_manager=manager,
    batch_size=4,
    bootstrap_iters=0,
)
print(json.dumps({name: evaluated[name] for name in ("results", "samples")}, default=str))
