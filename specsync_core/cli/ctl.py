"""``specsync ctl``"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table
from specsync_core.control.protocol import ARGUMENTS, DEFAULT_WAIT_S, MAX_WAIT_S, Request
from specsync_core.errors import UnsettledError, did_you_mean
from specsync_core.settings import read_environment

USAGE = "status | sites POLICY | mode SITES sync|audit|off | stats"
UNSETTLED_CODE = 3
"""A change was asked for and not refused, and it is not known to be applied."""


def ctl(
    command: Annotated[str, typer.Argument(help="status, sites, mode or stats.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="sites: a policy. mode: names of sites, and sync, audit or off.")
    ] = None,
    socket: Annotated[
        str | None, typer.Option(help="The engine's control socket. Default: what SPECSYNC_CONTROL says here.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the engine's next step.")] = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Look at a running engine's sites and change them, on all ranks at the same step.

    Start the engine with SPECSYNC_CONTROL=/absolute/path/of/a.sock.

    `sites POLICY` reads its policy as SPECSYNC_SITES is read.

    `mode SITES sync|audit|off` leaves all other sites alone.

    Exit code 0: done; 1: refused, or nobody answers; 2: usage; 3: a change that is not known to be applied yet.
    """
    from specsync_core.control.client import ask, find_socket

    request = _request(command, arguments or [], wait)
    path = find_socket(_path(socket))
    try:
        answer = ask(path, request)
    except UnsettledError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(UNSETTLED_CODE) from error
    if as_json:
        print_json(answer)
    elif command in ("sites", "mode"):
        _show_change(answer, path)
    else:
        {"status": _show_status, "stats": _show_stats}[command](answer)
    if command == "stats" and None in answer["group_ranks"].values():
        raise typer.Exit(1)
    if command != "status" and answer.get("pending_step") is not None:
        raise typer.Exit(UNSETTLED_CODE)


def _request(command: str, arguments: list[str], wait_s: float) -> Request:
    if command not in ARGUMENTS:
        raise UsageError(f"ctl: unknown command '{command}'{did_you_mean(command, ARGUMENTS)}. Usage: {USAGE}.")
    names = ARGUMENTS[command]
    if len(arguments) != len(names):
        raise UsageError(f"ctl {command} takes {len(names)} arguments, not {len(arguments)}. Usage: {USAGE}.")
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise UsageError(f"--wait takes 0 to {MAX_WAIT_S:g} seconds.")
    return Request(command, wait_s=wait_s, **dict(zip(names, arguments, strict=True)))


def _path(given: str | None) -> str:
    if given is not None:
        if not given.strip():
            raise UsageError("--socket is empty: it takes the path that the engine has in SPECSYNC_CONTROL.")
        return given
    if (stated := read_environment().control) is None:
        raise UsageError("ctl: say which engine: --socket PATH, or SPECSYNC_CONTROL=PATH as the engine has it.")
    return stated.value


def _show_change(answer: dict[str, Any], path: str) -> None:
    if answer["applied"] is not None:
        ranks = answer["group_ranks"]
        plan = f"plan {answer['digest'][:12]}, was {answer['was'][:12]}, generation {answer['generation']}"
        print(f"Applied at step {answer['applied']} on all {ranks} group ranks ({plan}).")
        print(f"  engine: process {answer['pid']}, {path}")
    elif answer.get("pending_step") is not None:
        print(
            f"Agreed for step {answer['pending_step']}, which the engine has not begun yet. See `specsync ctl status`."
        )
    else:
        print("Nothing to change: the sites are so already.")
    for change, slugs in _grouped(answer["changes"]).items():
        print(f"  {' -> '.join(change)}: {', '.join(slugs)}")
    for (reason,), slugs in _grouped({slug: [reason] for slug, reason in answer["kept"].items()}).items():
        print(f"  not changed: {', '.join(slugs)}: {reason}.")


def _grouped(values: dict[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group slugs by what is said of them."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for slug, said in values.items():
        groups.setdefault(tuple(said), []).append(slug)
    return groups


def _show_status(answer: dict[str, Any]) -> None:
    pending = answer["pending_step"]
    print(
        f"Process {answer['pid']}, {answer['group_ranks']} group ranks, step {answer['step']},"
        f" plan {answer['digest'][:12]}, generation {answer['generation']}."
    )
    if pending is not None:
        print(f"A change is agreed for step {pending}.")
    if answer["refuses"] is not None:
        print(f"Sites cannot change here: {answer['refuses']}")
    fixed = set(answer["fixed"])
    rows = [
        (slug, mode, "stays" if slug in fixed else "", answer["origins"][slug])
        for slug, mode in answer["sites"].items()
    ]
    print_table(("site", "mode", "", "origin"), rows)
    for change in answer["history"]:
        sites = f"{len(change['modes'])} site{'' if len(change['modes']) == 1 else 's'}"
        print(f"Step {change['step']}: {change['request']} ({sites}, plan {change['digest'][:12]}).")


def _show_stats(answer: dict[str, Any]) -> None:
    columns = ("site", "rank", "mode", "calls", "compared", "mismatches", "first divergence")
    rows = []
    for rank, report in answer["group_ranks"].items():
        if report is None:
            rows.append(("-", rank, "-", "-", "-", "-", "this rank did not report in time"))
            continue
        for slug, stats in report.items():
            counts = (str(stats[name]) for name in ("calls", "compared", "mismatches"))
            rows.append((slug, rank, stats["mode"], *counts, _first(stats["first_divergence"])))
    print_table(columns, sorted(rows))


def _first(divergence: dict[str, Any] | None) -> str:
    if divergence is None:
        return "-"
    place = f"{divergence['tensor']}{divergence['index']}" if divergence["index"] else divergence["tensor"]
    return f"step {divergence['step']}: {place} is {divergence['own']}, {divergence['rank0']} on group rank 0"
