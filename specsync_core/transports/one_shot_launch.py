"""Compile the kernels of ``one-shot`` and launch them with little host time.

Triton's own dispatcher looks at every argument of every launch (15 us on an H200's host); here a variant is compiled
once for fixed argument types, and a launch hands Python integers to the compiled launcher. Imported only where
Triton is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

# mypy: disable-error-code="import-not-found, import-untyped"
import torch
import triton
from triton.compiler import ASTSource

from specsync_core.transports import one_shot_kernel as kernels

Launch = Callable[..., None]
"""Takes the stream's handle and the kernel's arguments, without its constants."""


@dataclass(frozen=True)
class Variant:
    """What `one_shot_kernel.sync_kernel` is compiled for."""

    widths: tuple[int, ...]
    """Element size of each tensor."""
    rank: int
    world: int
    block: int
    mode: int
    """`kernels.OVERWRITE`, `COMPARE_ONLY` or `FETCH`."""
    count: bool
    one_tile: bool
    """All of a call's lines fit into one block."""

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "widths": self.widths,
            "RANK": self.rank,
            "WORLD": self.world,
            "BLOCK": self.block,
            "UNIT": min(8, *self.widths),
            "MODE": self.mode,
            "COUNT": self.count,
            "ONE_TILE": self.one_tile,
        }

    @property
    def signature(self) -> dict[str, Any]:
        tensors = len(self.widths)
        scalars = dict.fromkeys(("state", "stats", "record", "timeout_ns"), "i64")
        return {
            "addresses": ("i64",) * tensors,
            "targets": ("i64",) * tensors,
            "sizes": ("i32",) * tensors,
            "header": "i64",
            "lanes": "i32",
            "inboxes": ("i64",) * self.world,
            **scalars,
            **dict.fromkeys(self.constants, "constexpr"),
        }


WARPS = {32: 1, 64: 2, 128: 4, 256: 8, 512: 16, 1024: 32, 2048: 32}
"""Warps by lines per tile: one line a thread, for a thread waits for its lines one after the other."""


def block_for(lines: int) -> int:
    """Lines that one tile takes: no larger than needed, for a wait ends with the slowest thread."""
    return next((block for block in WARPS if lines <= block), max(WARPS))


def compile_variant(variant: Variant, target: Any = None) -> Any:
    """Compile without launching. ``target`` None is the current device; needs no device otherwise."""
    source = ASTSource(kernels.sync_kernel, variant.signature, variant.constants)
    return compile_source(source, WARPS[variant.block], target)


def compile_source(source: ASTSource, warps: int, target: Any = None) -> Any:
    # One stage: the software pipeliner must not move loads of a slot ahead of the wait for it.
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 1})


@cache
def launcher(variant: Variant, device_index: int) -> Launch:
    """Return a variant's launch on one device. Compiles on first use; never call it first inside a capture."""
    with torch.cuda.device(device_index):
        return bind_launch(compile_variant(variant), (1, 1, 1), tuple(variant.constants.values()))


def bind_launch(compiled: Any, grid: tuple[int, int, int], constants: tuple[Any, ...]) -> Launch:
    """Return ``launch(stream, *arguments)`` for a compiled kernel."""
    run = compiled.run  # loads the binary now
    if not triton.__version__.startswith("3.6."):
        runner = compiled[grid]
        return lambda stream, *arguments: runner(*arguments, *constants, stream=stream)
    # Triton 3.6: past two Python frames, straight to the launcher written in C. No scratch memory is in use.
    assert not run.global_scratch_size
    assert not run.profile_scratch_size
    launch, function, metadata = run.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    def call(stream: int, *arguments: Any) -> None:
        launch(
            *grid, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments,
            *constants,
        )  # fmt: skip

    return call
