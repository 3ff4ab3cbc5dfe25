"""The minimal set: which sites the facts of an engine leave out, in words and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from specsync_core.cli import main
from specsync_core.cli.forecast import forecast
from specsync_core.errors import PolicyError
from specsync_core.explain import FACTS, explain, facts_from, judge, known_facts, minimal_sites
from specsync_core.facts import Facts
from specsync_core.manager import load_registry
from specsync_core.registry import Cause, Kind, Phase, Registry, Site

ALL = dict.fromkeys(FACTS, True)
SLUGS = [site.slug for site in load_registry().sites]


def needed(registry: Registry, algorithm: str | None = None, **given: bool) -> set[str]:
    facts = facts_from(known_facts(None, {name.replace("_", "-"): value for name, value in given.items()}))
    return {site.slug for site in minimal_sites(explain(registry, facts, algorithm))}


def all_true(**but: bool) -> dict[str, bool]:
    return {**{name.replace("-", "_"): True for name in FACTS}, **but}


def test_without_facts_every_site_that_decides_is_needed(registry: Registry) -> None:
    assert needed(registry) == {site.slug for site in registry.sites if site.kind != "check"}


def test_with_every_fact_what_is_each_ranks_own_is_left(registry: Registry) -> None:
    left = needed(registry, **all_true())
    assert {registry.site(slug).cause for slug in left} >= {"memory", "host"}
    assert {slug for slug in left if registry.site(slug).cause in ("float", "rng")} == {"eagle-draft", "vllm-seed"}


def test_gathered_logits_free_what_only_computes(registry: Registry) -> None:
    left = needed(registry, "dspark", **all_true(counter_noise=False))
    assert left == {
        site.slug for site in registry.sites if site.algorithm == "dspark" and site.cause in ("memory", "rng")
    }


def test_devices_that_differ_need_everything_again(registry: Registry) -> None:
    assert "dspark-accept-greedy" in needed(registry, "dspark", **all_true(uniform_devices=False))


def test_counter_based_noise_frees_draws_only_on_agreed_logits(registry: Registry) -> None:
    assert "dspark-accept-sample" not in needed(registry, "dspark", **all_true())
    assert "dspark-accept-sample" in needed(registry, "dspark", **all_true(gathered_logits=False))


def test_a_plan_is_made_from_confidences(registry: Registry) -> None:
    assert "dspark-plan" in needed(registry, "dspark", **all_true(gathered_confidences=False))
    assert "dspark-plan" not in needed(registry, "dspark", **all_true())


def test_more_facts_never_need_more_sites(registry: Registry) -> None:
    names = [name.replace("-", "_") for name in FACTS]
    for bits in range(2 ** len(names)):
        known = {name: True for index, name in enumerate(names) if bits >> index & 1}
        for name in names:
            assert needed(registry, **{**known, name: True}) <= needed(registry, **known)


def test_an_unknown_fact_counts_as_false(registry: Registry) -> None:
    assert needed(registry, **all_true(gathered_logits=False)) == needed(
        registry, gathered_confidences=True, uniform_devices=True, counter_noise=True
    )


def test_what_a_site_derives_from_comes_before_it(registry: Registry) -> None:
    by_slug = {each.site.slug: each for each in explain(registry, Facts())}
    assert by_slug["dspark-mem"].parents == ()
    assert set(by_slug["dspark-plan"].parents) >= {"dspark-draft-greedy", "dspark-mem", "dspark-target"}
    assert "dspark-plan" in by_slug["dspark-accept-greedy"].parents
    assert "dspark-accept-greedy" in by_slug["dspark-draft-greedy"].parents, "of the step before"
    assert "dspark-accept-graph" not in by_slug["dspark-accept-greedy"].parents


def test_reasons_are_words(registry: Registry) -> None:
    by_slug = {each.site.slug: each.why for each in explain(registry, facts_from(known_facts("demo", {})))}
    assert by_slug["dspark-mem"] == "free memory: each device has its own, and no fact makes them equal"
    assert by_slug["dspark-target"] == "noise: drawn from each rank's own generator"
    assert by_slug["dspark-accept-greedy"].startswith("a pure function of agreed values (logits: all-gathered")
    assert by_slug["eagle-draft"].startswith("hidden states: they come out of an all-reduce")
    assert by_slug["state-seq-lens"] == "it only compares, and nothing follows from it"
    unknown = {each.site.slug: each.why for each in explain(registry, Facts(gathered_logits=True))}
    assert "the devices are not known to be alike" in unknown["dspark-accept-greedy"]
    assert "as far as is known" in unknown["dspark-target"]


def test_what_is_given_overrules_what_is_known() -> None:
    known = known_facts("demo", {"counter-noise": True})
    assert known["counter-noise"] == (True, "given")
    assert known["gathered-logits"] == (True, "known of demo")


def test_unknown_engines_and_facts_are_refused() -> None:
    with pytest.raises(
        PolicyError, match=r"unknown engine 'vlm' \(did you mean 'vllm'\?\)\. Known: demo, vllm, sglang"
    ):
        known_facts("vlm", {})
    with pytest.raises(PolicyError, match=r"unknown fact 'counter' .*Known: gathered-logits, "):
        known_facts(None, {"counter": True})


def stats(**counts: tuple[int, int]) -> dict[str, dict[str, int]]:
    return {
        slug.replace("_", "-"): {"mismatches": mismatches, "compared": compared}
        for slug, (mismatches, compared) in counts.items()
    }


def test_an_audit_holds_or_refutes(registry: Registry) -> None:
    found = explain(registry, facts_from(known_facts("demo", {})), "dspark")
    held = judge(found, stats(dspark_plan=(0, 40), dspark_accept_greedy=(0, 24), dspark_target=(9, 9)))
    assert held.refuted == ()
    assert str(held) == (
        "0 mismatches in 64 checks at 2 sites that the facts leave out;"
        " not called: dspark-draft-greedy, dspark-graph-greedy, dspark-accept-graph"
    )
    refuted = judge(found, stats(dspark_plan=(3, 40)))
    assert str(refuted) == "refuted: dspark-plan has 3 mismatches in 40 checks"


@pytest.mark.parametrize("phase", ["draft", "plan", "accept", "target", "state"])
@pytest.mark.parametrize("cause", ["float", "rng"])
def test_no_fact_leaves_out_a_plugins_site(phase: Any, cause: Any) -> None:
    """It may be made from anything, such as hidden states under another name."""
    site = Site(
        number=1001, slug="x-site", algorithm="x", phase=phase, kind="broadcast", cause=cause, tensors=(),
        graph=False, platforms=("cpu",), summary="of what, nobody says",
    )  # fmt: skip
    (found,) = explain(Registry(sites=(site,), presets={}, handles={}, sources={}), Facts(**all_true()))
    assert found.needed
    assert found.why.startswith("its inputs: what a plugin's site is made from is not known")


def test_a_decision_from_nothing_known_is_not_agreed() -> None:
    site = Site(
        number=999, slug="x-state", algorithm="x", phase="state", kind="broadcast", cause="float", tensors=(),
        graph=False, platforms=("cpu",), summary="of what, nobody says",
    )  # fmt: skip
    (found,) = explain(Registry(sites=(site,), presets={}, handles={}, sources={}), Facts(**all_true()))
    assert found.needed
    assert found.why == "its inputs: the declaration does not tell them"


def test_the_page_has_every_word_of_a_site() -> None:
    page = (Path(__file__).parents[2] / "docs/write-a-plugin.md").read_text()
    for field, words in (("phase", get_args(Phase)), ("kind", get_args(Kind)), ("cause", get_args(Cause))):
        assert [word for word in words if f'| `{field} = "{word}"` | ' not in page] == []


def test_an_audit_says_what_was_called_but_not_compared(registry: Registry) -> None:
    found = explain(registry, facts_from(known_facts("demo", {})), "dspark")
    said = str(judge(found, {"dspark-plan": {"calls": 1, "compared": 0, "mismatches": 0}}))
    assert said.startswith(
        "nothing was checked: called, but nothing was compared (group rank 0 never compares): dspark-plan;"
    )
    assert "dspark-plan" not in said.split("not called: ")[1]


def test_a_set_that_leaves_nothing_out_has_nothing_to_prove(registry: Registry) -> None:
    assert str(judge(explain(registry, Facts(), "dspark"), {})) == "nothing is left out, so there is nothing to prove"


def test_a_run_under_another_policy_refutes_nothing(registry: Registry) -> None:
    """All of dspark in audit: what differs at accept follows from a draft that nobody synchronised."""
    found = explain(registry, facts_from(known_facts("demo", {})), "dspark")
    modes = {each.site.slug: "sync" for each in found} | {"dspark-target": "audit"}
    verdict = judge(found, stats(dspark_accept_greedy=(3, 40)), modes)
    assert str(verdict) == "not proven: not run under the prove policy, set sites were not in sync: dspark-target"
    assert str(judge(found, stats(dspark_accept_greedy=(3, 40)), modes | {"dspark-target": "sync"})).startswith(
        "refuted"
    )


# --- the command ---


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["plan", *words])
    except SystemExit as error:
        code = int(str(error.code or 0))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsync_core.cli.plan.detect_platform", lambda: "cpu")
    monkeypatch.setenv("COLUMNS", "400")


def counted(stats: dict[str, dict[str, int]]) -> dict[str, object]:
    """A file of ``SPECSYNC_STATS_DIR``."""
    return {"version": 1, "stats": stats, "modes": dict.fromkeys(SLUGS, "sync")}


@pytest.mark.parametrize("algorithm", ["eagle", "dspark", "ngram", "vllm", None])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_set_holds_only_sites_that_it_decides(
    capsys: pytest.CaptureFixture[str], engine: str, algorithm: str | None
) -> None:
    """A set of another engine's sites would turn every site of this one off."""
    chosen = () if algorithm is None else ("--algorithm", algorithm)
    code, text, error = say(capsys, "--minimal", "--engine", engine, *chosen, "--fact", "uniform-devices", "--json")
    if (engine, algorithm) == ("sglang", "vllm"):
        assert code == 2
        assert "--engine sglang --algorithm vllm: no broadcast point of sglang belongs to that algorithm" in error
        return
    found = json.loads(text)
    of_engine = {"vllm"} if engine == "vllm" else {"dspark", "dflash", "eagle"}
    registry = load_registry()
    proof = found["proof"].split(",")
    assert proof == [f"{slug}:audit" for slug in found["left_out"]] + found["policy"].split(",")
    for token in proof:
        assert registry.site(token.partition(":")[0]).algorithm in of_engine
    if (engine, algorithm) == ("vllm", "eagle"):
        assert found["left_out"] == ["vllm-draft-step"]
        assert set(found["policy"].split(",")) == {"vllm-tokens", "vllm-verdict", "vllm-seed", "vllm-drafter-gate"}


