"""The doctor: merge the recordings of a group and say which decision diverged first. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Union

from specsync_core.diagnostics.recording import StrPath, Value

Finding = Literal[
    "drift-hang", "drift-crash", "silent-divergence", "dead-rank", "hang", "healed", "clean", "inconclusive"
]


@dataclass(frozen=True)
class Divergence:
    """The first place where ranks held different values."""

    phase: Literal["before", "after"]
    """``after``: the values that everything is derived from. ``before``: own values, healed by the sync."""
    kind: Literal["value", "shape", "path"]
    """``path``: the ranks went through different sites; ``own`` and ``rank0`` are then slugs."""
    site: str
    step: int
    call: int
    """The site's call number, from 1, on the reference rank."""
    group_rank: int
    """The odd one out: of the minority with three or more ranks, else the one that is not the reference."""
    odd_ranks: tuple[int, ...]
    tensor: str | None
    index: int | None
    """Flat index of the first different element; None when it lies behind the kept values."""
    own: Value | str | None
    rank0: Value | str | None
    """Value of the reference rank: rank 0, or the lowest rank whose recording is there."""
    values: Mapping[int, Value | str | None]
    """By group rank, of all ranks that were compared here."""
    equal_before: bool | None
    """Of phase ``after``: own values were equal before the sync; None when that was not seen."""


@dataclass(frozen=True)
class Wait:
    """What a rank is inside of."""

    group_rank: int
    what: str
    detail: str
    since_s: float
    """Wall time, seconds since the epoch."""
    seconds: float | None
    """How long, when that is known."""
    last_step: int
    failed: str | None
    """The exception's type, when the wait was left by one."""


@dataclass(frozen=True)
class Diagnosis:
    """What the recordings show, and no more."""

    finding: Finding
    verdict: tuple[str, ...]
    """Plain words, one sentence or two a line, the most important first."""
    divergence: Divergence | None
    """The first divergence of committed values."""
    first_healed: Divergence | None
    """The first divergence of own values that the sync healed."""
    waits: Mapping[int, Wait]
    """By group rank."""
    healed: Mapping[str, int]
    """Calls per site whose own values differed and whose committed values were equal."""
    comparisons: int
    """Tensors whose committed values were compared with the reference rank's."""
    world_size: int
    missing_ranks: tuple[int, ...]
    dead_ranks: tuple[int, ...]
    behind_ranks: tuple[int, ...]
    reference_rank: int | None

    @property
    def is_finding(self) -> bool:
        """Whether a command should exit with 1."""
        return self.finding not in ("clean", "healed")

    @property
    def text(self) -> str:
        return "\n".join(self.verdict)

    @property
    def _first(self) -> Divergence | None:
        return self.divergence or self.first_healed

    @property
    def site(self) -> str | None:
        return self._first.site if self._first else None

    @property
    def step(self) -> int | None:
        return self._first.step if self._first else None

    @property
    def group_rank(self) -> int | None:
        return self._first.group_rank if self._first else None

    @property
    def tensor(self) -> str | None:
        return self._first.tensor if self._first else None

    @property
    def index(self) -> int | None:
        return self._first.index if self._first else None

    @property
    def own(self) -> Value | str | None:
        return self._first.own if self._first else None

    @property
    def rank0(self) -> Value | str | None:
        return self._first.rank0 if self._first else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that ``json`` writes."""
        flat = ("site", "step", "group_rank", "tensor", "index", "own", "rank0", "is_finding")
        return {**asdict(self), **{name: getattr(self, name) for name in flat}}


def diagnose(
    recordings: Union[StrPath, Iterable[StrPath]],  # noqa: UP007
    exit_codes: Mapping[int, int | None] | None = None,
    *,
    hang_after_s: float = 1.0,
) -> Diagnosis:
    """Merge the recordings of any subset of a group's ranks.

    Args:
        recordings: a directory that holds recordings, or their paths.
        exit_codes: by group rank, as multiprocessing has them (negative: a signal); None for a rank that still ran
            when it was ended from outside.
        hang_after_s: a living rank's wait counts as a hang from this age on.

    Raises:
        RecordingError: the directory does not exist. Damaged files are no error; the verdict names them.
    """
    raise NotImplementedError
