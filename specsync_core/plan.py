"""The plan: every source's say, resolved once, frozen, and with the origin of each value.

Sources, the weakest first: the registry's default, the plugins' policy hooks, the policy file, the
environment. A stronger source replaces a weaker one whole; inside the policy file, the tables of
algorithms and models decide about what they name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specsync_core import sources
from specsync_core.errors import GroupError
from specsync_core.facts import Facts
from specsync_core.manager import PluginManager, plugin_manager
from specsync_core.narrowing import narrowing_warning
from specsync_core.policy import Mode, Policy
from specsync_core.policy_file import PolicyFile, find_policy_file, read_policy_file
from specsync_core.registry import Registry, Site
from specsync_core.settings import Setting, Transport, read_environment

__all__ = ["Plan", "PluginVersion", "Setting", "SitePlan", "resolve_plan"]

logger = logging.getLogger("specsync")


@dataclass(frozen=True)
class SitePlan:
    """What is to happen at one site."""

    site: Site
    mode: Setting[Mode]
    group: Setting[str]
    """``tp`` or ``attn_tp`` where tensors are broadcast; ``capture``, the ranks that capture graphs together,
    for the gates at start-up; ``tp`` for other host agreements."""
    transport: Setting[Transport]


@dataclass(frozen=True)
class PluginVersion:
    """A plugin that is active; ranks compare these at start-up."""

    name: str
    distribution: str
    version: str


@dataclass(frozen=True, eq=False)
class Plan:
    """The frozen decisions. Two plans are equal when their decisions are; origins do not count."""

    registry: Registry
    facts: Facts
    sites: Mapping[str, SitePlan]
    """By slug, in the order of the sites' numbers."""
    timeout: Setting[float]
    """``timeout_s`` with its origin."""
    counting: Setting[bool]
    """``counters`` with its origin."""
    plugins: tuple[PluginVersion, ...] = ()
    advice: tuple[str, ...] = field(default=(), repr=False)
    """What is odd about the policies in force, in words."""
    control: Setting[str | None] = field(default_factory=lambda: Setting(None, "default"))
    """Path of the socket over which sites are changed while the engine runs; None: they are not."""
    presets: Mapping[str, Policy] = field(default_factory=dict, repr=False)
    """The policy file's own, for policies that come while the engine runs."""

    @property
    def timeout_s(self) -> float:
        """Seconds that ranks wait for each other at start-up and in host agreements."""
        return self.timeout.value

    @property
    def counters(self) -> bool:
        """Whether divergence is counted in mode sync too; audit always counts."""
        return self.counting.value

    def __getitem__(self, key: Site | str | int) -> SitePlan:
        """Return one site's plan, by site, slug or number. Raises RegistryError when there is no such site."""
        return self.sites[self.registry.site(key).slug]

    def mode(self, key: Site | str | int) -> Mode:
        """Return one site's mode. Raises RegistryError when there is no such site."""
        return self[key].mode.value

    def may_be_on(self, key: Site | str | int) -> bool:
        """Whether a site is on, or live control may turn it on. Raises RegistryError when there is no such site."""
        planned = self[key]
        may_change = self.control.value is not None and planned.site.kind != "consensus"
        return may_change or planned.mode.value != "off"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical JSON of every decision and site declaration, in hexadecimal."""
        return _sha256(self._decisions())

    def _decisions(self) -> dict[str, Any]:
        return {
            "counters": self.counters,
            "sites": {
                slug: {
                    "mode": planned.mode.value,
                    "group": planned.group.value,
                    "transport": planned.transport.value,
                    "declaration": _sha256(planned.site.model_dump(mode="json"))[:16],
                }
                for slug, planned in self.sites.items()
            },
        }

    def summary(self) -> dict[str, Any]:
        """Return the decisions and the plugin versions as JSON can hold them, for ranks to compare."""
        plugins = {plugin.name: f"{plugin.distribution} {plugin.version}" for plugin in self.plugins}
        return {**self._decisions(), "plugins": plugins, "control": "off" if self.control.value is None else "on"}

    def policy_origins(self) -> list[str]:
        """Return where the sites' modes come from, each place once; then where another setting has one of its own."""
        sites = list(self.sites.values())
        settings: list[tuple[str, Setting[Any]]] = [("transport", planned.transport) for planned in sites]
        settings += [("timeout_s", self.timeout), ("counters", self.counting), ("control", self.control)]
        others = {f"{name} by {setting.origin}" for name, setting in settings if setting.origin != "default"}
        return [*sorted({planned.mode.origin for planned in sites}), *sorted(others)]

    def differences(self, other: Plan | Mapping[str, Any], mine: str = "here", theirs: str = "there") -> list[str]:
        """Name what another plan, or another rank's `summary`, decides otherwise: a line for each difference.

        Args:
            other: the other plan or summary.
            mine, theirs: how the lines call the two, e.g. ``on group rank 0``.
        """
        their_summary = other.summary() if isinstance(other, Plan) else other
        return list(summary_differences(self.summary(), their_summary, mine, theirs))

    def with_dp_attention(self, dp_attention: bool) -> Plan:
        """Return the plan with its groups bound, once the engine's groups are known.

        Raises:
            GroupError: the plan was resolved for the opposite.
        """
        if self.facts.dp_attention not in (None, dp_attention):
            known, given = ("on", "off") if self.facts.dp_attention else ("off", "on")
            raise GroupError(
                f"the plan was resolved with dp attention {known}, but the groups have it {given}."
                " Resolve the plan with Facts(dp_attention=None), or hand over the groups that belong to it."
            )
        sites = {
            slug: replace(planned, group=_group(planned.site, dp_attention)) for slug, planned in self.sites.items()
        }
        return replace(self, facts=replace(self.facts, dp_attention=dp_attention), sites=MappingProxyType(sites))

    def with_modes(self, modes: Mapping[str, Mode], origin: str) -> Plan:
        """Return the plan with other modes at some sites.

        Args:
            modes: by slug.
            origin: what the sites' modes then come from.
        """
        sites = dict(self.sites)
        for slug, mode in modes.items():
            before = sites[slug].mode
            sites[slug] = replace(sites[slug], mode=Setting(mode, origin, ((before.value, before.origin),)))
        return replace(self, sites=MappingProxyType(sites))

    def narrowing_warning(self) -> str | None:
        """Return what the operator should know when not every site is synchronised; None when all are.

        How many and which sites, why, what that risks, and how to widen the plan or to watch instead.
        """
        return narrowing_warning(self.sites.values(), self.advice)


