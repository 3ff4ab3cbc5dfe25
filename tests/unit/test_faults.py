"""Faults: the grammar with each of its errors, and the injector."""

import logging
import subprocess
import sys

import pytest
import torch

from specsync_core.diagnostics import FaultInjector, parse_faults
from specsync_core.diagnostics.faults import check_ranks
from specsync_core.errors import PolicyError
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
ACCEPT = REGISTRY.site("dspark-accept-greedy")
TARGET = REGISTRY.site("dspark-target")


def parse(text):
    return parse_faults(text, REGISTRY, "SPECSYNC_FAULTS")


def inject(text, group_rank=1):
    return FaultInjector(parse(text), group_rank, allowed=True)


def triple(batch=3):
    return tuple(torch.arange(batch) + start for start in (0, 100, 200))


# --- the grammar ------------------------------------------------------------------------------------


def test_the_example_of_the_design():
    (fault,) = parse("dspark-accept-greedy:rank=1:step=20:add=1")
    assert (fault.site, fault.group_rank, fault.first_step, fault.last_step) == (ACCEPT, 1, 20, 20)
    assert (fault.add, fault.set, fault.tensor, fault.index, fault.when) == (1, None, 0, None, "before")


def test_every_key():
    (fault,) = parse(
        "EAGLE_draft : rank=all : from=3 : until=9 : prob=.25 : seed=7 : tensor=topk_p : index=2 : set=0.5"
        " : when=after : delay=1.5 : exit=3"
    )
    assert (fault.site.slug, fault.group_rank) == ("eagle-draft", None)
    assert (fault.first_step, fault.last_step, fault.probability, fault.seed) == (3, 9, 0.25, 7)
    assert (fault.tensor, fault.index, fault.set, fault.when) == (0, 2, 0.5, "after")
    assert (fault.delay_s, fault.exit_code) == (1.5, 3)


def test_several_faults_and_none():
    faults = parse("8:rank=0:add=1; 11:rank=1:set=0 ,dspark-plan:rank=0:drop")
    assert [fault.site.number for fault in faults] == [8, 11, 7]
    assert parse("") == parse("  ") == ()


def test_separators_alone_are_an_error():
    with pytest.raises(
        PolicyError, match=r"^SPECSYNC_FAULTS: no fault stands in '; ,'\. Write SITE:rank=N:add=1, or un"
    ):
        parse(" ; ,")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dspark-acept-greedy:rank=1:add=1", "did you mean 'dspark-accept-greedy'"),
        ("dspark-draft:rank=1:add=1", "'dspark-draft' stands for several sites: name one of dspark-draft-greedy,"),
        ("17:rank=1:add=1", "'17' stands for several sites"),
        ("8:rnk=1:add=1", r"unknown key 'rnk' \(did you mean 'rank'\?\). Keys: rank, step, from,"),
        ("8:rank:add=1", "key 'rank' has no value; write rank=VALUE"),
        ("8:rank=:add=1", "key 'rank' has no value"),
        ("8:rank=1:rank=2:add=1", "key 'rank' is given twice"),
        ("8:add=1", "key 'rank' is missing; write rank=N"),
        ("8:rank=1", "it does nothing; give at least one of add, set, delay, drop, exit"),
        ("8:rank=one:add=1", "'one' is not a whole number of at least 0 or 'all'"),
        ("8:rank=-1:add=1", "'-1' is not a whole number of at least 0"),
        ("8:rank=1:step=x:add=1", "key 'step': 'x' is not a whole number"),
        ("8:rank=1:step=1.5:add=1", "key 'step': '1.5' is not a whole number"),
        ("8:rank=1:step=1:from=2:add=1", "keys 'step' and 'from' exclude each other"),
        ("8:rank=1:step=1:until=2:add=1", "keys 'step' and 'until' exclude each other"),
        ("8:rank=1:from=3:until=2:add=1", "no step lies from 3 until 2"),
        ("8:rank=1:add=1:set=2", "keys 'add' and 'set' exclude each other"),
        ("8:rank=1:add=much", "key 'add': 'much' is not a number"),
        ("8:rank=1:add=nan", "correct_len holds whole numbers, not nan"),
        ("8:rank=1:set=0.5", "correct_len holds whole numbers, not 0.5"),
        ("8:rank=1:set=2147483648", "2147483648 does not fit into int32 or int64"),
        ("8:rank=1:prob=0:add=1", "'0' is not a probability above 0"),
        ("8:rank=1:prob=2:add=1", "'2' is not a probability above 0"),
        ("8:rank=1:seed=1:add=1", "key 'seed' means nothing without prob"),
        ("8:rank=1:index=1:drop", "key 'index' means nothing without add or set"),
        ("8:rank=1:tensor=bonus:delay=1", "key 'tensor' means nothing without add or set"),
        ("8:rank=1:tensor=bonsu:add=1", r"no tensor 'bonsu' \(did you mean 'bonus'\?\). Its tensors: correct_len, b"),
        ("dspark-mem:rank=1:tensor=x:add=1", "It declares no tensors; leave the key out"),
        ("8:rank=1:delay=-1", "'-1' is not a number of seconds"),
        ("8:rank=1:delay=inf", "'inf' is not a number of seconds"),
        ("8:rank=1:exit=256", "'256' is not a whole number of at least 0 and at most 255"),
        ("8:rank=1:when=later:add=1", "'later' is neither before nor after"),
        ("8:rank=1:drop=1", "key 'drop' takes no value"),
        ("8:rank=1:drop:when=after", "after the sync it is too late"),
        ("dspark-mem:rank=1:drop", "dspark-mem is of kind consensus; only a broadcast can be dropped"),
    ],
)
def test_each_error_says_where_and_what(text, message):
    with pytest.raises(PolicyError, match=message) as caught:
        parse(f"11:rank=0:add=1; {text}")
    assert str(caught.value).startswith(f"SPECSYNC_FAULTS: '{text}': ")


