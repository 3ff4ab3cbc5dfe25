"""``specsync plan``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table, setting_json, setting_row
from specsync_core.errors import RegistryError
from specsync_core.facts import Facts
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.plan import Plan, SitePlan, resolve_plan


def plan(
    site: Annotated[str | None, typer.Argument(help="A site's slug or number: show why it is planned so.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="cuda, rocm, cpu or another's name (default: this machine)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name or path, for policies by model.")] = None,
    dp_attention: Annotated[bool | None, typer.Option(help="Whether attention is data parallel.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The policy file, instead of the one that would be found.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would be synchronised, and where each decision comes from."""
    manager = plugin_manager()
    registry = load_registry(manager)
    facts = Facts(platform=platform or detect_platform(), model=model, dp_attention=dp_attention)
    resolved = resolve_plan(registry, config=config, facts=facts, manager=manager)
    if site is not None:
        _show_site(resolved, _planned(resolved, site), as_json)
    elif as_json:
        print_json(_as_json(resolved))
    else:
        _show_plan(resolved, "given" if platform else "detected")
        if (warning := resolved.narrowing_warning()) is not None:
            print(warning, file=sys.stderr)


def detect_platform(devices: Path = Path("/dev")) -> str:
    """Guess this machine's platform from its device files, without torch."""
    if (devices / "nvidiactl").exists():
        return "cuda"
    return "rocm" if (devices / "kfd").exists() else "cpu"


def _planned(resolved: Plan, key: str) -> SitePlan:
    try:
        return resolved[key]
    except RegistryError as error:
        raise UsageError(str(error)) from error


def _show_site(resolved: Plan, planned: SitePlan, as_json: bool) -> None:
    if as_json:
        print_json(_site_json(planned))
        return
    rows = [setting_row("mode", planned.mode), setting_row("group", planned.group)]
    if planned.site.kind != "consensus":
        rows.append(setting_row("transport", planned.transport))
    print_table((), rows)


def _show_plan(resolved: Plan, platform_origin: str) -> None:
    rows = [
        (
            planned.site.slug,
            planned.mode.value,
            planned.group.value,
            "host" if planned.site.kind == "consensus" else planned.transport.value,
            planned.mode.origin,
        )
        for planned in resolved.sites.values()
    ]
    print_table(("site", "mode", "group", "transport", "mode's origin"), rows)
    print()
    facts = resolved.facts
    dp_attention = {True: "on", False: "off", None: None}[facts.dp_attention]
    print_table(
        ("setting", "value", "origin"),
        [
            setting_row("timeout_s", resolved.timeout),
            setting_row("counters", resolved.counting),
            ("platform", str(facts.platform), platform_origin),
            _fact_row("model", facts.model),
            _fact_row("dp attention", dp_attention),
            ("digest", resolved.digest[:12], "of every decision above"),
        ],
    )


def _fact_row(name: str, value: str | None) -> tuple[str, str, str]:
    return (name, "-", "not known") if value is None else (name, value, "given")


def _site_json(planned: SitePlan) -> dict[str, Any]:
    return {
        "site": planned.site.slug,
        "number": planned.site.number,
        "mode": setting_json(planned.mode),
        "group": setting_json(planned.group),
        "transport": setting_json(planned.transport) if planned.site.kind != "consensus" else None,
    }


def _as_json(resolved: Plan) -> dict[str, Any]:
    facts = resolved.facts
    return {
        "digest": resolved.digest,
        "facts": {"platform": facts.platform, "model": facts.model, "dp_attention": facts.dp_attention},
        "timeout_s": setting_json(resolved.timeout),
        "counters": setting_json(resolved.counting),
        "plugins": [
            {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
            for plugin in resolved.plugins
        ],
        "sites": [_site_json(planned) for planned in resolved.sites.values()],
        "warning": resolved.narrowing_warning(),
    }
