"""Make the page's scripts and styles smaller: without comments, indentation and needless blanks.

Names are kept, and so are strings, templates and regular expressions, character by character, but
for the indentation in templates of HTML. A line break stays where JavaScript could end a statement.
A `/` after `)` or `}` is a division.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<blank> (?: \s | //[^\n]* | /\*.*?\*/ )+ )
      | [\w$]+
      | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*'
      | .""",
    re.VERBOSE | re.DOTALL,
)
_REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/\w*")
_BEFORE_REGEX = re.compile(r"[(,=:\[!&|?{;*%<>~^]|return|typeof|case|of|in|await|yield")
_TEMPLATE_TEXT = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*", re.DOTALL)
_INDENT = re.compile(r"\s*\n\s*")
_CSS_BLANK = r"(?: \s | /\*.*?\*/ )"
_CSS_TOKEN = re.compile(
    rf"""(?P<string> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )
      | {_CSS_BLANK}* (?: ; {_CSS_BLANK}* (?=\}}) )? (?P<mark> [{{}};,] ) {_CSS_BLANK}*
        (?: (?P<name> [-\w]+: ) {_CSS_BLANK}+ )?
      | {_CSS_BLANK}+""",
    re.VERBOSE | re.DOTALL,
)


def minify_script(text: str) -> str:
    """A JavaScript module that does the same."""
    code, _ = _minify(text, 0)
    return code + "\n"


def minify_style(text: str) -> str:
    """A style sheet with the same rules."""

    def shorten(match: re.Match[str]) -> str:
        return match["string"] or (match["mark"] or " ") + (match["name"] or "")

    return _CSS_TOKEN.sub(shorten, text).strip() + "\n"


def _minify(text: str, at: int) -> tuple[str, int]:
    """The code from `at` to the end or to a closing brace without an opening one; where it ends."""
    parts: list[str] = []
    last, blank, depth = "(", "", 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative is any character
        token = match.group()
        if match["blank"]:
            blank = "\n" if "\n" in token else " "
            at = match.end()
            continue
        if token == "}" and depth == 0:
            break
        depth += (token == "{") - (token == "}")
        if token == "`":
            token, at = _template(text, at + 1, is_html=last == "html")
        else:
            if token == "/" and _BEFORE_REGEX.fullmatch(last):
                regex = _REGEX.match(text, at)
                token = regex.group() if regex else token
            at += len(token)
        if blank and parts and _separates(last[-1], blank, token[0]):
            parts.append(blank)
        parts.append(token)
        last, blank = token, ""
    return "".join(parts), at


def _template(text: str, at: int, is_html: bool) -> tuple[str, int]:
    """A template from after its first quote, and where it ends; the code within it is minified."""
    parts = ["`"]
    while True:
        match = _TEMPLATE_TEXT.match(text, at)
        assert match is not None  # it matches nothing too
        parts.append(_INDENT.sub("\n", match.group()) if is_html else match.group())
        at = match.end()
        if text[at] == "`":
            return "".join([*parts, "`"]), at + 1
        code, at = _minify(text, at + len("${"))
        parts.append("${" + code + "}")
        at += 1


def _separates(before: str, blank: str, after: str) -> bool:
    """Whether a blank between two characters has a meaning."""
    if blank == "\n":
        return before not in "{([,;:?=&|" and after not in "}]),;:?&|."
    ends_name, is_name = (char.isalnum() or char in "_$" for char in (before, after))
    if before == "/":  # perhaps the end of a regular expression, whose flags are letters
        return is_name or after == "/"
    return (ends_name and is_name) or (before == after and before in "+-")
