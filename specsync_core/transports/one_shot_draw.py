"""Fused draw: each row's winning token, drawn by group rank 0 and written on every rank in one launch.

A step of a Markov draft is a draw and a sync; here it is one kernel, which also draws faster than ``torch.argmax``
over a vocabulary (one block per row there). The token is the one that ``argmax`` and a sync would give, bit for bit.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsync_core.errors import PayloadError
from specsync_core.transports.one_shot_protocol import SLOT_LANES, Header

if TYPE_CHECKING:
    from specsync_core.transports.one_shot import OneShotTransport

SCORES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = SLOT_LANES
PROGRAMS = 1056
"""Eight for each multiprocessor of an H200; fewer and larger spans were up to twice as slow there."""
SMALLEST = -(1 << 63)

Draw = Callable[[Tensor, "Tensor | None", Tensor], None]
"""Takes scores, noise and the output."""


def find_draw_problem(scores_BV: Tensor, noise_BV: Tensor | None, out_B: Tensor | None = None) -> str | None:
    """Return why these cannot be drawn from, or not into ``out_B``, or None."""
    if scores_BV.dim() != 2 or scores_BV.dtype not in SCORES:
        return f"scores must be float32, bfloat16 or float16 [B, V], not {scores_BV.dtype} {list(scores_BV.shape)}"
    if scores_BV.shape[1] == 0 or scores_BV.shape[1] >= 1 << 31:
        return f"the vocabulary must have 1 to 2**31 - 1 tokens, not {scores_BV.shape[1]}"
    if out_B is not None and (out_B.dtype, out_B.shape, out_B.device, out_B.is_contiguous()) != (
        torch.int64,
        scores_BV.shape[:1],
        scores_BV.device,
        True,
    ):
        given = f"{out_B.dtype} {list(out_B.shape)} on {out_B.device}" + ("" if out_B.is_contiguous() else ", strided")
        return f"out must be int64 [{scores_BV.shape[0]}], contiguous, on {scores_BV.device}, not {given}"
    if noise_BV is None:
        return None
    if noise_BV.dtype != torch.float32 or noise_BV.shape != scores_BV.shape or noise_BV.device != scores_BV.device:
        given = f"{noise_BV.dtype} {list(noise_BV.shape)}"
        return f"noise must be float32 {list(scores_BV.shape)} on the scores' device, not {given}"
    return None


def draw_then(scores_BV: Tensor, noise_BV: Tensor | None) -> Tensor:
    """This rank's own draw: int64 ``[B]``, ``argmax(scores)`` or ``argmax(scores / noise)``, in float32."""
    if noise_BV is None:
        return scores_BV.argmax(dim=-1)
    return (scores_BV.float() / noise_BV).argmax(dim=-1)


def span_for(rows: int, vocabulary: int) -> int:
    """Elements of a row that one program reads."""
    return 1024 if rows * vocabulary <= 1024 * PROGRAMS else 2048


def make_draw(
    transport: OneShotTransport, slug: str, label: str, scores_BV: Tensor, noisy: bool, stats: Tensor, count: bool
) -> Draw:
    """Prepare the draw of one shape and dtype; the ranks make it together.

    Args:
        stats: the counters of this signature.
        count: compare each rank's own draw with group rank 0's.
    """
    rows, vocabulary = scores_BV.shape
    if rows > MOST_ROWS:
        raise PayloadError(f"{slug}: a fused draw takes up to {MOST_ROWS} rows, not {rows}. Draw, then sync.")
    channel, device, span = transport.channel, scores_BV.device, span_for(rows, vocabulary)
    header = Header.of(slug, label, rows * 8).word
    channel.known[header] = f"{slug} with {label}"
    cells = torch.full((max(rows, 1),), SMALLEST, dtype=torch.int64, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    launch = _launcher(
        channel.rank, channel.world, count, str(scores_BV.dtype), noisy, span,
        1 << max(rows - 1, 0).bit_length(), (rows, -(-vocabulary // span), 1), transport.device_index,
    )  # fmt: skip
    fixed = (
        vocabulary, rows, cells.data_ptr(), ticket.data_ptr(), header, channel.inboxes, channel.state.data_ptr(),
        stats.data_ptr(), channel.record.data_ptr(), transport.wait_ns,
    )  # fmt: skip

    def draw(scores_BV: Tensor, noise_BV: Tensor | None, out_B: Tensor, _keep: object = (cells, ticket, stats)) -> None:
        transport.check()
        noise = 0 if noise_BV is None else noise_BV.data_ptr()
        launch(transport.stream(), scores_BV.data_ptr(), noise, out_B.data_ptr(), scores_BV.stride(0), *fixed)

    return draw


@cache
def _launcher(
    rank: int, world: int, count: bool, dtype: str, noisy: bool, span: int, rows: int,
    grid: tuple[int, int, int], device_index: int,
) -> Callable[..., None]:  # fmt: skip
    from specsync_core.transports.one_shot_launch import bind_launch

    compiled, constants = compile_draw(rank, world, count, dtype, noisy, span, rows)
    with torch.cuda.device(device_index):
        return bind_launch(compiled, grid, constants)


def compile_draw(
    rank: int,
    world: int,
    count: bool,
    dtype: str,
    noisy: bool,
    span: int,
    rows: int,
    target: Any = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Compile one variant; return it and its constants. ``target`` None is the current device."""
    import triton.language as tl
    from triton.compiler import ASTSource

    from specsync_core.transports.one_shot_draw_kernel import draw_kernel
    from specsync_core.transports.one_shot_launch import compile_source

    constants = {
        "RANK": rank, "WORLD": world, "BLOCK": 128, "COUNT": count,
        "SCORE": getattr(tl, dtype.removeprefix("torch.")), "NOISY": noisy, "SPAN": span, "ROWS": rows,
    }  # fmt: skip
    signature: dict[str, Any] = {
        "scores": "i64", "noise": "i64", "out": "i64", "stride": "i64", "vocabulary": "i32", "rows": "i32",
        "cells": "i64", "ticket": "i64", "header": "i64", "inboxes": ("i64",) * world,
        **dict.fromkeys(("state", "stats", "record", "timeout_ns"), "i64"),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    source = ASTSource(draw_kernel, signature, constants)
    return compile_source(source, 4, target), tuple(constants.values())