def resolve_plan(
    registry: Registry,
    environ: Mapping[str, str] | None = None,
    config: Path | str | PolicyFile | None = None,
    facts: Facts | None = None,
    manager: PluginManager | None = None,
) -> Plan:
    """Resolve every source into one plan.

    Args:
        registry: the known sites.
        environ: None reads the process's own environment.
        config: a policy file, instead of the one that would be found.
        facts: what is known about the deployment; None is nothing.
        manager: the loaded plugins; None loads the installed ones.

    Raises:
        PolicyError: a variable, the policy file or a policy is wrong, or two plugins disagree.
        PluginError: a plugin is broken.
    """
    environment = read_environment(environ)
    facts = Facts() if facts is None else facts
    manager = plugin_manager(environ) if manager is None else manager
    if isinstance(config, (str, Path)):
        policy_file: PolicyFile | None = read_policy_file(Path(config))
    else:
        policy_file = find_policy_file(environment.config) if config is None else config
    if policy_file is not None and policy_file.tables.models and facts.model is None:
        logger.warning("%s: the model is not known here, so none of the tables [models] applies.", policy_file.path)

    layers = sources.policy_layers(registry, facts, environment, policy_file, manager)
    modes = sources.modes(layers, registry)
    transport = sources.transport(policy_file, facts, environment)
    sites = {
        site.slug: SitePlan(site, modes[site.slug], _group(site, facts.dp_attention), transport)
        for site in registry.sites
    }
    active = [info for info in manager.plugins() if info.status == "active"]
    return Plan(
        registry=registry,
        facts=facts,
        sites=MappingProxyType(sites),
        timeout=sources.timeout(policy_file, environment),
        counting=sources.counting(policy_file, environment),
        plugins=tuple(PluginVersion(info.name, info.distribution, info.version) for info in active),
        advice=sources.advice(layers),
        control=sources.control(environment),
        presets=sources.presets(registry, policy_file),
    )


def _group(site: Site, dp_attention: bool | None) -> Setting[str]:
    if site.kind == "consensus":
        if site.phase == "init":
            return Setting("capture", "start-up gate", (("tp", "the ranks that capture together may be more"),))
        return Setting("tp", "host agreement")
    if dp_attention:
        return Setting("attn_tp", "dp attention is on", (("tp", "idle DP ranks would not take part"),))
    if dp_attention is None:
        return Setting("tp", "dp attention is not known yet", (("attn_tp", "only under dp attention"),))
    return Setting("tp", "dp attention is off", (("attn_tp", "only under dp attention"),))


def summary_differences(
    mine: Any, theirs: Any, my_name: str, their_name: str, path: tuple[str, ...] = ()
) -> Iterator[str]:
    """Compare two summaries; see `Plan.differences`."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            yield from summary_differences(
                mine.get(key, "absent"), theirs.get(key, "absent"), my_name, their_name, (*path, str(key))
            )
    elif mine != theirs:
        what = " ".join(path[1:] if path[0] == "sites" else path)
        yield f"{what}: {_short(mine)} {my_name}, {_short(theirs)} {their_name}"


def _short(value: Any) -> str:
    """A site's declaration is a hash, of which twelve digits do; a site that only one side has is just present."""
    return "present" if isinstance(value, Mapping) else str(value)[:60]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