# --- the injector -----------------------------------------------------------------------------------


def test_faults_need_consent():
    with pytest.raises(PolicyError, match=r"8:rank=1:add=1\) and not allowed.*SPECSYNC_ALLOW_FAULTS=1"):
        FaultInjector(parse("8:rank=1:add=1"), 0)
    FaultInjector((), 0)


def test_an_active_injector_is_loud_where_it_strikes(caplog):
    with caplog.at_level(logging.WARNING):
        inject("8:rank=1:add=1", group_rank=0)
        assert not caplog.records
        inject("8:rank=1:add=1", group_rank=1)
    assert [record.getMessage() for record in caplog.records] == [
        "FAULT INJECTION IS ACTIVE on group rank 1: 8:rank=1:add=1"
    ]


def test_it_strikes_its_site_rank_step_and_tensor_alone():
    text = "8:rank=1:step=20:tensor=bonus:add=1"
    injector, other = inject(text), inject(text, group_rank=0)
    tensors = triple()
    other.before(ACCEPT, tensors, 20)
    injector.before(ACCEPT, tensors, 19)
    injector.before(ACCEPT, tensors, 21)
    injector.after(ACCEPT, tensors, 20)
    injector.before(TARGET, tensors[1:2], 20)
    assert [tensor.tolist() for tensor in tensors] == [tensor.tolist() for tensor in triple()]
    assert injector.before(ACCEPT, tensors, 20) is None
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [101, 102, 103], [200, 201, 202]]
    assert injector.firings() == {text: 1}
    assert other.firings() == {}


def test_after_the_sync():
    injector = inject("8:rank=all:when=after:set=9")
    tensors = triple()
    injector.before(ACCEPT, tensors, 0)
    assert tensors[0].tolist() == [0, 1, 2]
    injector.after(ACCEPT, tensors, 0)
    assert tensors[0].tolist() == [9, 9, 9]


def test_from_and_until():
    injector = inject("8:rank=1:from=2:until=3:add=10; 8:rank=1:from=4:add=100; 8:rank=1:until=0:add=1000")
    found = []
    for step in range(6):
        lens = torch.zeros(1, dtype=torch.int64)
        injector.before(ACCEPT, (lens, lens.clone(), lens.clone()), step)
        found.append(lens.item())
    assert found == [1000, 0, 10, 10, 100, 100]


