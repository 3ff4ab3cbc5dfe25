"""Facts about the running system that policies and plugins decide by. No torch."""

from __future__ import annotations

from dataclasses import dataclass

PLATFORMS = ("cuda", "rocm", "cpu", "xpu", "npu", "hpu", "musa", "tpu")
"""Platforms that are known by name. Where no site names a platform, every site is opt-in there."""


@dataclass(frozen=True)
class Facts:
    """What is known about a deployment when its plan is resolved."""

    platform: str | None = None
    """``cuda``, ``rocm``, ``cpu`` or another vendor's name; None when not known yet."""
    model: str | None = None
    """The model's name or path as the engine was given it."""
    dp_attention: bool | None = None
    """Whether attention is data parallel; None when not known yet."""
    gathered_logits: bool | None = None
    """Whether every rank's logits come out of an all-gather. This and what follows only explain; see `explain`."""
    gathered_confidences: bool | None = None
    """The same, of what a verify plan is made from."""
    uniform_devices: bool | None = None
    """Whether all ranks run the same kernels on the same model of device."""
    counter_noise: bool | None = None
    """Whether noise is a pure function of request and position."""


@dataclass(frozen=True)
class EngineFacts(Facts):
    """What is known about the inference engine that asks for broadcast points."""

    engine: str = "demo"
    """``sglang``, ``vllm`` or ``demo``."""
    version: str = "0"
    """The engine's version, as its distribution states it."""
    algorithm: str | None = None
    """The speculative algorithm in use, lower case; None for all."""
