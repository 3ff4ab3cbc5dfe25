"""The sources of a plan, the weakest first: default, plugins' hooks, policy file, environment.

Each policy text becomes a `Layer`. For each site the last layer that speaks of it decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from specsync_core.errors import PolicyError, did_you_mean
from specsync_core.facts import Facts
from specsync_core.manager import PluginManager
from specsync_core.policy import Choice, Mode, Policy, normalise, parse_policy, parse_presets, removes_from_nothing
from specsync_core.policy_file import AlgorithmPolicy, PolicyFile
from specsync_core.registry import Registry, Site
from specsync_core.settings import DEFAULT_TIMEOUT_S, Environment, Setting, Transport

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """What one policy says about the sites that it decides about."""

    text: str
    origin: str
    choices: Policy
    whole: bool = True
    """It decides about every site, and so replaces every layer below it."""


@dataclass
class _Reader:
    """Turns policies into layers, and collects what is wrong with them."""

    registry: Registry
    presets: Mapping[str, Policy] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self, text: str, origin: str, within: str | None = None, way_out: str = "") -> list[Layer]:
        """Return the policy's layer: none where it is wrong. ``within`` is the one algorithm it decides about."""
        try:
            named = parse_policy(text, self.registry, origin, self.presets, within)
        except PolicyError as error:
            self.problems.append(f"{error}{way_out}")
            return []
        unnamed = Choice("off", f"{origin} (not selected)")
        sites = [site for site in self.registry.sites if within in (None, site.algorithm)]
        return [Layer(text, origin, {site.slug: named.get(site.slug, unnamed) for site in sites}, within is None)]


def policy_layers(
    registry: Registry,
    facts: Facts,
    environment: Environment,
    policy_file: PolicyFile | None,
    manager: PluginManager,
) -> list[Layer]:
    """Return the layers of every source, the weakest first.

    Every policy in the policy file is read, also those for other models: a typo in one of them is an error
    now, and not on the day when that model is loaded.

    Raises:
        PolicyError: a policy is wrong, or two plugins disagree where nothing stronger decides; one line for each.
    """
    reader = _Reader(registry)
    stronger: list[Layer] = []
    if policy_file is not None:
        reader.presets = _presets(policy_file, reader)
        stronger += _file_layers(policy_file, facts, reader)
    if (sites := environment.sites) is not None:
        stronger += reader.read(sites.value, sites.origin)
    from_plugins = _plugin_layers(manager, facts, reader, any(layer.whole for layer in stronger))
    if reader.problems:
        raise PolicyError("\n".join(reader.problems))
    return [_default_layer(registry, facts), *from_plugins, *stronger]


def modes(layers: Sequence[Layer], registry: Registry) -> dict[str, Setting[Mode]]:
    """Return every site's mode: the strongest layer's, with what the others say."""
    decided: dict[str, Setting[Mode]] = {}
    for site in registry.sites:
        *weaker, choice = [layer.choices[site.slug] for layer in layers if site.slug in layer.choices]
        rejected = tuple((str(other.mode), other.origin) for other in reversed(weaker))
        decided[site.slug] = Setting(choice.mode, choice.origin, rejected)
    return decided


