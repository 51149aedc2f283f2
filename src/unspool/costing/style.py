"""The style sheets and the HTML frame of a report page."""

from __future__ import annotations

# Of the page, and of a standalone plot.
COLOURS = """
:root{color-scheme:light dark;--ink:#1d1f21;--paper:#fff;--raised:#f5f6f7;--line:#dfe2e5;
--dim:#5d646b;--good:#1a7f4b;
--c0:#2f6db5;--c1:#d1495b;--c2:#2e8b57;--c3:#b07d12;--c4:#7b52ab;--c5:#13899b;--c6:#8a5a44;--c7:#6b7280;
--m0:#ffe08a;--m1:#ffc2c2;--m2:#bfe3c5;--m3:#cfd8ff}
@media (prefers-color-scheme:dark){:root{--ink:#e7e9eb;--paper:#141618;--raised:#1d2023;
--line:#33383d;--dim:#9aa3ab;--good:#62c690;
--c0:#6fa8e8;--c1:#f0808d;--c2:#62c690;--c3:#e0b04a;--c4:#b394e0;--c5:#4fc3d5;--c6:#c79880;--c7:#a0a7b0;
--m0:#6b5510;--m1:#73303a;--m2:#245c3c;--m3:#38457f}}
"""
PLOTS = """svg text{font:12px system-ui,sans-serif;fill:var(--dim)}
.mid{text-anchor:middle}.end{text-anchor:end}
.axis{fill:none;stroke:var(--dim)}.grid{stroke:var(--line)}
.line{fill:none;stroke-width:2}.band{opacity:.16;stroke:none}
.whisker{fill:none;stroke-width:1.2;opacity:.6}
.reference{fill:none;stroke:var(--dim);stroke-width:1.5;stroke-dasharray:5 4}
"""

STYLE = (
    COLOURS
    + PLOTS
    + """*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0}
main{max-width:1080px;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;line-height:1.3;margin:0 0 .4rem}
.sub{font-size:1.1rem;margin:.2rem 0;overflow-wrap:anywhere}
.dim{color:var(--dim);margin:.2rem 0}
.facts{display:flex;flex-wrap:wrap;gap:1rem 3rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem 1rem;font-size:.85rem;margin:1rem 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:.7rem;
margin:1.2rem 0 2rem}
.card{display:block;padding:.7rem .85rem;border:1px solid var(--line);border-radius:8px;
background:var(--raised);color:inherit;text-decoration:none}
.card:hover,.card:focus-visible{border-color:var(--c0)}
.card em{font-style:normal;font-size:.78rem;color:var(--dim);display:block}
.card b{display:block;font-size:1.25rem}
.card span{font-size:.8rem;color:var(--dim)}
section{border-top:1px solid var(--line);padding:1.6rem 0 1rem}
.formula{font-size:.88rem;color:var(--dim);border-left:3px solid var(--line);padding-left:.8rem;
margin:.4rem 0 1rem;max-width:75ch}
.wide{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,30rem)}
caption{text-align:left;color:var(--dim);font-size:.8rem;padding:.2rem 0}
th,td{text-align:left;vertical-align:top;padding:.3rem .9rem .3rem 0;
border-bottom:1px solid var(--line)}
th{font-weight:600;font-size:.8rem;color:var(--dim)}
.figures td:nth-child(n+2){white-space:nowrap;font-variant-numeric:tabular-nums}
.figures td:nth-child(odd):not(:first-child){color:var(--dim)}
td small{display:block;color:var(--dim);font-size:.78rem}
td.best{color:var(--good);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
gap:1.4rem;margin:1.2rem 0}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.9rem;margin-bottom:.3rem;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.4rem 0;
font-size:.8rem;color:var(--dim)}
.legend i{display:inline-block;width:1rem;height:.6rem;border-radius:2px;margin-right:.35rem}
.example{margin:1.2rem 0;max-width:75ch}
.caption{font-size:.9rem;font-weight:600;margin:0 0 .4rem}
blockquote{margin:0;padding:.8rem 1rem;background:var(--raised);border-radius:8px;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:22rem;overflow-y:auto}
mark{color:inherit;border-radius:3px}
.m0{background:var(--m0)}.m1{background:var(--m1)}.m2{background:var(--m2)}.m3{background:var(--m3)}
.notes{font-size:.83rem;color:var(--dim);padding-left:1.1rem;max-width:80ch}
@media (max-width:600px){main{padding:1rem .9rem 3rem}h1{font-size:1.4rem}
.figures td:nth-child(n+2){white-space:normal}th,td{padding-right:.6rem}}
"""
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>{head}<div class="facts">{facts}</div></header>
<nav class="cards" aria-label="parts">{cards}</nav>
{parts}
</main>
</body>
</html>
"""
