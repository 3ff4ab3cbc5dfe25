"""What a person asks of the demo, checked before any process starts. No torch unless CUDA is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from specsync_core.algorithm import Algorithm
from specsync_core.demo.config import Device, ModelConfig, check_ranks
from specsync_core.diagnostics import Fault, parse_faults
from specsync_core.errors import SpecSyncError, did_you_mean
from specsync_core.manager import PluginManager, load_registry, plugin_manager
from specsync_core.policy import parse_policy
from specsync_core.registry import Registry, Site
from specsync_core.settings import TRANSPORTS, Transport

FAULT_STEP = 8
LONGEST_PROMPT = 1024
NO_FAULT = "none"
DEVICES = ("cpu", "cuda")


class DemoError(SpecSyncError, ValueError):
    """The demo cannot run what it was asked for."""


@dataclass(frozen=True)
class Options:
    """The command's options, as given."""

    algorithm: str = "dspark"
    ranks: int = 2
    sites: str = "all"
    fault: str | None = None
    """None: the algorithm's accepted length on rank 1 grows by one at step 8."""
    steps: int = 32
    temperature: float = 0.0
    device: str = "cpu"
    prompts: Path | None = None
    """None: the prompts that ship."""
    train: int = 0
    seed: int = 0
    transport: str = "auto"
    folded: bool = False
    keep: Path | None = None
    """Where recordings of runs that went wrong are kept; None keeps none."""


@dataclass(frozen=True)
class Setup:
    """Options that were checked, with what they name."""

    options: Options
    manager: PluginManager
    registry: Registry
    algorithm: Algorithm
    device: Device
    transport: Transport
    prompts: tuple[bytes, ...]
    faults: tuple[Fault, ...]

    @property
    def fault_text(self) -> str:
        return ";".join(fault.text for fault in self.faults)


def prepare(options: Options) -> Setup:
    """Check every option.

    Raises:
        DemoError, PolicyError: an option is wrong; the message names it and what would be right.
        PluginError, RegistryError: a plugin is broken.
    """
    manager = plugin_manager()
    registry = load_registry(manager)
    algorithm = _algorithm(options.algorithm, manager)
    _check_numbers(options)
    parse_policy(options.sites, registry, "--sites")
    _check_keep(options.keep)
    return Setup(
        options=options,
        manager=manager,
        registry=registry,
        algorithm=algorithm,
        device=_device(options),
        transport=_transport(options),
        prompts=read_prompts(options.prompts),
        faults=_faults(options, registry, algorithm.name),
    )


def _algorithm(name: str, manager: PluginManager) -> Algorithm:
    known = manager.algorithms()
    if name not in known:
        raise DemoError(
            f"--algorithm: unknown algorithm '{name}'{did_you_mean(name, known)}."
            f" Offered by plugins: {', '.join(sorted(known)) or 'none'}. List the plugins with `specsync plugins`."
        )
    return known[name]


def _check_keep(directory: Path | None) -> None:
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(directory, os.W_OK) else "nothing can be written into it"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is not None:
        raise DemoError(f"--keep (or SPECSYNC_DUMP_DIR): {directory}: {problem}. Give a directory for recordings.")


MOST_SEED = 2**32 - 1
"""Each rank's generator takes a 64-bit multiple of it."""


