"""The policy grammar: everything that the published one says, and the modes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsync_core.errors import PolicyError
from specsync_core.policy import (
    Policy,
    format_sites,
    normalise,
    parse_policy,
    parse_presets,
    parse_sites,
    removes_from_nothing,
)
from specsync_core.registry_files import builtin_registry, merge_registries, read_registry

REGISTRY = merge_registries([builtin_registry()])
ALL = {site.number for site in REGISTRY.sites}
RNG = {site.number for site in REGISTRY.preset_sites("rng")}
DFLASH = {site.number for site in REGISTRY.sites if site.algorithm == "dflash"}


def numbers(text: str) -> set[int]:
    return {site.number for site in parse_sites(text, REGISTRY)}


def modes(text: str, presets: Mapping[str, Policy] | None = None) -> dict[str, str]:
    return {slug: choice.mode for slug, choice in parse_policy(text, REGISTRY, "test", presets).items()}


def refusal(text: str, presets: Mapping[str, Policy] | None = None, within: str | None = None) -> str:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, REGISTRY, "SPECSYNC_SITES", presets, within)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        (" , ,, ", set()),
        ("off", set()),
        ("none", set()),
        ("all", ALL),
        ("init", {1, 12}),
        ("rng", RNG),
        ("dspark-plan", {7}),
        ("7", {7}),
        ("007", {7}),
        ("1,dspark-plan, 16", {1, 7, 16}),
        ("dflash", DFLASH),
        ("17", {2, 3, 4, 5, 6}),
        ("dspark-draft", {2, 3, 4, 5, 6}),
        ("all,-dspark-plan", ALL - {7}),
        ("all,-17", ALL - {2, 3, 4, 5, 6}),
        ("all,-rng", ALL - RNG),
        ("all,-dflash,12", (ALL - DFLASH) | {12}),
        ("-dspark-plan", set()),
        ("-dspark-plan,dspark-plan", {7}),
        ("all,off", ALL),
        ("all,none", ALL),
        ("off,7", {7}),
        ("all,-all,7", {7}),
        ("DSpark_Plan", {7}),
        (" dspark - plan ,\tDFLASH_MEM\n", {7, 12}),
        ("all,_dspark_plan", ALL - {7}),
    ],
)
def test_published_grammar(text: str, expected: set[int]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize("order", ["7,8", "8,7"])
def test_union_has_no_order(order: str) -> None:
    assert numbers(order) == {7, 8}


def test_tokens_are_read_left_to_right() -> None:
    assert numbers("-7,all") == ALL
    assert numbers("all,-7") == ALL - {7}


def test_mode_suffixes() -> None:
    assert modes("dspark-plan:audit, 8 : SYNC, 9:off, 10") == {
        "dspark-plan": "audit",
        "dspark-accept-greedy": "sync",
        "dspark-accept-sample": "off",
        "dspark-accept-graph": "sync",
    }


def test_a_suffix_on_a_preset_an_algorithm_and_a_handle_sets_all_of_it() -> None:
    assert set(modes("all:audit").values()) == {"audit"}
    mixed = modes("all:audit,dflash,17:off")
    assert mixed["dflash-mem"] == "sync"
    assert mixed["dspark-draft-sample"] == "off"
    assert mixed["dspark-plan"] == "audit"


def test_sites_in_audit_are_on_and_sites_off_are_not() -> None:
    assert numbers("7:audit,8:off") == {7}


def test_the_origin_names_the_token() -> None:
    policy = parse_policy("rng, 7, dflash:audit, 17, -8", REGISTRY, "SPECSYNC_SITES")
    origins = {slug: choice.origin for slug, choice in policy.items()}
    assert origins["dspark-target"] == "SPECSYNC_SITES (preset rng)"
    assert origins["dspark-plan"] == "SPECSYNC_SITES (dspark-plan)"
    assert origins["dflash-mem"] == "SPECSYNC_SITES (algorithm dflash:audit)"
    assert origins["dspark-draft-greedy"] == "SPECSYNC_SITES (alias dspark-draft)"
    assert policy["dspark-accept-greedy"] == ("off", "SPECSYNC_SITES (-dspark-accept-greedy)")
    assert "eagle-draft" not in policy


def test_unknown_token() -> None:
    assert refusal("all,-DSpark_Plam") == (
        "SPECSYNC_SITES: unknown token 'dspark-plam' (did you mean 'dspark-plan'?).\n"
        "  Presets: all, init, none, off, rng. List the sites with `specsync sites`."
    )


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("vllm-lead", "vllm-draft-lead"),  # more letters in common with vllm-seed
        ("ngram-corpus", "eagle-ngram-corpus"),
        ("dspark-accept", "dspark-accept-graph"),  # a part of several: the closest
    ],
)
def test_an_unknown_token_with_parts_of_a_known_one(token: str, meant: str) -> None:
    assert f"unknown token '{token}' (did you mean '{meant}'?)" in refusal(token)


@pytest.mark.parametrize("text", ["99", "0", "-1000", "\u0667", "all dspark-plan", "all;rng", "sync", "--7"])
def test_more_unknown_tokens(text: str) -> None:
    assert refusal(text).startswith("SPECSYNC_SITES: unknown token ")


def test_a_number_is_not_compared_with_other_numbers() -> None:
    assert "did you mean" not in refusal("99")


@pytest.mark.parametrize("text", ["-", ":audit", "-:audit", "all, _"])
def test_a_token_without_a_name(text: str) -> None:
    assert "names nothing. Presets: all, init" in refusal(text)


def test_unknown_mode() -> None:
    assert refusal("all:audti") == (
        "SPECSYNC_SITES: unknown mode 'audti' in token 'all:audti' (did you mean 'audit'?). Modes: sync, audit, off."
    )
    assert "unknown mode '' in token 'all:'" in refusal("all:")
    assert "unknown mode 'sync:off'" in refusal("all:sync:off")


def test_a_removal_takes_no_mode() -> None:
    assert refusal("all,-7:audit") == (
        "SPECSYNC_SITES: token '-7:audit': a removal takes no mode. Write '-7' to remove, or '7:audit' to set the mode."
    )


def test_a_long_token_is_shortened_in_the_message() -> None:
    assert len(refusal("x" * 10_000)) < 250


@pytest.mark.parametrize(
    ("text", "token"), [("-7, all", "-7"), ("_7", "-7"), (",,-rng", "-rng"), ("all,-7", None), ("", None)]
)
def test_a_policy_that_begins_by_removing(text: str, token: str | None) -> None:
    assert removes_from_nothing(text) == token


def test_normalised_texts_compare() -> None:
    assert normalise(" All,, -DSpark_Plan ") == normalise("all,-dspark-plan") == "all,-dspark-plan"


def test_retired_handles_warn_and_say_what_they_select(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(
        '[handle.old-plan]\nnumber = 1999\nstatus = "retired"\nsites = ["dspark-plan", "dspark-mem"]\nsummary = ""\n'
    )
    registry = merge_registries([builtin_registry(), read_registry(path, "other-dist")])
    with caplog.at_level(logging.WARNING, logger="specsync"):
        assert {site.number for site in parse_sites("old_plan", registry, "SPECSYNC_SITES")} == {1, 7}
        assert {site.number for site in parse_sites("1999", registry, "SPECSYNC_SITES")} == {1, 7}
    assert caplog.messages[0] == (
        "SPECSYNC_SITES: 'old-plan' is retired; it selects dspark-mem,dspark-plan. Name those instead."
    )
    assert caplog.messages[1].startswith("SPECSYNC_SITES: '1999' is retired; it selects dspark-mem,dspark-plan.")


def test_an_alias_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    numbers("17")
    assert caplog.messages == []


def test_user_presets_use_each_other_in_any_order() -> None:
    presets = parse_presets({"mine": ("base:audit,7", "f:1"), "base": ("init, 8", "f:2")}, REGISTRY)
    expected = {"dspark-mem": "audit", "dflash-mem": "audit", "dspark-accept-greedy": "audit", "dspark-plan": "sync"}
    assert modes("mine", presets) == expected
    assert set(modes("mine:off", presets).values()) == {"off"}


def test_what_a_user_preset_removes_is_not_part_of_it() -> None:
    presets = parse_presets({"careful": ("all:audit,-7", "f:1"), "without": ("7:off", "f:2")}, REGISTRY)
    assert modes("7,careful", presets)["dspark-plan"] == "sync"
    assert modes("7,without", presets)["dspark-plan"] == "off"
    assert modes("all,-careful", presets)["dspark-plan"] == "sync"
    assert modes("all,-careful", presets)["dspark-mem"] == "off"


def test_user_presets_are_offered_in_messages() -> None:
    presets = parse_presets({"careful": ("all", "f:1")}, REGISTRY)
    message = refusal("carefull", presets)
    assert "unknown token 'carefull' (did you mean 'careful'?)." in message
    assert "Presets: all, careful, init, none, off, rng." in message


@pytest.mark.parametrize(
    ("name", "what"), [("rng", "preset"), ("dspark-plan", "site"), ("dflash", "algorithm"), ("dspark-draft", "alias")]
)
def test_user_presets_do_not_shadow(name: str, what: str) -> None:
    with pytest.raises(PolicyError, match=rf"^f:1: '{name}' is the name of a registry's {what}. Choose another.$"):
        parse_presets({name: ("all", "f:1")}, REGISTRY)


def test_user_presets_that_include_themselves() -> None:
    with pytest.raises(PolicyError, match=r"the preset includes itself: a -> b -> a\."):
        parse_presets({"a": ("b", "f:1"), "b": ("-a:", "f:2")}, REGISTRY)


def test_within_an_algorithm_other_sites_stay_undecided() -> None:
    policy = parse_policy("all,-dflash-mem", REGISTRY, "f:1", within="dflash")
    assert {REGISTRY.site(slug).number for slug in policy} == DFLASH
    assert policy["dflash-mem"].mode == "off"


def test_within_an_algorithm_a_foreign_site_is_a_mistake() -> None:
    assert refusal("rng,dspark-plan", within="dflash") == (
        "SPECSYNC_SITES: token 'dspark-plan' names no site of algorithm 'dflash'."
    )
    assert parse_policy("none", REGISTRY, "f:1", within="dflash") == {}


WORDS = sorted(REGISTRY.words)
TOKENS = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(WORDS).map("-{}".format),
    st.builds("{}:{}".format, st.sampled_from(WORDS), st.sampled_from(["sync", "audit", "off"])),
)


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("-_:, 017"))))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    with suppress(PolicyError):
        parse_sites(text, REGISTRY)


@given(st.lists(TOKENS))
def test_spelling_does_not_matter(tokens: list[str]) -> None:
    text = ",".join(tokens)
    loud = " , ".join(token.replace("-", "_").upper() for token in ["", *tokens, ""])
    assert modes(text) == modes(loud) == modes(normalise(text))


@given(st.lists(TOKENS))
def test_a_set_of_sites_is_a_policy(tokens: list[str]) -> None:
    selected = parse_sites(",".join(tokens), REGISTRY)
    assert parse_sites(format_sites(selected), REGISTRY) == selected


@given(st.lists(TOKENS), st.sampled_from(WORDS))
def test_a_removal_at_the_end_removes_and_a_name_at_the_end_selects(tokens: list[str], word: str) -> None:
    named = REGISTRY.words[word].sites
    assert parse_sites(",".join([*tokens, f"-{word}"]), REGISTRY).isdisjoint(named)
    assert parse_sites(",".join([*tokens, word]), REGISTRY) >= named


@given(st.lists(st.sampled_from(WORDS)), st.lists(st.sampled_from(WORDS)))
def test_selection_is_a_union(left: list[str], right: list[str]) -> None:
    together = parse_sites(",".join(left + right), REGISTRY)
    assert together == parse_sites(",".join(left), REGISTRY) | parse_sites(",".join(right), REGISTRY)
