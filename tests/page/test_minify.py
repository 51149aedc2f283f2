"""Scripts and styles without comments and blanks mean the same."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from unspool.page.files import FOLDER
from unspool.page.minify import minify_script, minify_style

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

# Each is evaluated as it is and minified.
EXPRESSIONS = [
    "1 + +2 - -3 + 4 / 2 / /* two */ 1",
    "[1, 2]\n  .map((x) => x * 2) // double\n  .join(' ; ')",
    "'a // b' + \"/* c */ \\\" d\" + 'it\\'s'",
    "`a  ${ [1 , 2].map( (n) => `<${ n + 1 }>  // not a comment` ) }  b $5 \\` ${`}`}`",
    "'a/b /c'.split(/[/ ]+ ?/g).length / 2 / 1",
    "['x'].filter((s) => /['\"`]|\\/|x/.test(s)) .length",
    "(() => { let n = 1\n  n++\n  const f = () => ({ n })\n  return f().n })()",
    "typeof /a/ in { object: 1 } ? `\n   kept\n` : 0",
    "(({ a = 1, ...others } = { b: 2 }) => [a, others])()",
    "(() => { for (const x of [/b/]) if ( ! /a/.test(x.source)) return 5 % 3\n })()",
]


@needs_node
def test_minified_expressions_have_the_same_values():
    script = "const all = JSON.parse(require('fs').readFileSync(0));" + (
        "console.log(JSON.stringify(all.map((pair) => pair.map((code) => eval(`(${code})`)))))"
    )
    pairs = [[code, minify_script(code)] for code in EXPRESSIONS]
    done = subprocess.run(
        [str(NODE), "-e", script], input=json.dumps(pairs), capture_output=True, text=True
    )
    for code, (expected, value) in zip(EXPRESSIONS, json.loads(done.stdout), strict=True):
        assert value == expected, code
    assert all(len(short) <= len(code) + 1 for code, short in pairs)


@needs_node
def test_every_script_of_the_page_is_still_one():
    """Those that the other tests do not run too."""
    names = [path for path in FOLDER.rglob("*.js") if path.parent.name != "vendor"]
    modules = [minify_script(path.read_text("utf-8")) for path in names]
    script = (
        "const { SourceTextModule } = require('vm');"
        "for (const code of JSON.parse(require('fs').readFileSync(0))) new SourceTextModule(code)"
    )
    done = subprocess.run(
        [str(NODE), "--no-warnings", "--experimental-vm-modules", "-e", script],
        input=json.dumps(modules), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not any("\n  " in line for module in modules for line in module.split("`")[::2])


def test_styles():
    style = """/* a */ .a > .b , .c :hover {
        content: " ;  /* kept */ " ; margin : calc(1px + 2px) ;
    }

    @media (width < 700px) { .d { color: red } }
    """
    assert minify_style(style) == (
        '.a > .b,.c :hover{content:" ;  /* kept */ ";margin : calc(1px + 2px)}'
        "@media (width < 700px){.d{color:red}}\n"
    )


def test_html_in_a_script_loses_its_indentation():
    script = "html`<p title=${ a }>One\n      line</p>`; other`\n   text`;"
    assert minify_script(script) == "html`<p title=${a}>One\nline</p>`;other`\n   text`;\n"
