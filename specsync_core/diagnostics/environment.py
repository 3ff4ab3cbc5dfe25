"""How the ranks' software, hardware, plans and generators compare. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specsync_core.diagnostics.dump import Dump
from specsync_core.diagnostics.facts import BAD_NCCL
from specsync_core.diagnostics.recording import Recording

LARGEST_SET_SEED = 2**53
"""A seed above was drawn by torch itself, where nobody set one."""


@dataclass(frozen=True)
class Difference:
    """Something that ranks of one group should have in common, in words."""

    text: str
    is_finding: bool
    """Somebody should act on it. False: it is worth knowing where ranks diverge, and as it should be otherwise."""


def compare_environments(recordings: Mapping[int, Recording], dumps: Mapping[int, Dump]) -> tuple[Difference, ...]:
    """Compare plans, versions, hardware and generators over the ranks of a group."""
    return (*_bad_versions(recordings), *_differing(recordings), *_generators(recordings), *_offsets_now(dumps))


def _bad_versions(recordings: Mapping[int, Recording]) -> Iterator[Difference]:
    ranks: dict[str, list[int]] = {}
    for rank, recording in recordings.items():
        ranks.setdefault(recording.header.versions.get("nccl") or "", []).append(rank)
    for version in sorted(set(ranks) & set(BAD_NCCL)):
        yield Difference(f"NCCL {version} is on the list of bad versions: {BAD_NCCL[version]}.", True)


def _differing(recordings: Mapping[int, Recording]) -> Iterator[Difference]:
    headers = {rank: recording.header for rank, recording in recordings.items()}
    facts: dict[str, dict[int, object]] = {
        "plan digest": {rank: header.plan_digest for rank, header in headers.items()},
        "world size": {rank: header.world_size for rank, header in headers.items()},
    }
    for name in sorted({name for header in headers.values() for name in header.versions}):
        what = name if name in ("gpu", "driver", "compute capability") else f"{name} version"
        facts[what] = {rank: header.versions.get(name) for rank, header in headers.items()}
    for name, by_rank in facts.items():
        if len(set(by_rank.values())) > 1:
            yield Difference(f"The ranks differ in their {name}: {_by_rank(by_rank)}.", True)


def _generators(recordings: Mapping[int, Recording]) -> Iterator[Difference]:
    """As of the start, when nothing has been drawn that ranks should not have drawn alike."""
    states = {rank: recording.header.generators for rank, recording in recordings.items()}
    for name in sorted({name for each in states.values() for name in each}):
        own = {rank: each[name] for rank, each in states.items() if isinstance(each.get(name), Mapping)}
        seeds = {rank: each.get("seed") for rank, each in own.items()}
        if len(set(seeds.values())) > 1:
            is_set = all(isinstance(seed, int) and seed < LARGEST_SET_SEED for seed in seeds.values())
            hint = "draws from them differ" if is_set else "nobody seeded them, so draws from them differ"
            yield Difference(f"The ranks' {name} generators have different seeds ({hint}): {_by_rank(seeds)}.", is_set)
            continue
        for key in ("offset", "state"):
            values = {rank: each.get(key) for rank, each in own.items()}
            if len(set(values.values())) > 1:
                has_seed = None not in seeds.values()
                what = f"the same seed and another {key}: one has drawn more" if has_seed else f"another {key}"
                yield Difference(f"At the start the ranks' {name} generators had {what}: {_by_rank(values)}.", has_seed)
                break


def _offsets_now(dumps: Mapping[int, Dump]) -> Iterator[Difference]:
    offsets = {rank: _offset(dump.generators) for rank, dump in dumps.items()}
    if len(set(offsets.values()) - {None}) > 1:
        text = f"When the dumps were written the ranks' cuda generators were at different offsets: {_by_rank(offsets)}."
        yield Difference(f"{text} Ranks that are at different places differ there by right.", False)


def _offset(generators: Mapping[str, Any]) -> object:
    cuda = generators.get("cuda")
    return cuda.get("offset") if isinstance(cuda, Mapping) else None


def _by_rank(values: Mapping[int, object]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in sorted(values.items()))