def test_minimal_refuses_another_runs_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--minimal", "--engine", "demo", "--algorithm", "dspark", "--audit", str(tmp_path / "rank-1.json"))
    (tmp_path / "rank-1.json").write_text("{}")
    code, _, error = say(capsys, *words)
    assert code == 2
    assert "it is no file of SPECSYNC_STATS_DIR, which has version, stats and modes" in error
    document = counted(stats(dspark_accept_greedy=(3, 40))) | {"modes": dict.fromkeys(SLUGS, "audit")}
    (tmp_path / "rank-1.json").write_text(json.dumps(document))
    code, text, _ = say(capsys, *words)
    assert code == 1
    assert "audit rank-1.json: not proven: " in text
    assert "refuted:" not in text


def test_explain_says_it_for_every_site(capsys: pytest.CaptureFixture[str], registry: Registry) -> None:
    code, text, _ = say(capsys, "--explain", "--engine", "demo")
    assert code == 0
    for site in registry.sites:
        line = next(line for line in text.splitlines() if line.startswith(f"{site.slug} "))
        assert ("must be on" in line) != ("may be off" in line)
        assert site.cause in line
        assert "It derives from" in line
    assert "counter-noise         no     known of demo" in text


def test_explain_one_site(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = say(capsys, "--explain", "7", "--fact", "gathered-confidences", "--fact", "uniform-devices")
    assert "under these facts  may be off" in text
    assert "all agreed: synchronised, or pure" in text


def test_explain_names_parents_that_the_plan_leaves_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "all,-dspark-target")
    _, text, _ = say(capsys, "--explain", "dspark-plan", "--engine", "demo")
    assert "(not agreed in this plan: dspark-target)" in text


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = say(capsys, "--explain", "--engine", "demo", "--algorithm", "dflash", "--json")
    found = json.loads(text)
    assert found["facts"]["gathered-logits"] == {"value": True, "origin": "known of demo"}
    site = next(each for each in found["sites"] if each["site"] == "dflash-accept-greedy")
    assert (site["needed"], site["mode"], site["inputs"][0]["agreed"]) == (False, "sync", True)