def advice(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return what is odd about the policies in force, in words."""
    last_whole = max(index for index, layer in enumerate(layers) if layer.whole)
    found = []
    for layer in layers[last_whole:]:
        if not normalise(layer.text).strip(","):
            found.append(f"{layer.origin} is set but empty, which selects no site: unset it for the default, 'all'.")
        elif (token := removes_from_nothing(layer.text)) is not None:
            found.append(
                f"{layer.origin}: a policy starts empty, so '{token}' removes from nothing: write 'all,{token}'."
            )
    return tuple(found)


def presets(registry: Registry, policy_file: PolicyFile | None) -> Mapping[str, Policy]:
    """Return the policy file's own presets, which `policy_layers` has found to be right."""
    return {} if policy_file is None else _presets(policy_file, _Reader(registry))


def _default_layer(registry: Registry, facts: Facts) -> Layer:
    def choice(site: Site) -> Choice:
        if facts.platform is None or facts.platform.lower() in site.platforms:
            return Choice("sync", "default (preset all)")
        return Choice("off", f"default (on {facts.platform} the site is opt-in)")

    return Layer("all", "default", {site.slug: choice(site) for site in registry.sites})


def _plugin_layers(manager: PluginManager, facts: Facts, reader: _Reader, overruled: bool) -> list[Layer]:
    layers: list[Layer] = []
    for info, text in manager.policies(facts):
        way_out = f"\n  Leave the plugin out with SPECSYNC_DISABLE={info.name}."
        layers += reader.read(text, f"plugin {info.name} of {info.distribution}", way_out=way_out)
    answers = {tuple(choice.mode for choice in layer.choices.values()) for layer in layers}
    if len(answers) > 1 and not overruled:
        said = "; ".join(f"{layer.origin} says '{layer.text}'" for layer in layers)
        reader.problems.append(
            f"plugins propose different policies: {said}.\n  Decide with SPECSYNC_SITES or the policy file's key"
            " 'sites', or leave plugins out with SPECSYNC_DISABLE."
        )
    return layers


def _presets(policy_file: PolicyFile, reader: _Reader) -> dict[str, Policy]:
    texts: dict[str, tuple[str, str]] = {}
    for written, text in policy_file.tables.presets.items():
        origin = policy_file.origin("presets", written)
        name = written.lower().replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            reader.problems.append(
                f"{origin}: preset {written!r}: a name is words of letters and digits joined by '-'."
            )
        elif name in texts:
            reader.problems.append(f"{origin}: preset {written!r} is the same as the one in {texts[name][1]}.")
        else:
            texts[name] = (text, origin)
    try:
        return parse_presets(texts, reader.registry)
    except PolicyError as error:
        reader.problems.append(str(error))
        return {name: {} for name in texts}


def _file_layers(policy_file: PolicyFile, facts: Facts, reader: _Reader) -> Iterator[Layer]:
    tables = policy_file.tables
    if tables.sites is not None:
        yield from reader.read(tables.sites, policy_file.origin("sites"))
    yield from _algorithm_layers(policy_file, tables.algorithms, ("algorithms",), reader)
    in_force = dict(policy_file.models_matching(facts.model))
    for glob, table in tables.models.items():
        layers: list[Layer] = []
        if table.sites is not None:
            layers += reader.read(table.sites, policy_file.origin("models", glob, "sites"))
        layers += _algorithm_layers(policy_file, table.algorithms, ("models", glob, "algorithms"), reader)
        if glob in in_force:
            yield from layers


def _algorithm_layers(
    policy_file: PolicyFile, tables: Mapping[str, AlgorithmPolicy], path: tuple[str, ...], reader: _Reader
) -> Iterator[Layer]:
    known = reader.registry.algorithms
    for written, table in tables.items():
        name = written.lower().replace("_", "-")
        if name in known:
            yield from reader.read(table.sites, policy_file.origin(*path, written, "sites"), within=name)
        else:
            reader.problems.append(
                f"{policy_file.origin(*path, written)}: unknown algorithm '{written}'{did_you_mean(name, known)}."
                f" Known: {', '.join(known)}."
            )


def transport(policy_file: PolicyFile | None, facts: Facts, environment: Environment) -> Setting[Transport]:
    """Return the transport that the strongest source states."""
    stated: list[Setting[Transport] | None] = []
    if policy_file is not None:
        stated.append(_stated(policy_file, policy_file.tables.transport, "transport"))
        for glob, table in policy_file.models_matching(facts.model):
            stated.append(_stated(policy_file, table.transport, "models", glob, "transport"))
    return _strongest(Setting("auto", "default"), *stated, environment.transport)


def timeout(policy_file: PolicyFile | None, environment: Environment) -> Setting[float]:
    """Return the time-out in seconds that the strongest source states."""
    stated = None if policy_file is None else _stated(policy_file, policy_file.tables.timeout_s, "timeout_s")
    return _strongest(Setting(DEFAULT_TIMEOUT_S, "default"), stated, environment.timeout_s)


def counting(policy_file: PolicyFile | None, environment: Environment) -> Setting[bool]:
    """Return whether divergence is counted in mode sync too, as the strongest source states."""
    stated = None if policy_file is None else _stated(policy_file, policy_file.tables.counters, "counters")
    return _strongest(Setting(True, "default"), stated, environment.counters)


def control(environment: Environment) -> Setting[str | None]:
    """Return the path of the control socket; None where control is off."""
    stated = environment.control
    return Setting(None, "default") if stated is None else Setting(stated.value, stated.origin)


def _stated(policy_file: PolicyFile, value: T | None, *key: str) -> Setting[T] | None:
    return None if value is None else Setting(value, policy_file.origin(*key))


def _strongest(default: Setting[T], *stated: Setting[T] | None) -> Setting[T]:
    *weaker, strongest = [default, *(setting for setting in stated if setting is not None)]
    rejected = tuple((str(setting.value), setting.origin) for setting in reversed(weaker))
    return Setting(strongest.value, strongest.origin, rejected)
