"""A model of the one-shot protocol on the host, and a search through everything its ranks can do.

The model has the protocol's rules and none of its speed: a ring of slots per peer, words that arrive one by one and in
any order, acks that arrive late, tags that come again after `Rules.tags` chunks, slots that are cleared now and then.
What `specsync_core.transports.one_shot_kernel` does in one instruction is one step here; every interleaving of the
steps of all ranks is visited. Peers that are in the same state are interchangeable, so states are compared as if the
peers were sorted: that is what makes eight ranks possible.

A step of a rank is one of
    rank 0: store one word of its chunk into one peer's slot (the header and the lanes in any order), once no peer is
            `slots` chunks behind; or give up when its patience ends
    a peer: take a word of the slot that carries its tag; compare the header; finish the chunk; clear; ack; give up
    the memory: deliver an ack that a peer has sent
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

HEADER = 0
"""Position of the header among a slot's words; the lanes follow."""


@dataclass(frozen=True)
class Rules:
    """The protocol's constants; the real ones are in `one_shot_protocol`, these are small enough to search."""

    slots: int = 2
    lanes: int = 1
    ack_every: int = 1
    tags: int = 4
    """Chunks after which a tag comes again; a power of two times ``slots``. The real number is 2**31."""
    clear_rounds: int = 1
    """Every how many rounds of the ring a reader clears a slot; 0 never (wrong, for the search to find)."""
    back_pressure: bool = True
    """False lets rank 0 lap its peers (wrong, for the search to find)."""
    checks_header: bool = True
    """False takes whatever comes (wrong, for the search to find)."""
    tags_lanes: bool = True
    """False believes a lane once the header is there (wrong, for the search to find)."""

    def tag(self, sequence: int) -> int:
        """Never 0, which is cleared memory."""
        return 1 + sequence % self.tags


Word = tuple[int, int]
"""Tag and payload."""
EMPTY: Word = (0, 99)


@dataclass(frozen=True, order=True)
class Peer:
    """One peer and everything that rank 0 and it share."""

    plan: tuple[tuple[int, int], ...]
    """The calls it will make: header and number of lanes in use, a chunk each."""
    inbox: tuple[tuple[Word, ...], ...]
    """By slot: the header's word and the lanes'."""
    sequence: int = 0
    taken: tuple[int, ...] = ()
    """Payload of the lanes of the current chunk that it has taken, -1 where it has not."""
    sent_ack: int = 0
    ack: int = 0
    """What rank 0 sees of `sent_ack`; lags behind."""
    to_send: tuple[int, ...] = ()
    """Words of rank 0's current chunk that are not stored here yet."""
    outcome: str = ""
    """Empty while it runs; else how it ended."""


@dataclass(frozen=True)
class World:
    """Everything."""

    calls: tuple[tuple[int, int], ...]
    """Rank 0's calls: header and number of lanes, a chunk each."""
    peers: tuple[Peer, ...]
    sequence: int = 0
    sending: bool = False
    broken: bool = False
    outcome: str = ""

    @property
    def key(self) -> World:
        return replace(self, peers=tuple(sorted(self.peers)))


class BrokenRuleError(AssertionError):
    """A rank took what it should not have taken."""


def start(rules: Rules, calls: tuple[tuple[int, int], ...], plans: tuple[tuple[tuple[int, int], ...], ...]) -> World:
    inbox = ((EMPTY,) * (1 + rules.lanes),) * rules.slots
    return World(calls, tuple(Peer(plan, inbox, taken=(-1,) * rules.lanes) for plan in plans))


def payload(sequence: int, lane: int) -> int:
    """What rank 0 sends: different in every chunk, so that stale memory shows."""
    return sequence * 10 + lane


def header_of(call: tuple[int, int]) -> int:
    """Site and size in one word."""
    return 1000 + call[0] * 10 + call[1]


def steps(rules: Rules, world: World) -> Iterator[World]:
    """Every world that one step of one rank, or of the memory, leads to."""
    yield from _root_steps(rules, world)
    for position, peer in enumerate(world.peers):
        if peer.ack != peer.sent_ack:
            yield _with(world, position, replace(peer, ack=peer.sent_ack))
        if world.sending and peer.to_send:
            for word in peer.to_send:
                yield _with(world, position, _store(rules, world, peer, word))
        if not peer.outcome:
            yield from _peer_steps(rules, world, position, peer)


def _with(world: World, position: int, peer: Peer) -> World:
    return replace(world, peers=(*world.peers[:position], peer, *world.peers[position + 1 :]))


