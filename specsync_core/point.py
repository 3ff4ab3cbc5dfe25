"""One site that is on, bound to its group and transport: the hot path of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from specsync_core.collectives import AbsentRankError, GroupStore
from specsync_core.counters import SiteCounter
from specsync_core.errors import PayloadError, SpecSyncError, TransportError
from specsync_core.groups import Group
from specsync_core.payload import Packet, Signature, declared, describe, find_problem, signature_of
from specsync_core.ragged import RaggedMove, describe_ragged, keep_in_place, ragged_signature
from specsync_core.registry import Site
from specsync_core.transports import Transport
from specsync_core.transports.base import CountingTransport, Move, copy_all_
from specsync_core.transports.framed import FramedTransport
from specsync_core.transports.one_shot_draw import MOST_ROWS

if TYPE_CHECKING:
    from specsync_core.sync import SpecTpSync

PointCall = Callable[..., Any]
"""Takes a site's tensors, and ``logits=`` if there are any; returns the one tensor, or all of them as a tuple."""


def passthrough(*tensors: Tensor, logits: Tensor | None = None) -> Any:
    """A point that does nothing: the site is off, or the group has one rank."""
    return tensors[0] if len(tensors) == 1 else tensors


class Point:
    """One site that is on, bound to its group, transport and counter. Calling it is the hot path."""

    def __init__(
        self,
        owner: SpecTpSync,
        site: Site,
        group: Group,
        store: GroupStore | None,
        transport: Transport,
        counter: SiteCounter,
    ) -> None:
        self._owner = owner
        self._site = site
        self._group = group
        self._store = store
        self._transport = transport
        self._counter = counter
        self._overwrites = owner.plan.mode(site.slug) == "sync"
        self._compares = owner.plan.counters or not self._overwrites
        self._moves: dict[Signature, tuple[Move, str, Packet]] = {}
        """With the words for the place, for what peers are told."""
        self._frames: FramedTransport | None = None
        self._ragged: dict[Any, tuple[RaggedMove, str]] = {}
        self._fused: dict[tuple[Signature, bool], tuple[Callable[..., None], str]] = {}

    def __call__(self, *tensors: Tensor, logits: Tensor | None = None) -> Any:
        try:
            move, place, packet = self._known(tensors) or self._admit(tensors)
            if self._store is not None:
                self._store.glance()
                self._store.place = place
            move(tensors)
            if logits is not None and self._compares:
                self._counter.note_gap(packet, tensors, logits)
        except BaseException as error:
            self.give_up(error, tensors)
        return tensors[0] if len(tensors) == 1 else tensors

    def _known(self, tensors: Sequence[Tensor]) -> tuple[Move, str, Packet] | None:
        try:
            return self._moves.get(signature_of(tensors))
        except AttributeError:  # not tensors: `_admit` says which
            return None

    def _bind(self, packet: Packet, tensors: Sequence[Tensor]) -> Move:
        transport = self._transport_for(tensors[0].device)
        if isinstance(transport, CountingTransport):
            move, counted = transport.bind(packet, tensors, overwrite=self._overwrites, count=self._compares)
            transport.set_step(self._owner.step)
            self._counter.add(counted, packet)
            return move
        transport.prepare(packet, tensors)
        self._counter.prepare(packet, tensors, self._owner.clock)
        return partial(self._move, transport, packet)

    def _transport_for(self, device: torch.device) -> Transport:
        """The point's transport, or for host tensors, where that one works on devices alone, frames."""
        if device.type != "cpu" or not isinstance(self._transport, CountingTransport):
            return self._transport
        if self._frames is None:
            self._frames = FramedTransport(self._group)
        return self._frames

    def _move(self, transport: Transport, packet: Packet, tensors: Sequence[Tensor]) -> None:
        if not self._compares:
            transport.overwrite_(packet, tensors)
            self._counter.count(packet, tensors, None, self._owner.step)
            return
        rank0 = transport.fetch(packet, tensors)
        self._counter.count(packet, tensors, rank0, self._owner.step)
        if self._overwrites:
            copy_all_(tensors, rank0)

    def _admit(self, tensors: Sequence[Any]) -> tuple[Move, str, Packet]:
        """Check a signature that is new on this rank, together with the other ranks, and make its buffers."""
        label = describe(tensors)
        if (problem := self._problem(tensors)) is not None:
            raise problem
        self._meet(label, tensors[0].device)
        packet = Packet(self._site.slug, label, sum(tensor.nbytes for tensor in tensors))
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            move = self._bind(packet, tensors)
        known = self._moves[signature_of(tensors)] = move, f"{self._site} with {label}", packet
        return known

    def _meet(self, label: str, device: torch.device) -> None:
        """Compare a payload that is new on this rank with what the other ranks bring."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"{self._site}: the first call with {label} is inside a graph capture, where buffers cannot be made."
                " Run the step once eagerly with these shapes before capturing it."
            )
        if self._store is None:
            return
        self._store.glance()
        self._store.place = f"{self._site} with {label}, for the first time"
        try:
            labels = self._store.exchange(f"payload of {self._site}", label, self._owner.plan.timeout_s)
        except AbsentRankError as error:
            raise AbsentRankError(
                f"{self._site}: group rank {self._group.rank_in_group} brings {label} for the first time, and could"
                f" not compare it with what the others bring. {error}"
            ) from None
        if len(set(labels)) > 1:
            brought = "; ".join(f"group rank {rank} {theirs}" for rank, theirs in enumerate(labels))
            raise PayloadError(f"{self._site}: the ranks bring different payloads: {brought}.")

    def can_draw(self, scores_BV: Tensor, noise_BV: Tensor | None) -> bool:
        """Whether these can be drawn from and synced in one launch; audit keeps each rank's own draw."""
        if not self._overwrites or not hasattr(self._transport, "bind_draw") or not scores_BV.is_cuda:
            return False
        in_rows = scores_BV.stride(1) == 1 and (noise_BV is None or noise_BV.is_contiguous())
        return in_rows and scores_BV.shape[0] <= MOST_ROWS

    def draw(self, scores_BV: Tensor, noise_BV: Tensor | None, out_B: Tensor) -> Tensor:
        """Draw and sync in one launch; see `SpecTpSync.draw`."""
        key = (signature_of((scores_BV,)), noise_BV is not None)
        try:
            fused, place = self._fused.get(key) or self._admit_draw(scores_BV, noise_BV, key)
            if self._store is not None:
                self._store.glance()
                self._store.place = place
            fused(scores_BV, noise_BV, out_B)
        except BaseException as error:
            self.give_up(error, (out_B,))
        return out_B

    def _admit_draw(
        self, scores_BV: Tensor, noise_BV: Tensor | None, key: tuple[Signature, bool]
    ) -> tuple[Callable[..., None], str]:
        label = f"a draw over {describe((scores_BV,) if noise_BV is None else (scores_BV, noise_BV))}"
        self._meet(label, scores_BV.device)
        transport: Any = self._transport
        with torch.inference_mode(False):
            fused, counted = transport.bind_draw(
                self._site.slug, label, scores_BV, noisy=noise_BV is not None, count=self._compares
            )
        self._counter.add(counted)
        known = self._fused[key] = fused, f"{self._site} with {label}"
        return known

    def ragged(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sync tensors whose sizes may differ between ranks; see `SpecTpSync.sync_ragged`."""
        try:
            move, place = self._known_ragged(tensors) or self._admit_ragged(tensors)
            if self._store is not None:
                self._store.glance()
                self._store.place = place
            rank0 = move.fetch(tensors)
            if self._compares:
                self._count_ragged(tensors, rank0)
            return tuple(keep_in_place(tensors, rank0) if self._overwrites else tensors)
        except BaseException as error:
            self.give_up(error, tensors)

    def _known_ragged(self, tensors: Sequence[Tensor]) -> tuple[RaggedMove, str] | None:
        # Sizes are checked in every call: they are new in every call.
        if (problem := self._problem(tensors)) is not None:
            raise problem
        return self._ragged.get(ragged_signature(tensors))

    def _admit_ragged(self, tensors: Sequence[Tensor]) -> tuple[RaggedMove, str]:
        label = describe_ragged(tensors)
        self._meet(label, tensors[0].device)
        with torch.inference_mode(False):
            transport = self._transport_for(tensors[0].device)
            move = RaggedMove(self._site, transport, self._group.rank_in_group == 0, tensors)
        known = self._ragged[ragged_signature(tensors)] = move, f"{self._site} with {label}"
        return known

    def _count_ragged(self, tensors: Sequence[Tensor], rank0: Sequence[Tensor]) -> None:
        """Count on the host, which knows the sizes anyway: elements where shapes are equal, else the larger tensor."""
        self._counter.count_ragged(
            [tensor.cpu() for tensor in tensors], [other.cpu() for other in rank0], self._owner.step
        )

    def _problem(self, tensors: Sequence[Any]) -> PayloadError | None:
        if (problem := find_problem(self._site, tensors)) is None:
            return None
        return PayloadError(
            f"{self._site}: {problem}. It is called with {describe(tensors)}; the site takes {declared(self._site)}."
        )

    def give_up(self, error: BaseException, tensors: Sequence[Any]) -> NoReturn:
        """Tell the peers, then raise: they are, or will be, waiting for this rank."""
        if isinstance(error, SpecSyncError):
            failure: SpecSyncError = error
        else:
            what = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            failure = self._problem(tensors) or TransportError(f"{self._site}: {what}")
        if self._store is not None:
            self._store.fail(failure)
        if not isinstance(error, Exception):  # an interrupt ends this rank; it is not for a caller to handle
            raise error
        raise failure from (None if failure is error else error)
