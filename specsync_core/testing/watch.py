"""Watching a rank's site calls, and making one of them differ: a tap of `SpecTpSync`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specsync_core.payload import describe
from specsync_core.registry import Site
from specsync_core.testing.capture import enter_site, leave_site
from specsync_core.testing.engine import FakeEngine

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


class Change(NamedTuple):
    """One site call in which one rank is made to differ, before the sync."""

    rank: int
    call: int
    """Index among all of the rank's calls."""
    how: Literal["wrong", "moved"]
    """``wrong``: values that need not be possible. ``moved``: each request gets its neighbour's, which are."""


@dataclass
class SiteCall:
    """One call of one site on one rank."""

    place: str
    slug: str
    label: str
    """Shapes and dtypes."""
    in_capture: bool
    shapes: Shapes
    own: tuple[Tensor, ...] = ()
    """Copies of the values that this rank brought; none where a GPU captures."""
    agreed: tuple[Tensor, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.slug} in {self.place}"


@dataclass
class Watch:
    """Keeps every call of a rank, and carries out a `Change`."""

    rank: int
    rows: int
    """Requests in the batch."""
    change: Change | None = None
    engine: FakeEngine | None = None
    calls: list[SiteCall] = field(default_factory=list)
    sizes: list[tuple[str, str]] = field(default_factory=list)
    """By site, what is wrong with a payload's number of requests."""

    def before(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        in_capture = enter_site(site.slug)
        place = "bind" if self.engine is None else self.engine.place
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        call = SiteCall(place, site.slug, describe(tensors), in_capture, shapes)
        if self.change is not None and self.change[:2] == (self.rank, len(self.calls)):
            for tensor in tensors:
                _alter(site, tensor, self.change.how, self.rows)
        call.own = self._copied(tensors, in_capture)
        self._check_rows(site, tensors)
        self.calls.append(call)

    def after(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        call = self.calls[-1]
        call.agreed = self._copied(tensors, call.in_capture)
        leave_site()

    def _copied(self, tensors: Sequence[Tensor], in_capture: bool) -> tuple[Tensor, ...]:
        if in_capture and any(tensor.is_cuda for tensor in tensors):
            return ()  # copies would become part of the graph
        return tuple(tensor.detach().cpu().clone() for tensor in tensors)

    def _check_rows(self, site: Site, tensors: Sequence[Tensor]) -> None:
        for spec, tensor in zip(site.tensors, tensors):  # noqa: B905 - optional tensors may be left out
            for letter, size in zip(spec.shape, tensor.shape, strict=True):
                if letter == "B" and size != self.rows:
                    self.sizes.append((site.slug, f"{spec.name} has {size} rows, and the batch {self.rows} requests"))


def _alter(site: Site, tensor: Tensor, how: str, rows: int) -> None:
    if site.kind == "consensus":
        _alter_host_value(site, tensor)
    elif how == "moved" and tensor.dim():
        _move(tensor, rows)
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.add_(1)


def _move(tensor: Tensor, rows: int) -> None:
    """Each request gets its neighbour's values; where these are equal, numbers above 1 become one less."""
    size = tensor.shape[0]
    moved = tensor.roll(size // rows if rows and size % rows == 0 else 1, dims=0)
    tensor.copy_(torch.where(tensor > 1, tensor - 1, tensor) if torch.equal(moved, tensor) else moved)


def _alter_host_value(site: Site, value: Tensor) -> None:
    """A gate sees no memory at all, a flag the opposite, a number one more."""
    if site.cause == "memory":
        value.zero_()
    else:
        value.copy_(1 - value if value.item() in (0, 1) else value + 1)
