"""Which transport ``auto`` would take here, before any rank has started: what can be known without a group.

The ranks decide at start-up, by self-test, and say so in their log and in `SpecTpSync.transports`. torch is imported
only where there is a GPU to ask about.
"""

from __future__ import annotations

from importlib.util import find_spec

from specsync_core.settings import Setting

OLDEST_CAPABILITY = (7, 0)


def forecast(platform: str, here: str) -> Setting[str]:
    """Return the transport that ``auto`` would take, with the reason for each one that it would not.

    Args:
        platform: the plan's.
        here: this machine's. What needs a look at its GPUs is only known where the two are equal.
    """
    obstacle = one_shot_obstacle(platform, here)
    if obstacle is not None:
        return Setting("grouped", "one collective per call", (("one-shot", obstacle),))
    test = (
        "if it passes its self-test"
        if platform == here
        else "on NVIDIA GPUs of one machine, if it passes its self-test"
    )
    return Setting("one-shot", f"{test}; else grouped, else group")


def one_shot_obstacle(platform: str, here: str) -> str | None:
    """Return what keeps ``one-shot`` from this platform, or from the GPUs of this machine; None where nothing does."""
    if platform != "cuda":
        return "its kernel is written for NVIDIA GPUs" if platform == "rocm" else "it needs CUDA tensors"
    return None if platform != here else _obstacle_on_these_gpus()


def _obstacle_on_these_gpus() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return f"this torch ({torch.__version__}) sees no GPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    count = torch.cuda.device_count()
    old = [device for device in range(count) if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY]
    if old:
        return f"GPU {old[0]} ({torch.cuda.get_device_name(old[0])}) is older than compute capability 7.0"
    for device in range(1, count):
        if not torch.cuda.can_device_access_peer(0, device):
            return f"GPU 0 has no peer access to GPU {device}"
    return None
