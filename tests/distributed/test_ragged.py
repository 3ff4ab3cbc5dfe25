"""Payloads whose sizes differ between ranks arrive as group rank 0 holds them."""

import pytest
import torch

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, resolve_plan
from specsync_core.errors import SpecSyncError
from specsync_core.registry_files import builtin_registry, merge_registries, read_registry
from specsync_core.testing import run_ranks

TOY = """
[site.toy-drafts]
number = 1000
algorithm = "toy"
phase = "draft"
kind = "broadcast"
cause = "host"
tensors = [
    { name = "lens", shape = ["B"], dtypes = ["int32", "int64"] },
    { name = "tokens", shape = ["N"], dtypes = ["int64"] },
    { name = "scores", shape = ["N", "D"], dtypes = ["float32", "bfloat16"], optional = true },
]
graph = false
platforms = ["cpu"]
summary = "drafts that each host finds on its own"

[site.toy-rows]
number = 1001
algorithm = "toy"
phase = "draft"
kind = "broadcast"
cause = "host"
tensors = [{ name = "lens", shape = ["B"], dtypes = ["int32"] }, { name = "tokens", shape = ["N"], dtypes = ["int64"] }]
graph = false
platforms = ["cpu"]
summary = "rows of tokens"
"""


class Text:
    """A registry without a file."""

    def read_bytes(self) -> bytes:
        return TOY.encode()


def toy_sync(policy: str = "all", taps=(), **environ: str) -> SpecTpSync:
    registry = merge_registries([builtin_registry(), read_registry(Text(), "specsync-toy")])
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TIMEOUT_S": "5", **environ}
    plan = resolve_plan(registry, environ=environ, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan, taps=taps)


def drafts(rank: int, turn: int) -> tuple[torch.Tensor, ...]:
    """Other counts and values on every rank and in every turn; turn 3 drafts nothing on rank 0."""
    lens = torch.arange(3) * (rank + 1) + turn if turn < 3 else torch.full((3,), rank)
    count = int(lens.sum())
    return lens.int(), torch.arange(count) * 10 + rank, torch.arange(count * 2.0).view(count, 2) / 3 + rank


def caught(fn, *args):
    try:
        return fn(*args)
    except SpecSyncError as error:
        return type(error).__name__, str(error)


class Watcher:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def before(self, site, tensors, step):
        self.seen.append([tensor.tolist() for tensor in tensors[:2]])

    def after(self, site, tensors, step):
        self.seen.append([tensor.tolist() for tensor in tensors[:2]])


