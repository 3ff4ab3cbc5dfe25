"""The demo engine, small, with one fault per run: for the matrix of sites, faults and modes.

A host process imports everything once and forks the ranks of each case, so that a case costs a fraction of a second
and may end its ranks in any way. No rank outlives its host, and no host its test.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from specsync_core.algorithm import Algorithm, Batch, Draft, Speculator, SpeculatorContext, Verdict
from specsync_core.demo.config import Job, JobResult, ModelConfig, World
from specsync_core.demo.network import DraftModel
from specsync_core.demo.worker import Groups, Rank, make_groups
from specsync_core.diagnostics import Recorder, recording_path
from specsync_core.plan import Plan
from specsync_core.sync import SpecTpSync

Mode = Literal["sync", "audit", "off"]
POLICY: dict[Mode, str] = {"sync": "all", "audit": "all:audit", "off": "off"}
RANKS = 2
FAULT_STEP = 1
STEPS = 3


@dataclass(frozen=True)
class Setting:
    """How the demo engine comes to call a site."""

    algorithm: str = "dspark"
    temperature: float = 0.0
    folded: bool = False
    fast_sampling: bool = True
    simulated: float | None = None
    probe: str | None = None
    """A site that no reference algorithm calls in this engine: it is called once a step, with plausible tensors."""


@dataclass(frozen=True)
class Place:
    """A site, how the engine comes to call it, and a fault that changes a value there."""

    site: str
    change: str
    setting: Setting = Setting()
    is_start: bool = False
    """Called at the start and in prefills, not in every step."""


DSPARK, WARM = Setting(), Setting(temperature=1.0)
FOLDED = Setting(folded=True)
BONUS, TOKEN = "tensor=bonus:index=0:add=1", "index=0:add=1"
PLACES = (
    Place("dspark-mem", "set=0.001", FOLDED, is_start=True),
    Place("dspark-draft-greedy", TOKEN, DSPARK),
    Place("dspark-draft-sample", TOKEN, WARM),
    Place("dspark-draft-multinomial", TOKEN, replace(WARM, fast_sampling=False)),
    Place("dspark-graph-sample", TOKEN, replace(WARM, folded=True)),
    Place("dspark-graph-greedy", TOKEN, FOLDED),
    Place("dspark-plan", "index=0:add=-1", DSPARK),
    Place("dspark-accept-greedy", BONUS, DSPARK),
    Place("dspark-accept-sample", BONUS, WARM),
    Place("dspark-accept-graph", BONUS, FOLDED),
    Place("dspark-target", TOKEN, DSPARK, is_start=True),
    Place("dflash-mem", "set=0.001", Setting("dflash", folded=True), is_start=True),
    Place("dflash-selector", BONUS, Setting("dflash", 1.0)),
    Place("dflash-accept-sample", BONUS, Setting("dflash", 1.0, folded=True)),
    Place("dflash-accept-greedy", TOKEN, Setting("dflash")),
    Place("dflash-target", TOKEN, Setting("dflash"), is_start=True),
    Place("eagle-verify-greedy", "tensor=predict:index=0:add=1", Setting("eagle")),
    Place("eagle-verify-sample", "tensor=predict:index=0:add=1", Setting("eagle", 1.0)),
    Place("eagle-draft", "tensor=topk_index:index=0:add=1", Setting("eagle")),
    Place("eagle-target", TOKEN, Setting("eagle"), is_start=True),
    Place("eagle-accept-simulated", "tensor=predict:index=0:add=1", Setting("eagle", simulated=1.5)),
    Place("eagle-draft-tree", TOKEN, Setting("eagle", probe="eagle-draft-tree")),
    Place("eagle-ngram-draft", TOKEN, Setting("eagle", probe="eagle-ngram-draft")),
    Place("eagle-ngram-tree", TOKEN, Setting("eagle", probe="eagle-ngram-tree")),
    Place("eagle-ngram-corpus", "add=1", Setting("eagle", probe="eagle-ngram-corpus")),
)


@dataclass(frozen=True)
class CaseJob(Job):
    """A job that also says how the algorithm is bound."""

    setting: Setting = Setting()
    number: int = 0
    """Shifts prompts and draws."""


def make_job(name: str, setting: Setting, mode: Mode, fault: str = "", number: int = 0, **changes: Any) -> CaseJob:
    job = CaseJob(
        name, setting.algorithm, POLICY[mode], STEPS, setting.temperature, fault,
        folded=setting.folded, generators="shared", setting=setting, number=number,
    )  # fmt: skip
    return replace(job, **changes)


WORLD = World(
    ranks=RANKS,
    device="cpu",
    seed=3,
    prompts=(b"Once", b"upon a time", b"there were", b"two ranks"),
    jobs=(),
    new_tokens=(5, 7, 9),
    gamma=3,
    slots=2,
    config=ModelConfig(hidden=32, heads=2, layers=1, mlp=32),
    group_timeout_s=15.0,
)


class CaseRank(Rank):
    """A rank of the demo, bound as a case says."""

    def _recorder(self, job: Job, plan: Plan) -> Recorder:
        return Recorder(
            recording_path(self.folder / job.name, self.rank),
            group_rank=self.rank,
            world_size=self.world.ranks,
            ranks=range(self.world.ranks),
            plan_digest=plan.digest,
            sites=self.registry.sites,
            slots=1024,
            run_id=job.name,
            modes={slug: planned.mode.value for slug, planned in plan.sites.items()},
        )

    def _bind(self, job: Job, algorithm: Algorithm | None, network: DraftModel | None, sync: SpecTpSync) -> Speculator:
        assert isinstance(job, CaseJob)
        assert network is not None
        seed = 1_000 + job.number + (self.rank if job.generators == "per-rank" else 0)
        context = SpeculatorContext(
            sync=sync,
            network=network,
            gamma=self.world.gamma,
            vocab_size=self.world.config.vocab_size,
            max_batch=self.world.slots,
            device=self.device,
            gpu_id=0,
            generator=torch.Generator().manual_seed(seed),
            folded=job.folded,
            simulated_accept_len=job.setting.simulated,
        )
        if not job.setting.fast_sampling:
            from specsync_dspark.speculator import DSparkSpeculator

            return DSparkSpeculator(context, fast_sampling=False)
        assert algorithm is not None
        inner = algorithm.bind(context)
        return inner if job.setting.probe is None else Probe(inner, sync, job.setting.probe)

    def do(self, job: Job, on_step: Callable[[int], None]) -> JobResult:
        assert isinstance(job, CaseJob)
        turned = WORLD.prompts[job.number % 4 :] + WORLD.prompts[: job.number % 4]
        self.world = replace(WORLD, prompts=turned)
        return super().do(job, on_step)


class Probe:
    """A speculator that also goes through one more site, once a step, and derives the batch's tokens from it."""

    def __init__(self, inner: Speculator, sync: SpecTpSync, site: str) -> None:
        self._inner, self._sync, self._site = inner, sync, site
        self.width = inner.width

    def draft(self, batch: Batch) -> Draft:
        size, site = len(batch.request_ids), self._site
        if site == "eagle-ngram-corpus":
            self._sync.agree(site, len(batch.request_ids), "min")
        elif site == "eagle-ngram-draft":
            tokens_N = torch.arange(size * 4)
            self._sync.sync(site, tokens_N, torch.ones(size * 16, dtype=torch.bool))
        elif site == "eagle-ngram-tree":
            tokens_N, links = torch.arange(size * 4), torch.arange(size * 4).view(size, 4)
            mask_M = torch.ones(size * 16, dtype=torch.bool)
            self._sync.sync(site, tokens_N, mask_M, tokens_N + 1, links, links + 1, links + 2)
        else:
            self._sync.sync(site, *(torch.arange(size * 4).view(size, 4) for _ in range(3)))
        return self._inner.draft(batch)

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        return self._inner.accept(batch, draft, target_logits_BWV)

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        return self._inner.first_token(batch, target_logits_BV)


