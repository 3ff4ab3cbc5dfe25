"""What lets sites change while an engine runs: points that can be switched, and graphs that know their plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsync_core.errors import PlanMismatchError

if TYPE_CHECKING:
    from specsync_core.point import PointCall
    from specsync_core.sync import SpecTpSync


class Switch:
    """A bound point whose site may change mode; used only where live control is on."""

    __slots__ = ("_captures", "_slug", "now")

    def __init__(self, slug: str, now: PointCall, captures: Captures) -> None:
        self._slug = slug
        self.now = now
        """What a call does under the plan in force."""
        self._captures = captures

    def __call__(self, *tensors: Tensor, logits: Tensor | None = None) -> Any:
        if tensors:
            self.look(tensors[0])
        return self.now(*tensors, logits=logits)

    def look(self, tensor: Tensor) -> None:
        """Note a call that is captured into a graph."""
        if getattr(tensor, "is_cuda", False) and torch.cuda.is_current_stream_capturing():
            self._captures.note(self._slug)


def in_force(point: PointCall, tensor: Tensor) -> PointCall:
    """Return what a point does under the plan in force, for a call with this tensor."""
    if not isinstance(point, Switch):
        return point
    point.look(tensor)
    return point.now


class Capture:
    """Which plan a graph was captured under; `SpecTpSync.capturing` makes it."""

    __slots__ = ("_owner", "digest", "generation")

    def __init__(self, owner: SpecTpSync) -> None:
        self._owner = owner
        self.generation = owner.plan_generation
        self.digest = owner.plan.digest

    @property
    def is_current(self) -> bool:
        """Whether the plan is still the one of the capture; cheap enough for every replay."""
        return self.generation == self._owner.plan_generation

    def check(self) -> None:
        """Refuse a replay under another plan: the graph would do what the old one says, and peers may not.

        Raises:
            PlanMismatchError: the plan has changed since. It changes on all ranks at the same step, so all raise.
        """
        if not self.is_current:
            raise PlanMismatchError(
                f"a graph that was captured under plan {self.digest[:12]} (generation {self.generation}) must not be"
                f" replayed under plan {self._owner.plan.digest[:12]} (generation {self._owner.plan_generation}):"
                " its calls would follow the old plan. Capture it again, on every rank at the same step."
            )


class Captures:
    """The captures that go through one `SpecTpSync`: whether their graphs know the plan, or are the engine's own."""

    def __init__(self) -> None:
        self._known = 0
        self.foreign: dict[str, None] = {}
        """Sites that were captured into graphs that do not check the plan before they replay."""

    @contextmanager
    def known(self) -> Iterator[None]:
        """A capture whose graph checks the plan before each replay."""
        self._known += 1
        try:
            yield
        finally:
            self._known -= 1

    def note(self, slug: str) -> None:
        """Note a call inside a capture."""
        if not self._known:
            self.foreign[slug] = None
