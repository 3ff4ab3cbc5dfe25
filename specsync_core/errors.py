"""The error types. Every message says where, what, the known values and the next act."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecSyncError(Exception):
    """Base of every error that specsync raises on purpose."""


class RegistryError(SpecSyncError, ValueError):
    """A registry file is wrong, two registries collide, or a site does not exist."""


class PolicyError(SpecSyncError, ValueError):
    """A policy, a policy file or an environment variable cannot be understood."""


class PluginError(SpecSyncError):
    """A plugin cannot be imported, or its hooks do not fit the hook specifications."""


class PlanMismatchError(SpecSyncError):
    """Ranks hold different plans or plugins, or a rank did not arrive. Raised on every rank."""


class GroupError(SpecSyncError, ValueError):
    """A group is missing, inert, or not of the shape that the group protocol asks for."""


class PayloadError(SpecSyncError, ValueError):
    """Tensors do not fit their site's declaration, or differ in shape or dtype between ranks."""


class TransportError(SpecSyncError, RuntimeError):
    """A collective failed, timed out, or a peer gave up."""


class ControlError(SpecSyncError):
    """A change of sites while the engine runs was refused, or the control socket cannot be used."""


class UnsettledError(ControlError):
    """A change of sites was asked for, and it is not known here whether it was made, or will be."""


class EngineError(SpecSyncError):
    """An inference engine is not what its adapter knows."""


class BisectError(SpecSyncError):
    """A bisection cannot begin or go on: its command, its report or its options are not what they must be."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest known word, or an empty string.

    The closest is the only one that has all parts of a word with dashes (``vllm-lead``: ``vllm-draft-lead``), else the
    one with the most letters in common.
    """
    words, parts = list(known), set(word.split("-"))
    close = [each for each in words if len(parts) > 1 and parts <= set(each.split("-"))]
    if len(close) != 1:
        close = get_close_matches(word, words, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