def _root_steps(rules: Rules, world: World) -> Iterator[World]:
    if world.outcome:
        return
    if world.broken and not world.sending:
        yield replace(world, outcome="stopped")
    elif world.sending:
        if not any(peer.to_send for peer in world.peers):
            yield replace(world, sending=False, sequence=world.sequence + 1)
    elif world.sequence == len(world.calls):
        yield replace(world, outcome="done")
    elif not rules.back_pressure or all(world.sequence - peer.ack < rules.slots for peer in world.peers):
        words = tuple(range(1 + world.calls[world.sequence][1]))
        yield replace(world, sending=True, peers=tuple(replace(peer, to_send=words) for peer in world.peers))
    elif all(
        peer.ack == peer.sent_ack and (peer.outcome or not _can_move(rules, world, peer)) for peer in world.peers
    ):  # patience ends only where waiting longer would be of no use
        yield replace(world, outcome="gave up", broken=True)


def _store(rules: Rules, world: World, peer: Peer, word: int) -> Peer:
    value = header_of(world.calls[world.sequence]) if word == HEADER else payload(world.sequence, word - 1)
    slot = world.sequence % rules.slots
    words = list(peer.inbox[slot])
    words[word] = (rules.tag(world.sequence), value)
    inbox = (*peer.inbox[:slot], tuple(words), *peer.inbox[slot + 1 :])
    return replace(peer, inbox=inbox, to_send=tuple(other for other in peer.to_send if other != word))


def _can_move(rules: Rules, world: World, peer: Peer) -> bool:
    return any(True for _ in _peer_steps(rules, world, 0, peer, only_peer=True))


def _peer_steps(rules: Rules, world: World, position: int, peer: Peer, only_peer: bool = False) -> Iterator[World]:
    def become(changed: Peer, **others: object) -> World:
        return world if only_peer else replace(_with(world, position, changed), **others)  # type: ignore[arg-type]

    if peer.sequence == len(peer.plan):
        yield become(replace(peer, outcome="done"))
        return
    slot, tag = peer.sequence % rules.slots, rules.tag(peer.sequence)
    words = peer.inbox[slot]
    _, lanes = peer.plan[peer.sequence]
    if words[HEADER][0] == tag:
        if rules.checks_header and words[HEADER][1] != header_of(peer.plan[peer.sequence]):
            yield become(replace(peer, outcome="mismatch"), broken=True)
            return
        for lane in range(lanes):
            if peer.taken[lane] < 0 and (words[1 + lane][0] == tag or not rules.tags_lanes):
                taken = (*peer.taken[:lane], words[1 + lane][1], *peer.taken[lane + 1 :])
                yield become(replace(peer, taken=taken))
        if all(value >= 0 for value in peer.taken[:lanes]):
            yield become(_finish(rules, world, peer, lanes))
    if only_peer:
        return
    if world.broken:
        yield become(replace(peer, outcome="stopped"))
    elif world.outcome and not peer.to_send and not _can_move(rules, world, peer):
        yield become(replace(peer, outcome="gave up"), broken=True)


def _finish(rules: Rules, world: World, peer: Peer, lanes: int) -> Peer:
    right = tuple(payload(peer.sequence, lane) for lane in range(lanes))
    if peer.taken[:lanes] != right or world.calls[peer.sequence] != peer.plan[peer.sequence]:
        raise BrokenRuleError(f"chunk {peer.sequence}: took {peer.taken[:lanes]}, rank 0 sent {right}; {peer}")
    slot, following = peer.sequence % rules.slots, peer.sequence + 1
    inbox = peer.inbox
    if rules.clear_rounds and (peer.sequence // rules.slots) % rules.clear_rounds == rules.clear_rounds - 1:
        inbox = (*inbox[:slot], (EMPTY,) * (1 + rules.lanes), *inbox[slot + 1 :])
    sent = following if following % rules.ack_every == 0 else peer.sent_ack
    return replace(peer, inbox=inbox, sequence=following, sent_ack=sent, taken=(-1,) * rules.lanes)


@dataclass
class Search:
    """What a search has seen."""

    states: int
    outcomes: frozenset[tuple[str, tuple[str, ...]]]
    """How it can end: rank 0's outcome, and the peers' in sorted order."""


def search(rules: Rules, world: World, most_states: int = 3_000_000) -> Search:
    """Visit every reachable state.

    Raises:
        BrokenRuleError: a rank takes wrong values somewhere.
        AssertionError: some rank can neither go on nor stop, or the search is too large.
    """
    seen, frontier, outcomes = {world.key}, [world.key], set()
    while frontier:
        current = frontier.pop()
        followers = {following.key for following in steps(rules, current)}
        if not followers:
            ended = tuple(sorted(peer.outcome for peer in current.peers))
            assert all((current.outcome, *ended)), f"stuck: {current}"
            outcomes.add((current.outcome, ended))
        fresh = followers - seen
        seen |= fresh
        frontier.extend(fresh)
        assert len(seen) <= most_states, "too large to search"
    return Search(len(seen), frozenset(outcomes))


def all_plans(
    calls: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Rank 0's calls with any of them replaced by another call, and every prefix of that."""
    for plan in product(*(tuple({call, *others}) for call in calls)):
        for length in range(len(plan) + 1):
            yield plan[:length]
