"""Faults on purpose: a tap that changes values, delays or ends a rank at a chosen site, rank and step.

Grammar of ``SPECSYNC_FAULTS``: faults separated by ``;`` or ``,``, each ``SITE:KEY=VALUE:KEY=VALUE...``;
spaces vanish, ``_`` equals ``-`` in the site, and case does not matter there::

    dspark-accept-greedy:rank=1:step=20:add=1
    eagle-target:rank=all:from=3:until=9:prob=0.25:seed=7:set=0:index=2; dspark-plan:rank=0:step=4:exit=3

Importing this module does not import torch.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specsync_core.errors import PolicyError, RegistryError, did_you_mean
from specsync_core.registry import Registry, Site

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

KEYS: dict[str, str] = {
    "rank": "the group rank that is hit, or 'all'; required",
    "step": "the one step at which it strikes",
    "from": "the first step at which it strikes",
    "until": "the last step at which it strikes",
    "prob": "probability per matching call, above 0 and up to 1; every rank draws its own",
    "seed": "seed of the draws (default 0)",
    "tensor": "name of the site's tensor (default: its first)",
    "index": "flat index of the one element that is changed (default: all)",
    "add": "number added to the values; an odd number flips a bool",
    "set": "number that the values become",
    "delay": "seconds to sleep",
    "exit": "exit code with which the process ends at once, 0 to 255",
    "when": "'before' the sync, on the rank's own value (default), or 'after' it",
}
_ACTIONS = ("add", "set", "delay", "exit")


@dataclass(frozen=True)
class Fault:
    """One fault. Steps are the engine's (``SpecTpSync.step``)."""

    text: str
    """As it was written, for messages."""
    site: Site
    group_rank: int | None
    """None hits every rank."""
    first_step: int | None = None
    last_step: int | None = None
    probability: float | None = None
    seed: int = 0
    tensor: int = 0
    """Position among the site's tensors."""
    index: int | None = None
    add: int | float | None = None
    set: int | float | None = None
    delay_s: float | None = None
    exit_code: int | None = None
    when: Literal["before", "after"] = "before"

    @property
    def unconditional(self) -> bool:
        """Strikes at every call, and so may be captured into a graph."""
        return self.first_step is None and self.last_step is None and self.probability is None

    def hits(self, group_rank: int) -> bool:
        return self.group_rank is None or self.group_rank == group_rank

    def matches(self, step: int) -> bool:
        return (self.first_step is None or step >= self.first_step) and (self.last_step is None or step <= self.last_step)


def parse_faults(text: str, registry: Registry, origin: str) -> tuple[Fault, ...]:
    """Parse faults.

    Args:
        text: the faults; empty text is no fault.
        registry: knows the sites and their tensors.
        origin: where the text comes from, e.g. ``SPECSYNC_FAULTS``, for messages.

    Raises:
        PolicyError: anything is unknown, missing, twice or out of range.
    """
    words = (re.sub(r"\s", "", word) for word in re.split(r"[;,]", text))
    return tuple(_parse_fault(word, registry, f"{origin}: '{word}'") for word in words if word)


def _parse_fault(word: str, registry: Registry, where: str) -> Fault:
    head, *pairs = word.split(":")
    site = _parse_site(head, registry, where)
    given = _parse_pairs(pairs, where)
    first, last = _parse_steps(given, where)
    tensor = _parse_tensor(given.get("tensor"), site, where)
    return Fault(
        text=word,
        site=site,
        group_rank=_parse_rank(given, where),
        first_step=first,
        last_step=last,
        probability=_probability(given, where),
        seed=_integer(given, "seed", where) or 0,
        tensor=tensor,
        index=_integer(given, "index", where, minimum=0),
        add=_parse_number(given, "add", site, tensor, where),
        set=_parse_number(given, "set", site, tensor, where),
        delay_s=_seconds(given, where),
        exit_code=_integer(given, "exit", where, minimum=0, maximum=255),
        when=_parse_when(given, where),
    )


def _parse_site(word: str, registry: Registry, where: str) -> Site:
    name = word.lower().replace("_", "-")
    handles = [handle for handle in registry.handles.values() if name in (handle.name, str(handle.number))]
    if handles:
        raise PolicyError(f"{where}: '{word}' stands for several sites: name one of {', '.join(handles[0].sites)}.")
    try:
        return registry.site(name)
    except RegistryError as error:
        raise PolicyError(f"{where}: {error}") from error