def moved(rank: int, world_size: int, transport: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for policy in ("all", "all:audit", "off"):
        watcher = Watcher()
        sync = toy_sync(policy, SPECSYNC_TRANSPORT=transport)
        watched = toy_sync(policy, (watcher,), SPECSYNC_TRANSPORT=transport)
        for turn in (0, 1, 3, 2, 0):
            own = drafts(rank, turn)
            back = sync.sync_ragged("toy-drafts", *own)
            again = watched.sync_ragged("toy-drafts", *drafts(rank, turn)[:2])
            want = drafts(0 if policy == "all" else rank, turn)
            found[f"{policy} {turn}"] = all(map(torch.equal, back, want)) and all(map(torch.equal, again, want))
            in_place = [mine is theirs for mine, theirs in zip(own, back, strict=True)]
            found[f"{policy} {turn} in place"] = in_place == [mine.shape == w.shape for mine, w in zip(own, want)]  # noqa: B905
        stats = sync.stats()["toy-drafts"]
        found[f"{policy} stats"] = stats.calls, stats.mismatched_calls, stats.first_divergence
        found[f"{policy} seen"] = watcher.seen[:2]
    return found


@pytest.mark.parametrize("transport", ["grouped", "group"])
def test_every_rank_gets_group_rank_0s_tensors_of_whatever_size(transport):
    for rank, found in enumerate(run_ranks(moved, 3, args=(transport,))):
        for policy in ("all", "all:audit", "off"):
            for turn in (0, 1, 2, 3):
                assert found[f"{policy} {turn}"], (rank, policy, turn)
                assert found[f"{policy} {turn} in place"], (rank, policy, turn)
            calls, mismatched, first = found[f"{policy} stats"]
            assert (calls, mismatched) == (0 if policy == "off" else 5, 5 if rank and policy != "off" else 0)
            assert (first is not None) == (rank > 0 and policy != "off")
            own, agreed = ([part.tolist() for part in drafts(who, 0)[:2]] for who in (rank, 0))
            assert found[f"{policy} seen"] == [own, agreed if policy == "all" else own]
        if rank:
            assert found["all stats"][2].own == [0, rank + 1, 2 * rank + 2][1]


def listed(rank: int, world_size: int) -> list[object]:
    sync = toy_sync()
    rows = [[rank, 2, 3], [], [rank] * (rank + 1)][: 3 - rank]
    return [
        sync.sync_lists("toy-rows", rows),
        sync.sync_lists("toy-rows", [] if rank == 0 else rows),
        toy_sync("off").sync_lists("toy-rows", rows) == rows,
        caught(sync.sync_lists, "dspark-target", rows),
    ]


def test_lists_of_rows_travel_whole_whatever_their_number():
    for rows, nothing, off, refused in run_ranks(listed, 2):
        assert rows == [[0, 2, 3], [], [0]]
        assert nothing == []
        assert off
        assert refused[0] == "PayloadError"
        assert "lists need a site with two tensors [B] and [N]; it takes next_token_ids" in refused[1]


def wrong(rank: int, world_size: int, case: str) -> object:
    sync = toy_sync()
    lens, tokens, scores = drafts(rank, 1)
    if case == "dtype":
        return caught(sync.sync_ragged, "toy-drafts", lens, tokens, scores.bfloat16() if rank else scores)
    if case == "one rank lacks a tensor":
        return caught(sync.sync_ragged, "toy-drafts", *((lens, tokens) if rank else (lens, tokens, scores)))
    if case == "sizes that contradict each other":
        sync.sync_ragged("toy-drafts", lens, tokens, scores)
        bad = scores[1:] if rank else scores
        calls = [caught(sync.sync_ragged, "toy-drafts", lens, tokens, bad)]
        import time

        deadline = time.monotonic() + 10
        while isinstance(calls[-1][0], torch.Tensor) and time.monotonic() < deadline:
            time.sleep(0.1)
            calls.append(caught(sync.sync_ragged, "toy-drafts", lens, tokens, scores))
        return calls[-1]
    return caught(sync.sync, "toy-drafts", lens, tokens, scores)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dtype", "group rank 0 ragged int32[*], int64[*], float32[*, *]; group rank 1 ragged int32[*], int64[*], bfl"),
        ("one rank lacks a tensor", "float32[*, *]; group rank 1 ragged int32[*], int64[*]."),
        ("sizes that contradict each other", "toy-drafts: N is 9 in tokens and 8 in scores"),
        ("not called as ragged", "different payloads: group rank 0 int32[3], int64[6], float32[6, 2]; group rank 1"),
    ],
)
def test_what_must_be_alike_is_checked_on_every_rank(case, message):
    for kind, text in run_ranks(wrong, 2, args=(case,)):
        assert kind == "PayloadError"
        assert message in text


class DeviceOnly:
    """A transport as one-shot is: it counts by itself, and knows no host memory."""

    name = "one-shot"

    def prepare(self, packet, tensors):
        raise AssertionError("host tensors do not go through it")

    overwrite_ = fetch = prepare

    def bind(self, packet, tensors, *, overwrite, count):
        raise AssertionError("host tensors do not go through it")

    def set_step(self, step):
        pass


def on_the_host(rank: int, world_size: int) -> list[object]:
    sync = toy_sync()
    for slug in ("toy-drafts", "toy-rows", "dspark-target"):
        sync._live[slug]._transport = DeviceOnly()
    lens, tokens, _ = drafts(rank, 1)
    ragged = [part.tolist() for part in sync.sync_ragged("toy-drafts", lens, tokens)]
    rows = sync.sync_lists("toy-rows", [[rank] * (2 - rank)])
    return [ragged, rows, sync.sync("dspark-target", torch.full((2,), rank)).tolist()]


def test_host_tensors_travel_in_frames_where_the_transport_is_for_devices():
    want = [part.tolist() for part in drafts(0, 1)[:2]]
    assert run_ranks(on_the_host, 2) == [[want, [[0, 0]], [0, 0]]] * 2
