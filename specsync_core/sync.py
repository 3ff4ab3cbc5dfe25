"""`SpecTpSync`: what an engine calls where a rank decides.

The path of one call: `SpecTpSync.sync` finds the site's point, which is either `passthrough` (the site is off,
or the group has one rank) or a `Point`; a `Point` knows the payload's signature from an earlier call, or checks
it once with all ranks, and hands the tensors to its transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specsync_core.agreements import Agreements, Pending, settle_mapping
from specsync_core.checks import StateCheck
from specsync_core.collectives import GroupStore, store_of
from specsync_core.consensus import Op
from specsync_core.counters import SiteCounter, SiteStats
from specsync_core.device_counts import StepClock, uses_cuda
from specsync_core.errors import ControlError, PayloadError, RegistryError, SpecSyncError
from specsync_core.facts import Facts
from specsync_core.groups import Group, ParallelGroups, select_group
from specsync_core.handshake import shake_hands
from specsync_core.manager import load_registry
from specsync_core.memory import free_memory_gib
from specsync_core.payload import declared
from specsync_core.plan import Plan, resolve_plan
from specsync_core.point import Point, PointCall, passthrough
from specsync_core.policy import Mode
from specsync_core.registry import Site
from specsync_core.settings import stats_directory, unused_settings
from specsync_core.stats_file import StatsFile
from specsync_core.switching import Capture, Captures, Switch, in_force
from specsync_core.transports import Choice, Transport, choose_transport
from specsync_core.transports.base import CountingTransport
from specsync_core.transports.one_shot import OneShotTransport
from specsync_core.transports.one_shot_draw import draw_then, find_draw_problem

if TYPE_CHECKING:
    from specsync_core.control.live import LiveControl

__all__ = ["PointCall", "SpecTpSync", "Tap"]

logger = logging.getLogger("specsync")


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
            plan = plan_of_the_environment(groups, handshake)
            if groups.tp.world_size > 1 and not taps and (unused := unused_settings()):
                logger.warning(
                    "%s: no effect on a SpecTpSync that is made directly; make it with"
                    " specsync_core.diagnostics.open_session(groups).sync.",
                    ", ".join(unused),
                )
        self.groups = groups
        self.plan = plan.with_dp_attention(groups.dp_attention)
        self.step = 0
        """The engine's step, for diagnostics; `next_step` counts it up."""
        self.plan_generation = 0
        """How often `change_modes` has replaced the plan."""
        # Another thread, such as a watchdog's, has device 0 as its current one.
        self._device_index = torch.cuda.current_device() if uses_cuda() else None
        self.clock = StepClock()
        """`step`, where captured graphs read it."""
        self.taps = tuple(taps)
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
        self._counting: list[CountingTransport] = []
        self._counters = {
            slug: SiteCounter(planned.site, planned.mode.value, self._group.rank_in_group)
            for slug, planned in self.plan.sites.items()
        }
        self._agreements = Agreements(self)
        self._made: dict[tuple[str, Mode], Point] = {}
        """By mode, so that a site that returns to a mode finds its buffers."""
        self._live: dict[str, Point] = {}
        """The points of the sites that are on, without taps."""
        self._captures = Captures()
        self._points = {
            slug: self._bind(planned.site)
            for slug, planned in self.plan.sites.items()
            if planned.site.kind == "broadcast"
        }
        self.control: LiveControl | None = None
        """None unless the plan names a control socket, and then None with one rank."""
        if self.plan.control.value is not None and handshake and groups.tp.world_size > 1:
            self._points = {slug: Switch(slug, act, self._captures) for slug, act in self._points.items()}
            self.control = _open_control(self)
        elif groups.tp.world_size == 1:
            say_uncontrolled(self.plan)
        directory = stats_directory()
        self._stats_file = None if directory is None else StatsFile(self, directory)

    def enabled(self, site: Site | str | int) -> bool:
        """Whether a call at this site takes part in a collective: it is on, and its group has more than one rank."""
        site = self.plan.registry.site(site)
        group = self.groups.tp if site.kind == "consensus" else self._group
        return self.plan.mode(site.slug) != "off" and group.world_size > 1

    def sync(self, site: Site | str | int, *tensors: Tensor, logits: Tensor | None = None) -> Any:
        """Overwrite ``tensors`` on every rank with the values that group rank 0 holds, and return them.

        Args:
            site: a `Site`, slug or number of kind broadcast.
            tensors: the site's declared tensors in order, of the same shapes and dtypes on every rank; any
                strides, as long as elements do not share memory. Written in place.
            logits: what this rank decided by, float ``[B, V]``, ``[B, S, V]`` or ``[B * S, V]``. The first divergence
                then tells how close the decision was (``logit_gap``). Never sent. Free on host tensors; on a device
                some launches per call.

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
        return self.point(site)(*tensors, logits=logits)

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

        One launch takes up to 4096 rows on a device, each contiguous, whatever lies between them; with taps or in
        audit, tokens are drawn and then synced.

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
        point = in_force(self.point(site), scores_BV)
        if (problem := find_draw_problem(scores_BV, noise_BV, out)) is not None:
            refused = PayloadError(f"{self.plan.registry.site(site)}: {problem}.")
            if (live := self._live.get(self.plan.registry.site(site).slug)) is not None:
                live.give_up(refused, (scores_BV,))  # the peers, whose own are fine, must not wait for this rank
            raise refused
        if isinstance(point, Point) and point.can_draw(scores_BV, noise_BV):
            tokens_B = scores_BV.new_empty(scores_BV.shape[0], dtype=torch.int64) if out is None else out
            return point.draw(scores_BV, noise_BV, tokens_B)
        tokens_B = draw_then(scores_BV, noise_BV)
        if out is not None:
            tokens_B = out.copy_(tokens_B)
        point(tokens_B)
        return tokens_B

    def sync_ragged(self, site: Site | str | int, *tensors: Tensor) -> Any:
        """Bring group rank 0's tensors to every rank where their *sizes* may differ between ranks.

        For drafts that each host found on its own: ``lens_B, tokens_N = sync.sync_ragged(site, lens_B, tokens_N)``.
        The sizes travel first, then the values: two broadcasts, however many tensors there are.

        Args:
            tensors: as `sync` takes them; dtypes and numbers of dimensions must be the same on every rank.

        Returns:
            One tensor for one, a tuple for several, with group rank 0's shapes and values. A tensor that has group
            rank 0's shape is written in place and returned; the others are replaced, so use what is returned. Where
            the site is off, or only audited, the tensors as they are.

        Raises:
            RegistryError, PayloadError, TransportError: as `sync`.

        Graph: never inside capture; the host reads the sizes, which waits for the device.
        """
        point = self.point(site)
        slug = self.plan.registry.site(site).slug
        live = self._live.get(slug)
        act: PointCall = passthrough if live is None else lambda *own: passthrough(*live.ragged(own))
        if self.taps:
            return _between(self, self.plan.registry.site(slug), live or point, self.taps, tensors, act)
        return act(*tensors)

    def sync_lists(self, site: Site | str | int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """`sync_ragged` for lists of integers on the host: return group rank 0's rows, however many and long.

        Args:
            site: declares two tensors of one dimension: the rows' lengths, then all values behind one another.
        """
        lengths = torch.tensor([len(row) for row in rows], dtype=self._dtype(site, 0))
        values = torch.tensor([value for row in rows for value in row], dtype=self._dtype(site, 1))
        lengths, values = self.sync_ragged(site, lengths, values)
        return [part.tolist() for part in values.split(lengths.tolist())]

    def _dtype(self, key: Site | str | int, position: int) -> torch.dtype:
        site = self.plan.registry.site(key)
        if len(site.tensors) != 2 or any(len(spec.shape) != 1 for spec in site.tensors):
            raise PayloadError(f"{site}: lists need a site with two tensors [B] and [N]; it takes {declared(site)}.")
        dtype: torch.dtype = getattr(torch, site.tensors[position].dtypes[0])
        return dtype

    def _find_point(self, key: Site | str | int) -> PointCall:
        site = self.plan.registry.site(key)
        if site.slug not in self._points:
            raise RegistryError(
                f"{site} is of kind {site.kind}; sync takes broadcast sites."
                + (" Use available_memory_gb or agree." if site.kind == "consensus" else " Use check.")
            )
        return self._points[site.slug]

    def _bind(self, site: Site) -> PointCall:
        self._live.pop(site.slug, None)
        call: PointCall = passthrough
        if self.enabled(site):
            call = self._live[site.slug] = self._point_of(site)
        return _tapped(self, site, call, self.taps) if self.taps else call

    def _point_of(self, site: Site) -> Point:
        key = site.slug, self.plan.mode(site.slug)
        if key not in self._made:
            transport = self._transport(self.plan[site.slug].transport.value)
            self._made[key] = Point(self, site, self._group, self._store, transport, self._counters[site.slug])
        return self._made[key]

    def _transport(self, requested: str) -> Transport:
        if requested not in self.transports:
            store, timeout_s = self._store, self.plan.timeout_s
            exchange = None if store is None else lambda topic, payload: store.exchange(topic, payload, timeout_s)
            choice = self.transports[requested] = choose_transport(requested, self._group, exchange)
            if isinstance(choice.transport, CountingTransport):  # asked once: 30 us for a protocol
                self._counting.append(choice.transport)
            if store is not None and isinstance(choice.transport, OneShotTransport):
                store.when_failed(choice.transport.halt)
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

    def agree_many(self, values: Mapping[str, tuple[Any, Op]], *, group: Group | None = None) -> dict[str, Any]:
        """Agree on several host values in one collective.

        Args:
            values: per slug the value and its op, as `agree` takes them; alike keys in the same order on every rank.

        Returns:
            Per slug what `agree` would return. Raises as `agree`, with a line for each value that a rank lacks.
        """
        return settle_mapping(self._agreements, values, group)

    def together(self, group: Group | None = None) -> Pending:
        """Gather agreements that are pending at the same moment into one collective.

        with sync.together() as pending:
            fits = pending.agree("dspark-mem", free_gib, "min")
            drafts = pending.lead("toy-drafts", find_drafts)
        use(fits.value, drafts.value)
        """
        return Pending(self._agreements, group)

    def lead(self, site: Site | str | int, compute: Callable[[], Any], *, group: Group | None = None) -> Any:
        """Let group rank 0 alone compute a host value, and give it to every rank.

        Where the site is off or only audited every rank computes, and keeps its own value.

        Args:
            compute: gives a number, a flag, a string, None, or a list of those. The other ranks wait while it runs,
                as long as the CPU group's own time-out allows.

        Raises:
            PayloadError: on every rank, when ``compute`` raised on group rank 0, with its error.
            GroupError, TransportError: as `agree`.

        Graph: host only; never inside capture.
        """
        wanted = self._agreements.want(site, "root", compute, leads=True)
        return self._agreements.settle([wanted], group)[0]

    def check(self, site: Site | str | int, value: Any, *, group: Group | None = None) -> StateCheck:
        """Compare derived state between ranks: sequence lengths, request ids, a graph's key. Changes nothing.

        One small gather over the CPU group, so ask for it every so many steps; all ranks ask together.

        Args:
            site: of kind check, e.g. ``state-seq-lens``.
            value: numbers, strings, tensors, or lists and dicts of those. A tensor on a device is read on the host.
            group: the ranks that should hold the same; None is the group of broadcasts.

        Returns:
            The finding, the same on every rank: false when ranks differ, with the odd ones out. Who acts on it acts
            alike everywhere: ``if not (found := sync.check(...)): raise RuntimeError(found.text)``.

        Raises:
            RegistryError: there is no such site, or it is not of kind check.
            PayloadError: on every rank, when one rank's value cannot be compared.
            TransportError: the ranks' calls do not match, or a peer failed.

        Graph: host only; never inside capture.
        """
        return self._agreements.check(site, value, self._group if group is None else group)

    def _agree(self, key: Site | str | int, op: Op, chosen: Group | None, compute: Callable[[], Any]) -> Any:
        return self._agreements.settle([self._agreements.want(key, op, compute)], chosen)[0]

    def count_value(self, site: Site, own: Any, agreed: Any, compared: bool = True) -> None:
        """Count one agreement."""
        self._counters[site.slug].count_value(own, agreed, self.step, compared)

    def next_step(self) -> None:
        """Say that the engine begins its next step; never inside capture. Where live control is on, sites change here.

        Raises:
            TransportError: only while a change of sites is agreed on, when a rank does not answer in time.
        """
        self.step += 1
        self.clock.set(self.step)
        if self._stats_file is not None:
            self._stats_file.step()
        if self.control is not None:
            self.control.begin_step(self.step)
        for transport in self._counting:
            transport.set_step(self.step)

    def change_modes(self, modes: Mapping[str, Mode], origin: str) -> None:
        """Replace the plan by one with other modes; `LiveControl` does so on all ranks at the same step.

        Args:
            modes: by slug, of broadcast and check sites; points that were handed out follow.
            origin: what the sites' modes then come from.

        Raises:
            ControlError: live control is off, so that points cannot follow.
        """
        if self.control is None:
            raise ControlError("sites can change only where live control is on. Start with SPECSYNC_CONTROL=PATH.")
        self.plan = self.plan.with_modes(modes, origin)
        self.plan_generation += 1
        for slug, mode in modes.items():
            self._counters[slug].mode = mode
            point = self._points.get(slug)
            if isinstance(point, Switch):
                point.now = self._bind(self.plan[slug].site)

    @contextmanager
    def capturing(self) -> Iterator[Capture]:
        """Capture a graph inside, and check what this yields before each replay: the plan may have changed.

        with sync.capturing() as capture, torch.cuda.graph(graph):
            step()
        ...
        capture.check()  # or, where `capture.is_current` is False, capture again
        graph.replay()

        While live control is on, a site that is captured without this keeps every later change from being made.
        """
        with self._captures.known():
            yield Capture(self)

    @property
    def foreign_captures(self) -> Sequence[str]:
        """Slugs of sites in graphs that do not check the plan; seen only while live control is on."""
        return tuple(self._captures.foreign)

    def reachable(self, site: Site | str | int) -> bool:
        """Whether a call at this site takes part in a collective now, or may after a change of sites."""
        site = self.plan.registry.site(site)
        may_change = self.control is not None and site.kind != "consensus" and self._group.world_size > 1
        return may_change or self.enabled(site)

    def stats(self, *, wait: bool = True) -> Mapping[str, SiteStats]:
        """Return what this rank counted, per slug; `specsync_core.counters.summary` says it in a line.

        Args:
            wait: wait for the device where counters live there. False reads them beside the engine's stream, as they
                are at this moment: also while a collective on that stream hangs.
        """
        with nullcontext() if wait else beside_the_stream(self._device_index):
            return {slug: counter.stats() for slug, counter in self._counters.items()}

    def save_stats(self) -> None:
        """Write the last counts to ``SPECSYNC_STATS_DIR``, if it is set: for a process that ends without notice."""
        if self._stats_file is not None:
            self._stats_file.close()


def beside_the_stream(device_index: int | None = None) -> AbstractContextManager[Any]:
    """A stream of its own on this device: what is read on it waits for no other. None: the thread's current device."""
    if not uses_cuda():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device=device_index))  # type: ignore[no-untyped-call]


