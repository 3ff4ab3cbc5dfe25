"""Reading TOML registries, checking them, and merging them into one `Registry`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, get_args

import tomli
from pydantic import BaseModel, ValidationError

from specsync_core.bounded_file import MAX_TEXT_BYTES, read_bounded
from specsync_core.errors import RegistryError, did_you_mean
from specsync_core.registry import Handle, Preset, ReadableFile, Registry, Site, Table

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

BUILTIN_SOURCE = "specsync-core"
FIRST_THIRD_PARTY_NUMBER = 1000


@dataclass(frozen=True)
class RegistryFile:
    """The content of one TOML registry, checked against the models but not against other files."""

    source: str
    """The distribution that ships it."""
    path: str
    sites: tuple[Site, ...]
    presets: tuple[Preset, ...]
    handles: tuple[Handle, ...]

    def where(self, table: str, name: str) -> str:
        return f"{self.path} ({self.source}): [{table}.{name}]"


def read_registry(path: ReadableFile, source: str) -> RegistryFile:
    """Read one TOML registry.

    Args:
        path: the file, a ``Path`` or a ``Traversable``.
        source: the name of the distribution that ships it, for messages.

    Raises:
        RegistryError: the file cannot be read or parsed, or a table or key is wrong; the message
            names the file, the table and the key.
    """
    try:
        text = read_bounded(path, MAX_TEXT_BYTES).decode("utf-8-sig")
        document = tomli.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path} ({source}): the registry cannot be read: {error}") from error
    except (tomli.TOMLDecodeError, RecursionError) as error:
        raise RegistryError(f"{path} ({source}): not valid TOML: {error}") from error

    parsed, problems = _parse_tables(document, f"{path} ({source})")
    if problems:
        raise RegistryError("\n".join(problems))
    return RegistryFile(source, str(path), tuple(parsed["site"]), tuple(parsed["preset"]), tuple(parsed["handle"]))


_TABLES: dict[str, tuple[type[Table], str]] = {
    "site": (Site, "slug"),
    "preset": (Preset, "name"),
    "handle": (Handle, "name"),
}
"""Each table's model, and the field that holds the name of the table itself."""


def _parse_tables(document: Mapping[str, Any], place: str) -> tuple[dict[str, list[Any]], list[str]]:
    parsed: dict[str, list[Any]] = {table: [] for table in _TABLES}
    problems: list[str] = []
    for table, entries in document.items():
        if table not in _TABLES:
            known = ", ".join(f"[{name}.NAME]" for name in _TABLES)
            problems.append(f"{place}: unknown table [{table}]{did_you_mean(table, _TABLES)}. Known tables: {known}.")
        elif not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            problems.append(f"{place}: [{table}]: write each entry as its own table, [{table}.NAME].")
        else:
            model, name_key = _TABLES[table]
            for name, entry in entries.items():
                where = f"{place}: [{table}.{name}]"
                if name_key in entry:
                    problems.append(f"{where}: unknown key '{name_key}'. The table's own name is the {name_key}.")
                    continue
                try:
                    parsed[table].append(model.model_validate({**entry, name_key: name}))
                except ValidationError as error:
                    problems += validation_lines(error, model, where, name_key)
    return parsed, problems


def validation_lines(
    error: ValidationError, model: type[BaseModel], where: str, name_key: str | None = None
) -> list[str]:
    """Describe a pydantic error, one line per wrong key: where, what, the known keys, a suggestion.

    Args:
        error: what ``model`` raised.
        model: the model of the table, for its known keys.
        where: the file and the table.
        name_key: the field that holds the table's own name, which is no key of the table.
    """
    lines = []
    for problem in error.errors():
        loc = problem["loc"]
        if loc == (name_key,):
            lines.append(f"{where}: the table's name {problem['input']!r} must be lower case words joined by '-'.")
        else:
            known = [name for name in keys_at(model, loc[:-1]) if name != name_key]
            lines.append(problem_line(problem, f"{where}: ", ".".join(map(str, loc)), known))
    return lines


def problem_line(problem: ErrorDetails, where: str, key: str, known: Sequence[str]) -> str:
    """Describe one problem of a pydantic error; ``known`` are the keys that its table may hold."""
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(str(problem["loc"][-1]), known)
        return f"{where}unknown key '{key}'{hint}. Known keys: {', '.join(known)}."
    if problem["type"] == "missing":
        return f"{where}key '{key}' is missing."
    return f"{where}key '{key}': {problem['msg']}, not {problem['input']!r}."


