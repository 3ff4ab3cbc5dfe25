"""``specsync plan``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specsync_core.cli.explain import Known, decided_in, explanations, read_facts, show_explanations, show_minimal
from specsync_core.cli.forecast import forecast
from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table, setting_json, setting_row
from specsync_core.errors import RegistryError, did_you_mean
from specsync_core.explain import Explanation
from specsync_core.facts import PLATFORMS, Facts
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.plan import Plan, Setting, SitePlan, resolve_plan
from specsync_core.registry import Registry

OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "hip": "rocm", "amd": "rocm"}
"""What people call platforms, where the closest spelling would be another vendor's."""


def plan(
    site: Annotated[str | None, typer.Argument(help="A site's slug or number: show why it is planned so.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="cuda, rocm, cpu or another that is known (default: this machine's)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name or path, for policies by model.")] = None,
    dp_attention: Annotated[bool | None, typer.Option(help="Whether attention is data parallel.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The policy file, instead of the one that would be found.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for each site why it is on, or may be off under the facts.")
    ] = False,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="Print the smallest set of sites that the facts justify, and its proof.")
    ] = False,
    algorithm: Annotated[
        str | None,
        typer.Option(help="With --explain or --minimal: only this algorithm's sites, in the words of the --engine."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="With --explain or --minimal: take what is known of demo, sglang or vllm;"
            " of the last two, only the sites that they decide."
        ),
    ] = None,
    fact: Annotated[
        list[str] | None,
        typer.Option(
            help="With --explain or --minimal, may be repeated: gathered-logits, gathered-confidences,"
            " uniform-devices or counter-noise; add '=no' to deny it."
        ),
    ] = None,
    audit: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --minimal: a rank's counts in mode audit, or SPECSYNC_STATS_DIR; 1 if they refute the set,"
            " or were not counted under its prove policy."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would be synchronised, and where each decision comes from."""
    manager = plugin_manager()
    registry = load_registry(manager)
    facts = Facts(platform=_platform(platform, registry), model=model, dp_attention=dp_attention)
    resolved = resolve_plan(registry, config=config, facts=facts, manager=manager)
    slug = None if site is None else _planned(resolved, site).site.slug
    if explain or minimal:
        if explain and minimal:
            raise UsageError("--explain and --minimal are two questions. Ask one, then the other.")
        known = read_facts(engine, fact or [])
        decided = decided_in(engine, algorithm, facts, manager)
        found = explanations(resolved, known, algorithm, slug, decided)
        whole = algorithm or "all" if decided is None else None
        _explain(resolved, found, slug, known, whole, audit or [], minimal, as_json)
    elif algorithm or engine or fact or audit:
        raise UsageError("--algorithm, --engine, --fact and --audit belong to --explain or --minimal.")
    elif slug is not None:
        _show_site(resolved, resolved[slug], as_json)
    elif as_json:
        print_json(_as_json(resolved))
    else:
        _show_plan(resolved, "given" if platform else "detected")
        if (warning := resolved.narrowing_warning()) is not None:
            print(warning, file=sys.stderr)


def _explain(
    resolved: Plan,
    found: list[Explanation],
    slug: str | None,
    known: Known,
    whole: str | None,
    audits: list[Path],
    minimal: bool,
    as_json: bool,
) -> None:
    if not minimal:
        show_explanations(resolved, found, known, as_json)
    elif slug is not None:
        raise UsageError("--minimal is about all sites, or those of an --algorithm; leave the site out.")
    elif show_minimal(found, known, whole, audits, as_json):
        raise typer.Exit(1)


def _platform(given: str | None, registry: Registry) -> str:
    """This machine's platform, or the given one. A misspelt one would turn every site off, as opt-in there."""
    if given is None:
        return detect_platform()
    known = sorted({*PLATFORMS, *(platform for site in registry.sites for platform in site.platforms)})
    if given.lower() not in known:
        meant = OTHER_NAMES.get(given.lower())
        hint = f" (did you mean '{meant}'?)" if meant else did_you_mean(given, known)
        raise UsageError(f"--platform: unknown platform '{given}'{hint}. Known: {', '.join(known)}.")
    return given.lower()


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
    if planned.site.kind == "broadcast":
        rows.append(setting_row("transport", planned.transport))
        if planned.transport.value == "auto":
            rows.append(setting_row("auto takes", _forecast(resolved)))
    print_table((), rows)


def _forecast(resolved: Plan) -> Setting[str]:
    return forecast(str(resolved.facts.platform), detect_platform())


def _show_plan(resolved: Plan, platform_origin: str) -> None:
    rows = [
        (
            planned.site.slug,
            planned.mode.value,
            planned.group.value,
            planned.transport.value if planned.site.kind == "broadcast" else "host",
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
            setting_row("auto takes", _forecast(resolved)),
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
        "transport": setting_json(planned.transport) if planned.site.kind == "broadcast" else None,
    }


def _as_json(resolved: Plan) -> dict[str, Any]:
    facts = resolved.facts
    return {
        "digest": resolved.digest,
        "facts": {"platform": facts.platform, "model": facts.model, "dp_attention": facts.dp_attention},
        "timeout_s": setting_json(resolved.timeout),
        "counters": setting_json(resolved.counting),
        "auto_takes": setting_json(_forecast(resolved)),
        "plugins": [
            {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
            for plugin in resolved.plugins
        ],
        "sites": [_site_json(planned) for planned in resolved.sites.values()],
        "warning": resolved.narrowing_warning(),
    }
