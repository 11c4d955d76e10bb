"""The page's and the pictures' style sheets. Colours are given twice, for a light and for a dark page."""

# Each at least 4.5:1 against its background; the dash below tells curves apart where colours do not.
LIGHT_CURVES = ("#0b57d0", "#c2410c", "#7e22ce", "#047857", "#b0126f", "#7a5600", "#0e7490", "#4b5563")
DARK_CURVES = ("#8ab4f8", "#ff9d66", "#d0a6ff", "#4fd1a5", "#ff8ac4", "#e3c04f", "#5fd4e6", "#b8c0cc")
DASHES = ("none", "7 3", "2 3", "9 3 2 3")
FILLS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866", "#44bb99", "#99ddff")
FILLS += ("#885522", "#777777")
_FONTS = "system-ui,'Segoe UI',Roboto,'Noto Sans','DejaVu Sans',sans-serif"
_LIGHT = {"text": "#1b1f24", "muted": "#57606a", "grid": "#e4e7eb", "axis": "#6e7781", "page": "#ffffff"}
_DARK = {"text": "#e6e9ed", "muted": "#a5afba", "grid": "#30363d", "axis": "#8b949e", "page": "#14171b"}
STYLES = 32  # curves that differ in colour or dash


def picture_css(dark: bool = False) -> str:
    """Rules for the classes that svg.py writes. Concrete colours: rasterisers know no CSS variables."""
    tone, curves = (_DARK, DARK_CURVES) if dark else (_LIGHT, LIGHT_CURVES)
    rules = [
        f"svg text{{font-family:{_FONTS};font-size:13px;fill:{tone['text']}}}",
        "svg text.title{font-size:15px;font-weight:600}",
        f"svg text.name,svg text.tick{{fill:{tone['muted']}}}",
        f"svg .grid{{stroke:{tone['grid']};stroke-width:1}}",
        f"svg .axis{{stroke:{tone['axis']};stroke-width:1;fill:none}}",
        "svg .line{fill:none;stroke-width:2;stroke-linejoin:round}",
        "svg .faint{opacity:.5;stroke-width:1.3}",
        "svg .band{opacity:.18}",
        f"svg rect{{stroke:{tone['page']};stroke-width:.5}}",
    ]
    for i in range(STYLES):
        colour, dash = curves[i % len(curves)], DASHES[(i + i // len(curves)) % len(DASHES)]
        rules.append(f"svg .c{i}{{stroke:{colour};stroke-dasharray:{dash}}}")
        rules.append(f"svg .b{i},svg .d{i}{{fill:{colour}}}")
    rules += [f"svg .f{i}{{fill:{colour}}}" for i, colour in enumerate(FILLS)]
    return "\n".join(rules)


def page_css() -> str:
    light = ";".join(f"--{name}:{value}" for name, value in _LIGHT.items())
    dark = ";".join(f"--{name}:{value}" for name, value in _DARK.items())
    return f""":root{{color-scheme:light dark;{light};--panel:#f6f8fa;--good:#0a6b2e;--warn:#8a5200;--bad:#b3261e}}
@media (prefers-color-scheme:dark){{:root{{{dark};--panel:#1d2126;--good:#6ddc8b;--warn:#f0b866;--bad:#ff9a91}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1280px;padding:16px;font:15px/1.45 {_FONTS};color:var(--text);background:var(--page);overflow-wrap:anywhere}}
h1{{font-size:21px;margin:0 0 4px}} h2{{font-size:18px;margin:28px 0 8px}} p{{margin:4px 0}} .muted{{color:var(--muted);font-size:13px}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr));gap:10px;margin:12px 0}}
.card,figure{{background:var(--panel);border:1px solid var(--grid);border-radius:8px;padding:10px;margin:0;min-width:0}}
.card b{{display:block}} .card .big{{font-size:18px;font-weight:600}} .big .muted{{font-weight:400}} .one{{white-space:nowrap}}
.unified{{color:var(--good)}} .not-unified{{color:var(--warn)}} .violated{{color:var(--bad)}} .not-checked{{color:var(--muted)}}
ul{{margin:6px 0;padding-left:20px}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:12px}}
figure{{background:var(--page);padding:8px}} figure svg{{display:block;width:100%;max-width:500px;height:auto;margin:0 auto}} figure:not(:has(svg)){{align-self:start}}
figcaption{{color:var(--muted);font-size:13px;margin-top:4px}}
table{{border-collapse:collapse;width:100%}} caption{{text-align:left;color:var(--muted);font-size:13px;padding-bottom:6px}}
th,td{{text-align:left;vertical-align:top;padding:6px 8px;border-bottom:1px solid var(--grid)}} th{{font-size:13px;color:var(--muted)}}
table{{overflow-wrap:break-word}} .any{{overflow-wrap:anywhere;display:inline-block;min-width:10em}} .charts+table{{margin-top:14px}}
@media (max-width:1000px){{
body{{padding:12px}} .any{{min-width:0}} table{{overflow-wrap:anywhere}} thead{{position:absolute;left:-9999px}} table,tbody,tr,td,caption{{display:block}}
tr{{background:var(--panel);border:1px solid var(--grid);border-radius:8px;margin-bottom:10px;padding:4px 8px}}
td{{display:grid;grid-template-columns:minmax(0,9em) minmax(0,1fr);gap:8px;padding:4px 0}} tr td:last-child{{border-bottom:0}}
td::before{{content:attr(data-label);color:var(--muted);font-size:13px}} td:first-child{{font-weight:600}}
}}"""