def _parse_pairs(pairs: Iterable[str], where: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.lower()
        if key == "drop":
            raise PolicyError(f"{where}: 'drop' is not supported: a tap sees a collective but cannot skip it. Use exit=0.")
        if key not in KEYS:
            raise PolicyError(f"{where}: unknown key '{key}'{did_you_mean(key, KEYS)}. Keys: {', '.join(KEYS)}.")
        if not equals or not value:
            raise PolicyError(f"{where}: key '{key}' has no value; write {key}=VALUE ({KEYS[key]}).")
        if key in given:
            raise PolicyError(f"{where}: key '{key}' is given twice.")
        given[key] = value
    if "rank" not in given:
        raise PolicyError(f"{where}: key 'rank' is missing; write rank=N (a group rank) or rank=all.")
    if not any(action in given for action in _ACTIONS):
        raise PolicyError(f"{where}: it does nothing; give at least one of {', '.join(f'{name}=' for name in _ACTIONS)}.")
    for one, other in (("add", "set"), ("step", "from"), ("step", "until")):
        if one in given and other in given:
            raise PolicyError(f"{where}: keys '{one}' and '{other}' exclude each other.")
    for key, needed in (("seed", ("prob",)), ("index", ("add", "set")), ("tensor", ("add", "set"))):
        if key in given and not any(name in given for name in needed):
            raise PolicyError(f"{where}: key '{key}' means nothing without {' or '.join(f'{name}=' for name in needed)}.")
    return given


def _parse_rank(given: dict[str, str], where: str) -> int | None:
    if given["rank"].lower() == "all":
        return None
    return _integer(given, "rank", where, minimum=0, or_else="or 'all'")


def _parse_steps(given: dict[str, str], where: str) -> tuple[int | None, int | None]:
    step = _integer(given, "step", where, minimum=0)
    if step is not None:
        return step, step
    first, last = _integer(given, "from", where, minimum=0), _integer(given, "until", where, minimum=0)
    if first is not None and last is not None and first > last:
        raise PolicyError(f"{where}: no step lies from {first} until {last}.")
    return first, last


def _parse_tensor(name: str | None, site: Site, where: str) -> int:
    if name is None:
        return 0
    names = [spec.name for spec in site.tensors]
    if name not in names:
        known = f"Its tensors: {', '.join(names)}." if names else "It declares no tensors; leave the key out."
        raise PolicyError(f"{where}: site {site} has no tensor '{name}'{did_you_mean(name, names)}. {known}")
    return names.index(name)


def _parse_number(given: dict[str, str], key: str, site: Site, tensor: int, where: str) -> int | float | None:
    if key not in given:
        return None
    number = _number(given[key])
    if number is None:
        raise PolicyError(f"{where}: key '{key}': {given[key]!r} is not a number.")
    dtypes = site.tensors[tensor].dtypes if site.tensors else ()
    narrowest = min((_INTEGER_BITS[dtype] for dtype in dtypes if dtype in _INTEGER_BITS), default=None)
    if narrowest is None:
        return number
    if not isinstance(number, int):
        raise PolicyError(f"{where}: key '{key}': {site.tensors[tensor].name} holds whole numbers, not {given[key]}.")
    if not -(2**narrowest) <= number < 2**narrowest:
        raise PolicyError(f"{where}: key '{key}': {number} does not fit into {' or '.join(dtypes)}.")
    return number


_INTEGER_BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63, "uint8": 8}


def _parse_when(given: dict[str, str], where: str) -> Literal["before", "after"]:
    when = given.get("when", "before").lower()
    if when == "before":
        return "before"
    if when == "after":
        return "after"
    raise PolicyError(f"{where}: key 'when': {when!r} is neither before nor after{did_you_mean(when, ('before', 'after'))}.")


def _integer(
    given: dict[str, str], key: str, where: str, minimum: int | None = None, maximum: int | None = None, or_else: str = ""
) -> int | None:
    if key not in given:
        return None
    number = _number(given[key])
    fits = isinstance(number, int) and (minimum is None or number >= minimum) and (maximum is None or number <= maximum)
    if not fits or not isinstance(number, int):
        limits = f" of at least {minimum}" if minimum is not None else ""
        limits += f" and at most {maximum}" if maximum is not None else ""
        raise PolicyError(
            f"{where}: key '{key}': {given[key]!r} is not a whole number{limits}{' ' + or_else if or_else else ''}."
        )
    return number


def _probability(given: dict[str, str], where: str) -> float | None:
    if "prob" not in given:
        return None
    number = _number(given["prob"])
    if number is None or not 0 < number <= 1:
        raise PolicyError(f"{where}: key 'prob': {given['prob']!r} is not a probability above 0 and up to 1.")
    return float(number)