def test_minimal_gives_the_set_and_its_proof(capsys: pytest.CaptureFixture[str], registry: Registry) -> None:
    code, text, _ = say(capsys, "--minimal", "--engine", "demo", "--algorithm", "eagle", "--json")
    found = json.loads(text)
    assert code == 0
    left = set(found["policy"].split(","))
    assert left == needed(registry, "eagle", **all_true(counter_noise=False))
    assert found["proof"] == f"eagle:audit,{found['policy']}"
    assert set(found["left_out"]) == {site.slug for site in registry.sites if site.algorithm == "eagle"} - left
    _, text, _ = say(capsys, "--minimal", "--engine", "demo", "--algorithm", "eagle")
    assert "Nothing was changed: it is a claim, to be proven." in text
    assert f"  2. narrow  SPECSYNC_SITES={found['policy']}\n" in text


def test_minimal_never_changes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, before, _ = say(capsys, "--json")
    say(capsys, "--minimal", "--engine", "demo")
    _, after, _ = say(capsys, "--json")
    assert before == after


@pytest.mark.parametrize(("mismatches", "code"), [(0, 0), (2, 1)])
def test_minimal_reads_an_audit(capsys: pytest.CaptureFixture[str], tmp_path: Path, mismatches: int, code: int) -> None:
    file = tmp_path / "rank-1.json"
    file.write_text(json.dumps(counted(stats(dspark_plan=(mismatches, 40)))))
    words = ("--minimal", "--engine", "demo", "--algorithm", "dspark", "--audit", str(file))
    ended, text, _ = say(capsys, *words)
    assert ended == code
    said = "refuted: dspark-plan has 2 mismatches" if mismatches else "0 mismatches in 40 checks at 1 sites"
    assert f"audit rank-1.json: {said}" in text
    ended, text, _ = say(capsys, *words, "--json")
    assert (ended, json.loads(text)["audits"]["rank-1.json"]["checks"]) == (code, 40)


