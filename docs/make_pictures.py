"""Make the pictures of the README: python docs/make_pictures.py

The picture is what `unspool "..." --probs` prints, drawn by rich from the same run.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import unspool
from unspool.cli.output import closing_line, legend, probability_style

QUESTION = "Why do leaves change color in fall?"
THEME = TerminalTheme((24, 26, 31), (220, 223, 228), [(0, 0, 0)] * 8)


def main() -> None:
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    lm = unspool.load()
    made = lm.chat(QUESTION, max_tokens=64, seed=7, temperature=0.7, top=0, explain=False)
    console.print(Text("$ ", "#7fd18c").append(f'unspool "{QUESTION}" --probs', "bold #ffffff"))
    answer = Text()
    for step in made.steps:
        answer.append(step.text, probability_style(math.exp(step.logprob)))
    console.print(answer)
    console.print(legend())
    console.print(Text(closing_line(made), "dim"))
    picture = console.export_svg(title="unspool", theme=THEME)
    # Whoever looks at the picture should not have to fetch fonts from anywhere.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = re.sub(r"<!--.*?-->", "", picture, flags=re.DOTALL)
    target = Path(__file__).parent / "images" / "probs.svg"
    target.write_text(picture, encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
