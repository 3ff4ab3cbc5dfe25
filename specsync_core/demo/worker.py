"""One rank of the demo: connects, builds its shards, and does its jobs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from specsync_core.algorithm import Algorithm, Speculator, SpeculatorContext
from specsync_core.demo.config import Device, Job, JobResult, World
from specsync_core.demo.engine import Engine
from specsync_core.demo.model import Collectives, Decoder, Weights, init_draft, init_target, shard
from specsync_core.demo.network import DraftModel
from specsync_core.demo.plain import PlainSpeculator
from specsync_core.demo.scheduler import Lead, Request, Scheduler
from specsync_core.demo.tensor_parallel import GroupCollectives, Marks, lead
from specsync_core.diagnostics import FaultInjector, Recorder, parse_faults, recording_path
from specsync_core.diagnostics.metrics import Metrics
from specsync_core.diagnostics.watchdog import Watchdog
from specsync_core.facts import Facts
from specsync_core.groups import Group, ParallelGroups, TorchGroup
from specsync_core.manager import PluginManager, load_registry, plugin_manager
from specsync_core.plan import Plan, resolve_plan
from specsync_core.policy_file import PolicyFile, PolicyTables
from specsync_core.registry import Registry
from specsync_core.sync import SpecTpSync, Tap

DUMP_AFTER_S = 1.0
"""Sooner than the parent calls a rank that does not move a hang, and ends it."""


class Wire(Protocol):
    """All that a rank has of the others."""

    @property
    def group(self) -> Group:
        """What the sites are synced in."""
        ...

    def collectives(self, marks: Marks | None) -> Collectives:
        """What the engine's forwards communicate by."""
        ...

    def lead(self, marks: Marks | None) -> Lead:
        """How rank 0 shares its requests."""
        ...


@dataclass(frozen=True)
class Groups:
    """A rank's process groups: one for tensors, one for what hosts tell each other. A `Wire`."""

    tp: dist.ProcessGroup
    cpu: dist.ProcessGroup

    @property
    def group(self) -> TorchGroup:
        return TorchGroup(self.tp, self.cpu)

    def collectives(self, marks: Marks | None) -> GroupCollectives:
        return GroupCollectives(self.tp, marks)

    def lead(self, marks: Marks | None) -> Lead:
        return partial(lead, self.cpu, marks=marks)


def connect(world: World, rank: int, rendezvous: Path) -> Groups:
    """Meet the other ranks and make the two groups; both have carried something when this returns."""
    timeout = timedelta(seconds=world.group_timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world.ranks, timeout=timeout
    )
    return make_groups(world, rank)


def make_groups(world: World, rank: int) -> Groups:
    """Make the two groups of a world whose ranks have met; a collective."""
    ranks = list(range(world.ranks))
    timeout = timedelta(seconds=world.group_timeout_s)
    # The parent ends a hang long before NCCL's own time-out would abort the process without a word.
    tp_timeout = timeout if world.device == "cpu" else timedelta(minutes=5)
    tp = dist.new_group(ranks, backend="gloo" if world.device == "cpu" else "nccl", timeout=tp_timeout)
    cpu = dist.new_group(ranks, backend="gloo", timeout=timeout)
    assert tp is not None
    assert cpu is not None
    dist.all_reduce(torch.zeros(1, device=device_of(world, rank)), group=tp)
    dist.barrier(group=cpu)
    return Groups(tp, cpu)


def device_of(world: World, rank: int) -> torch.device:
    return torch.device("cpu") if world.device == "cpu" else torch.device("cuda", rank)


