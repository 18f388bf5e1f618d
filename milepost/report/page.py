"""The HTML report of a plan: interactive plots, no network. The plotting library is part of the page."""

from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from milepost.report.lines import COLOURS, MOST, lines

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; margin: 0 auto; max-width: 1080px; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: 0.2rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.4rem }
p.lead { color: #52606d; margin-top: 0 } .cards { display: flex; gap: 1rem; flex-wrap: wrap }
.card { border: 1px solid #d9e2ec; border-radius: 10px; padding: 0.9rem 1.1rem; flex: 1 1 420px }
.card b.big { font-size: 1.5rem } code { background: #f0f4f8; padding: 0.5rem; display: block; border-radius: 6px;
font-size: 0.85rem; overflow-wrap: anywhere } ul { padding-left: 1.2rem }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem }
th, td { border-bottom: 1px solid #d9e2ec; padding: 0.3rem 0.5rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr.best td { background: #e6f4ea } .warn { background: #fff8e6;
border-left: 4px solid #edae49; padding: 0.3rem 0.9rem 0.3rem 2rem } .note { color: #52606d; font-size: 0.9rem }
"""


def write(path: Path, plan: dict[str, Any]) -> None:
    """Write the page. `plan` is what `milepost plan --json` prints, with `timelines` and `lost` besides."""
    path.write_text(render(plan), encoding="utf-8")


def render(plan: dict[str, Any]) -> str:
    parts = [
        f"<h1>Milepost plan: {escape(plan['title'])}</h1>",
        f"<p class=lead>{escape(plan['subtitle'])}</p>",
        _cards(plan),
        _list("Why", plan["why"]),
        _list("Beware", plan["warnings"], "warn") if plan["warnings"] else "",
        _section(
            "Reuse and throughput over the split",
            f"Each line is a kind of flags, at most the best {MOST}; points are splits of the same memory. The bar of "
            "a point spans all seeds: a long bar is a split that sometimes collapses.",
            split_figure(plan, "hit_rates", "share of prompt tokens reused"),
            split_figure(plan, "output_tps", "output tokens a second"),
        ),
        _section("Throughput against latency", "Up and to the left is better.", pareto_figure(plan)),
        *(
            _section(
                f"Both pools over time: {name}",
                f"First seed. {escape(about)}",
                timeline_figure(samples, "slots", (1, 2, 3), ("running requests", "checkpoints", "free")),
                timeline_figure(samples, "KV tokens", (4, 5, 6), ("running requests", "cached", "free")),
            )
            for name, about, samples in plan["timelines"]
        ),
        _lost(plan),
        "<h2>All settings that were given every seed</h2>" + _table(plan),
    ]
    body = "\n".join(part for part in parts if part)
    head = f"<meta charset=utf-8><title>Milepost plan</title><style>{STYLE}</style><script>{get_plotlyjs()}</script>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>"


def split_figure(plan: dict[str, Any], values: str, title: str) -> go.Figure:
    """`values` of each candidate over its state slots: mean, and a bar from the worst seed to the best."""
    figure = go.Figure()
    for colour, (kind, line) in zip(COLOURS, lines(plan), strict=False):
        means = [sum(c[values]) / len(c[values]) for c in line]
        figure.add_scatter(
            x=[c["state_slots"] for c in line],
            y=means,
            name=kind,
            mode="lines+markers",
            line={"color": colour},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [max(c[values]) - m for c, m in zip(line, means, strict=True)],
                "arrayminus": [m - min(c[values]) for c, m in zip(line, means, strict=True)],
                "thickness": 1.2,
            },
            customdata=[c["kv_tokens"] for c in line],
            hovertemplate="%{x} slots, %{customdata:,} KV tokens: %{y:.3g}",
        )
    figure.update_layout(xaxis_title="state slots (the rest of the memory is KV)", yaxis_title=title)
    figure.update_yaxes(rangemode="tozero")
    return figure


def pareto_figure(plan: dict[str, Any]) -> go.Figure:
    figure = go.Figure()
    for edge, name, colour in ((False, "beaten", "#b0bec5"), (True, "best trade-offs", "#1b6ca8")):
        chosen = [c for c in plan["candidates"] if c["pareto"] is edge]
        figure.add_scatter(
            x=[c["ttft_p90"] for c in chosen],
            y=[c["output_tps_mean"] for c in chosen],
            text=[c["name"] for c in chosen],
            name=name,
            mode="markers",
            marker={"size": 11, "color": colour},
            hovertemplate="%{text}<br>%{y:.1f} tokens/s, TTFT p90 %{x:.1f} s",
        )
    figure.update_layout(xaxis_title="time to first token, 90th percentile (s)", yaxis_title="output tokens a second")
    figure.update_yaxes(rangemode="tozero")
    return figure


def timeline_figure(
    samples: list[list[float]], unit: str, columns: tuple[int, int, int], names: tuple[str, str, str]
) -> go.Figure:
    figure = go.Figure()
    minutes = [sample[0] / 60 for sample in samples]
    for column, name, colour in zip(columns, names, ("#d1495b", "#1b6ca8", "#d9e2ec"), strict=True):
        figure.add_scatter(
            x=minutes,
            y=[sample[column] for sample in samples],
            name=name,
            mode="lines",
            line={"width": 0.5, "color": colour},
            stackgroup="pool",
        )
    figure.update_layout(xaxis_title="minutes", yaxis_title=unit)
    return figure


def _section(title: str, about: str, *figures: go.Figure) -> str:
    plots = []
    for figure in figures:
        figure.update_layout(
            template="plotly_white",
            height=340,
            margin={"l": 60, "r": 20, "t": 20, "b": 45},
            legend={"orientation": "h", "y": -0.22},
        )
        plots.append(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))
    return f"<h2>{escape(title)}</h2><p class=note>{about}</p>{''.join(plots)}"


def _cards(plan: dict[str, Any]) -> str:
    cards = []
    for key, title in (("milepost", "Run with Milepost"), ("sglang", "Run with SGLang")):
        chosen = plan["recommended"][key]
        cards.append(
            f"<div class=card><b>{title}</b><br><b class=big>{chosen['hit_rate_mean']:.0%}</b> of prompt tokens reused "
            f"(worst seed {chosen['hit_rate_worst']:.0%}), <b class=big>{chosen['output_tps_mean']:,.0f}</b> output "
            f"tokens/s (worst {chosen['output_tps_worst']:,.0f})"
            f"<code>{escape(plan['recommended']['flags'][key])}</code></div>"
        )
    return f"<div class=cards>{''.join(cards)}</div>"


def _list(title: str, lines: list[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul class='{kind}'>{items}</ul>"


def _lost(plan: dict[str, Any]) -> str:
    sections = []
    for name, rows in plan["lost"]:
        body = "".join(
            f"<tr><td>{escape(session)}</td><td>{tokens:,}</td><td>{escape(reason)}</td></tr>"
            for session, tokens, reason in rows
        )
        head = "<tr><th>session</th><th>tokens computed again</th><th>mostly because</th></tr>"
        sections.append(f"<p class=note>{escape(name)}</p><table>{head}{body}</table>")
    return "<h2>Which sessions lost most, and why</h2>" + "".join(sections)


def _table(plan: dict[str, Any]) -> str:
    best = {plan["recommended"][key]["name"] for key in ("milepost", "sglang")}
    rows = []
    for c in plan["candidates"]:
        cells = [
            escape(c["name"]),
            f"{c['kv_tokens']:,}",
            f"{c['hit_rate_mean']:.3f}",
            f"{c['hit_rate_worst']:.3f}",
            f"{c['output_tps_mean']:,.1f}",
            f"{c['output_tps_worst']:,.1f}",
            "{:,.1f}–{:,.1f}".format(*c["ttft_p90_band"]),
            f"{c['running_mean']:.1f}",
            f"{c['collapsed_share']:.0%}",
        ]
        mark = " class=best" if c["name"] in best else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    names = (
        "setting",
        "KV tokens",
        "hit mean",
        "hit worst",
        "tok/s mean",
        "tok/s worst",
        "TTFT p90 (s)",
        "running",
        "collapsed",
    )
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{''.join(rows)}</table>"
