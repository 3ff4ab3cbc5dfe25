"""Finding plugins, holding them to the hook specifications, and asking them. pluggy stays behind this module.

The built-in algorithms come through the same entry-point group as anyone's. A plugin that is broken stops
the program: were it skipped, one rank could run without the sites that its peers synchronise.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, get_args

import pluggy

from specsync_core.algorithm import Algorithm, DraftKind
from specsync_core.errors import PluginError, RegistryError, did_you_mean
from specsync_core.hookspecs import PROJECT, BroadcastPoint, Specs
from specsync_core.registry_files import RegistryFile, builtin_registry, merge_registries, read_registry
from specsync_core.settings import disabled_plugins

if TYPE_CHECKING:
    from specsync_core.facts import EngineFacts, Facts
    from specsync_core.registry import Registry

logger = logging.getLogger("specsync")

GROUP = "specsync"
"""The entry-point group."""
HOOKS = tuple(sorted(name for name in vars(Specs) if name.startswith(f"{PROJECT}_")))


@dataclass(frozen=True)
class PluginInfo:
    """A plugin, as far as it came."""

    name: str
    """The entry point's name, which ``SPECSYNC_DISABLE`` takes."""
    distribution: str
    version: str
    entry_point: str
    """The module that the entry point names."""
    status: Literal["active", "disabled", "broken"] = "active"
    hooks: tuple[str, ...] = ()
    """The hooks that it implements."""

    def __str__(self) -> str:
        return f"plugin '{self.name}' of {self.distribution} {self.version} (entry point {self.entry_point})"

    def error(self, problem: object) -> PluginError:
        """Return the error that names this plugin, what is wrong with it, and the way out."""
        return PluginError(
            f"{self}: {problem}\n  Mend or remove it, or leave it out with SPECSYNC_DISABLE={self.name}."
        )


def plugin_manager(environ: Mapping[str, str] | None = None) -> PluginManager:
    """Load every installed plugin that ``SPECSYNC_DISABLE`` does not name.

    Args:
        environ: None reads the process's own environment.

    Raises:
        PluginError: a plugin cannot be imported or does not fit the hook specifications; names its
            distribution, entry point and cause.
    """
    manager = PluginManager()
    manager.load(disable=disabled_plugins(environ))
    return manager


def load_registry(manager: PluginManager | None = None) -> Registry:
    """Merge the built-in registry and those of every plugin.

    Args:
        manager: None loads the installed plugins.

    Raises:
        RegistryError: a registry is wrong, or two collide; names the files and their distributions.
        PluginError: as `plugin_manager`.
    """
    manager = plugin_manager() if manager is None else manager
    return merge_registries([builtin_registry(), *manager.registry_files()])