def test_minimal_reads_the_directory_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank, mismatches in ((0, 0), (1, 3)):
        document = counted(stats(dspark_plan=(mismatches, 40)))
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(document))
    words = ("--minimal", "--engine", "demo", "--algorithm", "dspark", "--audit", str(tmp_path))
    code, text, _ = say(capsys, *words)
    assert code == 1
    assert "audit rank-0.json: 0 mismatches in 40 checks" in text
    assert "audit rank-1.json: refuted: dspark-plan has 3 mismatches in 40 checks" in text
    (tmp_path / "empty").mkdir()
    code, _, error = say(capsys, *words[:-1], str(tmp_path / "empty"))
    assert code == 2
    assert "it holds no counts. Run with SPECSYNC_STATS_DIR=" in error


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--platform", "cudda"), "unknown platform 'cudda' (did you mean 'cuda'?). Known: cpu, cuda, "),
        (("--platform", "gpu"), "unknown platform 'gpu' (did you mean 'cuda'?)"),
        (("--platform", "nvidia"), "(did you mean 'cuda'?)"),
        (("--platform", "hip"), "unknown platform 'hip' (did you mean 'rocm'?)"),
        (("--platform", "AMD"), "(did you mean 'rocm'?)"),
        (("--minimal", "--explain"), "--explain and --minimal are two questions"),
        (("--minimal", "--fact", "counter-noise", "--fact", "counter-noise=no"), "both stated and denied"),
        (("--explain", "dspark-plan", "--engine", "vllm"), "dspark-plan is not among the sites that were asked for"),
        (("--explain", "--engine", "vlm"), "unknown engine 'vlm' (did you mean 'vllm'?)"),
        (("--explain", "--fact", "gathered"), "unknown fact 'gathered' (did you mean 'gathered-logits'?)"),
        (("--explain", "--fact", "counter-noise=perhaps"), "'perhaps' is neither yes nor no"),
        (("--explain", "--algorithm", "dsprak"), "unknown algorithm 'dsprak' (did you mean 'dspark'?)"),
        (("--explain", "dspark-plam"), "unknown site 'dspark-plam'"),
        (("--minimal", "7"), "--minimal is about all sites"),
        (("--fact", "counter-noise"), "belong to --explain or --minimal"),
        (("--minimal", "--audit", "absent.json"), "--audit absent.json: no counts can be read from it"),
    ],
)
def test_what_cannot_be_understood_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    code, _, error = say(capsys, *words)
    assert code == 2
    assert problem in error