def _check_numbers(options: Options) -> None:
    if options.ranks < 2:
        raise DemoError(f"--ranks: {options.ranks} ranks have nobody to disagree with. Numbers that work: 2, 4, 8.")
    try:
        check_ranks(ModelConfig(), options.ranks)
    except ValueError as error:
        raise DemoError(f"--ranks: {error}") from error
    for name, least in (("steps", 1), ("train", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise DemoError(f"--{name}: {getattr(options, name)} is too small; give at least {least}.")
    if options.seed > MOST_SEED:
        raise DemoError(f"--seed: {options.seed} is too large; give at most {MOST_SEED}.")
    if not 0 <= options.temperature <= 100:
        raise DemoError(f"--temperature: {options.temperature:g} is not between 0 (greedy) and 100.")


def _transport(options: Options) -> Transport:
    for transport in TRANSPORTS:
        if transport == options.transport:
            if transport == "one-shot" and options.device == "cpu":
                raise DemoError(
                    "--transport: one-shot is a kernel for GPUs. Add --device cuda, or give another transport."
                )
            return transport
    hint = did_you_mean(options.transport, TRANSPORTS)
    raise DemoError(f"--transport: unknown transport '{options.transport}'{hint}. Known: {', '.join(TRANSPORTS)}.")


def _device(options: Options) -> Device:
    if options.device == "cpu":
        return "cpu"
    if options.device != "cuda":
        raise DemoError(
            f"--device: unknown device '{options.device}'{did_you_mean(options.device, DEVICES)}. Known: cpu, cuda."
        )
    import torch

    if not torch.cuda.is_available():
        raise DemoError(f"--device: this torch ({torch.__version__}) finds no CUDA device. Use --device cpu.")
    if torch.cuda.device_count() < options.ranks:
        raise DemoError(
            f"--device: {options.ranks} ranks need a GPU each, and there are {torch.cuda.device_count()}."
            " Give fewer --ranks, or use --device cpu."
        )
    return "cuda"


def read_prompts(path: Path | None) -> tuple[bytes, ...]:
    """Read prompts, one a line; None reads those that ship.

    Raises:
        DemoError: the file cannot be read, is not UTF-8, is empty, or a line is too long.
    """
    source = files("specsync_core.demo") / "prompts.txt" if path is None else path
    try:
        text = source.read_bytes().decode("utf-8")
    except OSError as error:
        raise DemoError(
            f"--prompts: {path} cannot be read: {error.strerror or error}. Give a text file, one prompt a line."
        ) from error
    except UnicodeDecodeError as error:
        raise DemoError(
            f"--prompts: {path} is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start})."
            " Save it as UTF-8."
        ) from error
    prompts = [(number, line.strip().encode()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise DemoError(f"--prompts: {path} holds no prompt. Write one a line.")
    for number, prompt in prompts:
        if len(prompt) > LONGEST_PROMPT:
            raise DemoError(
                f"--prompts: {path}, line {number}: {len(prompt)} bytes; the demo takes at most {LONGEST_PROMPT}."
                " Shorten it, or break the line."
            )
    return tuple(prompt for _, prompt in prompts)


def _faults(options: Options, registry: Registry, algorithm: str) -> tuple[Fault, ...]:
    text = options.fault
    if text is None:
        text = default_fault(options, registry, algorithm)
    elif text.strip().lower() == NO_FAULT:
        text = ""
    elif not text.strip():
        raise DemoError(f"--fault: empty. Write one (see --help), or '{NO_FAULT}' for natural divergence alone.")
    faults = parse_faults(text, registry, "--fault")
    for fault in faults:
        _check_fault(fault, options, algorithm)
    return faults


def _check_fault(fault: Fault, options: Options, algorithm: str) -> None:
    where = f"--fault: '{fault.text}'"
    if fault.site.algorithm != algorithm:
        raise DemoError(
            f"{where}: {fault.site} is a site of {fault.site.algorithm}; with --algorithm {algorithm} it never strikes."
        )
    if fault.group_rank is not None and fault.group_rank >= options.ranks:
        raise DemoError(f"{where}: there is no rank {fault.group_rank}; the ranks are 0 to {options.ranks - 1}.")
    if fault.first_step is not None and fault.first_step >= options.steps:
        raise DemoError(
            f"{where}: step {fault.first_step} is never reached; a run's steps are 0 to {options.steps - 1}."
            " Give an earlier step, or more --steps."
        )


def default_fault(options: Options, registry: Registry, algorithm: str) -> str:
    """The skewed accepted length: one more on rank 1, at the accept site that this run goes through.

    Inside a captured graph a fault cannot choose its step. Where a GPU accepts in one, rank 1's plan is cut short.

    Raises:
        DemoError: the algorithm declares no accept site; the person must name a fault.
    """
    sites = [
        site
        for site in registry.sites
        if site.algorithm == algorithm and site.kind == "broadcast"
        and "simulated" not in site.slug and "selector" not in site.slug
    ]  # fmt: skip
    accepts = [site for site in sites if site.phase == "accept"]
    if not accepts:
        raise DemoError(f"--fault: {algorithm} declares no accept site to skew; name a fault at one of its sites.")
    step = min(FAULT_STEP, options.steps - 1)
    wanted = "rng" if options.temperature > 0 else "float"
    in_graph = options.folded and wanted == "float"
    plan = next((site for site in sites if site.phase == "plan"), None)
    if plan and in_graph and options.device == "cuda" and any(site.graph for site in accepts):
        return f"{plan.slug}:rank=1:from={step}:set=1"
    accepts.sort(key=lambda site: (site.cause != wanted, site.graph != in_graph))
    return f"{accepts[0].slug}:rank=1:step={step}{_length_tensor(accepts[0])}:add=1"


def _length_tensor(site: Site) -> str:
    names: Sequence[str] = [spec.name for spec in site.tensors]
    lengths = [name for name in names if "len" in name or name.startswith("num_")]
    return f":tensor={lengths[0]}" if lengths and lengths[0] != names[0] else ""
