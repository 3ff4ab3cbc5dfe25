"""specsync: keeps the tensor-parallel ranks of an inference engine in agreement during speculative decoding.

The public names below are imported when they are first used, so that ``import specsync_core`` costs
neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specsync_core import decisions, replay
    from specsync_core.algorithm import (
        Algorithm,
        Batch,
        Draft,
        DraftNetwork,
        Speculator,
        SpeculatorContext,
        Verdict,
    )
    from specsync_core.engines.vllm_points import vllm_draft_steps
    from specsync_core.errors import (
        ControlError,
        EngineError,
        GroupError,
        PayloadError,
        PlanMismatchError,
        PluginError,
        PolicyError,
        RegistryError,
        SpecSyncError,
        TransportError,
    )
    from specsync_core.facts import EngineFacts, Facts
    from specsync_core.groups import ParallelGroups, TorchGroup, select_group
    from specsync_core.hookspecs import BroadcastPoint, Call, Scope, hookimpl, no_tensors
    from specsync_core.manager import load_registry, plugin_manager
    from specsync_core.memory import can_capture, can_fold_sampling, folded_sampling_bytes
    from specsync_core.plan import Plan, resolve_plan
    from specsync_core.policy import parse_sites
    from specsync_core.registry import Registry, Site
    from specsync_core.sync import SpecTpSync

_NAMES_BY_MODULE = {
    "algorithm": ("Algorithm", "Batch", "Draft", "DraftNetwork", "Speculator", "SpeculatorContext", "Verdict"),
    "engines.vllm_points": ("vllm_draft_steps",),
    "errors": (
        "ControlError",
        "EngineError",
        "GroupError",
        "PayloadError",
        "PlanMismatchError",
        "PluginError",
        "PolicyError",
        "RegistryError",
        "SpecSyncError",
        "TransportError",
    ),
    "facts": ("EngineFacts", "Facts"),
    "groups": ("ParallelGroups", "TorchGroup", "select_group"),
    "hookspecs": ("BroadcastPoint", "Call", "Scope", "hookimpl", "no_tensors"),
    "manager": ("load_registry", "plugin_manager"),
    "memory": ("can_capture", "can_fold_sampling", "folded_sampling_bytes"),
    "plan": ("Plan", "resolve_plan"),
    "policy": ("parse_sites",),
    "registry": ("Registry", "Site"),
    "sync": ("SpecTpSync",),
}
_MODULES = ("decisions", "replay")
"""Modules that are public as a whole: the mathematics that algorithms share, and their captured form."""
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "Algorithm",
    "Batch",
    "BroadcastPoint",
    "Call",
    "ControlError",
    "Draft",
    "DraftNetwork",
    "EngineError",
    "EngineFacts",
    "Facts",
    "GroupError",
    "ParallelGroups",
    "PayloadError",
    "Plan",
    "PlanMismatchError",
    "PluginError",
    "PolicyError",
    "Registry",
    "RegistryError",
    "Scope",
    "Site",
    "SpecSyncError",
    "SpecTpSync",
    "Speculator",
    "SpeculatorContext",
    "TorchGroup",
    "TransportError",
    "Verdict",
    "__version__",
    "can_capture",
    "can_fold_sampling",
    "decisions",
    "folded_sampling_bytes",
    "hookimpl",
    "load_registry",
    "no_tensors",
    "parse_sites",
    "plugin_manager",
    "replay",
    "resolve_plan",
    "select_group",
    "vllm_draft_steps",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