class PluginManager:
    """The plugins that are loaded, in the order of their names on every rank.

    Args:
        keep_going: collect broken plugins in ``problems`` instead of raising; for commands that show them.
    """

    def __init__(self, *, keep_going: bool = False) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(Specs)
        self._infos: dict[str, PluginInfo] = {}
        self._keep_going = keep_going
        self.problems: list[PluginError] = []

    def load(self, disable: Iterable[str] = ()) -> None:
        """Import and register the installed plugins. ``disable`` holds the names of entry points to leave out.

        Raises:
            PluginError: as `plugin_manager`.
        """
        found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
        _check_disabled(disable, [point.name for point in found])
        described = _Distributions()
        for point in found:
            distribution, version = described(point)
            info = PluginInfo(point.name, distribution, version, point.value)
            if point.name in disable:
                self._infos[point.name] = replace(info, status="disabled")
            else:
                self._attempt(info, point)

    def _attempt(self, info: PluginInfo, point: EntryPoint) -> None:
        try:
            self._add(info, _import(info, point))
        except PluginError as error:
            if not self._keep_going:
                raise
            self.problems.append(error)
            self._infos.setdefault(info.name, replace(info, status="broken"))

    def register(self, plugin: object, name: str, distribution: str = "this process", version: str = "0") -> None:
        """Register a plugin that is not installed: a module, or an object with hook methods.

        Raises:
            PluginError: the name is taken, or the plugin does not fit the hook specifications.
        """
        self._add(PluginInfo(name, distribution, version, getattr(plugin, "__name__", type(plugin).__name__)), plugin)

    def _add(self, info: PluginInfo, plugin: object) -> None:
        if (other := self._infos.get(info.name)) is not None:
            raise info.error(f"the name is taken already by the {other}.")
        if problems := list(_hook_problems(plugin)):
            raise info.error("\n  ".join(problems))
        try:
            self._pluggy.register(plugin, info.name)
            self._pluggy.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise info.error(str(error)) from error
        callers = self._pluggy.get_hookcallers(plugin) or []
        if not callers:
            logger.warning("%s implements no hook.", info)
        self._infos[info.name] = replace(info, hooks=tuple(sorted(caller.name for caller in callers)))

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return every plugin that was found, also the disabled and broken ones, by name."""
        return tuple(self._infos[name] for name in sorted(self._infos))

    def ask(self, hook: str, **arguments: object) -> Iterator[tuple[PluginInfo, Any]]:
        """Yield each plugin that implements a hook with what it returns; None is skipped.

        Raises:
            PluginError: an implementation raises; names its plugin.
        """
        everyone = self._pluggy.get_plugins()
        for info in self.plugins():
            if hook not in info.hooks:
                continue
            others = everyone - {self._pluggy.get_plugin(info.name)}
            try:
                results = self._pluggy.subset_hook_caller(hook, others)(**arguments)
            except PluginError as error:
                raise info.error(str(error)) from error
            except (Exception, SystemExit) as error:
                raise info.error(f"hook {hook} raises {type(error).__name__}: {error}.") from error
            for result in results:
                yield info, result

    def registry_files(self) -> list[RegistryFile]:
        """Read the registries of the plugins. Raises RegistryError or PluginError."""
        read = []
        for info, path in self.ask("specsync_sites"):
            if not hasattr(path, "read_bytes"):
                raise info.error(f"hook specsync_sites returns {path!r}, not a path.")
            try:
                read.append(read_registry(path, info.distribution))
            except RegistryError as error:
                raise RegistryError(
                    f"{error}\n  Mend it, or leave it out with SPECSYNC_DISABLE={info.name}."
                ) from error
        return read

    def policies(self, facts: Facts) -> list[tuple[PluginInfo, str]]:
        """Return the policies that plugins propose for these facts. Raises PluginError."""
        proposed = list(self.ask("specsync_policy", facts=facts))
        for info, policy in proposed:
            if not isinstance(policy, str):
                raise info.error(f"hook specsync_policy returns {policy!r}, not a policy or None.")
        return proposed

    def algorithms(self) -> dict[str, Algorithm]:
        """Return the algorithms that plugins offer, by name. Raises PluginError."""
        found: dict[str, Algorithm] = {}
        owners: dict[str, PluginInfo] = {}
        for info, algorithm in self.ask("specsync_algorithm"):
            if not isinstance(algorithm, Algorithm):
                raise info.error(f"hook specsync_algorithm returns {algorithm!r}, not an Algorithm.")
            if algorithm.name in owners:
                raise info.error(f"algorithm '{algorithm.name}' is offered already by the {owners[algorithm.name]}.")
            found[algorithm.name], owners[algorithm.name] = algorithm, info
        return found

    def algorithm_problems(self, registry: Registry) -> Iterator[tuple[PluginInfo, str]]:
        """Yield what is wrong with an algorithm that a plugin offers: no draft network, or no sites of its name.

        Raises:
            PluginError: as `algorithms`.
        """
        kinds = get_args(DraftKind)
        for info, algorithm in self.ask("specsync_algorithm"):
            where = f"algorithm '{algorithm.name}'"
            if algorithm.draft_kind not in kinds:
                hint = did_you_mean(str(algorithm.draft_kind), kinds)
                yield info, f"{where}: unknown draft_kind {algorithm.draft_kind!r}{hint}. Known: {', '.join(kinds)}."
            own = {site.algorithm for site in registry.sites if registry.sources[site.slug] == info.distribution}
            known = sorted(own or registry.algorithms)
            if algorithm.name not in known:
                hint = did_you_mean(algorithm.name, known)
                yield info, f"{where} has no site{hint}: the plugin's sites belong to {', '.join(known)}."

    def broadcast_points(self, engine: EngineFacts) -> list[BroadcastPoint]:
        """Return where in this engine's code the plugins' sites are decided. Raises PluginError."""
        return [point for _, point in self.owned_points(engine)]

    def owned_points(self, engine: EngineFacts) -> list[tuple[PluginInfo, BroadcastPoint]]:
        """Return `broadcast_points`, each with its plugin. Raises PluginError."""
        found: list[tuple[PluginInfo, BroadcastPoint]] = []
        for info, points in self.ask("specsync_broadcast_points", engine=engine):
            if not isinstance(points, (list, tuple)) or not all(isinstance(point, BroadcastPoint) for point in points):
                raise info.error(f"hook specsync_broadcast_points returns {points!r}, not a list of BroadcastPoint.")
            found += [(info, point) for point in points]
        return found


class _Distributions:
    """Names and versions; reading a distribution's metadata costs milliseconds, so each is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Distribution, tuple[str, str]]] = {}

    def __call__(self, point: EntryPoint) -> tuple[str, str]:
        if point.dist is None:
            return "an unknown distribution", "?"
        if id(point.dist) not in self._known:
            metadata = point.dist.metadata
            self._known[id(point.dist)] = (point.dist, (metadata["Name"], metadata["Version"]))
        return self._known[id(point.dist)][1]


