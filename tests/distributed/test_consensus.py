import time
from enum import Enum, IntEnum

import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.consensus import Ask, agree_over, agree_together
from specsync_core.errors import PayloadError, SpecSyncError, TransportError
from specsync_core.local_wire import LocalWire
from specsync_core.testing import run_ranks


def agree(slug, call, op, compute):
    try:
        return agree_over(dist.group.WORLD, slug, call, op, compute)
    except SpecSyncError as error:
        return type(error), str(error)


def agreements(rank: int, world_size: int) -> dict[str, object]:
    flags = [True, True, False]
    ids = [[7, 3, 9], [3, 7], [7, 11]]
    long = list(range(400 * rank, 400 * rank + 400))
    cases = {
        "min": ("min", [3, 1, 2][rank]),
        "max": ("max", [1.5, 0.1, 7][rank]),
        "all": ("all", flags[rank]),
        "any": ("any", not flags[rank]),
        "root": ("root", f"rank {rank}"),
        "root None": ("root", None if rank == 0 else 5),
        "root list": ("root", long),
        "all lists": ("all", ids[rank]),
        "any lists": ("any", ids[rank]),
        "exact float": ("min", 0.1 + rank),
        "huge integer": ("max", 2**70 + rank),
        "long lists that begin alike": ("root", [0] * 600 + [rank]),
    }
    return {
        name: agree("toy-gate", call, op, lambda value=value: value)
        for call, (name, (op, value)) in enumerate(cases.items())
    }


def test_ops_over_numbers_flags_strings_and_lists():
    for rank, found in enumerate(run_ranks(agreements, 3)):
        agreed = {name: group for name, (_, group) in found.items()}
        assert agreed == {
            "min": 1,
            "max": 7,
            "all": False,
            "any": True,
            "root": "rank 0",
            "root None": None,
            "root list": list(range(400)),
            "all lists": [7],
            "any lists": [7, 3, 9, 11],
            "exact float": 0.1,
            "huge integer": 2**70 + 2,
            "long lists that begin alike": [0] * 601,
        }
        assert found["root"][0] == f"rank {rank}"


class Word(str, Enum):
    FAST, SLOW = "fast", "slow"


class Level(IntEnum):
    LOW, HIGH = 1, 2


class Seconds(float):
    pass


def members(rank: int, world_size: int) -> list[object]:
    """Values of types of their own: equal, differing, in lists, and led."""
    brought = [
        ("root", Word.FAST),
        ("root", Word.SLOW if rank else Word.FAST),
        ("max", Level(1 + rank)),
        ("min", Seconds(1.5)),
        ("all", [Word.FAST, Level.HIGH]),
    ]
    found = [agree("toy-gate", call, op, lambda value=value: value)[1] for call, (op, value) in enumerate(brought)]
    led = Ask("toy-gate", len(brought), "root", lambda: Word.FAST, leads=True)
    return [*found, agree_together(dist.group.WORLD, [led])[0][1]]


def test_the_agreed_value_has_the_same_type_on_every_rank():
    """A healed rank can only get a plain one."""
    for found in run_ranks(members, 2):
        flat = [part for each in found for part in (each if isinstance(each, list) else [each])]
        assert flat == ["fast", "fast", 2, 1.5, "fast", 2, "fast"]
        assert [type(part) for part in flat] == [str, str, int, float, str, int, str]


def failures(rank: int, world_size: int) -> dict[str, object]:
    def raise_on_one():
        if rank == 1:
            raise MemoryError("no memory left to measure memory")
        return 1.0

    return {
        "raises": agree("toy-gate", 1, "min", raise_on_one),
        "nan": agree("toy-gate", 2, "min", lambda: float("nan") if rank == 1 else 1.0),
        "list": agree("toy-gate", 3, "min", lambda: [1] if rank == 1 else 1),
        "flag": agree("toy-gate", 4, "all", lambda: "yes" if rank == 1 else True),
        "object": agree("toy-gate", 5, "root", lambda: object() if rank == 1 else 1),
        "op": agree("toy-gate", 6, "sum", lambda: 1),
        "still usable": agree("toy-gate", 7, "min", lambda: rank),
        "sites": agree("toy-gate" if rank else "other-gate", 8, "min", lambda: rank),
        "calls": agree("toy-gate", 8 + rank, "min", lambda: rank),
        "ops": agree("toy-gate", 9, "max" if rank else "min", lambda: rank),
    }