# --- processes --------------------------------------------------------------------------------------------


def host(pipe: Connection, folder: str) -> None:
    """Fork the ranks of every list of jobs that comes, and tell of every end, until the pipe closes."""
    _die_with_parent()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    names: dict[int, tuple[str, int]] = {}
    while True:
        try:
            if pipe.poll(0.01):
                name, jobs = pipe.recv()
                for rank in range(RANKS):
                    if (pid := os.fork()) == 0:
                        _rank_main(name, jobs, rank, Path(folder))
                    names[pid] = name, rank
                pipe.send(("pids", name, [pid for pid, (case, _) in names.items() if case == name]))
        except EOFError:
            break
        pid, status = os.waitpid(-1, os.WNOHANG) if names else (0, 0)
        if pid:
            pipe.send(("ended", *names.pop(pid), os.waitstatus_to_exitcode(status)))
    for pid in names:
        os.kill(pid, signal.SIGKILL)


def _rank_main(name: str, jobs: list[CaseJob], rank: int, folder: Path) -> None:
    code = 1
    try:
        _die_with_parent()
        log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        member = CaseRank(WORLD, rank, _connect(rank, folder / f"{name}.port"), folder)
        for job in jobs:
            member.do(job, lambda step: None)
        _leave_together(name, rank, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _connect(rank: int, port: Path) -> Groups:
    """Meet through a socket: quicker than through a file, which every look reads from its beginning."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, RANKS, True, timeout=timedelta(seconds=20), wait_for_workers=False)
        port.with_suffix(".tmp").write_text(str(store.port))
        port.with_suffix(".tmp").rename(port)
    else:
        while not port.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), RANKS, False, timeout=timedelta(seconds=20))
    timeout = timedelta(seconds=WORLD.group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    return make_groups(WORLD, rank)


def _leave_together(name: str, rank: int, folder: Path) -> None:
    """A rank that leaves first would break what its peer still reads."""
    (folder / f"{name}.{rank}.done").touch()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all((folder / f"{name}.{peer}.done").exists() for peer in range(RANKS)):
            return
        time.sleep(0.01)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
