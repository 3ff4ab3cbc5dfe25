"""The host agreements of one `SpecTpSync`: which ones meet, how they travel together, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from specsync_core.checks import StateCheck, compare_state, digest_of, numbers_of
from specsync_core.consensus import Ask, Op, agree_together
from specsync_core.errors import RegistryError
from specsync_core.groups import Group, consensus_group
from specsync_core.registry import Site

if TYPE_CHECKING:
    from specsync_core.sync import SpecTpSync

logger = logging.getLogger("specsync")


@dataclass
class Wanted:
    """One value that is to be agreed on."""

    site: Site
    op: Op
    compute: Callable[[], Any]
    leads: bool = False
    """Only group rank 0 computes."""


class Agreements:
    """Agrees for a `SpecTpSync`, and keeps its call numbers."""

    def __init__(self, owner: SpecTpSync) -> None:
        self._owner = owner
        self._calls: dict[str, int] = {}
        self._warned: set[str] = set()
        """Check sites of which a difference was logged."""

    def want(self, key: Site | str | int, op: Op, compute: Callable[[], Any], *, leads: bool = False) -> Wanted:
        """Raises RegistryError when there is no such site, or it is not of kind consensus."""
        site = self._owner.plan.registry.site(key)
        if site.kind != "consensus":
            raise RegistryError(f"{site} is of kind {site.kind}; agree takes consensus sites. Use sync.")
        return Wanted(site, op, compute, leads)

    def settle(self, wanted: Sequence[Wanted], chosen: Group | None) -> list[Any]:
        """Return the values, in order: those of sites that are on cost one collective together."""
        group = consensus_group(self._owner.groups, chosen)
        meets = [
            group.world_size > 1 and self._owner.plan.mode(one.site.slug) != "off" for one in wanted
        ]  # alike on every rank: the handshake compared the plans
        asks = [self._ask(one) for one, meet in zip(wanted, meets, strict=True) if meet]
        agreed = iter(agree_together(group.cpu_group, asks) if asks else ())
        return [
            self._keep(one, *next(agreed)) if meet else self._decide_alone(one)
            for one, meet in zip(wanted, meets, strict=True)
        ]

    def _decide_alone(self, one: Wanted) -> Any:
        value = self._show_own(one)
        self._show_result(one.site, value)
        return value

    def check(self, key: Site | str | int, value: Any, group: Group) -> StateCheck:
        """`SpecTpSync.check`, over the group that is to be compared."""
        owner = self._owner
        site = owner.plan.registry.site(key)
        if site.kind != "check":
            raise RegistryError(f"{site} is of kind {site.kind}; check takes check sites, such as state-seq-lens.")
        if group.world_size == 1 or owner.plan.mode(site.slug) == "off":
            return StateCheck(site.slug, owner.step, 0)
        call = self._number(site.slug)
        if owner.taps:
            value = self._show_state(site, value)
        found = compare_state(group.cpu_group, site.slug, owner.step, call, value)
        self._count_state(site, found, group.rank_in_group)
        return found

    def _show_state(self, site: Site, value: Any) -> Any:
        """Show a copy of the value to the taps, which may change it; what is not numbers is shown as its hash."""
        shown = numbers_of(value)
        hashed = shown is None
        if shown is None:
            shown = torch.tensor([int(digest_of(value)[:15], 16)])
        for tap in self._owner.taps:
            tap.before(site, (shown,), self._owner.step)
        for tap in self._owner.taps:
            tap.after(site, (shown,), self._owner.step)
        return value if hashed else shown

    def _count_state(self, site: Site, found: StateCheck, rank: int) -> None:
        held = found.values or {}
        right = next((theirs for other, theirs in held.items() if other not in found.odd_ranks), None)
        self._owner.count_value(site, held[rank] if rank in found.odd_ranks else right, right)
        if not found and rank == 0 and site.slug not in self._warned:
            self._warned.add(site.slug)
            logger.warning("%s", found.text)

    def _number(self, slug: str) -> int:
        call = self._calls[slug] = self._calls.get(slug, 0) + 1
        return call

    def _ask(self, one: Wanted) -> Ask:
        slug = one.site.slug
        call = self._number(slug)
        # In audit the others compute too: there is nothing to compare otherwise, and they keep their own values.
        leads = one.leads and self._owner.plan.mode(slug) == "sync"
        return Ask(slug, call, one.op, lambda: self._show_own(one), leads)

    def _show_own(self, one: Wanted) -> Any:
        """Compute this rank's value and show it to the taps, which may change a number or flag."""
        value = one.compute()
        if not self._owner.taps or not isinstance(value, (bool, int, float)):
            return value
        shown = torch.tensor(float(value), dtype=torch.float64)
        for tap in self._owner.taps:
            tap.before(one.site, (shown,), self._owner.step)
        return value if shown.item() == value else type(value)(shown.item())

    def _keep(self, one: Wanted, own: Any, agreed: Any) -> Any:
        is_synced = self._owner.plan.mode(one.site.slug) == "sync"
        self._owner.count_value(one.site, own, agreed, compared=not (one.leads and is_synced))
        value = agreed if is_synced else own
        self._show_result(one.site, value)
        return value

    def _show_result(self, site: Site, value: Any) -> None:
        if isinstance(value, (bool, int, float)):
            for tap in self._owner.taps:
                tap.after(site, (torch.tensor(float(value), dtype=torch.float64),), self._owner.step)


@dataclass
class Pending:
    """Agreements that wait for each other, to travel in one collective; `SpecTpSync.together` makes it."""

    _agreements: Agreements
    _group: Group | None
    _wanted: list[Wanted] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)

    def agree(self, site: Site | str | int, value: Any, op: Op = "root") -> Promise:
        """As `SpecTpSync.agree`; the value is there when the ``with`` block ends."""
        return self._add(self._agreements.want(site, op, lambda: value))

    def lead(self, site: Site | str | int, compute: Callable[[], Any]) -> Promise:
        """As `SpecTpSync.lead`; group rank 0 computes when the ``with`` block ends."""
        return self._add(self._agreements.want(site, "root", compute, leads=True))

    def _add(self, wanted: Wanted) -> Promise:
        self._wanted.append(wanted)
        return Promise(self._values, len(self._wanted) - 1)

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._wanted:
            self._values += self._agreements.settle(self._wanted, self._group)


@dataclass(frozen=True)
class Promise:
    """A value that is agreed on when its ``with`` block ends."""

    _values: Sequence[Any]
    _index: int

    @property
    def value(self) -> Any:
        """The agreed value.

        Raises:
            RuntimeError: the block has not ended yet, or it ended in an error.
        """
        if self._index >= len(self._values):
            raise RuntimeError("the value is agreed on when the `with sync.together()` block ends")
        return self._values[self._index]


def settle_mapping(agreements: Agreements, values: Mapping[Any, tuple[Any, Op]], group: Group | None) -> dict[Any, Any]:
    """`SpecTpSync.agree_many`."""
    wanted = [agreements.want(key, op, lambda value=value: value) for key, (value, op) in values.items()]  # type: ignore[misc]
    return dict(zip(values, agreements.settle(wanted, group), strict=True))