def test_one_ranks_bad_value_raises_on_every_rank_and_the_group_stays_usable():
    for rank, found in enumerate(run_ranks(failures, 2)):
        for name, message in {
            "raises": "group rank 1: MemoryError: no memory left to measure memory",
            "nan": "group rank 1: PayloadError: op 'min' takes a number that is not NaN, not nan",
            "list": "group rank 1: PayloadError: op 'min' takes a number, not a list",
            "flag": "group rank 1: PayloadError: op 'all' takes a flag or a list, not 'yes'",
            "object": "a object cannot be agreed on",
            "op": "unknown op 'sum'; known: min, max, all, any, root",
        }.items():
            assert found[name][0] is PayloadError
            assert message in found[name][1]
        assert found["still usable"] == (rank, 0)


def test_ranks_that_agree_on_different_things_all_learn_of_it():
    for found in run_ranks(failures, 2):
        for name in ("sites", "calls", "ops"):
            assert found[name][0] is TransportError
            assert "the ranks' agreements do not match: group rank 0 at call" in found[name][1]


def mixed(rank: int, world_size: int) -> object:
    first = agree("toy-gate", 1, "all", lambda: [1] if rank else True)
    nested = agree("toy-gate", 2, "all", lambda: [[1, 2], [3]] if rank else [[3], [1]])
    return first, nested


def test_lists_on_some_ranks_only_raise_on_every_rank_and_elements_may_be_lists():
    for (kind, message), nested in run_ranks(mixed, 2):
        assert kind is PayloadError
        assert message == "op 'all' takes a list on every rank or on none"
        assert nested[1] == [[3]]


def consensus_sync(policy: str = "all") -> SpecTpSync:
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TIMEOUT_S": "10"}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan)


def counted_gathers(fn):
    """Run ``fn`` and count the collectives of this rank."""
    made, original = [], LocalWire.gather

    def gather(*args, **kwargs):
        made.append(1)
        return original(*args, **kwargs)

    LocalWire.gather = gather
    try:
        return fn(), len(made)
    finally:
        LocalWire.gather = original


def several_at_once(rank: int, world_size: int) -> dict[str, object]:
    sync, audit, off = consensus_sync(), consensus_sync("all:audit"), consensus_sync("all,-dflash-mem")
    wanted = {"dspark-mem": (4.0 - rank, "min"), "dflash-mem": (rank, "max"), "eagle-ngram-corpus": (rank == 0, "any")}
    found = {
        name: counted_gathers(lambda each=each: each.agree_many(wanted))
        for name, each in (("sync", sync), ("audit", audit), ("off", off))
    }
    with sync.together() as pending:
        ids = pending.agree("eagle-ngram-corpus", [7, rank, 9], "all")
        same_site_again = pending.agree("eagle-ngram-corpus", rank == 1, "any")
        led = pending.lead("dspark-mem", lambda: [f"made on rank {rank}"])
        try:
            early = ids.value
        except RuntimeError as error:
            early = str(error)
    found["together"] = (ids.value, same_site_again.value, led.value, early)
    found["nothing"] = counted_gathers(lambda: sync.agree_many({}))
    found["stats"] = {slug: stats.calls for slug, stats in sync.stats().items() if stats.calls}
    return found


def test_agreements_that_are_pending_together_cost_one_collective():
    for rank, found in enumerate(run_ranks(several_at_once, 3)):
        agreed = {"dspark-mem": 2.0, "dflash-mem": 2, "eagle-ngram-corpus": True}
        own = {"dspark-mem": 4.0 - rank, "dflash-mem": rank, "eagle-ngram-corpus": rank == 0}
        assert found["sync"] == (agreed, 1)
        assert found["audit"] == (own, 1)
        assert found["off"] == ({**agreed, "dflash-mem": rank}, 1)
        assert found["together"][:3] == ([7, 9], True, ["made on rank 0"])
        assert "when the `with sync.together()` block ends" in found["together"][3]
        assert found["nothing"] == ({}, 0)
        assert found["stats"] == {"dspark-mem": 2, "dflash-mem": 1, "eagle-ngram-corpus": 3}


def caught(fn, *args, **kwargs):
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def several_with_errors(rank: int, world_size: int) -> list[object]:
    sync = consensus_sync()
    wanted = {"dspark-mem": (float("nan") if rank else 1.0, "min"), "dflash-mem": ("x" if rank == 0 else 1, "max")}
    failed = caught(sync.agree_many, wanted)
    other = caught(sync.agree_many, {"dspark-mem" if rank else "dflash-mem": (1, "min")})

    def leave():
        with sync.together() as pending:
            pending.agree("dspark-mem", 1, "min")
            raise KeyError("the block failed on every rank, and nothing was agreed on")

    return [failed, other, caught(leave)[0], sync.agree("eagle-ngram-corpus", rank, "max")]