def _import(info: PluginInfo, point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise info.error(f"it cannot be imported: {type(error).__name__}: {error}.") from error


def _check_disabled(disable: Iterable[str], known: list[str]) -> None:
    """Refuse a misspelt name, which would leave the plugin active; only log one that is not installed."""
    for name in sorted(set(disable) - set(known)):
        if get_close_matches(name, known, n=1, cutoff=0.7):
            raise PluginError(
                f"SPECSYNC_DISABLE: unknown plugin '{name}'{did_you_mean(name, known)}."
                f" Installed: {', '.join(known)}. List them with `specsync plugins`."
            )
        logger.warning("SPECSYNC_DISABLE: plugin '%s' is not installed. Installed: %s.", name, ", ".join(known))


def _hook_problems(plugin: object) -> Iterator[str]:
    """Yield what pluggy would not see, or would say less well: misspelt, unmarked and misdeclared hooks."""
    if inspect.isclass(plugin):
        yield f"it names the class {plugin.__name__}; name a module, or an instance of the class."
        return
    for attribute in dir(plugin):
        marks = getattr(inspect.getattr_static(plugin, attribute, None), f"{PROJECT}_impl", None)
        looks_like_hook = attribute.startswith(f"{PROJECT}_") and inspect.isroutine(getattr(plugin, attribute, None))
        if marks is None and not looks_like_hook:
            continue
        hook = (marks or {}).get("specname") or attribute
        if hook not in HOOKS:
            yield f"unknown hook {hook}{did_you_mean(hook, HOOKS)}. Known hooks: {', '.join(HOOKS)}."
        elif marks is None:
            yield f"function {attribute} is not marked as a hook. Put @hookimpl above it."
        else:
            yield from _signature_problems(hook, getattr(plugin, attribute))


def _signature_problems(hook: str, function: Any) -> Iterator[str]:
    specification = inspect.signature(getattr(Specs, hook))
    known = [name for name in specification.parameters if name != "self"]
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is parameter.empty and not str(parameter).startswith("*")
        if required and name not in known:
            shown = str(specification).replace("self, ", "").replace("self", "").replace("'", "")
            yield f"hook {hook}: unknown argument '{name}'{did_you_mean(name, known)}. The hook is {hook}{shown}."
