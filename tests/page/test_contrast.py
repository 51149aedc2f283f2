"""Text on every color of the page can be read.

Not the texts that happen to come in a test, but the palettes themselves: every tint, every strength
of light, every hue, in light and in dark, by the contrast that WCAG asks of text (4.5:1).
"""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

STRENGTHS = [n / 25 for n in range(26)]
TINTS = range(1, 10)
HUES = ["hue-0", "hue-pick", *(f"hue-{n}" for n in range(1, 7))]

# Where text stands: what is around it, what it is, and its own place within (the last element).
TOKENS = [
    f'<div class="{around}"><div class="tokens"><span class="t {tint} {kind}">a</span></div></div>'
    for around in ("text-box", "cmp-column panel cmp-text", "beside-column panel")
    for tint in ("", *(f"tint-{n}" for n in TINTS))
    for kind in ("", "chosen", "special", "added", "selected", "part", "accepted", "in-part",
                 "struck", "struck current-change", "unscored")
]  # fmt: skip
TOKENS += [
    f'<div class="text-box"><div class="tokens"><span class="t prompt {kind}">a</span></div></div>'
    for kind in ("", "special", "added", "selected", "part")
]
LIGHTED = [
    f'<div class="text-box"><div class="tokens lighted"><span class="t {kind}"'
    f' data-var="--lit:{strength}">a</span></div></div>'
    for strength in STRENGTHS
    for kind in ("lit", "lit prompt", "lit special added", "lit selected", "masked", "masked added")
]
LENS = [
    f'<div class="side-panel panel"><table class="inside-lens"><tbody><tr><td></td><td>'
    f'<span class="said {kind}" data-var="--p:{strength}"><{tag}>a</{tag}></span></td></tr>'
    f"</tbody></table></div>"
    for strength in STRENGTHS
    for kind in ("", "followed")
    for tag in ("small", 'span class="piece"', "i")
]
LENS += [
    row.replace("<i>a</i>", '<span class="piece"><i>a</i></span>') for row in LENS if "<i>" in row
]
NEAR = [
    f'<div class="side-panel panel"><ul class="inside-near"><li class="chip"'
    f' data-var="--p:{strength}"><span class="{kind}">a</span></li></ul></div>'
    for strength in STRENGTHS
    for kind in ("piece", "mono")
]
PIECES = [
    f'<div class="{around}"><span class="piece {kind}"><i>␣</i></span></div>'
    for around in ("side-panel panel", "candidate", "candidate picked", "dialog")
    for kind in ("", "followed")
] + [
    f'<div class="tk-list"><div><span class="tk c{n}"><{tag}>a</{tag}></span></div></div>'
    for n in range(1, 7)
    for tag in ("span", "i", "sub")
]
PARTS = [
    f'<div class="panel"><div class="merge-box l{level}"><small>a</small></div></div>'
    for level in range(6)
] + [
    f'<p class="{kind}"><span>a</span></p>'
    for kind in ("notice", "notice bad", "fault", "chip", "step-pen", "tiny-note", "map-deleted")
]
PARTS += [
    f'<div class="panel"><div class="{around}"><button class="place {kind}">a</button></div></div>'
    for around in ("canvas", "board board-9")
    for kind in ("", "guess", "blank", "did-set", "did-edited", "did-hand", "guess did-cleared",
                 "given", "wrong", "given wrong", "wrong did-set")
]  # fmt: skip
PARTS += [
    f'<ul class="revision-list"><li class="{kind}"><{tag}>a</{tag}></li></ul>'
    for kind in ("", "current-change")
    for tag in ("del", "ins", 'span class="quiet"')
]
PARTS += [f'<ul class="twins-candidates"><li><button aria-pressed="{is_on}"><span class="piece">'
          "<i>a</i></span></button></li></ul>" for is_on in ("true", "false")]  # fmt: skip
PARTS += [
    f'<div class="think-card {kind}"><span class="{part}">a</span></div>'
    for kind in ("", "lost", "lost failed", "on-way", "winner", "failed")
    for part in ("think-score", "think-words")
]

CONTRAST = """
    const { colorOf, rgbaOf } = await import("/page/code/lib.js");
    const bright = (color) => color.map((one) => one / 255)
        .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const contrast = (text, under) => {
        const [low, high] = [bright(text), bright(under)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    };
    const mix = ([r, g, b, a = 255], back) =>
        [r, g, b].map((one, at) => back[at] + ((one - back[at]) * a) / 255);"""
