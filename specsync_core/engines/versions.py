"""Engine versions, as broadcast points name them: ``>=0.5.16,<0.5.19`` or ``==0.5.23``."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import eq, ge, gt, le, lt, ne

from specsync_core.errors import EngineError

_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": eq,
    "!=": ne,
    ">=": ge,
    "<=": le,
    ">": gt,
    "<": lt,
}


def is_among(version: str, wanted: str) -> bool:
    """Whether a version meets every comma-separated condition.

    A version that is not plain numbers (a pre-release, a local build) meets none: its code was not read.

    Raises:
        EngineError: a condition cannot be understood.
    """
    conditions = [_condition(text, wanted) for text in wanted.split(",")]
    numbers = _numbers(version)
    return numbers is not None and all(_COMPARE[compare](numbers, limit) for compare, limit in conditions)


def _condition(text: str, wanted: str) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"\s*(==|!=|>=|<=|>|<)\s*([0-9.]+)\s*", text)
    limit = match and _numbers(match[2])
    if not match or not limit:
        raise EngineError(f"engine versions {wanted!r}: {text!r} is not one of {', '.join(_COMPARE)} and a version.")
    return match[1], limit


def _numbers(version: str) -> tuple[int, ...] | None:
    release = version.partition("+")[0]  # a local label such as +cpu does not change the code
    if not re.fullmatch(r"\d+(\.\d+)*", release):
        return None
    return tuple(int(part) for part in release.split("."))
