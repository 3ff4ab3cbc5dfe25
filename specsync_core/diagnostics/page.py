"""The doctor's report as one page: no other file, no script, no address is needed to read it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from time import localtime, strftime

from specsync_core.diagnostics.doctor import Diagnosis
from specsync_core.diagnostics.timeline import Bar, Lane, lanes
from specsync_core.diagnostics.verdict import Evidence, clock

LANE_PX, BAR_PX, LEFT_PX, RIGHT_PX, WIDTH_PX = 62, 22, 74, 16, 1100
SHOWN_S = 6.0
"""Length of the picture; it ends where the last rank was last seen, and is longer where a wait began before."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5a636e; --paper: #fff; --line: #d5dae0; --panel: #f4f6f8;
  --bad: #b3261e; --good: #1a7f37; --site: #2f6fb2; --wait: #c3cbd4; --open: #d9822b; --healed: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #9aa5b1; --paper: #14171a; --line: #39414a;
  --panel: #1d2126; --bad: #ff7b72; --good: #56d364; --site: #6aa6e8; --wait: #4b5560; --open: #e8a35c;
  --healed: #56d364; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; line-height: 1.35; margin: .25rem 0 1rem; padding: .9rem 1rem; background: var(--panel);
  border-left: .35rem solid var(--good); }
