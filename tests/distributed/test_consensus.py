import torch.distributed as dist

from specsync_core.consensus import agree_over
from specsync_core.errors import PayloadError, SpecSyncError, TransportError
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
        }
        assert found["root"][0] == f"rank {rank}"


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