def test_an_index_of_a_tensor_with_strides():
    injector = inject("15:rank=1:index=4:set=-7")
    predict_BS = torch.arange(6).reshape(3, 2).t()
    injector.before(REGISTRY.site(15), (predict_BS,), 0)
    assert predict_BS.tolist() == [[0, 2, 4], [1, -7, 5]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_add_on_other_dtypes(dtype):
    tensor = torch.tensor([0, 1]).to(dtype)
    inject("11:rank=1:add=1").before(TARGET, (tensor,), 0)
    assert tensor.tolist() == ([True, False] if dtype is torch.bool else [1, 2])


def test_a_value_that_is_agreed_on():
    value = torch.tensor(5.5, dtype=torch.float64)
    inject("dspark-mem:rank=1:add=-5").before(REGISTRY.site(1), (value,), 0)
    assert value.item() == 0.5


def test_a_drawn_fault_is_the_same_in_each_run_and_another_on_each_rank():
    def strikes(group_rank):
        injector = inject("11:rank=all:prob=0.5:seed=3:add=1", group_rank)
        tokens = [torch.zeros(1, dtype=torch.int64) for _ in range(64)]
        for step, token in enumerate(tokens):
            injector.before(TARGET, (token,), step)
        return [int(token) for token in tokens]

    assert strikes(0) == strikes(0)
    assert strikes(0) != strikes(1)
    assert 16 < sum(strikes(0)) < 48


def test_drop_asks_to_skip_the_broadcast():
    injector = inject("8:rank=1:step=2:drop")
    assert injector.before(ACCEPT, triple(), 1) is None
    assert injector.before(ACCEPT, triple(), 2) is False
    assert injector.unfired() == ()


def test_a_fault_that_never_struck_says_why():
    injector = inject("8:rank=1:step=99:add=1; 8:rank=1:index=5:add=1; 11:rank=0:add=1")
    injector.before(ACCEPT, triple(), 0)
    assert injector.unfired() == (
        "8:rank=1:step=99:add=1: site dspark-accept-greedy was not called at such a step",
        "8:rank=1:index=5:add=1: there is no index 5 in a call of dspark-accept-greedy, whose tensor has 3 elements",
    )


def test_an_index_that_a_call_does_not_have_is_warned_of_once_and_an_early_end_names_it(caplog):
    injector = inject("8:rank=1:index=5:add=1; 8:rank=1:from=9:add=1; 8:rank=1:index=1:add=1; 8:rank=0:add=1")
    caplog.clear()
    for _ in range(3):
        injector.before(ACCEPT, triple(), 0)
    why = "there is no index 5 in a call of dspark-accept-greedy, whose tensor has 3 elements"
    assert [record.getMessage() for record in caplog.records] == [
        f"fault 8:rank=1:index=5:add=1 did not strike on group rank 1: {why}"
    ]
    caplog.clear()
    injector.close()
    injector.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"A FAULT NEVER STRUCK on group rank 1: 8:rank=1:index=5:add=1: {why}",
        "A FAULT NEVER STRUCK on group rank 1: 8:rank=1:from=9:add=1: site dspark-accept-greedy was not called at"
        " such a step",
    ]


def test_a_draw_that_never_comes_is_named():
    injector = inject("8:rank=1:prob=0.000001:add=1")
    injector.before(ACCEPT, triple(), 0)
    assert injector.unfired() == (
        "8:rank=1:prob=0.000001:add=1: 1 matching calls, but no draw, or a graph was being captured",
    )


def test_a_call_without_elements_says_so(caplog):
    injector = inject("8:rank=1:add=1")
    injector.before(ACCEPT, (torch.empty(0, dtype=torch.int64),) * 3, 0)
    assert "the tensor has no elements in a call of dspark-accept-greedy" in caplog.text
    injector.before(ACCEPT, (), 0)
    assert injector.unfired() == ("8:rank=1:add=1: the tensor has no elements in a call of dspark-accept-greedy",)


def test_a_rank_outside_the_group_is_refused():
    check_ranks(parse("8:rank=1:add=1; 8:rank=all:add=1"), 2)
    with pytest.raises(
        PolicyError,
        match=r"^SPECSYNC_FAULTS: 8:rank=2:add=1: no such rank in a group of 2\. Group ranks: 0 to 1, or 'all'\.",
    ):
        check_ranks(parse("8:rank=0:add=1; 8:rank=2:add=1"), 2)


def test_a_delay_sleeps(monkeypatch):
    slept = []
    monkeypatch.setattr("specsync_core.diagnostics.faults.time.sleep", slept.append)
    inject("8:rank=1:delay=2.5").before(ACCEPT, triple(), 0)
    assert slept == [2.5]


EXIT = """
import torch
from specsync_core.diagnostics import FaultInjector, parse_faults
from specsync_core.registry_files import builtin_registry, merge_registries
registry = merge_registries([builtin_registry()])
injector = FaultInjector(parse_faults("11:rank=0:step=1:exit=37", registry, "test"), 0, allowed=True)
for step in range(3):
    injector.before(registry.site(11), (torch.zeros(1),), step)
    print(step, flush=True)
"""


def test_an_exit_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", EXIT], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (37, "0\n")
    assert "fault 11:rank=0:step=1:exit=37 ends group rank 0" in done.stderr