h1.finding { border-color: var(--bad); }
h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p.dim, .key { color: var(--dim); font-size: .9rem; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); background: var(--panel); }
svg { display: block; min-width: 700px; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .axis { fill: var(--dim); } svg line { stroke: var(--line); }
.site { fill: var(--site); } .wait { fill: var(--wait); } .open { fill: var(--open); } .differs { fill: var(--bad); }
.healed { fill: var(--healed); }
.key span { display: inline-block; margin-right: 1rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -.1rem; }
table { border-collapse: collapse; width: 100%; min-width: 30rem; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: normal; }
th { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { text-align: right; }
td.name { white-space: nowrap; }
pre { overflow-x: auto; background: var(--panel); padding: .6rem; font-size: .8rem; }
"""


@dataclass(frozen=True)
class Report:
    """One group of ranks, as the doctor saw it."""

    title: str
    diagnosis: Diagnosis
    evidence: Evidence


def render_page(reports: Sequence[Report]) -> str:
    """Return the page as HTML. Everything that came out of a file is escaped."""
    body = "\n".join(part for report in reports for part in _sections(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>specsync doctor</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    found, evidence = report.diagnosis, report.evidence
    state = ' class="finding"' if found.is_finding else ""
    yield f'<p class="dim">specsync doctor: {escape(report.title)}</p>'
    yield f"<h1{state}>{escape(found.headline)}</h1>"
    yield "<h2>Evidence</h2>\n<ul>" + "".join(f"<li>{escape(line.strip())}</li>" for line in found.verdict) + "</ul>"
    seen_s = {rank: dump.written_s for rank, dump in evidence.dumps.items()}
    yield from _timeline(lanes(evidence.recordings, evidence.states, seen_s, evidence.divergence, evidence.healed))
    yield from _ranks(evidence)
    yield from _counters(evidence)
    yield from _stacks(evidence)


# --- the picture ----------------------------------------------------------------------------------------


def _timeline(found: Sequence[Lane]) -> Iterator[str]:
    bars = [bar for lane in found for bar in lane.bars]
    if not bars:
        return
    end_s = max(bar.end_s for bar in bars)
    marked = [bar.begin_s for bar in bars if bar.kind in ("open", "differs")]
    begin_s = max(min(bar.begin_s for bar in bars), min([end_s - SHOWN_S, *(begin - 0.5 for begin in marked)]))
    span_s = max(end_s - begin_s, 1e-3)
    scale = (WIDTH_PX - LEFT_PX - RIGHT_PX) / span_s
    height = 34 + LANE_PX * len(found)
    yield "<h2>Timeline</h2>"
    yield (
        '<p class="key"><span><i style="background:var(--site)"></i>call of a site</span>'
        '<span><i style="background:var(--wait)"></i>the engine\'s own wait</span>'
        '<span><i style="background:var(--open)"></i>not left when last seen</span>'
        '<span><i style="background:var(--bad)"></i>first divergence</span>'
        '<span><i style="background:var(--healed)"></i>first one healed</span></p>'
    )
    yield f'<div class="scroll"><svg viewBox="0 0 {WIDTH_PX} {height}" role="img" aria-label="timeline by rank">'
    yield from _axis(begin_s, span_s, scale, height)
    for row, lane in enumerate(found):
        y = 28 + LANE_PX * row
        yield f'<text x="8" y="{y + 20}">rank {lane.group_rank}</text>'
        shown = [bar for bar in lane.bars if bar.end_s >= begin_s]
        for bar in shown:
            yield _rectangle(bar, begin_s, scale, y)
    yield "</svg></div>"
    yield (
        f'<p class="dim">The last {span_s:.2f} s before {clock(end_s)} on {strftime("%Y-%m-%d", localtime(end_s))}.'
        " Above: calls of sites. Below: waits. Point at a bar for its name.</p>"
    )


def _axis(begin_s: float, span_s: float, scale: float, height: int) -> Iterator[str]:
    for tick in range(6):
        x = LEFT_PX + tick * span_s / 5 * scale
        anchor = "end" if tick == 5 else "middle" if tick else "start"
        yield f'<line x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{height}"/>'
        text = clock(begin_s + tick * span_s / 5)
        yield f'<text class="axis" x="{x:.1f}" y="13" text-anchor="{anchor}">{text}</text>'


def _rectangle(bar: Bar, begin_s: float, scale: float, y: int) -> str:
    left = LEFT_PX + max(0.0, bar.begin_s - begin_s) * scale
    width = max(1.5 if bar.kind in ("site", "wait") else 6.0, (bar.end_s - max(bar.begin_s, begin_s)) * scale)
    top = y + (BAR_PX + 6 if bar.is_wait else 0)
    title = escape(f"{clock(bar.begin_s)} {bar.title}")
    return (
        f'<rect class="{bar.kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR_PX}">'
        f"<title>{title}</title></rect>"
    )


# --- tables -----------------------------------------------------------------------------------------------


def _ranks(evidence: Evidence) -> Iterator[str]:
    yield "<h2>Ranks</h2>"
    rows = []
    for rank, state in evidence.states.items():
        recording = evidence.recordings.get(rank)
        where = "" if state.wait is None else f"{state.wait.what} {state.wait.detail}".strip()
        step = "" if state.last is None else str(state.last.step)
        host = "" if recording is None else f"pid {recording.header.pid} on {recording.header.host.get('name')}"
        kept = "" if recording is None else f"{len(recording.records):,}"
        rows.append((str(rank), state.ending, where, step, kept, host))
    yield _table(("rank", "it", "waits in", "step", "records", "process"), rows, numbers=(3, 4))
    versions: dict[str, dict[int, str]] = {}
    for rank, recording in evidence.recordings.items():
        for name, version in recording.header.versions.items():
            versions.setdefault(name, {})[rank] = str(version)
        versions.setdefault("plan digest", {})[rank] = recording.header.plan_digest[:12]
    ranks = list(evidence.recordings)
    yield "<h2>Software and hardware</h2>"
    yield _table(
        ("", *(f"rank {rank}" for rank in ranks)),
        [(name, *(by_rank.get(rank, "") for rank in ranks)) for name, by_rank in sorted(versions.items())],
    )


def _counters(evidence: Evidence) -> Iterator[str]:
    if not evidence.counted.sites:
        return
    yield "<h2>Counters</h2>"
    rows = [
        (each.site, str(each.group_rank), each.mode, *(f"{n:,}" for n in (each.calls, each.checks, each.mismatches)))
        for each in evidence.counted.sites
    ]
    yield _table(("site", "rank", "mode", "calls", "checks", "mismatches"), rows, numbers=(1, 3, 4, 5))


def _stacks(evidence: Evidence) -> Iterator[str]:
    if not any(dump.stacks for dump in evidence.dumps.values()):
        return
    yield "<h2>Python stacks</h2>"
    for rank, dump in evidence.dumps.items():
        yield f'<p class="dim">Rank {rank} at {clock(dump.written_s)}: {escape(dump.reason)}</p>'
        for name, frames in sorted(dump.stacks.items(), key=lambda item: not item[0].startswith("MainThread (")):
            lines = escape("\n".join(reversed(frames)))
            is_main = name.startswith("MainThread (")
            yield f"<details{' open' if is_main else ''}><summary>{escape(name)}</summary><pre>{lines}</pre></details>"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, place: int, text: str) -> str:
        kind = ' class="number"' if place in numbers else ' class="name"' if tag == "td" and not place else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, place, text) for place, text in enumerate(cells)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", names)}{body}</table></div>'
