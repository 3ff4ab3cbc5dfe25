"""Checks of derived state: is what a rank made of the decisions still the same on every rank?

Sequence lengths, request ids, graph keys: each rank sends a hash, and all come to the same finding. Only where the
hashes differ do the values travel, so that the finding can name the element.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsync_core.consensus import gather_values
from specsync_core.errors import PayloadError

if TYPE_CHECKING:
    import torch.distributed as dist

MOST_SHOWN = 4096
"""Elements that ranks show each other where hashes differ; a difference behind them is known by the hash alone."""


@dataclass(frozen=True)
class StateCheck:
    """What a check found; the same on every rank, so that ranks which act on it act alike. False when ranks differ."""

    site: str
    step: int
    call: int
    """The site's call on this rank, from 1; 0 where nothing was compared."""
    odd_ranks: tuple[int, ...] = ()
    """Group ranks that hold something else than the majority, or, without a majority, than group rank 0."""
    has_majority: bool = False
    """Three or more ranks, and more than half of them agree: the others are the odd ones out."""
    index: int | None = None
    """Of the first element that differs, in the order of the flattened value; None where it is not known."""
    values: Mapping[int, Any] | None = None
    """By group rank, that element; where it is not known, the value's hash."""
    world_size: int = 1

    @property
    def equal(self) -> bool:
        return not self.odd_ranks

    def __bool__(self) -> bool:
        return self.equal

    @property
    def text(self) -> str:
        """The finding in a sentence."""
        where = f"{self.site}, step {self.step}, call {self.call}"
        if not self.call:
            return f"{self.site}: nothing was compared, since the site is off or the group has one rank"
        if self.equal:
            return f"{where}: equal on {self.world_size} ranks"
        assert self.values is not None
        what = "the hash" if self.index is None else f"element {self.index}"
        by_value: dict[str, list[int]] = {}
        for rank in (*self.odd_ranks, *(rank for rank in self.values if rank not in self.odd_ranks)):
            by_value.setdefault(_show(self.values[rank]), []).append(rank)
        held = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
        odd = f"{_ranks(self.odd_ranks)} {'is' if len(self.odd_ranks) == 1 else 'are'} the odd one"
        named = (
            f"{odd}{'' if len(self.odd_ranks) == 1 else 's'} out of {self.world_size}: " if self.has_majority else ""
        )
        alone = "" if self.has_majority else " (no majority: either may be wrong)"
        return f"{where}: {named}{what} is {held}{alone}"


def compare_state(cpu_group: dist.ProcessGroup, site: str, step: int, call: int, value: Any) -> StateCheck:
    """Compare a value over a CPU group; a collective, and a second one where ranks differ.

    Raises:
        PayloadError: on every rank, when one rank's value cannot be hashed.
        TransportError: the ranks' calls do not match, a peer gave up, or the collective failed.
    """
    hashes = gather_values(cpu_group, site, call, "check", lambda: digest_of(value))
    odd, has_majority = odd_ones(hashes)
    if not odd:
        return StateCheck(site, step, call, world_size=len(hashes))
    shown = gather_values(cpu_group, site, call, "check, the values", lambda: outline(value))
    index = _first_difference(shown, odd[0], next(rank for rank in range(len(shown)) if rank not in odd))
    held = {rank: hashes[rank] if index is None else _at(theirs, index) for rank, theirs in enumerate(shown)}
    return StateCheck(site, step, call, odd, has_majority, index, held, len(hashes))


def odd_ones(contents: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that differ from the majority, or without one from rank 0, and whether there is one."""
    content, votes = Counter(contents).most_common(1)[0]
    has_majority = len(contents) >= 3 and 2 * votes > len(contents)
    right = content if has_majority else contents[0]
    return tuple(rank for rank, held in enumerate(contents) if held != right), has_majority


def digest_of(value: Any) -> str:
    """A hash of numbers, strings, None, tensors, and lists, tuples or dicts of those. Order counts, dtypes do not.

    Raises:
        PayloadError: it holds something else.
    """
    return blake2b(json.dumps(_plain(value)).encode(), digest_size=12).hexdigest()


def numbers_of(value: Any) -> Tensor | None:
    """A copy on the host of a tensor or a list of whole numbers; None for anything else."""
    if isinstance(value, Tensor) and value.numel():
        return torch.tensor(_plain(value), dtype=value.dtype)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int and abs(item) < 2**63 for item in value):
        return torch.tensor(value)
    return None


def outline(value: Any) -> list[Any]:
    """The flattened value's first elements, as JSON can hold them; at the end how many there are."""
    flat: list[Any] = []
    _flatten(_plain(value), flat)
    return [*(_short(element) for element in flat[:MOST_SHOWN]), f"{len(flat)} elements"]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            raise PayloadError("a check reads its value on the host; it cannot be captured into a graph")
        return value.detach().cpu().tolist()
    if hasattr(value, "tolist"):  # a NumPy array or scalar
        return value.tolist()
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        raise PayloadError("a set has no order that ranks share; pass sorted(...)")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PayloadError(
        f"a {type(value).__name__} cannot be compared; pass numbers, strings, tensors, or lists of those"
    )


def _flatten(value: Any, into: list[Any]) -> None:
    if isinstance(value, list):
        for item in value:
            _flatten(item, into)
    else:
        into.append(value)


def _short(element: Any) -> Any:
    return element[:120] if isinstance(element, str) else element


def _first_difference(shown: Sequence[list[Any]], one: int, other: int) -> int | None:
    mine, theirs = shown[one], shown[other]
    for index in range(max(len(mine), len(theirs)) - 1):
        if _at(mine, index) != _at(theirs, index):
            return index
    return None


def _at(elements: list[Any], index: int) -> Any:
    return elements[index] if index < len(elements) - 1 else "absent"


def _ranks(ranks: Sequence[int]) -> str:
    return f"group rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) and value != "absent" else str(value)
