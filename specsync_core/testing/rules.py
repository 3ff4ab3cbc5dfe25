"""The rules that an algorithm must keep, each a judgement on the records of a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from specsync_core.registry import Registry
from specsync_core.testing.engine import Result, contract_problem, place_order
from specsync_core.testing.trial import Record
from specsync_core.testing.watch import Change, SiteCall

RULES: Mapping[str, str] = {
    "covered": "every declared site is synchronised: by the reference algorithm, or at a broadcast point",
    "declared": "only declared sites are called, each as its kind says, by an algorithm that bears their name",
    "payload": "tensors have the declared shapes and dtypes, and one row for each request",
    "once": "a decision is synchronised exactly once",
    "order": "every rank calls the same sites in the same order",
    "derived": "nothing is derived from a decision before it is agreed on",
    "obeyed": "what was agreed on is what follows, not this rank's own value",
    "capture": "what runs in a captured graph obeys its rules, and only sites with graph = true are called there",
    "contract": "drafts and verdicts keep the contract of specsync_core.algorithm",
    "points": "broadcast points name sites of their kind, known versions and signatures",
    "policy": "the policies that a plugin proposes can be read",
    "runs": "the algorithm runs without an error of its own",
}
"""Each rule in a sentence. Every violation names one of them and a site."""

ENDING = frozenset({"declared", "order", "payload", "runs"})
"""Breaking one of these ends a trial before its time."""
BY_ERROR = {"RegistryError": "declared", "PayloadError": "payload"}


class Violation(NamedTuple):
    """A rule that was broken, and where."""

    rule: str
    site: str
    """Its slug; several, where one of them is to blame; ``-`` for none."""
    detail: str

    def __str__(self) -> str:
        return f"rule '{self.rule}', site {self.site}: {self.detail}"


def failures(records: Sequence[Record], registry: Registry) -> Iterator[Violation]:
    """A rank raised, or the ranks' calls part. At most one violation: what follows from it says nothing new."""
    if (parting := _parting(records)) is not None:
        yield parting
        return
    failed = [(record.is_echo, rank) for rank, record in enumerate(records) if record.error]
    if failed:
        rank = min(failed)[1]
        kind, words = records[rank].error or ("", "")
        calls = records[rank].calls
        rule = BY_ERROR.get(kind, "runs")
        known = [site.slug for site in registry.sites if site.slug in words]
        site = known[0] if rule != "runs" and known else calls[-1].slug if calls else "-"
        yield Violation(rule, site, f"group rank {rank} fails behind it: {kind}: {words}")


def _parting(records: Sequence[Record]) -> Violation | None:
    """The first call in which ranks do not call the same site."""
    logs = [record.calls for record in records]
    unheard = any(record.error and not record.is_echo for record in records)
    for index in range(max(map(len, logs))):
        calls = [log[index] if index < len(log) else None for log in logs]
        names = [call.name if call else "nothing" for call in calls]
        if len(set(names)) > 1 and not (None in calls and unheard):
            said = "; ".join(f"group rank {rank} calls {name}" for rank, name in enumerate(names))
            called = [call for call in calls if call]
            earliest = min(place_order(call.place) for call in called)  # who is further on has left that one out
            slugs = dict.fromkeys(call.slug for call in called if place_order(call.place) == earliest)
            return Violation("order", ", ".join(slugs), f"call {index}: {said}")
    return None


def held_contracts(records: Sequence[Record]) -> Iterator[Violation]:
    """Captures, row counts, and the shapes of drafts and verdicts, where no rank was made to differ."""
    record = records[0]
    for problem, slugs in record.captures:
        yield Violation("capture", ", ".join(dict.fromkeys(slugs)) or "-", f"in the captured function {problem}")
    for slug, problem in record.sizes:
        yield Violation("payload", slug, problem)
    draft: Result | None = None
    for result in record.results:
        if (broken := contract_problem(result, draft.tensors if draft else {})) is not None:
            yield Violation("contract", _sites_in(record, result.place), f"{result.place}: {broken}")
        draft = result if "parents_BW" in result.tensors else draft


def _sites_in(record: Record, place: str) -> str:
    return ", ".join(dict.fromkeys(call.slug for call in record.calls if call.place == place)) or "-"


def captured_where_allowed(records: Sequence[Record], registry: Registry) -> Iterator[Violation]:
    """No site without ``graph = true`` is called while a graph is captured."""
    for slug in dict.fromkeys(call.slug for call in records[0].calls if call.in_capture):
        if not registry.site(slug).graph:
            yield Violation("capture", slug, "it is called in a captured function, and the site has graph = false")


def agreed_results(records: Sequence[Record], cause: str, blamed: str | None = None) -> Iterator[Violation]:
    """Every rank returned what group rank 0 did, though one was made to differ. At most one violation.

    Args:
        cause: in what a rank was made to differ, in words.
        blamed: the site that was changed; None finds the ones in which the ranks' own values differed.
    """
    for rank, record in enumerate(records):
        for mine, roots in zip(record.results, records[0].results, strict=False):
            if (name := _difference(mine, roots)) is not None:
                suspects = blamed or _suspects(records[0], record, mine.place)
                if suspects:
                    words = f"group rank {rank}'s own value reached {name} of its {mine.place}"
                else:
                    words = f"{name} of group rank {rank}'s {mine.place} differs; a decision there has no site"
                yield Violation("derived", suspects or "-", f"with {cause}, {words}")
                return


def _suspects(roots: Record, own: Record, place: str) -> str:
    """The sites of this place to which this rank brought other values than group rank 0."""
    pairs = zip(roots.calls, own.calls, strict=False)
    slugs = [theirs.slug for ours, theirs in pairs if theirs.place == place and not _same(ours.own, theirs.own)]
    return ", ".join(dict.fromkeys(slugs))


def _difference(one: Result, other: Result) -> str | None:
    """The first tensor that differs."""
    for name, tensor in one.tensors.items():
        theirs = other.tensors.get(name)
        if theirs is None or not torch.equal(tensor, theirs):
            return name
    return None


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def same_outcome(one: Record, other: Record) -> bool:
    """Whether two trials called the same sites and returned the same on one rank."""
    calls = [[(call.name, call.in_capture) for call in record.calls] for record in (one, other)]
    return calls[0] == calls[1] and not any(
        _difference(*pair) for pair in zip(one.results, other.results, strict=False)
    )


def healed(records: Sequence[Record], base: Record, call: SiteCall, change: Change) -> Iterator[Violation]:
    """A rank brought wrong values to one call: no rank's results show it."""
    cause = f"group rank {change.rank} made wrong before {call.name}"
    yield from agreed_results(records, cause, call.slug)
    if call.own and call.own[0].dim() and not same_outcome(records[0], base):
        yield Violation("derived", call.slug, f"with {cause}, group rank 0 decides otherwise than before")


def repeats(record: Record) -> Iterator[tuple[str, str, bool]]:
    """Yield each call that could repeat an earlier one of the same call of the algorithm: the earlier call's site, its
    own, and whether it brings what was agreed on there."""
    for index, call in enumerate(record.calls):
        earlier = [other for other in record.calls[:index] if other.place == call.place and other.label == call.label]
        if not earlier or not call.own or not call.own[0].dim():
            continue
        repeated = next((other for other in reversed(earlier) if other.agreed and _same(other.agreed, call.own)), None)
        yield (repeated or earlier[-1]).slug, call.slug, repeated is not None
