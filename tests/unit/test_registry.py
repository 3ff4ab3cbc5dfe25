"""The registry: the published sites, what a file may hold, and how files merge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specsync_core.errors import RegistryError
from specsync_core.registry import DType, Registry
from specsync_core.registry_files import RegistryFile, builtin_registry, merge_registries, read_registry

PUBLISHED = {
    1: "dspark-mem",
    2: "dspark-draft-greedy",
    3: "dspark-draft-sample",
    4: "dspark-draft-multinomial",
    5: "dspark-graph-sample",
    6: "dspark-graph-greedy",
    7: "dspark-plan",
    8: "dspark-accept-greedy",
    9: "dspark-accept-sample",
    10: "dspark-accept-graph",
    11: "dspark-target",
    12: "dflash-mem",
    13: "dflash-selector",
    14: "dflash-accept-sample",
    15: "dflash-accept-greedy",
    16: "dflash-target",
}

SITE = """
[site.{slug}]
number = {number}
algorithm = "{algorithm}"
phase = "accept"
kind = "broadcast"
cause = "{cause}"
tensors = [{{ name = "bonus", shape = ["B"], dtypes = ["int64"] }}]
graph = false
platforms = ["cuda"]
summary = "a site"
"""


def site(slug: str = "other-accept", number: int = 1000, algorithm: str = "other", cause: str = "rng") -> str:
    return SITE.format(slug=slug, number=number, algorithm=algorithm, cause=cause)


def read(tmp_path: Path, text: str, source: str = "other-dist", name: str = "sites.toml") -> RegistryFile:
    path = tmp_path / name
    path.write_text(text)
    return read_registry(path, source)


def merged_with(tmp_path: Path, text: str, source: str = "other-dist") -> Registry:
    return merge_registries([builtin_registry(), read(tmp_path, text, source)])


def problem_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(RegistryError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def collision_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(RegistryError) as caught:
        merged_with(tmp_path, text)
    return str(caught.value)


def test_published_numbers_and_slugs(registry: Registry) -> None:
    assert {site.number: site.slug for site in registry.sites if site.number <= 16} == PUBLISHED


def test_eagle_is_numbered_from_101(registry: Registry) -> None:
    eagle = [site for site in registry.sites if site.algorithm == "eagle"]
    assert {"eagle-verify-greedy", "eagle-verify-sample", "eagle-draft", "eagle-target"} <= {s.slug for s in eagle}
    assert all(101 <= site.number < 200 for site in eagle)


def test_further_dspark_and_dflash_sites_are_numbered_from_201(registry: Registry) -> None:
    assert all(site.number > 200 for site in registry.sites if site.number > 16 and site.algorithm != "eagle")


def test_alias_17(registry: Registry) -> None:
    alias = registry.handles["dspark-draft"]
    assert (alias.number, alias.status) == (17, "alias")
    assert alias.sites == tuple(PUBLISHED[number] for number in range(2, 7))


def test_presets(registry: Registry) -> None:
    selected = {name: {site.number for site in registry.preset_sites(name)} for name in registry.presets}
    assert selected["all"] == {site.number for site in registry.sites}
    assert selected["off"] == selected["none"] == set()
    assert selected["init"] == {1, 12}
    assert {number for number in selected["rng"] if number <= 16} == {1, 12, 3, 4, 5, 9, 11, 13, 14, 16}
    assert {102, 104} <= selected["rng"]


def test_a_site_is_found_by_slug_number_and_itself(registry: Registry) -> None:
    plan = registry.site("dspark-plan")
    assert plan.number == 7
    assert registry.site(7) is registry.site("7") is registry.site(" DSpark_Plan ") is registry.site(plan) is plan


def test_unknown_site(registry: Registry) -> None:
    with pytest.raises(RegistryError, match=r"unknown site 'dspark-plam' \(did you mean 'dspark-plan'\?\)\. List"):
        registry.site("dspark-plam")


def test_a_word_for_several_sites_is_no_site(registry: Registry) -> None:
    with pytest.raises(RegistryError, match=r"'17' is no single site, it is the alias of dspark-draft-greedy, "):
        registry.site(17)


def test_every_dtype_is_one_of_torchs() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DType.__args__)  # type: ignore[attr-defined]


def test_third_party_sites_join_presets_by_attribute(tmp_path: Path) -> None:
    registry = merged_with(tmp_path, site() + site("other-plan", 1001, cause="host"))
    assert registry.site(1000) in registry.preset_sites("rng")
    assert registry.site(1001) not in registry.preset_sites("rng")
    assert registry.site(1001) in registry.preset_sites("all")
    assert registry.sources["other-accept"] == "other-dist"
    assert registry.algorithms == ("dflash", "dspark", "eagle", "other", "state", "vllm")


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    first, second = read(tmp_path, site(), name="a.toml"), read(tmp_path, site("other-b", 1001), name="b.toml")
    merged = merge_registries([builtin_registry(), first, second])
    assert merged == merge_registries([second, builtin_registry(), first])
    assert [site.number for site in merged.sites] == sorted(site.number for site in merged.sites)


def test_a_file_that_comes_twice_counts_once(tmp_path: Path) -> None:
    other = read(tmp_path, site())
    assert merge_registries([builtin_registry(), other, other]) == merge_registries([builtin_registry(), other])


def test_unknown_key_names_file_table_and_key(tmp_path: Path) -> None:
    message = problem_of(tmp_path, site() + "grpah = true\n")
    assert message.startswith(f"{tmp_path / 'sites.toml'} (other-dist): [site.other-accept]: unknown key 'grpah'")
    assert "(did you mean 'graph'?). Known keys: number, algorithm, phase" in message


def test_unknown_nested_key_lists_the_nested_keys(tmp_path: Path) -> None:
    text = site().replace('name = "bonus"', 'name = "bonus", dtype = "int64"')
    message = problem_of(tmp_path, text)
    assert "[site.other-accept]: unknown key 'tensors.0.dtype' (did you mean 'dtypes'?)" in message
    assert "Known keys: name, shape, dtypes, optional." in message


def test_unknown_key_in_a_condition(tmp_path: Path) -> None:
    message = problem_of(tmp_path, '[preset.mine]\nsummary = ""\nwhere = { phse = ["init"] }\n')
    assert "[preset.mine]: unknown key 'where.phse' (did you mean 'phase'?). Known keys: algorithm, phase" in message


@pytest.mark.parametrize(
    ("written", "instead", "expected"),
    [
        ("number = 1000", 'number = "1000"', "key 'number': Input should be a valid integer, not '1000'."),
        ("number = 1000", "number = true", "key 'number': Input should be a valid integer, not True."),
        ("number = 1000", "number = 0", "key 'number': Input should be greater than or equal to 1, not 0."),
        ("graph = false", "graph = 0", "key 'graph': Input should be a valid boolean, not 0."),
        ('"rng"', '"luck"', "key 'cause': Input should be 'memory', 'rng', 'float' or 'host', not 'luck'."),
        ('["int64"]', '["int46"]', "key 'tensors.0.dtypes.0': Input should be 'bool', "),
        ('["int64"]', "[]", "key 'tensors.0.dtypes': "),
        ('shape = ["B"]', 'shape = ["batch"]', "key 'tensors.0.shape.0': "),
        ("graph = false\n", "", "key 'graph' is missing."),
        ('platforms = ["cuda"]', 'platforms = ["CUDA"]', "key 'platforms.0': "),
    ],
)
def test_wrong_values(tmp_path: Path, written: str, instead: str, expected: str) -> None:
    message = problem_of(tmp_path, site().replace(written, instead))
    assert message.startswith(f"{tmp_path / 'sites.toml'} (other-dist): [site.other-accept]: {expected}")


def test_every_problem_of_a_file_is_told(tmp_path: Path) -> None:
    text = site().replace("graph = false\n", "") + site("other-b", 1001).replace('"rng"', '"luck"')
    assert len(problem_of(tmp_path, text).splitlines()) == 2


def test_a_table_name_that_is_no_slug(tmp_path: Path) -> None:
    assert "[site.Other]: the table's name 'Other' must be lower case words" in problem_of(tmp_path, site("Other"))


def test_the_name_is_not_a_key(tmp_path: Path) -> None:
    message = problem_of(tmp_path, site() + 'slug = "other-name"\n')
    assert "[site.other-accept]: unknown key 'slug'. The table's own name is the slug." in message


def test_unknown_table(tmp_path: Path) -> None:
    message = problem_of(tmp_path, "[sites.x]\nnumber = 1\n")
    assert "unknown table [sites] (did you mean 'site'?). Known tables: [site.NAME], [preset.NAME]" in message


def test_an_entry_that_is_no_table(tmp_path: Path) -> None:
    assert "[site]: write each entry as its own table, [site.NAME]." in problem_of(tmp_path, "[site]\nnumber = 1\n")


def test_broken_toml(tmp_path: Path) -> None:
    message = problem_of(tmp_path, "[site.x\n")
    assert message.startswith(f"{tmp_path / 'sites.toml'} (other-dist): not valid TOML: ")
    assert "line 1" in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"none\.toml \(other-dist\): the registry cannot be read: "):
        read_registry(tmp_path / "none.toml", "other-dist")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RegistryError, match="the registry cannot be read: "):
        read_registry(path, "other-dist")


def test_equal_numbers_name_both_distributions(tmp_path: Path) -> None:
    first, second = read(tmp_path, site(), "dist-a", "a.toml"), read(tmp_path, site("other-b"), "dist-b", "b.toml")
    with pytest.raises(RegistryError) as caught:
        merge_registries([builtin_registry(), second, first])
    assert str(caught.value) == (
        f"{tmp_path / 'b.toml'} (dist-b): [site.other-b]: number '1000' is taken already by"
        f" {tmp_path / 'a.toml'} (dist-a): [site.other-accept]. Choose another in one of them."
    )


def test_equal_slugs_name_both_distributions(tmp_path: Path) -> None:
    first, second = read(tmp_path, site(), "dist-a", "a.toml"), read(tmp_path, site(number=1001), "dist-b", "b.toml")
    with pytest.raises(RegistryError, match=r"\(dist-b\).* name 'other-accept' is taken already by .*\(dist-a\)"):
        merge_registries([first, second])


def test_duplicate_number_in_one_file(tmp_path: Path) -> None:
    assert "[site.other-b]: number '1000' is taken already by" in collision_of(tmp_path, site() + site("other-b"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[preset.dspark-plan]\nsummary = ""\n', "name 'dspark-plan' is taken already"),
        ('[handle.rng]\nstatus = "alias"\nsites = ["dspark-plan"]\nsummary = ""\n', "name 'rng' is taken already"),
        (
            '[handle.x]\nnumber = 7\nstatus = "alias"\nsites = ["dspark-plan"]\nsummary = ""\n',
            "number '7' is taken already",
        ),
        ('[preset.other]\nsummary = ""\n' + site(), "algorithm 'other' is taken already by"),
        (site("other", 1000, "other"), "algorithm 'other' is taken already by"),
    ],
)
def test_words_of_every_kind_are_distinct(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in collision_of(tmp_path, text)


def test_third_parties_number_from_1000(tmp_path: Path) -> None:
    message = collision_of(tmp_path, site(number=999))
    assert "[site.other-accept]: key 'number': 999 is reserved; plugins number from 1000." in message
    handle = '[handle.x]\nnumber = 18\nstatus = "alias"\nsites = ["dspark-plan"]\nsummary = ""\n'
    assert "[handle.x]: key 'number': 18 is reserved" in collision_of(tmp_path, handle)


def test_third_party_slugs_begin_with_their_algorithm(tmp_path: Path) -> None:
    message = collision_of(tmp_path, site("accept"))
    assert "[site.accept]: the slug must begin with its algorithm's name: [site.other-accept]." in message


def test_payload_declarations(tmp_path: Path) -> None:
    no_tensors = site().replace('[{ name = "bonus", shape = ["B"], dtypes = ["int64"] }]', "[]")
    assert "key 'tensors': a broadcast site names at least one tensor." in collision_of(tmp_path, no_tensors)
    spec = '{ name = "bonus", shape = ["B"], dtypes = ["int64"] }'
    optional_first = site().replace(f"[{spec}]", f"[{spec.replace(' }', ', optional = true }')}, {spec}]")
    message = collision_of(tmp_path, optional_first)
    assert "key 'tensors': optional tensors come last." in message
    assert "key 'tensors': two tensors have the same name." in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('sites = ["dspark-plam"]', "key 'sites': unknown site 'dspark-plam' (did you mean 'dspark-plan'?)."),
        ('include = ["rgn"]', "key 'include': unknown preset 'rgn' (did you mean 'rng'?)."),
        ('where = { algorithm = ["dsprak"] }', "unknown algorithm 'dsprak' (did you mean 'dspark'?)."),
        ('include = ["mine"]', "key 'include': the preset includes itself."),
    ],
)
def test_presets_that_refer_to_nothing(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in collision_of(tmp_path, f'[preset.mine]\nsummary = ""\n{text}\n')


def test_presets_that_include_each_other(tmp_path: Path) -> None:
    text = '[preset.a]\nsummary = ""\ninclude = ["b"]\n[preset.b]\nsummary = ""\ninclude = ["a"]\n'
    assert "[preset.a]: key 'include': the preset includes itself." in collision_of(tmp_path, text)


def test_handles_that_refer_to_nothing(tmp_path: Path) -> None:
    text = '[handle.x]\nstatus = "retired"\nsites = ["dspark-plam"]\nsummary = ""\n'
    assert "[handle.x]: key 'sites': unknown site 'dspark-plam' (did you" in collision_of(tmp_path, text)