def test_a_platform_is_known_whatever_its_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = say(capsys, "--platform", "CUDA", "--json")
    assert (code, json.loads(text)["facts"]["platform"]) == (0, "cuda")
    code, text, _ = say(capsys, "dspark-plan", "--platform", "npu")
    assert "opt-in" in text


# --- the transport that auto would take ---


def test_auto_is_forecast_for_every_platform(capsys: pytest.CaptureFixture[str]) -> None:
    for platform in ("cpu", "npu"):
        setting = forecast(platform, "cpu")
        assert (setting.value, setting.rejected) == ("grouped", (("one-shot", "it needs CUDA tensors"),))
    assert forecast("rocm", "cpu").rejected == (("one-shot", "its kernel is written for NVIDIA GPUs"),)
    assert (forecast("cuda", "cpu").value, forecast("cuda", "cpu").rejected) == ("one-shot", ())
    _, text, _ = say(capsys)
    assert "auto takes    grouped       one collective per call (one-shot rejected: it needs CUDA tensors)" in text
    _, text, _ = say(capsys, "--json")
    assert json.loads(text)["auto_takes"]["rejected"] == [{"value": "one-shot", "why": "it needs CUDA tensors"}]


def test_the_gpus_of_this_machine_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked = torch.cuda
    monkeypatch.setattr(asked, "is_available", lambda: False)
    assert "sees no GPU" in forecast("cuda", "cuda").rejected[0][1]
    monkeypatch.setattr(asked, "is_available", lambda: True)
    monkeypatch.setattr(asked, "device_count", lambda: 2)
    monkeypatch.setattr(asked, "get_device_capability", lambda device: (6, 1) if device else (9, 0))
    monkeypatch.setattr(asked, "get_device_name", lambda device: "an old one")
    monkeypatch.setattr("specsync_core.cli.forecast.find_spec", lambda name: None)
    assert forecast("cuda", "cuda").rejected == (("one-shot", "Triton is not installed"),)
    monkeypatch.setattr("specsync_core.cli.forecast.find_spec", lambda name: object())
    assert "GPU 1 (an old one) is older" in forecast("cuda", "cuda").rejected[0][1]
    monkeypatch.setattr(asked, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(asked, "can_device_access_peer", lambda one, other: False)
    assert forecast("cuda", "cuda").rejected == (("one-shot", "GPU 0 has no peer access to GPU 1"),)
    monkeypatch.setattr(asked, "can_device_access_peer", lambda one, other: True)
    assert forecast("cuda", "cuda").value == "one-shot"