class Rank:
    """What a rank keeps between its jobs: groups, weights, plugins.

    Args:
        folder: where recordings go, one directory per job.
    """

    def __init__(self, world: World, rank: int, groups: Wire, folder: Path) -> None:
        self.world = world
        self.rank = rank
        self.groups = groups
        self.folder = folder
        self.device = device_of(world, rank)
        self.manager = plugin_manager()
        self.registry = load_registry(self.manager)
        self.algorithms = self.manager.algorithms()
        target, draft = whole_weights(world)
        self._shards = [shard(weights, rank, world.ranks, self.device) for weights in (target, draft)]

    def do(self, job: Job, on_step: Callable[[int], None]) -> JobResult:
        """Run one job; a collective of all ranks. ``on_step(0)`` says that all is built and the first step begins."""
        plan = plan_of(job, self.registry, self.manager, self.world.device)
        recorder = self._recorder(job, plan) if job.recorded else None
        injector = FaultInjector(parse_faults(job.fault, self.registry, "--fault"), self.rank, allowed=True)
        taps: list[Tap] = [*([injector] if injector.faults else []), *([recorder] if recorder else [])]
        sync = SpecTpSync(ParallelGroups(tp=self.groups.group), plan, taps=taps)
        metrics = Metrics(sync) if job.control else None  # a job that is controlled is one that is watched

        def after_step(step: int) -> None:
            if metrics is not None:
                metrics.update()
            on_step(step)

        try:
            with recorder or nullcontext(), self._watchdog(recorder, sync):
                engine = self._engine(job, sync, recorder)
                on_step(0)
                outcome = engine.run(job.steps, after_step)
        finally:
            sync.save_stats()  # the parent ends ranks that are done, and one that fails leaves its process at once
        if metrics is not None:
            metrics.update(now=True)
        if sync.control is not None:
            sync.control.close()
        return JobResult(
            tokens=outcome.tokens,
            step_s=outcome.step_s,
            tokens_per_step=outcome.tokens_per_step,
            stats={
                slug: stats.as_dict() | {"kind": self.registry.site(slug).kind}
                for slug, stats in sync.stats().items()
                if stats.calls
            },
            transports={requested: choice.transport.name for requested, choice in sync.transports.items()},
            unfired=injector.unfired(),
        )

    def _watchdog(self, recorder: Recorder | None, sync: SpecTpSync) -> AbstractContextManager[object]:
        """What writes a dump when this rank stalls."""
        if recorder is None or not self.world.dumps:
            return nullcontext()

        def stats() -> dict[str, dict[str, object]]:
            return {slug: each.as_dict() for slug, each in sync.stats(wait=False).items() if each.calls}

        return closing(Watchdog(recorder, DUMP_AFTER_S, stats=stats, on_signal=False))

    def _recorder(self, job: Job, plan: Plan) -> Recorder:
        return Recorder(
            recording_path(self.folder / job.name, self.rank),
            group_rank=self.rank,
            world_size=self.world.ranks,
            ranks=range(self.world.ranks),
            plan_digest=plan.digest,
            sites=self.registry.sites,
            values=True,
            run_id=job.name,
            modes={slug: planned.mode.value for slug, planned in plan.sites.items()},
        )

    def _engine(self, job: Job, sync: SpecTpSync, recorder: Recorder | None) -> Engine:
        world, config = self.world, self.world.config
        collectives = self.groups.collectives(recorder)
        target = Decoder(config, self._shards[0], collectives)
        algorithm = self.algorithms[job.algorithm] if job.algorithm else None
        draft = Decoder(config.draft(), self._shards[1], collectives, "draft") if algorithm else None
        requests = requests_of(world, job.temperature)
        return Engine(
            target,
            draft,
            lambda network: self._bind(job, algorithm, network, sync),
            Scheduler(requests, world.slots, self.groups.lead(recorder)),
            slots=world.slots,
            max_len=max(map(len, world.prompts)) + max(world.new_tokens),
            counter=sync,
            marks=recorder,
        )

    def _bind(self, job: Job, algorithm: Algorithm | None, network: DraftModel | None, sync: SpecTpSync) -> Speculator:
        generator = torch.Generator(self.device).manual_seed(self._generator_seed(job))
        if algorithm is None:
            return PlainSpeculator(generator)
        assert network is not None
        return algorithm.bind(
            SpeculatorContext(
                sync=sync,
                network=network,
                gamma=self.world.gamma,
                vocab_size=self.world.config.vocab_size,
                max_batch=self.world.slots,
                device=self.device,
                gpu_id=self.device.index or 0,
                generator=generator,
                folded=job.folded,
            )
        )

    def _generator_seed(self, job: Job) -> int:
        own = self.rank if job.generators == "per-rank" and job.algorithm else 0
        return 1_000_003 * (self.world.seed + 1) + own


def plan_of(job: Job, registry: Registry, manager: PluginManager, device: Device) -> Plan:
    """The plan of a job. The demo's own settings are its only source: the operator's are not about it."""
    environ = {"SPECSYNC_SITES": job.sites, "SPECSYNC_TRANSPORT": job.transport}
    if job.control:
        environ["SPECSYNC_CONTROL"] = job.control
    no_file = PolicyFile("specsync demo", PolicyTables(), {})
    facts = Facts(platform=device, model="specsync-demo", dp_attention=False)
    return resolve_plan(registry, environ, no_file, facts, manager)


def whole_weights(world: World) -> tuple[Weights, Weights]:
    """The whole target and draft: the trained ones, or from the seed."""
    if world.weights is not None:
        target, draft = torch.load(io.BytesIO(world.weights), weights_only=True)
        return target, draft
    target = init_target(world.config, world.seed)
    return target, init_draft(world.config.draft(), target)


def requests_of(world: World, temperature: float) -> Iterator[Request]:
    """The prompts over and over, each request with its own number of tokens."""
    for number in count() if world.requests is None else range(world.requests):
        prompt = world.prompts[number % len(world.prompts)]
        yield Request(number, tuple(prompt), world.new_tokens[number % len(world.new_tokens)], temperature)
