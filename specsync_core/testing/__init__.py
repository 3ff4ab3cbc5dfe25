"""What tests of specsync, and of plugins for it, are made of. Each name is imported when it is first used.

- `run_ranks`: a function on real processes with a gloo group.
- `run_fake_ranks` and `FakeGroup`: the same on threads of this process, quick and without a network.
- `FakeEngine`: runs an algorithm against a toy target, and keeps all that it decides.
- `plugin_conformance`: the rules that a plugin must keep, each shown by making one rank differ.
- `full_plan`: every site on, whatever policy the environment or the folder holds.
- `hooked`: an engine's function under a plugin's broadcast point, without the engine.

The pytest plugin (`specsync_core.testing.pytest_plugin`, loaded by itself) offers them as fixtures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsync_core.testing.conformance import (
        ConformanceError,
        Report,
        conformance_on_ranks,
        full_plan,
        plugin_conformance,
    )
    from specsync_core.testing.engine import FakeEngine, Scenario, Skew
    from specsync_core.testing.fake_group import FakeGroup, run_fake_ranks
    from specsync_core.testing.points import hooked
    from specsync_core.testing.ranks import RankError, run_ranks
    from specsync_core.testing.rules import Violation

_NAMES_BY_MODULE = {
    "conformance": ("ConformanceError", "Report", "conformance_on_ranks", "full_plan", "plugin_conformance"),
    "engine": ("FakeEngine", "Scenario", "Skew"),
    "fake_group": ("FakeGroup", "run_fake_ranks"),
    "points": ("hooked",),
    "ranks": ("RankError", "run_ranks"),
    "rules": ("Violation",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "ConformanceError",
    "FakeEngine",
    "FakeGroup",
    "RankError",
    "Report",
    "Scenario",
    "Skew",
    "Violation",
    "conformance_on_ranks",
    "full_plan",
    "hooked",
    "plugin_conformance",
    "run_fake_ranks",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
