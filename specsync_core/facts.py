"""Facts about the running system that policies and plugins decide by. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is known about a deployment when its plan is resolved."""

    platform: str | None = None
    """``cuda``, ``rocm``, ``cpu`` or another vendor's name; None when not known yet."""
    model: str | None = None
    """The model's name or path as the engine was given it."""
    dp_attention: bool | None = None
    """Whether attention is data parallel; None when not known yet."""


@dataclass(frozen=True)
class EngineFacts(Facts):
    """What is known about the inference engine that asks for broadcast points."""

    engine: str = "demo"
    """``sglang``, ``vllm`` or ``demo``."""
    version: str = "0"
    """The engine's version, as its distribution states it."""
    algorithm: str | None = None
    """The speculative algorithm in use, lower case; None for all."""
