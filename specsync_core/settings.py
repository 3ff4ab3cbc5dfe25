"""What the environment says. The only module that reads environment variables, or sets one for an engine.

A value that cannot be understood is an error, and so is a variable that looks like a misspelt one: a
setting that is dropped in silence on one rank is a divergence.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

from specsync_core.errors import PolicyError, did_you_mean
from specsync_core.policy import normalise

PREFIX = "SPECSYNC_"
VARIABLES: Mapping[str, str] = {
    "SPECSYNC_SITES": "policy: which sites are on, e.g. 'all,-dspark-plan' or 'all:audit'",
    "SGLANG_SPEC_TP_SYNC": "the published fix's policy, read where SPECSYNC_SITES is not set",
    "SPECSYNC_CONFIG": "path of the policy file (default: ./specsync.toml, else [tool.specsync] in ./pyproject.toml)",
    "SPECSYNC_TRANSPORT": "auto, one-shot, grouped or group (default auto)",
    "SPECSYNC_TIMEOUT_S": "seconds that ranks wait for each other at start-up and in host agreements (default 30)",
    "SPECSYNC_DISABLE": "comma-separated entry points of plugins that are not loaded",
    "SPECSYNC_COUNTERS": "on or off: count divergence in mode sync too (default on)",
    "SPECSYNC_STRICT": "0: an engine adapter warns and goes on where it would otherwise stop the start (default 1)",
    "SPECSYNC_FAULTS": "faults on purpose, e.g. 'dspark-accept-greedy:rank=1:step=20:add=1'",
    "SPECSYNC_ALLOW_FAULTS": "1: obey SPECSYNC_FAULTS (default 0)",
    "SPECSYNC_DUMP_DIR": "directory for recordings and dumps; turns the recorder and the watchdog on (default: off)",
    "SPECSYNC_WATCHDOG_S": "seconds that a call or step may take before every rank writes a dump (default 60)",
    "SPECSYNC_CHECK_EVERY": "steps between checks of an engine's derived state, over the CPU group (default 0: none)",
    "SPECSYNC_RECORD_VALUES": "1: record values of device tensors too, a host wait per tensor (default 0)",
    "SPECSYNC_RECORD_PROMPTS": "1: record values of drafts that are copied out of prompts, as n-grams are (default 0)",
    "SPECSYNC_STATS_DIR": "directory in which each rank keeps its counts as JSON while it runs (default: none)",
    "SPECSYNC_TRIAL": "the number of the run, set by `specsync bisect` for its command; read by the demo alone",
    "SPECSYNC_CONTROL": "absolute path of the socket for `specsync ctl`, {pid} is the process's (default: no control)",
}
"""Every variable that is read, with its meaning."""

Transport: TypeAlias = Literal["auto", "group", "grouped", "one-shot"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_WATCHDOG_S = 60.0

logger = logging.getLogger("specsync")
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, where it comes from, and what was not taken."""

    value: T
    origin: str
    """A variable, a file and line, a plugin's hook, or ``default``."""
    rejected: tuple[tuple[str, str], ...] = ()
    """Other values, each with the weaker source that states it, or with the reason why it does not fit."""


@dataclass(frozen=True)
class Environment:
    """The settings that the environment holds; None where a variable is not set."""

    sites: Setting[str] | None = None
    """Policy text; the empty string selects nothing."""
    config: Path | None = None
    transport: Setting[Transport] | None = None
    timeout_s: Setting[float] | None = None
    """Seconds, above 0 and finite."""
    counters: Setting[bool] | None = None
    disable: frozenset[str] = frozenset()
    """Names of entry points."""
    strict: bool = True
    """An engine adapter that cannot synchronise a site stops the start; False only warns."""
    faults: str | None = None
    """As written; `specsync_core.diagnostics.faults` parses it."""
    allow_faults: bool = False
    dump_dir: Path | None = None
    """Absolute. None: no recorder, no watchdog."""
    watchdog_s: float = DEFAULT_WATCHDOG_S
    check_every: int = 0
    """Steps; 0 checks no derived state."""
    record_values: bool = False
    record_prompts: bool = False
    stats_dir: Path | None = None
    """Where each rank keeps a file of its counts; None keeps none."""
    control: Setting[str] | None = None
    """Path of the control socket that group rank 0 opens; ``{pid}`` in it stands for its process id."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read every variable of specsync.

    Args:
        environ: None reads the process's own environment.

    Raises:
        PolicyError: one line for each variable that is misspelt, cannot be understood, or contradicts another.
    """
    environ = os.environ if environ is None else environ
    problems = list(_misspelt(environ))
    read = _Reader(environ, problems)
    found = Environment(
        sites=_sites(environ, problems),
        config=read.plain("SPECSYNC_CONFIG", _path),
        transport=read("SPECSYNC_TRANSPORT", _transport),
        timeout_s=read("SPECSYNC_TIMEOUT_S", _seconds),
        counters=read("SPECSYNC_COUNTERS", _flag),
        disable=disabled_plugins(environ),
        strict=read.plain("SPECSYNC_STRICT", _flag) is not False,
        faults=environ.get("SPECSYNC_FAULTS"),
        allow_faults=read.plain("SPECSYNC_ALLOW_FAULTS", _flag) or False,
        dump_dir=read.plain("SPECSYNC_DUMP_DIR", _directory),
        stats_dir=read.plain("SPECSYNC_STATS_DIR", _directory),
        watchdog_s=read.plain("SPECSYNC_WATCHDOG_S", _seconds) or DEFAULT_WATCHDOG_S,
        check_every=read.plain("SPECSYNC_CHECK_EVERY", _count) or 0,
        record_values=read.plain("SPECSYNC_RECORD_VALUES", _flag) or False,
        record_prompts=read.plain("SPECSYNC_RECORD_PROMPTS", _flag) or False,
        control=read("SPECSYNC_CONTROL", _socket_path),
    )
    if problems:
        raise PolicyError("\n".join(problems))
    return found


