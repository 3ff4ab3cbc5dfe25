"""Writes the reference pages of the site from the registry and from the command line itself. Run by `conf.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import specsync_core
from specsync_core.cli.app import COMMANDS
from specsync_core.manager import load_registry
from specsync_core.payload import declared
from specsync_core.registry import Registry, Site
from specsync_core.settings import VARIABLES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
OPENING = "After this page you can"


def version() -> str:
    return specsync_core.__version__


def write_all(folder: Path) -> None:
    """Write every generated page; a page that has not changed keeps its time."""
    folder.mkdir(exist_ok=True)
    pages = {"sites": sites_page(load_registry()), "cli": cli_page(), "costs": costs_page()}
    for name, lines in pages.items():
        text = "\n".join(lines) + "\n"
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# --- sites ---


def sites_page(registry: Registry) -> Iterator[str]:
    yield "# Sites"
    yield f"\n{OPENING} look up every site: what is decided there, why ranks could differ, and with which tensors."
    yield (
        "\nGenerated from the registry, `sites.toml`. Numbers and slugs are stable for ever. A *broadcast* site is"
        " overwritten with group rank 0's tensors, a *consensus* site agrees on a host value, a *check* site only"
        " compares. Plugins add sites; `specsync sites` lists those of your installation."
    )
    for algorithm in dict.fromkeys(site.algorithm for site in registry.sites):
        sites = [site for site in registry.sites if site.algorithm == algorithm]
        yield f"\n## {algorithm}\n"
        for site in sites:
            yield from _site(site)
    yield "\n## Presets\n"
    yield "| preset | sites | what it selects |\n| --- | --- | --- |"
    for name, preset in sorted(registry.presets.items()):
        yield f"| `{name}` | {len(registry.preset_sites(name))} | {preset.summary} |"
    yield "\n## Handles\n"
    yield "| number | handle | status | what it selects |\n| --- | --- | --- | --- |"
    for handle in registry.handles.values():
        sites_text = ", ".join(f"`{slug}`" for slug in handle.sites)
        yield f"| {handle.number or ''} | `{handle.name}` | {handle.status} | {handle.summary}: {sites_text} |"


def _site(site: Site) -> Iterator[str]:
    yield f"### {site.number} {site.slug}\n"
    yield f"{site.summary[0].upper()}{site.summary[1:]}.\n"
    facts = [f"kind *{site.kind}*", f"phase *{site.phase}*", f"cause *{site.cause}*"]
    facts.append("may run in a captured graph" if site.graph else "never in a captured graph")
    facts.append(f"on by default on {', '.join(site.platforms) or 'no platform'}")
    yield f"- {'; '.join(facts)}"
    if site.tensors:
        yield f"- tensors: `{declared(site)}`"
    yield ""


# --- what a sync costs ---


def costs_page() -> Iterator[str]:
    yield "# What a sync costs"
    yield f"\n{OPENING} look up what each way of syncing took on the machines that were measured."
    yield (
        "\nGenerated from the runs in `benchmarks/results`; `specsync bench` measures your machine. Microseconds per"
        " call by the number of requests, and the ratio to the row that it is compared with. Each table is one run:"
        " machines vary, so compare within a table."
    )
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        if "rows" in document and "machine" in document:
            yield from _run(path.name, document)


def _run(name: str, document: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {document['machine']}, {document['ranks']} ranks\n"
    made = f"torch {document['torch']}" + (f", NCCL {document['nccl']}" if document.get("nccl") else "")
    yield f"`{name}`: {document['date'][:10]}, {made}.\n"
    sizes = list(dict.fromkeys(size for row in document["rows"] for size in row["us"]))
    yield f"| what | where | {' | '.join('1 request' if size == '1' else f'{size} requests' for size in sizes)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in sizes)} |"
    for row in document["rows"]:
        yield f"| {_cell(row['what'])} | {row['time']} | {' | '.join(_us(row, size) for size in sizes)} |"


def _us(row: dict[str, Any], size: str) -> str:
    if size not in row["us"]:
        return ""
    ratio = row["ratio"].get(size)
    return f"{row['us'][size]:.1f}" + (f" ({ratio:.2f})" if ratio is not None else "")


# --- the command line ---


def cli_page() -> Iterator[str]:
    yield "# Command line"
    yield f"\n{OPENING} look up every command, option and environment variable."
    yield (
        "\nGenerated from the commands themselves. Data goes to standard output, messages to standard error. Exit code"
        " 0: fine; 1: a finding; 2: a wrong argument. `--json` prints what a program can read."
    )
    for name in COMMANDS:
        yield f"\n## specsync {name}\n"
        yield from _command(name)
    yield "\n## Environment variables\n"
    yield "| variable | meaning |\n| --- | --- |"
    for variable, meaning in VARIABLES.items():
        yield f"| `{variable}` | {_cell(meaning)} |"


def _command(name: str) -> Iterator[str]:
    command = command_of(name)
    yield (command.help or "").split("\f")[0].strip()
    usage = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = " ".join(_argument(parameter) for parameter in usage)
    yield f"\n```text\nspecsync {name} [OPTIONS]{' ' if words else ''}{words}\n```\n"
    yield "| argument or option | meaning |\n| --- | --- |"
    for parameter in command.params:
        if parameter.name != "help":
            yield f"| {_names(parameter)} | {_cell(getattr(parameter, 'help', None) or '')}{_default(parameter)} |"


def command_of(name: str) -> Any:
    """The command, as the command line makes it."""
    import typer

    function = name.replace("-", "_")
    module = import_module(f"specsync_core.cli.{function}")
    app = typer.Typer(add_completion=False)
    app.command(name)(getattr(module, function))
    return typer.main.get_command(app)


def _argument(parameter: Any) -> str:
    word = parameter.name.upper()
    return word if parameter.required else f"[{word}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or parameter.required or value == "" or value == ():
        return ""
    return f" Default: `{value}`."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    write_all(Path("generated"))
