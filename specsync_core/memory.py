"""The memory gates: free memory, and the two start-up decisions that depend on it.

Ranks measure different amounts of free memory. The decisions below are pure functions, so ranks that call
them with the group's minimum (`SpecTpSync.available_memory_gb`) decide alike.
"""

from __future__ import annotations

from typing import Literal

import torch

from specsync_core.errors import GroupError

GIB = 2**30
CAPTURE_HEADROOM_GIB = 1.0
"""Free memory that capturing a draft graph needs."""

FoldMode = Literal["off", "auto", "force"]


def free_memory_gib(device: str | torch.device, gpu_id: int) -> float:
    """Return this rank's free memory in GiB: of the GPU on CUDA and ROCm, else what the system can still give.

    Raises:
        GroupError: the device type is not known here.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = str(device)
    if kind == "cuda":  # ROCm builds of torch use this name too
        if not torch.cuda.is_available():
            raise GroupError("free memory of a cuda device is not known: this torch sees no GPU.")
        free_bytes, _ = torch.cuda.mem_get_info(gpu_id)
        return free_bytes / GIB
    if kind == "cpu":
        return _available_host_bytes() / GIB
    raise GroupError(f"free memory of a {kind} device is not known here; known devices: cuda (ROCm too), cpu.")


def _available_host_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise GroupError("/proc/meminfo has no MemAvailable line, so the host's free memory is not known.")


def can_capture(free_gib: float, headroom_gib: float = CAPTURE_HEADROOM_GIB) -> bool:
    """Whether the draft graph is captured: at least ``headroom_gib`` GiB are free."""
    return free_gib >= headroom_gib


def folded_sampling_bytes(max_batch: int, gamma: int, vocab_size: int, itemsize: int) -> int:
    """Bytes of folding sampling into the draft graph: ``B * V`` float32 of noise and ``B * G * V`` probabilities.

    Args:
        itemsize: bytes of one probability.
    """
    return max_batch * vocab_size * 4 + max_batch * gamma * vocab_size * itemsize


def can_fold_sampling(mode: FoldMode, free_gib: float | None, needed_bytes: int) -> bool:
    """Whether sampling is folded into the draft graph.

    Args:
        mode: ``off`` and ``force`` decide without memory; ``auto`` needs ``needed_bytes`` on top of the
            capture headroom.
        free_gib: the group's minimum; may be None under ``off`` and ``force``, which skip the probe.
    """
    if mode != "auto":
        return mode == "force"
    if free_gib is None:
        raise ValueError("mode 'auto' decides by free memory: pass the group's minimum as free_gib")
    return free_gib * GIB >= CAPTURE_HEADROOM_GIB * GIB + needed_bytes