def test_one_bad_value_among_several_names_site_and_rank_on_every_rank():
    for failed, other, left, usable in run_ranks(several_with_errors, 2):
        assert failed[0] is PayloadError
        assert "dspark-mem: no agreement, since a rank has no value: group rank 1: PayloadError: op 'min'" in failed[1]
        assert "dflash-mem: no agreement, since a rank has no value: group rank 0: PayloadError: op 'max'" in failed[1]
        assert other[0] is TransportError
        assert "do not match: group rank 0 at call 2 of dflash-mem, op min; group rank 1 at call 2 of" in other[1]
        assert left is KeyError
        assert usable == 1


def led(rank: int, world_size: int) -> dict[str, object]:
    ran = []

    def drafts():
        ran.append(rank)
        return [[rank, 1], [], [2] * 500]

    def fails():
        if rank == 0:
            raise LookupError("no draft was found")
        raise AssertionError("only group rank 0 computes")

    sync, audit, off = consensus_sync(), consensus_sync("all:audit"), consensus_sync("off")
    found = {"value": sync.lead("eagle-ngram-corpus", drafts), "ran": list(ran)}
    found["error"] = caught(sync.lead, "eagle-ngram-corpus", fails)
    found["audit"] = audit.lead("eagle-ngram-corpus", drafts)
    first = audit.stats()["eagle-ngram-corpus"].first_divergence
    found["first"] = first and (first.own, first.rank0)
    found["off"] = off.lead("eagle-ngram-corpus", drafts)
    found["mixed"] = caught(sync.lead if rank else sync.agree, "eagle-ngram-corpus", drafts if rank else 1)
    found["inert"] = caught(sync.lead, "eagle-ngram-corpus", drafts, group=GroupOfOne())
    found["usable"] = sync.lead("eagle-ngram-corpus", lambda: rank + 5)
    return found


class GroupOfOne:
    world_size, rank_in_group, cpu_group = 1, 0, None

    def broadcast(self, tensor, src=0):
        raise AssertionError("a group of one broadcasts nothing")


def test_a_leader_computes_for_all_and_its_error_reaches_all():
    for rank, found in enumerate(run_ranks(led, 2)):
        assert found["value"] == [[0, 1], [], [2] * 500]
        assert found["ran"] == ([0] if rank == 0 else [])
        assert found["error"][0] is PayloadError
        assert "group rank 0: LookupError: no draft was found" in found["error"][1]
        assert found["audit"] == found["off"] == [[rank, 1], [], [2] * 500]
        assert (found["first"] is None) == (rank == 0)
        assert found["mixed"][0] is TransportError
        assert "op root; group rank 1 at call 3 of eagle-ngram-corpus, led by group rank 0" in found["mixed"][1]
        assert found["inert"][0].__name__ == "GroupError"
        assert found["usable"] == 5


def interrupted(rank: int, world_size: int) -> object:
    def stop():
        raise KeyboardInterrupt

    if rank == 0:
        try:
            agree_together(dist.group.WORLD, [Ask("toy-gate", 1, "min", stop)])
        except KeyboardInterrupt:
            return "interrupted", "", 0.0
    started = time.monotonic()
    kind, message = agree("toy-gate", 1, "min", lambda: 1)
    return kind.__name__, message, time.monotonic() - started


def test_an_interrupt_on_one_rank_ends_the_wait_of_the_others():
    (first, *_), (second, message, waited_s) = run_ranks(interrupted, 2, group_timeout_s=60)
    assert (first, second) == ("interrupted", "TransportError")
    assert "group rank 0 gave up: toy-gate: KeyboardInterrupt while it computed its value" in message
    assert waited_s < 30


def a_number_that_cannot_be_written(rank, world_size):
    sync = consensus_sync()
    return caught(sync.agree, "dspark-mem", 10**5000 if rank else 1, "min"), sync.agree("dspark-mem", rank, "max")


def test_a_number_too_long_to_be_written_is_refused_on_every_rank():
    """Python refuses to write more than 4300 digits: on rank 1 alone, while rank 0 already waits for its value."""
    for (kind, text), usable in run_ranks(a_number_that_cannot_be_written, 2):
        assert kind is PayloadError
        assert "group rank 1: ValueError" in text
        assert usable == 1
