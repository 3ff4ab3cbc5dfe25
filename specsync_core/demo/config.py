"""What the demo runs, as data that travels to the ranks: model shape, jobs, results. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. The default target reads and writes bytes."""

    vocab_size: int = 256
    hidden: int = 128
    heads: int = 8
    layers: int = 3
    mlp: int = 256

    @property
    def mask_token(self) -> int:
        """The id of the draft's mask token, one past the vocabulary."""
        return self.vocab_size

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def draft(self) -> ModelConfig:
        """The draft model's shape: the same width, one layer."""
        return replace(self, layers=1)


def check_ranks(config: ModelConfig, world_size: int) -> None:
    """Refuse a number of ranks that cannot share the weights equally.

    Raises:
        ValueError: heads, MLP or vocabulary are not a multiple of ``world_size``.
    """
    sizes = {"attention heads": config.heads, "MLP columns": config.mlp, "vocabulary entries": config.vocab_size}
    for what, size in sizes.items():
        if world_size < 1 or size % world_size:
            fitting = [n for n in range(1, config.heads + 1) if all(each % n == 0 for each in sizes.values())]
            raise ValueError(
                f"{world_size} ranks cannot share {size} {what} equally."
                f" Numbers of ranks that can: {', '.join(map(str, fitting))}."
            )


@dataclass(frozen=True)
class Job:
    """One run of the engine: all ranks decode the same requests for a number of steps."""

    name: str
    algorithm: str | None
    """None decodes without speculation."""
    sites: str
    """The policy, in the grammar of ``SPECSYNC_SITES``."""
    steps: int
    """Decode steps at most; fewer when rank 0's queue runs dry."""
    temperature: float = 0.0
    fault: str = ""
    """In the grammar of ``SPECSYNC_FAULTS``; empty for none."""
    transport: str = "auto"
    folded: bool = False
    generators: Literal["per-rank", "shared"] = "per-rank"
    """Per rank: every rank's generator has a seed of its own, as unseeded workers have (VL #17498)."""
    recorded: bool = True
    """Keep a recording, and mark every wait; off where time is measured."""
    control: str = ""
    """Path of a control socket, for ``specsync ctl``; empty for none."""


@dataclass(frozen=True)
class World:
    """A set of ranks that are started together, do their jobs in order, and are ended."""

    ranks: int
    device: Device
    seed: int
    prompts: tuple[bytes, ...]
    jobs: tuple[Job, ...]
    requests: int | None = None
    """How many are in rank 0's queue; None never runs dry."""
    new_tokens: tuple[int, ...] = (24, 28, 32, 36, 40)
    """Output tokens of the requests, by turns, so that they do not all end in one step."""
    gamma: int = 4
    slots: int = 4
    config: ModelConfig = ModelConfig()
    weights: bytes | None = None
    """Trained target and draft as ``torch.save`` wrote them; None creates them from the seed."""
    group_timeout_s: float = 12.0
    dumps: bool = False
    """Each rank that stalls in a recorded job writes a dump beside its recording."""


@dataclass
class JobResult:
    """What one rank brings back from a job."""

    tokens: dict[int, list[int]]
    """Output tokens by request, finished or not."""
    step_s: list[float]
    tokens_per_step: float
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`specsync_core.counters.SiteStats` by slug, with the site's ``kind``."""
    transports: dict[str, str] = field(default_factory=dict)
    """The transport taken for each requested one."""
    unfired: tuple[str, ...] = ()
    """Faults of this rank that never struck, with the reason."""
