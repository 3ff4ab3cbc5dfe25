"""How faults are written, in ``SPECSYNC_FAULTS`` and on command lines. No torch.

Faults are separated by ``;`` or ``,``; each is ``SITE:KEY=VALUE:KEY=VALUE...``, and ``drop`` stands without a value.
Spaces vanish; in the site ``_`` equals ``-`` and case does not matter::

    dspark-accept-greedy:rank=1:step=20:add=1
    dspark-plan:rank=0:from=5:drop
    eagle-target:rank=all:from=3:until=9:prob=0.25:seed=7:set=0:index=2; dspark-plan:rank=0:step=4:exit=3
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from specsync_core.diagnostics.faults import Fault
from specsync_core.errors import PolicyError, RegistryError, did_you_mean
from specsync_core.registry import Registry, Site

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
    "drop": "no value: this rank skips the broadcast and keeps its own values",
    "exit": "exit code with which the process ends at once, 0 to 255",
    "when": "'before' the sync, on the rank's own value (default), or 'after' it",
}
_ACTIONS = ("add", "set", "delay", "drop", "exit")


def parse_faults(text: str, registry: Registry, origin: str) -> tuple[Fault, ...]:
    """Parse faults.

    Args:
        text: the faults; empty text is no fault, separators alone are an error.
        registry: knows the sites and their tensors.
        origin: where the text comes from, e.g. ``SPECSYNC_FAULTS``, for messages.

    Raises:
        PolicyError: anything is unknown, missing, twice or out of range.
    """
    words = [word for part in re.split(r"[;,]", text) if (word := re.sub(r"\s", "", part))]
    if text.strip() and not words:
        raise PolicyError(f"{origin}: no fault stands in {text.strip()!r}. Write SITE:rank=N:add=1, or unset it.")
    return tuple(_parse_fault(word, registry, f"{origin}: '{word}'") for word in words)


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
        drop=_parse_drop(given, site, where),
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
        if key not in KEYS:
            raise PolicyError(f"{where}: unknown key '{key}'{did_you_mean(key, KEYS)}. Keys: {', '.join(KEYS)}.")
        if key == "drop" and equals:
            raise PolicyError(f"{where}: key 'drop' takes no value; write it alone.")
        if key != "drop" and not value:
            raise PolicyError(f"{where}: key '{key}' has no value; write {key}=VALUE ({KEYS[key]}).")
        if key in given:
            raise PolicyError(f"{where}: key '{key}' is given twice.")
        given[key] = value
    _check_together(given, where)
    return given


def _check_together(given: Mapping[str, str], where: str) -> None:
    if "rank" not in given:
        raise PolicyError(f"{where}: key 'rank' is missing; write rank=N (a group rank) or rank=all.")
    if not any(action in given for action in _ACTIONS):
        raise PolicyError(f"{where}: it does nothing; give at least one of {', '.join(_ACTIONS)}.")
    for one, other in (("add", "set"), ("step", "from"), ("step", "until")):
        if one in given and other in given:
            raise PolicyError(f"{where}: keys '{one}' and '{other}' exclude each other.")
    for key, needed in (("seed", ("prob",)), ("index", ("add", "set")), ("tensor", ("add", "set"))):
        if key in given and not any(name in given for name in needed):
            raise PolicyError(f"{where}: key '{key}' means nothing without {' or '.join(needed)}.")


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
    hint = did_you_mean(when, ("before", "after"))
    raise PolicyError(f"{where}: key 'when': {when!r} is neither before nor after{hint}.")


def _parse_drop(given: dict[str, str], site: Site, where: str) -> bool:
    if "drop" in given and site.kind != "broadcast":
        raise PolicyError(f"{where}: key 'drop': {site} is of kind {site.kind}; only a broadcast can be dropped.")
    if "drop" in given and given.get("when", "").lower() == "after":
        raise PolicyError(f"{where}: key 'drop': after the sync it is too late to drop it; leave when=after out.")
    return "drop" in given


def _integer(
    given: Mapping[str, str],
    key: str,
    where: str,
    minimum: int | None = None,
    maximum: int | None = None,
    or_else: str = "",
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
