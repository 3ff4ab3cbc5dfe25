"""Soak: the demo's engine for as long as one likes, with random faults, memory watched, every token compared.

    python benchmarks/soak.py --seconds 3600 --ranks 2
    python benchmarks/soak.py --steps 100000 --json soak.json

The ranks are started once and stay. Each round decodes a random job twice: as it is, and with random faults on every
rank but group rank 0. With the sync on both must give the same tokens, on every rank. Between the rounds each rank
notes its resident memory, which must stay flat. Exit code 1 is a finding.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import random
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specsync_core.testing import run_ranks

STEPS = 24
WARM_UP_ROUNDS = 4
"""Rounds in which allocators and caches still grow."""
GROWTH_BYTES = 24 << 20
"""What resident memory may grow by between the first and the last third of the rounds."""
PROMPTS = (b"It was the best of times, ", b"Call me Ishmael. ", b"All happy families ", b"In the beginning ")


@dataclass
class Round:
    """One job, as one rank saw it."""

    algorithm: str
    temperature: float
    clean: str
    """Digest of all tokens without faults."""
    faulted: str
    tokens: int
    fired: int
    """Faults of this rank that struck at least once."""
    healed: int
    """Elements in which this rank differed from group rank 0, in both runs."""
    resident_bytes: int


@dataclass
class Report:
    """What a soak found."""

    ranks: int
    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    faults_fired: int = 0
    values_healed: int = 0
    seconds: float = 0.0
    resident_mib: list[list[float]] = field(default_factory=list)
    """Per rank: the median of the first third of the rounds behind the warm-up, and of the last."""
    findings: list[str] = field(default_factory=list)


def soak(ranks: int, seconds: float, rounds: int, seed: int) -> Report:
    """Run until the time or the rounds are over, whichever comes first."""
    started = time.monotonic()
    arguments = (free_port(), seconds, rounds, seed)
    found: list[list[Round]] = run_ranks(
        soak_rank, ranks, timeout_s=seconds * 2 + 120, args=arguments, group_timeout_s=60, setup=meet
    )
    report = judge(found)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def judge(found: list[list[Round]]) -> Report:
    """Compare what the ranks brought back."""
    report = Report(len(found), rounds=len(found[0]), steps=2 * STEPS * len(found[0]))
    for number, each in enumerate(zip(*found, strict=True)):
        job = f"round {number} ({each[0].algorithm}, temperature {each[0].temperature})"
        for rank, one in enumerate(each):
            if one.clean != each[0].clean:
                report.findings.append(f"{job}: group rank {rank} has other tokens than group rank 0")
            if one.faulted != each[0].clean:
                report.findings.append(f"{job}: with faults, group rank {rank} has other tokens")
            report.faults_fired += one.fired
            report.values_healed += one.healed
        report.tokens += each[0].tokens
    for rank, rounds in enumerate(found):
        resident = [one.resident_bytes for one in rounds[WARM_UP_ROUNDS:]]
        third = max(1, len(resident) // 3)
        if len(resident) >= 3:
            before, after = median(resident[:third]), median(resident[-third:])
            report.resident_mib.append([round(before / 2**20, 1), round(after / 2**20, 1)])
            if after - before > GROWTH_BYTES:
                grown = f"{before / 2**20:.0f} to {after / 2**20:.0f} MiB"
                report.findings.append(f"group rank {rank}: resident memory grew from {grown}")
    if report.rounds and report.ranks > 1 and not report.values_healed:
        report.findings.append("no value was healed: the faults did not strike, so this soak proves nothing")
    return report


# --- in the ranks -----------------------------------------------------------------------------------


def soak_rank(rank: int, world_size: int, port: int, seconds: float, rounds: int, seed: int) -> list[Round]:
    """Decode rounds until group rank 0 says that it is time to stop."""
    from specsync_core.collectives import store_of
    from specsync_core.consensus import agree_over
    from specsync_core.demo.config import Job, World
    from specsync_core.demo.worker import Rank, make_groups

    world = World(world_size, "cpu", seed, PROMPTS, (), new_tokens=(20, 24, 28), group_timeout_s=60)
    draw, done, until = random.Random(seed), [], time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        member = Rank(world, rank, make_groups(world, rank), Path(folder))
        for number in range(rounds):
            cpu_group = member.groups.cpu
            stop = lambda: time.monotonic() > until  # noqa: E731
            if agree_over(cpu_group, "soak-stop", number, "root", stop)[1]:
                break
            assert store_of(cpu_group).world_size == world_size
            algorithm = draw.choice(sorted(member.algorithms))
            temperature = draw.choice([0.0, 0.0, 0.6, 1.0])
            faults = random_faults(draw, member.registry, algorithm, world_size)
            runs = [
                member.do(Job("soak", algorithm, "all", STEPS, temperature, text, recorded=False), lambda step: None)
                for text in ("", faults)
            ]
            own_faults = sum(f"rank={rank}:" in fault for fault in faults.split(";"))
            done.append(
                Round(
                    algorithm,
                    temperature,
                    *(digest(run.tokens) for run in runs),
                    tokens=sum(len(tokens) for run in runs for tokens in run.tokens.values()),
                    fired=own_faults - len(runs[1].unfired),
                    healed=sum(stats["mismatches"] for run in runs for stats in run.stats.values()),
                    resident_bytes=resident_bytes(),
                )
            )
    return done


def random_faults(draw: random.Random, registry: Any, algorithm: str, world_size: int) -> str:
    """Faults at several sites of an algorithm, on every group rank but 0: wrong values, and delays."""
    sites = [site for site in registry.sites if site.algorithm == algorithm and site.kind == "broadcast"]
    faults = []
    for rank in range(1, world_size):
        for site in draw.sample(sites, min(len(sites), draw.randint(1, 4))):
            act = draw.choice(["add=1", "add=1", "set=0", "add=3:index=0", "delay=0.002"])
            faults.append(f"{site.slug}:rank={rank}:prob=0.3:seed={draw.randint(0, 999)}:{act}")
    return ";".join(faults)


def digest(tokens: dict[int, list[int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()


def resident_bytes() -> int:
    """Memory that the process holds, behind a collection; what the C library keeps back is given up first."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def meet(rank: int, port: int, *_: object) -> str:
    return f"tcp://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--steps", type=int, default=10**8, help=f"decode steps; a round has {2 * STEPS}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    report = soak(options.ranks, options.seconds, -(-options.steps // (2 * STEPS)), options.seed)
    print(json.dumps(asdict(report), indent=2))
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
