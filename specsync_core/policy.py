"""The policy grammar: which sites are on, and how. A superset of the published ``SGLANG_SPEC_TP_SYNC``.

A policy is a comma-separated list of tokens, read left to right. The selection starts empty; a token
unites what it names, a token with a leading ``-`` removes it. A word is a preset, a slug, a number, an
algorithm, or a handle; ``off`` and ``none`` are presets that select nothing, and do not reset what was
selected before. Spaces vanish, ``_`` equals ``-``, case does not matter, empty tokens are skipped. New
against the published grammar: a suffix ``:sync``, ``:audit`` or ``:off`` sets the mode of what it names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from specsync_core.errors import PolicyError, did_you_mean
from specsync_core.registry import Named, Registry, Site

Mode: TypeAlias = Literal["sync", "audit", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)

logger = logging.getLogger("specsync")


class Choice(NamedTuple):
    """What a policy says about one site."""

    mode: Mode
    origin: str
    """Where it says so, and by which token: ``SPECSYNC_SITES (preset rng)``."""


Policy: TypeAlias = Mapping[str, Choice]
"""Site slug to choice. A site that is absent was not named, and is off."""


def parse_sites(text: str, registry: Registry, origin: str = "policy") -> frozenset[Site]:
    """Return the sites that a policy turns on, in mode sync or audit.

    Args:
        text: the policy, e.g. ``"all,-dspark-plan"``.
        registry: the known sites, presets and handles.
        origin: where the text comes from, for messages.

    Raises:
        PolicyError: a token is unknown; the message names it, and the closest known one.
    """
    policy = parse_policy(text, registry, origin)
    return frozenset(registry.site(slug) for slug, choice in policy.items() if choice.mode != "off")


def parse_policy(
    text: str,
    registry: Registry,
    origin: str,
    presets: Mapping[str, Policy] | None = None,
    within: str | None = None,
) -> Policy:
    """Return mode and origin of every site that a policy names, the removed ones included (as off).

    Args:
        text: the policy.
        registry: the known sites, presets and handles.
        origin: where the text comes from: a variable, a file and line, a plugin.
        presets: the user's own presets, parsed already (`parse_presets`).
        within: an algorithm; the policy decides about its sites only, and may not name others.

    Raises:
        PolicyError: a token is unknown or malformed, or names only sites outside ``within``.
    """
    selected, removed = _evaluate(text, registry, origin, presets or {}, within)
    return {**removed, **selected}


def parse_presets(texts: Mapping[str, tuple[str, str]], registry: Registry) -> dict[str, Policy]:
    """Parse a user's presets, which may name each other in any order.

    Args:
        texts: normalised name to policy text and origin.
        registry: the known words, none of which a user's preset may shadow.

    Returns:
        For each preset what it selects; sites that it removes are not part of it.

    Raises:
        PolicyError: a name is taken, a text is wrong, or a preset includes itself.
    """
    parsed: dict[str, Policy] = {}

    def parse(name: str, inside: tuple[str, ...]) -> None:
        text, origin = texts[name]
        if name in inside:
            raise PolicyError(f"{origin}: the preset includes itself: {' -> '.join((*inside, name))}.")
        if (taken := registry.words.get(name)) is not None:
            raise PolicyError(f"{origin}: '{name}' is the name of a registry's {taken.what}. Choose another.")
        for token in split_policy(text):
            word = token.removeprefix("-").partition(":")[0]
            if word in texts and word not in parsed:
                parse(word, (*inside, name))
        parsed[name], _ = _evaluate(text, registry, origin, parsed, None)

    for name in texts:
        if name not in parsed:
            parse(name, ())
    return parsed


def split_policy(text: str) -> Iterator[str]:
    """Yield the tokens of a policy: no spaces, no empty tokens, in lower case, with ``-`` for ``_``."""
    return filter(None, "".join(text.split()).lower().replace("_", "-").split(","))


def normalise(text: str) -> str:
    """Return a policy in the one form in which equal policies are written alike."""
    return ",".join(split_policy(text))


def removes_from_nothing(text: str) -> str | None:
    """Return the token by which a policy begins, when it is one that removes: there is nothing to remove yet."""
    first = next(split_policy(text), "")
    return first if first.startswith("-") else None


def format_sites(sites: Iterable[Site]) -> str:
    """Return a policy that selects exactly these sites: their slugs, in the order of their numbers."""
    return ",".join(site.slug for site in sorted(sites, key=lambda site: site.number)) or "none"


@dataclass(frozen=True)
class _Token:
    """One token, looked up."""

    removes: bool
    choices: Policy
    """What it selects or removes."""
    is_preset: bool


def _evaluate(
    text: str, registry: Registry, origin: str, presets: Mapping[str, Policy], within: str | None
) -> tuple[dict[str, Choice], dict[str, Choice]]:
    selected: dict[str, Choice] = {}
    removed: dict[str, Choice] = {}
    for token_text in split_policy(text):
        try:
            token = _look_up(token_text, registry, origin, presets)
        except PolicyError as error:
            if re.search(r"[^\s,]\s+[^\s,]", text) is None:
                raise
            raise PolicyError(f"{error}\n  Tokens are separated by commas; spaces count for nothing.") from None
        choices = token.choices
        if within is not None:
            choices = {slug: choice for slug, choice in choices.items() if registry.site(slug).algorithm == within}
            if token.choices and not choices and not token.is_preset:
                raise PolicyError(f"{origin}: token {_shown(token_text)} names no site of algorithm '{within}'.")
        for slug, choice in choices.items():
            put, take = (removed, selected) if token.removes else (selected, removed)
            take.pop(slug, None)
            put[slug] = choice
    return selected, removed


def _look_up(token: str, registry: Registry, origin: str, presets: Mapping[str, Policy]) -> _Token:
    removes = token.startswith("-")
    word, colon, suffix = token.removeprefix("-").partition(":")
    if not word:
        raise PolicyError(f"{origin}: token {_shown(token)} names nothing. {_known(registry, presets)}")
    if removes and colon:
        raise PolicyError(
            f"{origin}: token {_shown(token)}: a removal takes no mode."
            f" Write '-{word}' to remove, or '{word}:{suffix}' to set the mode."
        )
    if colon and suffix not in MODES:
        raise PolicyError(
            f"{origin}: unknown mode {_shown(suffix)} in token {_shown(token)}{did_you_mean(suffix, MODES)}."
            f" Modes: {', '.join(MODES)}."
        )
    mode = "off" if removes else next((mode for mode in MODES if mode == suffix), None)
    if word in presets:
        modes, what, name = {slug: choice.mode for slug, choice in presets[word].items()}, "preset", word
    else:
        named = _named(word, registry, origin, presets)
        modes, what, name = {site.slug: "sync" for site in named.sites}, named.what, named.name
    label = token.replace(word, name, 1) if removes or what == "site" else f"{what} {token.replace(word, name, 1)}"
    choices = {slug: Choice(mode or own, f"{origin} ({label})") for slug, own in modes.items()}
    return _Token(removes, choices, what == "preset")


def _named(word: str, registry: Registry, origin: str, presets: Mapping[str, Policy]) -> Named:
    key = word.lstrip("0") if word.isascii() and word.isdecimal() else word
    named = registry.words.get(key)
    if named is None:
        names = [name for name in (*registry.words, *presets) if not name.isdecimal()]
        raise PolicyError(
            f"{origin}: unknown token {_shown(word)}{did_you_mean(word, names)}.\n  {_known(registry, presets)}"
        )
    if named.what == "retired":
        members = format_sites(named.sites)
        logger.warning("%s: '%s' is retired; it selects %s. Name those instead.", origin, word, members)
    return named


def _known(registry: Registry, presets: Iterable[str]) -> str:
    return f"Presets: {', '.join(sorted((*registry.presets, *presets)))}. List the sites with `specsync sites`."


def _shown(token: str) -> str:
    return repr(token if len(token) <= 60 else f"{token[:57]}...")