def keys_at(model: type[BaseModel], loc: Iterable[int | str]) -> list[str]:
    """Return the keys of the model that sits at ``loc`` inside ``model``."""
    for part in loc:
        if (nested := model.model_fields.get(str(part))) is not None:
            model = next(_models_in(nested.annotation), model)
    return list(model.model_fields)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def merge_registries(registry_files: Iterable[RegistryFile]) -> Registry:
    """Merge registries into one; the order of the files does not matter, and a file that comes twice counts once.

    Raises:
        RegistryError: two entries share a name or a number (both distributions are named), a
            third-party entry is numbered below 1000, a third-party site is not prefixed with its
            algorithm, or an entry refers to a site, preset or algorithm that does not exist. The
            message holds one line for each problem.
    """
    by_place = {(registry_file.source, registry_file.path): registry_file for registry_file in registry_files}
    merged = [by_place[place] for place in sorted(by_place)]
    problems = _collisions(merged)
    if not problems:
        registry = Registry(
            sites=tuple(sorted((site for file in merged for site in file.sites), key=lambda site: site.number)),
            presets={preset.name: preset for file in merged for preset in file.presets},
            handles={handle.name: handle for file in merged for handle in file.handles},
            sources={site.slug: file.source for file in merged for site in file.sites},
        )
        problems = [problem for registry_file in merged for problem in _dangling(registry_file, registry)]
    problems += [problem for registry_file in merged for problem in _bad_entries(registry_file)]
    if problems:
        raise RegistryError("\n".join(problems))
    return registry


def _collisions(merged: Sequence[RegistryFile]) -> list[str]:
    """Names and numbers are tokens of one grammar, so sites, presets, handles and algorithms share them."""
    places: dict[str, str] = {}
    algorithms: dict[str, str] = {}
    problems = []

    def claim(token: str, what: str, where: str) -> None:
        if token in places:
            other = places[token]
            problems.append(f"{where}: {what} '{token}' is taken already by {other}. Choose another in one of them.")
        places.setdefault(token, where)

    for registry_file in merged:
        for site in registry_file.sites:
            where = registry_file.where("site", site.slug)
            claim(site.slug, "name", where)
            claim(str(site.number), "number", where)
            algorithms.setdefault(site.algorithm, where)
        for preset in registry_file.presets:
            claim(preset.name, "name", registry_file.where("preset", preset.name))
        for handle in registry_file.handles:
            where = registry_file.where("handle", handle.name)
            claim(handle.name, "name", where)
            if handle.number is not None:
                claim(str(handle.number), "number", where)
    for algorithm, where in algorithms.items():
        claim(algorithm, "algorithm", where)
    return problems


def _bad_entries(registry_file: RegistryFile) -> Iterator[str]:
    third_party = registry_file.source != BUILTIN_SOURCE
    for site in registry_file.sites:
        where = registry_file.where("site", site.slug)
        if third_party and not site.slug.startswith(f"{site.algorithm}-"):
            yield f"{where}: the slug must begin with its algorithm's name: [site.{site.algorithm}-{site.slug}]."
        if site.kind == "broadcast" and not site.tensors:
            yield f"{where}: key 'tensors': a broadcast site names at least one tensor."
        if (optional := [spec.optional for spec in site.tensors]) != sorted(optional):
            yield f"{where}: key 'tensors': optional tensors come last."
        if len({spec.name for spec in site.tensors}) < len(site.tensors):
            yield f"{where}: key 'tensors': two tensors have the same name."
    numbered = [("site", site.slug, site.number) for site in registry_file.sites]
    numbered += [("handle", handle.name, handle.number) for handle in registry_file.handles if handle.number]
    for table, name, number in numbered:
        if third_party and number < FIRST_THIRD_PARTY_NUMBER:
            where = registry_file.where(table, name)
            yield f"{where}: key 'number': {number} is reserved; plugins number from {FIRST_THIRD_PARTY_NUMBER}."


def _dangling(registry_file: RegistryFile, registry: Registry) -> Iterator[str]:
    slugs = [site.slug for site in registry.sites]

    def unknown(words: Iterable[str], known: Collection[str], what: str, where: str) -> Iterator[str]:
        for word in words:
            if word not in known:
                yield f"{where}: unknown {what} '{word}'{did_you_mean(word, known)}."

    for preset in registry_file.presets:
        where = registry_file.where("preset", preset.name)
        yield from unknown(preset.sites, slugs, "site", f"{where}: key 'sites'")
        yield from unknown(preset.include, registry.presets, "preset", f"{where}: key 'include'")
        if preset.where is not None:
            named = preset.where.algorithm or ()
            yield from unknown(named, registry.algorithms, "algorithm", f"{where}: key 'where.algorithm'")
        if _includes_itself(preset.name, registry, set()):
            yield f"{where}: key 'include': the preset includes itself."
    for handle in registry_file.handles:
        yield from unknown(handle.sites, slugs, "site", f"{registry_file.where('handle', handle.name)}: key 'sites'")


def _includes_itself(name: str, registry: Registry, path: set[str]) -> bool:
    if name in path:
        return True
    known = registry.presets.get(name)
    return known is not None and any(_includes_itself(other, registry, path | {name}) for other in known.include)


def builtin_registry() -> RegistryFile:
    """Read the ``sites.toml`` that ships with specsync."""
    return read_registry(files("specsync_core") / "sites.toml", BUILTIN_SOURCE)