def _tapped(owner: SpecTpSync, site: Site, inner: PointCall, taps: Sequence[Tap]) -> PointCall:
    def call(*tensors: Tensor, logits: Tensor | None = None) -> Any:
        act = inner if logits is None else partial(inner, logits=logits)
        return _between(owner, site, inner, taps, tensors, act)

    return call


def _between(
    owner: SpecTpSync,
    site: Site,
    point: PointCall,
    taps: Sequence[Tap],
    tensors: Sequence[Tensor],
    act: PointCall,
) -> Any:
    """Show the taps what goes into a call and what comes out. One that raises fails the group, as the call would."""
    try:
        answers = [tap.before(site, tensors, owner.step) for tap in taps]
        is_skipped = any(answer is False for answer in answers)
        if is_skipped and isinstance(point, Point):
            for tap in taps:
                if hasattr(tap, "skipped"):
                    tap.skipped(site)
        result = passthrough(*tensors) if is_skipped else act(*tensors)
        shown = result if isinstance(result, tuple) else (result,)
        for tap in taps:
            tap.after(site, shown, owner.step)
    except BaseException as error:
        for tap in taps:
            if hasattr(tap, "failed"):
                tap.failed(site, error)
        if isinstance(point, Point):
            point.give_up(error, tensors)
        raise
    return result


def _open_control(sync: SpecTpSync) -> LiveControl:
    from specsync_core.control.live import LiveControl  # only where it is asked for

    return LiveControl(sync, store_of(sync.groups.tp.cpu_group))


def say_uncontrolled(plan: Plan) -> None:
    """Say on a lone rank that a control socket was asked for and is not made."""
    if plan.control.value is not None:
        logger.info("%s: no socket is made with one rank, whose decisions nobody shares.", plan.control.origin)


def plan_of_the_environment(groups: ParallelGroups, handshake: bool) -> Plan:
    """Resolve this rank's plan; where it is in error, the peers that wait in the handshake hear so at once."""
    try:
        return resolve_plan(load_registry(), facts=Facts(platform=_platform(), dp_attention=groups.dp_attention))
    except SpecSyncError as error:
        if handshake and groups.tp.world_size > 1:
            store_of(groups.tp.cpu_group).fail(error)
        raise


def _platform() -> str:
    if torch.version.hip is not None:
        return "rocm"
    return "cuda" if torch.cuda.is_available() else "cpu"