FAINT = (
    f"async (pieces) => {{ {CONTRAST}"
    """
    const back = (element) => {
        if (!element) return [...rgbaOf(getComputedStyle(document.documentElement)
            .backgroundColor)].slice(0, 3);
        const own = rgbaOf(getComputedStyle(element).backgroundColor);
        return mix(own, back(element.parentElement));
    };
    const place = document.createElement("div");
    document.body.append(place);
    const found = [];
    for (const html of pieces) {
        place.innerHTML = html;
        for (const dressed of place.querySelectorAll("[data-var]")) {
            const [name, value] = dressed.dataset.var.split(":");
            dressed.style.setProperty(name, value);
        }
        let inner = place;
        while (inner.lastElementChild) inner = inner.lastElementChild;
        const ratio = contrast([...rgbaOf(getComputedStyle(inner).color)].slice(0, 3), back(inner));
        if (ratio < 4.5) found.push([html, ratio]);
    }
    place.remove();
    return found;
}"""
)

# Words in pictures: which color on which, the one below with this share over the next.
PICTURED = (
    f"async (pairs) => {{ {CONTRAST}"
    """
    const color = (name) => [...rgbaOf(colorOf(name))].slice(0, 3);
    const place = document.createElement("div"); // how strong a fill of this class is
    document.body.append(place);
    const shareOf = (name) => {
        place.innerHTML = `<svg><g class="${name}"><rect class="${name}" /></g></svg>`;
        const { opacity, fillOpacity } = getComputedStyle(place.querySelector("rect"));
        return opacity * fillOpacity;
    };
    return pairs.map(([text, fill, strength, under]) => {
        const share = typeof strength === "string" ? shareOf(strength) : strength;
        const back = mix([...color(fill), 255 * share], color(under));
        return [text, fill, share, under, contrast(color(text), back)];
    }).filter((each) => each[4] < 4.5);
}"""
)
DATA = ["--d1", "--d2", "--d3", "--d4", "--d5", "--d6", "--quiet", "--accent"]
PAIRS: list[list[Any]] = [
    *(["--back", hue, 1, "--raised"] for hue in DATA),  # a part of the chain, the part that was hit
    *(["--text", hue, "line-part", "--line"] for hue in DATA),  # the other parts of the line
    *(["--text", hue, "cmp-ribbon", "--back"] for hue in DATA),  # a ribbon of the samples
    *([hue, "--raised", 1, "--raised"] for hue in DATA),  # told in its color
    *([hue, "--back", 1, "--back"] for hue in DATA),
    *([text, "--raised", 1, "--raised"] for text in ("--quiet", "--dim", "--bad", "--good")),
    ["--accent", "--accent-faint", 1, "--raised"],
    ["--text", "--accent-faint", 1, "--raised"],
    ["--accent-text", "--accent", 1, "--raised"],
    ["--quiet", "--sunken", 1, "--sunken"],
    ["--warm", "--raised", 1, "--raised"],
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_on_every_color_can_be_read(page: Page, theme: Any) -> None:
    page.emulate_media(color_scheme=theme)
    assert page.evaluate(FAINT, [*TOKENS, *LIGHTED, *LENS, *NEAR, *PIECES, *PARTS]) == []
    assert page.evaluate(PICTURED, PAIRS) == []


def test_every_probability_has_a_color_that_was_looked_at(page: Page) -> None:
    """From certain to impossible, and what JSON cannot say: a tint of the nine, or none.
    Steps after an edit have no probability yet: they have a class of their own."""
    classes = page.evaluate(
        """import("/page/code/write/pane.js").then(({ TINTS, tintClass }) => {
            const steps = [];
            for (let n = 0; n <= 400; n += 1) {
                steps.push({ logprob: Math.log(1 - n / 400), entropy: n / 20, rank: n ** 2 });
            }
            steps.push({ logprob: null, entropy: null, rank: null });
            steps.push({ logprob: -1e9, entropy: 1e9, rank: 1e9 });
            const found = Object.keys(TINTS).flatMap((by) => steps.map((s) => tintClass(s, by)));
            return [...new Set(found)];
        })"""
    )
    assert set(classes) == {"", "unscored", *(f"tint-{n}" for n in TINTS)}
