"""Compare what runs and ranks produced, token for token. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specsync_core.demo.config import JobResult

Tokens = Mapping[int, Sequence[int]]
"""Output tokens by request."""


@dataclass(frozen=True)
class Agreement:
    """Whether two or more outputs agree, and where they first do not."""

    compared: int
    """Tokens."""
    requests: int
    first_difference: tuple[int, int, int | None, int | None] | None = None
    """Request, position, and the two tokens; None for a token that is not there."""

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.first_difference is None

    def describe(self) -> str:
        """Finish a sentence that begins with what was compared and ``are``."""
        if self.first_difference is None:
            text = f"identical ({self.compared} tokens of {self.requests} requests)"
            return text if self.compared else "not comparable: there are none"
        request, position, one, other = self.first_difference
        return f"different: request {request}, token {position}: {_show(one)} and {_show(other)}"


def compare_ranks(ranks: Mapping[int, JobResult]) -> Agreement:
    """Compare every rank's tokens with rank 0's: the same requests, the same lengths, the same tokens."""
    first = ranks[0].tokens
    for result in ranks.values():
        agreement = _compare(first, result.tokens, whole=True)
        if agreement.first_difference is not None:
            return agreement
    return agreement


def compare_runs(one: Tokens, other: Tokens) -> Agreement:
    """Compare two runs, which may have come to different lengths: what both have must be equal."""
    return _compare(one, other, whole=False)


def _compare(one: Tokens, other: Tokens, whole: bool) -> Agreement:
    compared = 0
    requests = sorted(set(one) | set(other) if whole else set(one) & set(other))
    for request in requests:
        ours, theirs = one.get(request, ()), other.get(request, ())
        shorter = min(len(ours), len(theirs))
        longer = max(len(ours), len(theirs)) if whole else shorter
        for position in range(longer):
            pair = (_at(ours, position), _at(theirs, position))
            if pair[0] != pair[1]:
                return Agreement(compared + position, len(requests), (request, position, *pair))
        compared += shorter
    return Agreement(compared, len(requests))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _show(token: int | None) -> str:
    return "nothing" if token is None else str(token)


def sample_text(prompts: Sequence[bytes], tokens: Tokens, count: int = 3) -> list[tuple[str, str]]:
    """The first requests' prompts and continuations as text; bytes that are no text are escaped."""
    return [
        (_text(prompts[request % len(prompts)]), _text(bytes(token % 256 for token in tokens[request])))
        for request in sorted(tokens)[:count]
    ]


def _text(data: bytes) -> str:
    text = data.decode("utf-8", errors="backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
