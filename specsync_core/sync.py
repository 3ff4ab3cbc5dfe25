"""`SpecTpSync`: what an engine calls where a rank decides.

The path of one call: `SpecTpSync.sync` finds the site's point, which is either `passthrough` (the site is off,
or the group has one rank) or a `Point`; a `Point` knows the payload's signature from an earlier call, or checks
it once with all ranks, and hands the tensors to its transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from specsync_core.collectives import GroupStore, store_of
from specsync_core.consensus import Op, agree_over
from specsync_core.counters import SiteCounter, SiteStats
from specsync_core.errors import PayloadError, RegistryError, SpecSyncError, TransportError
from specsync_core.facts import Facts
from specsync_core.groups import Group, ParallelGroups, consensus_group, select_group
from specsync_core.handshake import shake_hands
from specsync_core.manager import load_registry
from specsync_core.memory import free_memory_gib
from specsync_core.payload import Packet, Signature, declared, describe, find_problem, signature_of
from specsync_core.plan import Plan, resolve_plan
from specsync_core.registry import Site
from specsync_core.transports import Choice, Transport, choose_transport
from specsync_core.transports.base import CountingTransport, Move, copy_all_
from specsync_core.transports.one_shot_draw import draw_then, find_draw_problem

logger = logging.getLogger("specsync")

PointCall = Callable[..., Any]
"""Takes a site's tensors; returns the one tensor, or all of them as a tuple."""


