"""What a reader wants to compare across ranks: versions, hardware, generators. Asks only what is loaded already."""

from __future__ import annotations

import platform
import random
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

BAD_NCCL = {"2.28.9": "hangs of this look came from it alone; 2.30.7 was clean (sgl-project/sglang #33289)"}
"""NCCL versions that the field has reported, and what was reported."""


def library_versions(plugins: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Versions and hardware by name; None for what is absent.

    Args:
        plugins: specsync's plugins by name, with their distribution and version.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "specsync": None}
    with suppress(metadata.PackageNotFoundError):
        versions["specsync"] = metadata.version("specsync-core")
    torch: Any = sys.modules.get("torch")
    versions["torch"] = str(torch.__version__) if torch else None
    versions["cuda"] = torch.version.cuda if torch else None
    versions["nccl"] = _nccl_version() if torch and torch.version.cuda else None
    if _uses_cuda():
        versions |= _device(torch)
    return versions | {f"plugin {name}": version for name, version in (plugins or {}).items()}


def _nccl_version() -> str | None:
    with suppress(Exception):  # a torch without NCCL raises what it likes
        from torch.cuda import nccl

        return ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]
    return None


def _uses_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_available() and torch.cuda.is_initialized())


def _device(torch: Any) -> dict[str, str | None]:
    found: dict[str, str | None] = {"gpu": None, "compute capability": None, "driver": _driver_version()}
    with suppress(RuntimeError):
        found["gpu"] = torch.cuda.get_device_name()
        found["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def _driver_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    with suppress(OSError):
        found = re.search(r"Kernel Module\D*([\d.]+)", Path(path).read_text())
        return found.group(1) if found else None
    return None


def current_device() -> int | None:
    """The calling thread's CUDA device; None where CUDA is not in use."""
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if _uses_cuda() else None


def generators(device: int | None = None) -> dict[str, dict[str, Any]]:
    """Seeds and states of the process's own generators, by name.

    Args:
        device: the rank's CUDA device; None is the calling thread's current one, which is 0 on a thread of our own.

    Of torch's: the seed, and on CUDA the offset, i.e. how much was drawn. Of all that live on the host a checksum of
    the state: equal where as much was drawn from the same seed. Reading them changes and awaits nothing.
    """
    found: dict[str, dict[str, Any]] = {"python": {"state": crc32(repr(random.getstate()).encode())}}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        with suppress(Exception):  # a state that numpy does not tell is not known
            _, keys, position, *_ = numpy.random.get_state()
            found["numpy"] = {"state": crc32(keys.tobytes() + bytes(str(position), "ascii"))}
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        state = crc32(bytes(torch.default_generator.get_state().tolist()))
        found["torch"] = {"seed": torch.default_generator.initial_seed(), "state": state}
    if _uses_cuda():
        with suppress(Exception):  # inside a capture the state is not to be read
            generator = torch.cuda.default_generators[current_device() if device is None else device]
            offset = int.from_bytes(bytes(generator.get_state()[8:16].tolist()), "little")  # behind the seed
            found["cuda"] = {"seed": generator.initial_seed(), "offset": offset}
    return found
