"""What every transport must do, on any device. Used by tests/distributed (gloo) and tests/gpu (NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specsync_core.groups import Group
from specsync_core.payload import Packet, describe
from specsync_core.transports.base import Transport

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


def values(dtype: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Values that differ between ranks (seeds) in most elements, for any dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    steps = torch.arange(count, device=device) * 3 + seed * 5 + 1
    if dtype == "bool":
        return ((steps * 2 + seed) % 5 < 2).reshape(shape)
    if dtype.startswith(("int", "uint")):
        return (steps % 100).to(getattr(torch, dtype)).reshape(shape)
    return ((steps % 11) - 5.0).to(getattr(torch, dtype)).reshape(shape)


def payloads(seed: int, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Named payloads as rank ``seed`` holds them."""
    for dtype in DTYPES:
        yield dtype, (values(dtype, (5,), seed, device),)
        yield f"{dtype} scalar", (values(dtype, (), seed, device),)
    triple = (
        values("int32", (8,), seed, device),
        values("int64", (8,), seed, device),
        values("bool", (8, 3), seed, device),
    )
    yield "three tensors of three dtypes", triple
    yield "nothing at all", (values("int64", (0,), seed, device),)
    yield "something and nothing", (values("int64", (3,), seed, device), values("float32", (0, 4), seed, device))
    yield "a transposed view", (values("int64", (4, 6), seed, device).t(),)
    yield (
        "every second element",
        (values("int64", (12,), seed, device)[::2], values("int32", (12,), seed, device)[1::2]),
    )
    yield "a megabyte", (values("int64", (131072,), seed, device),)
    yield "small again after large", (values("int64", (5,), seed, device),)


def conform(build: Callable[[Group], Transport], group: Group, device: torch.device) -> list[str]:
    """Run the table on one rank and return what failed; every rank of the group calls it together."""
    failures = []
    transport = build(group)
    rank = group.rank_in_group
    rows = zip(payloads(rank, device), payloads(rank, device), payloads(0, device), strict=True)
    for (name, own), (_, before), (_, rank0) in rows:
        packet = Packet("conformance", describe(own), sum(tensor.nbytes for tensor in own))
        transport.prepare(packet, own)
        fetched = transport.fetch(packet, own)
        if not same(fetched, rank0):
            failures.append(f"fetch, {name}: not group rank 0's values")
        if not same(own, before):
            failures.append(f"fetch, {name}: changed the caller's tensors")
        for turn in ("first", "second"):
            transport.overwrite_(packet, own)
            if not same(own, rank0):
                failures.append(f"overwrite, {name}, {turn} call: not group rank 0's values")
            for tensor, old in zip(own, before, strict=True):
                tensor.copy_(old)
        if rank and own[0].numel() > 1 and same(before, rank0):
            failures.append(f"{name}: the ranks start from equal values, so this row proves nothing")
    return failures


def same(left: tuple[Tensor, ...] | list[Tensor], right: tuple[Tensor, ...] | list[Tensor]) -> bool:
    return all(
        mine.shape == theirs.shape and torch.equal(_bytes(mine), _bytes(theirs))
        for mine, theirs in zip(left, right, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