class Tap(Protocol):
    """Sees every call of every site on this rank, also where the site is off."""

    def before(self, site: Site, tensors: Sequence[Tensor], step: int) -> bool | None:
        """Called with this rank's own values, which it may change in place. False skips the broadcast."""
        ...

    def after(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        """Called with the values that everything is derived from."""
        ...


class SpecTpSync:
    """Makes group rank 0's decisions the decisions of the group, at the sites that the plan turns on.

    Args:
        groups: the engine's groups; `select_group` picks the one to broadcast in.
        plan: None resolves one from the environment and the policy file, also when the group has one rank.
        taps: observers of every call (recorder, fault injection). None of them costs nothing.
        handshake: compare plans, payloads and transports between ranks over the groups' ``cpu_group``. Only a
            group that cannot meet (a fake in a test) needs False.

    Raises:
        PolicyError, RegistryError, PluginError: as `resolve_plan`.
        GroupError: a group is missing or does not fit the plan.
        PlanMismatchError: on every rank, when ranks hold different plans or one does not arrive in time.
    """

    def __init__(
        self, groups: ParallelGroups, plan: Plan | None = None, *, taps: Sequence[Tap] = (), handshake: bool = True
    ) -> None:
        if plan is None:
            plan = resolve_plan(load_registry(), facts=Facts(platform=_platform(), dp_attention=groups.dp_attention))
        self.groups = groups
        self.plan = plan.with_dp_attention(groups.dp_attention)
        self.step = 0
        """The engine's step, for diagnostics; `next_step` counts it up."""
        self._taps = tuple(taps)
        self._group = select_group(groups)
        self._store: GroupStore | None = None
        if handshake and groups.tp.world_size > 1:
            shake_hands(store_of(groups.tp.cpu_group), self.plan)
            if self._group.world_size > 1:
                self._store = store_of(self._group.cpu_group)
        if groups.tp.world_size > 1 and groups.tp.rank_in_group == 0 and (warning := self.plan.narrowing_warning()):
            logger.warning(warning)
        self.transports: dict[str, Choice] = {}
        """By requested name: which transport was taken for it, and why."""
        self._counters = {
            slug: SiteCounter(planned.site, planned.mode.value, self._group.rank_in_group)
            for slug, planned in self.plan.sites.items()
        }
        self._agreements: dict[str, int] = {}
        self._points = {
            slug: self._bind(planned.site)
            for slug, planned in self.plan.sites.items()
            if planned.site.kind == "broadcast"
        }

    def enabled(self, site: Site | str | int) -> bool:
        """Whether a call at this site takes part in a collective: it is on, and its group has more than one rank."""
        site = self.plan.registry.site(site)
        group = self._group if site.kind == "broadcast" else self.groups.tp
        return self.plan.mode(site.slug) != "off" and group.world_size > 1

    def sync(self, site: Site | str | int, *tensors: Tensor) -> Any:
        """Overwrite ``tensors`` on every rank with the values that group rank 0 holds, and return them.

        Args:
            site: a `Site`, slug or number of kind broadcast.
            tensors: the site's declared tensors in order, of the same shapes and dtypes on every rank; any
                strides, as long as elements do not share memory. Written in place.

        Returns:
            The same tensor for one, the tuple of the same tensors for several. In ``audit`` mode they keep
            their values and are only compared.

        Raises:
            RegistryError: there is no such site, or it is not of kind broadcast.
            PayloadError: the tensors differ from the site's declaration or between ranks; on every rank.
            TransportError: a peer failed or gave up.

        Graph: capturable where the transport is, once the same shapes were seen eagerly; no allocation,
        no host read, no value-dependent branch.
        """
        return self.point(site)(*tensors)

    def point(self, site: Site | str | int) -> PointCall:
        """Return `sync` bound to one site, for hot loops: call it with the tensors.

        Raises:
            RegistryError: there is no such site, or it is not of kind broadcast.
        """
        found = self._points.get(site) if isinstance(site, str) else None
        return found if found is not None else self._find_point(site)

    def draw(
        self, site: Site | str | int, scores_BV: Tensor, noise_BV: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Draw a token per row and return group rank 0's, the same on every rank.

        The same, bit for bit, as taking ``argmax(scores)``, or ``argmax(scores / noise)`` in float32, and handing it
        to `sync`; where the transport can, both are one launch. With ``noise ~ Exp(1)`` and scores in proportion to
        probabilities that is a sample (exponential race).

        Args:
            site: a site of kind broadcast with one tensor ``[B]`` of int64.
            scores_BV: float32, bfloat16 or float16; without NaN.
            noise_BV: float32, above 0; None for a greedy draw.
            out: int64 ``[B]`` contiguous, to write into; None makes a tensor, in a graph's own pool inside capture.

        Returns:
            int64 ``[B]``; this rank's own draw where the site is off or only audited.

        Raises:
            RegistryError, PayloadError, TransportError: as `sync`.

        Graph: as `sync`: capturable once the same shapes were seen eagerly.
        """
        point = self.point(site)
        if (problem := find_draw_problem(scores_BV, noise_BV)) is not None:
            raise PayloadError(f"{self.plan.registry.site(site)}: {problem}.")
        contiguous = scores_BV.is_contiguous() and (noise_BV is None or noise_BV.is_contiguous())
        if isinstance(point, Point) and point.draws and contiguous:
            tokens_B = scores_BV.new_empty(scores_BV.shape[0], dtype=torch.int64) if out is None else out
            return point.draw(scores_BV, noise_BV, tokens_B)
        tokens_B = draw_then(scores_BV, noise_BV)
        if out is not None:
            tokens_B = out.copy_(tokens_B)
        point(tokens_B)
        return tokens_B

    def _find_point(self, key: Site | str | int) -> PointCall:
        site = self.plan.registry.site(key)
        if site.slug not in self._points:
            raise RegistryError(
                f"{site} is of kind {site.kind}; sync takes broadcast sites."
                + (" Use available_memory_gb or agree." if site.kind == "consensus" else "")
            )
        return self._points[site.slug]

    def _bind(self, site: Site) -> PointCall:
        if self.enabled(site):
            transport = self._transport(self.plan[site.slug].transport.value)
            call: PointCall = Point(self, site, self._group, self._store, transport, self._counters[site.slug])
        else:
            call = passthrough
        return _tapped(self, site, call, self._taps) if self._taps else call

    def _transport(self, requested: str) -> Transport:
        if requested not in self.transports:
            store, timeout_s = self._store, self.plan.timeout_s
            exchange = None if store is None else lambda topic, payload: store.exchange(topic, payload, timeout_s)
            self.transports[requested] = choose_transport(requested, self._group, exchange)
        return self.transports[requested].transport

    def agree(self, site: Site | str | int, value: Any, op: Op = "root", *, group: Group | None = None) -> Any:
        """Agree on a host value over the CPU group: a number, a flag, a string, or a list of those.

        Args:
            op: ``min``, ``max``, ``all``, ``any``, or ``root`` for group rank 0's value; ``all`` and ``any`` of
                lists keep the elements that all or any ranks hold.
            group: the ranks that act on the value; None is the tensor-parallel group.

        Returns:
            The same value on every rank; this rank's own where the site is off or only audited.

        Raises:
            GroupError: the group has one rank while a larger one exists.
            PayloadError: on every rank, when one rank's value does not fit ``op``.
            TransportError: the ranks agree on different things, or a peer failed.

        Graph: host only; never inside capture.
        """
        return self._agree(site, op, group, lambda: value)

    def available_memory_gb(
        self, site: Site | str | int, device: str | torch.device, gpu_id: int, group: Group | None = None
    ) -> float:
        """Return free memory in GiB: the minimum over the group where the site is on, else this rank's own.

        Args:
            site: a memory gate, such as ``dspark-mem``.
            device: ``cuda`` (ROCm too) or ``cpu``.
            group: the ranks that capture together, which may be more than the broadcast group; None is the
                tensor-parallel group.

        Raises:
            GroupError: the group has one rank while a larger one exists, or the device is not known.
            PayloadError: on every rank, when one rank could not measure.
        """
        return float(self._agree(site, "min", group, lambda: free_memory_gib(device, gpu_id)))

    def _agree(self, key: Site | str | int, op: Op, chosen: Group | None, compute: Callable[[], Any]) -> Any:
        site = self.plan.registry.site(key)
        if site.kind != "consensus":
            raise RegistryError(f"{site} is of kind {site.kind}; agree takes consensus sites. Use sync.")
        group = consensus_group(self.groups, chosen)
        mode = self.plan.mode(site.slug)
        if mode == "off" or group.world_size == 1:
            return compute()
        call = self._agreements[site.slug] = self._agreements.get(site.slug, 0) + 1
        tapped = _TappedValue(self, site, compute) if self._taps else None
        own, agreed = agree_over(group.cpu_group, site.slug, call, op, compute if tapped is None else tapped.before)
        self._counters[site.slug].count_value(own, agreed, self.step)
        value = agreed if mode == "sync" else own
        if tapped is not None:
            tapped.after(value)
        return value

    def next_step(self) -> None:
        """Say that the engine begins its next step."""
        self.step += 1
        for choice in self.transports.values():
            if isinstance(choice.transport, CountingTransport):
                choice.transport.set_step(self.step)

    def stats(self) -> Mapping[str, SiteStats]:
        """Return what this rank counted, per slug. Waits for the device where counters live there."""
        return {slug: counter.stats() for slug, counter in self._counters.items()}


def passthrough(*tensors: Tensor) -> Any:
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
        self._moves: dict[Signature, Move] = {}
        self._fused: dict[tuple[Signature, bool], Any] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        try:
            move = self._known(tensors) or self._admit(tensors)
            if self._store is not None:
                self._store.glance()
            move(tensors)
        except (SpecSyncError, RuntimeError) as error:
            self._give_up(error, tensors)
        return tensors[0] if len(tensors) == 1 else tensors

    def _known(self, tensors: Sequence[Tensor]) -> Move | None:
        try:
            return self._moves.get(signature_of(tensors))
        except AttributeError:  # not tensors: `_admit` says which
            return None

    def _bind(self, packet: Packet, tensors: Sequence[Tensor]) -> Move:
        if isinstance(self._transport, CountingTransport):
            move, counted = self._transport.bind(packet, tensors, overwrite=self._overwrites, count=self._compares)
            self._transport.set_step(self._owner.step)
            self._counter.add(counted)
            return move
        self._transport.prepare(packet, tensors)
        self._counter.prepare(packet, tensors)
        return partial(self._move, packet)

    def _move(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        if not self._compares:
            self._transport.overwrite_(packet, tensors)
            self._counter.count(packet, tensors, None, self._owner.step)
            return
        rank0 = self._transport.fetch(packet, tensors)
        self._counter.count(packet, tensors, rank0, self._owner.step)
        if self._overwrites:
            copy_all_(tensors, rank0)

    def _admit(self, tensors: Sequence[Any]) -> Move:
        """Check a signature that is new on this rank, together with the other ranks, and make its buffers."""
        label = describe(tensors)
        if (problem := self._problem(tensors)) is not None:
            raise problem
        self._meet(label, tensors[0].device)
        packet = Packet(self._site.slug, label, sum(tensor.nbytes for tensor in tensors))
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            move = self._bind(packet, tensors)
        self._moves[signature_of(tensors)] = move
        return move

    def _meet(self, label: str, device: torch.device) -> None:
        """Compare a payload that is new on this rank with what the other ranks bring."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"{self._site}: the first call with {label} is inside a graph capture, where buffers cannot be made."
                " Run the step once eagerly with these shapes before capturing it."
            )
        if self._store is None:
            return
        labels = self._store.exchange(f"payload of {self._site}", label, self._owner.plan.timeout_s)
        if len(set(labels)) > 1:
            brought = "; ".join(f"group rank {rank} {theirs}" for rank, theirs in enumerate(labels))
            raise PayloadError(f"{self._site}: the ranks bring different payloads: {brought}.")

    @property
    def draws(self) -> bool:
        """Whether this point's transport can draw and sync in one launch; audit keeps each rank's own draw."""
        return self._overwrites and hasattr(self._transport, "bind_draw")

    def draw(self, scores_BV: Tensor, noise_BV: Tensor | None, out_B: Tensor) -> Tensor:
        """Draw and sync in one launch; see `SpecTpSync.draw`."""
        key = (signature_of((scores_BV,)), noise_BV is not None)
        try:
            if (fused := self._fused.get(key)) is None:
                fused = self._fused[key] = self._admit_draw(scores_BV, noise_BV)
            fused(scores_BV, noise_BV, out_B)
        except (SpecSyncError, RuntimeError) as error:
            self._give_up(error, (out_B,))
        return out_B

    def _admit_draw(self, scores_BV: Tensor, noise_BV: Tensor | None) -> Any:
        label = f"a draw over {describe((scores_BV,) if noise_BV is None else (scores_BV, noise_BV))}"
        self._meet(label, scores_BV.device)
        transport: Any = self._transport
        with torch.inference_mode(False):
            fused, counted = transport.bind_draw(
                self._site.slug, label, scores_BV, noisy=noise_BV is not None, count=self._compares
            )
        self._counter.add(counted)
        return fused

    def _problem(self, tensors: Sequence[Any]) -> PayloadError | None:
        if (problem := find_problem(self._site, tensors)) is None:
            return None
        return PayloadError(
            f"{self._site}: {problem}. It is called with {describe(tensors)}; the site takes {declared(self._site)}."
        )

    def _give_up(self, error: Exception, tensors: Sequence[Any]) -> NoReturn:
        """Tell the peers, then raise: they are, or will be, waiting for this rank."""
        failure = error if isinstance(error, SpecSyncError) else self._problem(tensors)
        failure = failure or TransportError(f"{self._site}: {error}")
        if self._store is not None:
            self._store.fail(failure)
        raise failure from (None if failure is error else error)


def _tapped(owner: SpecTpSync, site: Site, inner: PointCall, taps: Sequence[Tap]) -> PointCall:
    def call(*tensors: Tensor) -> Any:
        skipped = [tap.before(site, tensors, owner.step) is False for tap in taps]
        result = passthrough(*tensors) if any(skipped) else inner(*tensors)
        for tap in taps:
            tap.after(site, tensors, owner.step)
        return result

    return call


class _TappedValue:
    """Shows taps a number or flag that is agreed on, as a float64 tensor without dimensions."""

    def __init__(self, owner: SpecTpSync, site: Site, compute: Callable[[], Any]) -> None:
        self._owner, self._site, self._compute = owner, site, compute

    def before(self) -> Any:
        value = self._compute()
        if not isinstance(value, (bool, int, float)):
            return value
        shown = torch.tensor(float(value), dtype=torch.float64)
        for tap in self._owner._taps:
            tap.before(self._site, (shown,), self._owner.step)
        return value if shown.item() == value else type(value)(shown.item())

    def after(self, value: Any) -> None:
        if isinstance(value, (bool, int, float)):
            for tap in self._owner._taps:
                tap.after(self._site, (torch.tensor(float(value), dtype=torch.float64),), self._owner.step)


def _platform() -> str:
    if torch.version.hip is not None:
        return "rocm"
    return "cuda" if torch.cuda.is_available() else "cpu"