def _seconds(given: dict[str, str], where: str) -> float | None:
    if "delay" not in given:
        return None
    number = _number(given["delay"])
    if number is None or not 0 <= number < math.inf:
        raise PolicyError(f"{where}: key 'delay': {given['delay']!r} is not a number of seconds.")
    return float(number)


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


class FaultInjector:
    """A tap that commits the faults of one rank.

    Args:
        faults: from `parse_faults`; those of other ranks are kept apart and do nothing here.
        group_rank: this rank within its group.
        allowed: the operator's explicit consent (``SPECSYNC_ALLOW_FAULTS=1``).

    Raises:
        PolicyError: there are faults and no consent.

    Graph: a fault without step and probability may be captured, and then strikes at each replay. Any other is
    passed over while a graph is captured. Nothing is read from the device.

    Put it first in ``taps``: recorders then see the injected values.
    """

    def __init__(self, faults: Sequence[Fault], group_rank: int, *, allowed: bool = False) -> None:
        if faults and not allowed:
            raise PolicyError(
                f"faults are given ({'; '.join(fault.text for fault in faults)}) and not allowed."
                " Set SPECSYNC_ALLOW_FAULTS=1 where wrong tokens and dead ranks do no harm, or remove the faults."
            )
        self.faults = tuple(faults)
        self.group_rank = group_rank
        self._mine = [number for number, fault in enumerate(self.faults) if fault.hits(group_rank)]
        self._matched = [0] * len(self.faults)
        self._fired = [0] * len(self.faults)
        for number in self._mine:
            logger.warning("FAULT INJECTION IS ACTIVE on group rank %d: %s", group_rank, self.faults[number].text)

    def before(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        self._strike("before", site, tensors, step)

    def after(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        self._strike("after", site, tensors, step)

    def firings(self) -> dict[str, int]:
        """How often each fault that hits this rank has struck, by its text."""
        return {self.faults[number].text: self._fired[number] for number in self._mine}

    def unfired(self) -> tuple[str, ...]:
        """The faults of this rank that never struck, each with the reason as far as it is known."""
        return tuple(self._why_not(number) for number in self._mine if self._fired[number] == 0)

    def _why_not(self, number: int) -> str:
        fault, matched = self.faults[number], self._matched[number]
        reason = (
            f"site {fault.site} was not called at such a step"
            if matched == 0
            else f"{matched} matching calls, but no draw, no such element, or a graph was being captured"
        )
        return f"{fault.text}: {reason}"

    def _strike(self, when: str, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        for number in self._mine:
            fault = self.faults[number]
            if fault.site.number != site.number or fault.when != when or not fault.matches(step):
                continue
            self._matched[number] += 1
            if self._is_drawn(fault, number):
                self._commit(fault, number, tensors)

    def _is_drawn(self, fault: Fault, number: int) -> bool:
        if fault.probability is None:
            return True
        draw = random.Random(f"{fault.seed}/{self.group_rank}/{fault.site.number}/{self._matched[number]}")
        return draw.random() < fault.probability

    def _commit(self, fault: Fault, number: int, tensors: Sequence[Tensor]) -> None:
        changes = fault.add is not None or fault.set is not None
        if changes and not _change(fault, tensors):
            return
        self._fired[number] += 1
        if fault.delay_s is not None:
            time.sleep(fault.delay_s)
        if fault.exit_code is not None:
            logger.warning("fault %s ends group rank %d", fault.text, self.group_rank)
            os._exit(fault.exit_code)


def _change(fault: Fault, tensors: Sequence[Tensor]) -> bool:
    """Change the fault's tensor in place; False when there is nothing to change, or it must not be captured."""
    if fault.tensor >= len(tensors):
        return False
    tensor = tensors[fault.tensor]
    if tensor.numel() <= (fault.index or 0) or (tensor.is_cuda and not fault.unconditional and _is_capturing()):
        return False
    if fault.index is not None:
        tensor = tensor[_position(fault.index, tensor.shape)]  # a view also of a non-contiguous tensor
    if fault.set is not None:
        tensor.fill_(fault.set)
    elif str(tensor.dtype) == "torch.bool":
        tensor.logical_xor_(tensor.new_full((), bool(int(fault.add or 0) % 2)))
    else:
        tensor.add_(fault.add)  # type: ignore[arg-type]
    return True


def _position(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        position.append(place)
    return tuple(reversed(position))


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