def disabled_plugins(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the entry points that ``SPECSYNC_DISABLE`` names, whatever else the environment says."""
    environ = os.environ if environ is None else environ
    names = (name.strip() for name in environ.get("SPECSYNC_DISABLE", "").split(","))
    return frozenset(filter(None, names))


def engine_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return what an engine's own environment variable says; None where it is not set."""
    return (os.environ if environ is None else environ).get(name)


def stats_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return what ``SPECSYNC_STATS_DIR`` names, whatever else the environment says."""
    named = (os.environ if environ is None else environ).get("SPECSYNC_STATS_DIR")
    return _directory(named) if named else None


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for a process that it starts."""
    return dict(os.environ)


def trial_number(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the number of the run under `specsync bisect`; None elsewhere."""
    return (os.environ if environ is None else environ).get("SPECSYNC_TRIAL")


_handed_over: dict[str, tuple[str, str | None]] = {}
"""By variable: what an engine is to read there, and what the operator had set."""


def unused_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables that are set and that only a session obeys (`specsync_core.diagnostics.open_session`)."""
    environ = os.environ if environ is None else environ
    return [variable for variable in ("SPECSYNC_DUMP_DIR", "SPECSYNC_FAULTS") if environ.get(variable)]


def hand_over(variable: str, text: str) -> None:
    """Set a variable of this process that an engine reads after us; we ourselves go on reading the operator's."""
    before = _stated(os.environ, variable)
    os.environ[variable] = text
    _handed_over[variable] = text, before


def _stated(environ: Mapping[str, str], variable: str) -> str | None:
    """What the operator set, where we have written something else over it for the engine."""
    text = environ.get(variable)
    handed, before = _handed_over.get(variable, (None, None))
    return before if environ is os.environ and text is not None and text == handed else text


def share_policy() -> None:
    """Set the published variable like ours where only ours is set, for the processes that this one starts.

    An engine that narrows the published variable for some models (SGLang: MiniMax-M3.1) leaves a set one alone.
    Nothing is parsed, and nothing raised, here: an engine's plugin loader would go on without us.
    """
    if (ours := os.environ.get("SPECSYNC_SITES")) is not None:
        os.environ.setdefault("SGLANG_SPEC_TP_SYNC", ours)


class _Reader:
    """Parses variables, and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str], problems: list[str]) -> None:
        self._environ = environ
        self._problems = problems

    def plain(self, variable: str, parse: Callable[[str], T]) -> T | None:
        text = self._environ.get(variable)
        if text is None:
            return None
        try:
            return parse(text.strip())
        except ValueError as error:
            self._problems.append(f"{variable}: {error}, not {text!r}. Unset it for the default.")
            return None

    def __call__(self, variable: str, parse: Callable[[str], T]) -> Setting[T] | None:
        value = self.plain(variable, parse)
        return None if value is None else Setting(value, variable)


def _sites(environ: Mapping[str, str], problems: list[str]) -> Setting[str] | None:
    ours, published = environ.get("SPECSYNC_SITES"), _stated(environ, "SGLANG_SPEC_TP_SYNC")
    if ours is not None and published is not None and normalise(ours) != normalise(published):
        problems.append(
            f"SPECSYNC_SITES is {ours!r} but SGLANG_SPEC_TP_SYNC is {published!r}."
            " Unset one of them, or make them equal."
        )
    if ours is not None:
        return Setting(ours, "SPECSYNC_SITES")
    return None if published is None else Setting(published, "SGLANG_SPEC_TP_SYNC")


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each variable that is nearly a known one; log those that are merely unknown."""
    suffixes = {variable.removeprefix(PREFIX): variable for variable in VARIABLES if variable.startswith(PREFIX)}
    for variable in sorted(environ):
        if variable in VARIABLES or not variable.upper().startswith(PREFIX):
            continue
        close = get_close_matches(variable.upper().removeprefix(PREFIX), suffixes, n=1, cutoff=0.7)
        if close:
            yield f"unknown variable {variable} (did you mean {suffixes[close[0]]}?). Rename or unset it."
        else:
            logger.warning("unknown variable %s has no effect. Known: %s.", variable, ", ".join(VARIABLES))


def _path(text: str) -> Path:
    if not text:
        raise ValueError("takes the path of a policy file")
    return Path(text)


def _socket_path(text: str) -> str:
    if not text.startswith("/") or text.endswith("/"):  # workers may run in another directory than the operator
        raise ValueError("takes the absolute path of a socket, such as /run/user/1000/specsync-{pid}.sock")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("takes a whole number of at least 0")
    return int(text)


def _directory(text: str) -> Path:
    if not text:
        raise ValueError("takes a directory")
    return Path(text).absolute()  # an engine's processes may change theirs


def _transport(text: str) -> Transport:
    for transport in TRANSPORTS:
        if text.lower() == transport:
            return transport
    raise ValueError(f"takes {', '.join(TRANSPORTS)}{did_you_mean(text.lower(), TRANSPORTS)}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("takes a number of seconds above 0")
    return seconds


def _flag(text: str) -> bool:
    if text.lower() in ("1", "on", "true", "yes"):
        return True
    if text.lower() in ("0", "off", "false", "no"):
        return False
    raise ValueError("takes on or off (1 or 0)")
