"""The registry: sites, presets and handles as data, read from TOML and merged.

One TOML file holds tables ``[site.SLUG]``, ``[preset.NAME]`` and ``[handle.NAME]``. The built-in
``sites.toml`` is one such file; plugins ship more. Reading and merging happen here and import neither
torch nor pluggy; finding the plugins' files is `specsync_core.manager`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Annotated, Any, Literal, Protocol

import tomli
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specsync_core.errors import RegistryError, did_you_mean

Phase = Literal["init", "draft", "plan", "accept", "target", "state"]
Kind = Literal["broadcast", "consensus", "check"]
Cause = Literal["memory", "rng", "float", "host"]

Slug = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")]

BUILTIN_SOURCE = "specsync-core"
FIRST_THIRD_PARTY_NUMBER = 1000


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorSpec(_Table):
    """One tensor of a site's payload."""

    name: str
    shape: tuple[str, ...] = Field(strict=False)
    """One letter per dimension; equal letters are equal sizes within one call."""
    dtypes: tuple[str, ...] = Field(min_length=1, strict=False)
    """Accepted dtypes, as torch names them without ``torch.``."""
    optional: bool = False
    """May be left out of a call (only at the end of the list)."""


class Site(_Table):
    """A place where a rank decides something that its whole group must agree on."""

    number: int = Field(ge=1)
    slug: Slug
    algorithm: Slug
    phase: Phase
    kind: Kind
    cause: Cause
    tensors: tuple[TensorSpec, ...] = Field(strict=False)
    graph: bool
    """May run while a CUDA or HIP graph is being captured."""
    platforms: tuple[str, ...] = Field(strict=False)
    """Platforms where the site is on by default; anywhere else it is opt-in."""
    summary: str

    def __str__(self) -> str:
        return self.slug


class Where(_Table):
    """Conditions on sites; an absent condition accepts every site."""

    algorithm: tuple[str, ...] | None = Field(default=None, strict=False)
    phase: tuple[Phase, ...] | None = Field(default=None, strict=False)
    kind: tuple[Kind, ...] | None = Field(default=None, strict=False)
    cause: tuple[Cause, ...] | None = Field(default=None, strict=False)

    def accepts(self, site: Site) -> bool:
        return all(
            allowed is None or getattr(site, name) in allowed
            for name, allowed in (
                ("algorithm", self.algorithm),
                ("phase", self.phase),
                ("kind", self.kind),
                ("cause", self.cause),
            )
        )


class Preset(_Table):
    """A named selection of sites: other presets, listed slugs, and conditions, united."""

    name: Slug
    summary: str
    include: tuple[str, ...] = Field(default=(), strict=False)
    sites: tuple[str, ...] = Field(default=(), strict=False)
    where: Where | None = None


class Handle(_Table):
    """Another name for one or more sites: an alias, or a name that is no longer used."""

    name: Slug
    number: int | None = Field(default=None, ge=1)
    status: Literal["alias", "retired"]
    sites: tuple[str, ...] = Field(min_length=1, strict=False)
    summary: str


class ReadableFile(Protocol):
    """What `read_registry` needs of a path: ``Path`` and importlib's ``Traversable`` both fit."""

    def read_bytes(self) -> bytes: ...


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
        text = path.read_bytes().decode("utf-8")
        document = tomli.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path} ({source}): the registry cannot be read: {error}") from error
    except tomli.TOMLDecodeError as error:
        raise RegistryError(f"{path} ({source}): not valid TOML: {error}") from error

    tables: dict[str, tuple[type[_Table], str]] = {
        "site": (Site, "slug"),
        "preset": (Preset, "name"),
        "handle": (Handle, "name"),
    }
    for table, entries in document.items():
        if table not in tables:
            raise RegistryError(
                f"{path} ({source}): unknown table [{table}]{did_you_mean(table, tables)}."
                f" Known tables: {', '.join(f'[{known}.NAME]' for known in tables)}."
            )
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise RegistryError(f"{path} ({source}): [{table}]: write each entry as its own table, [{table}.NAME].")
    parsed: dict[str, list[Any]] = {table: [] for table in tables}
    for table, (model, key) in tables.items():
        for name, entry in document.get(table, {}).items():
            parsed[table].append(_parse_entry(model, {**entry, key: name}, f"{path} ({source}): [{table}.{name}]", key))
    return RegistryFile(source, str(path), *(tuple(parsed[table]) for table in tables))


def _parse_entry(model: type[_Table], entry: dict[str, Any], where: str, name_key: str) -> _Table:
    try:
        return model.model_validate(entry)
    except ValidationError as error:
        raise RegistryError("\n".join(validation_lines(error, model, where, name_key))) from error


def validation_lines(
    error: ValidationError, model: type[BaseModel], where: str, name_key: str | None = None
) -> list[str]:
    """Describe a pydantic error, one line per wrong key: where, what, the known keys, a suggestion."""
    known = [name for name in model.model_fields if name != name_key]
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            word = str(problem["loc"][-1])
            hint = did_you_mean(word, known) + f" Known keys: {', '.join(known)}." if len(problem["loc"]) == 1 else ""
            lines.append(f"{where}: unknown key '{path}'.{hint}" if not hint else f"{where}: unknown key '{path}'{hint}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: key '{path}' is missing.")
        elif path == name_key:
            lines.append(f"{where}: the table's name {problem['input']!r} must be lower case words joined by '-'.")
        else:
            lines.append(f"{where}: key '{path}': {problem['msg']}, not {problem['input']!r}.")
    return lines


@dataclass(frozen=True)
class Registry:
    """Every site, preset and handle that is known, from all registries together.

    Equal names or numbers never meet here: `merge_registries` refuses them.
    """

    sites: tuple[Site, ...]
    """In the order of their numbers."""
    presets: Mapping[str, Preset]
    handles: Mapping[str, Handle]
    sources: Mapping[str, str] = field(compare=False)
    """Site slug to the distribution that declares it."""

    @cached_property
    def _by_key(self) -> dict[str, Site]:
        return {key: site for site in self.sites for key in (site.slug, str(site.number))}

    @cached_property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(sorted({site.algorithm for site in self.sites}))

    def site(self, key: Site | str | int) -> Site:
        """Return the site with this slug or number.

        Raises:
            RegistryError: there is no such site.
        """
        if isinstance(key, Site):
            key = key.slug
        found = self._by_key.get(str(key).strip().lower().replace("_", "-"))
        if found is None:
            raise RegistryError(
                f"unknown site {key!r}{did_you_mean(str(key), self._by_key)}. List the sites with `specsync sites`."
            )
        return found

    def preset_sites(self, name: str) -> frozenset[Site]:
        """Return the sites of a preset, following its includes."""
        preset = self.presets[name]
        selected = {self._by_key[slug] for slug in preset.sites}
        if preset.where is not None:
            selected.update(site for site in self.sites if preset.where.accepts(site))
        return frozenset(selected).union(*(self.preset_sites(included) for included in preset.include))


def merge_registries(registry_files: Iterable[RegistryFile]) -> Registry:
    """Merge registries into one; the order of the files does not matter.

    Raises:
        RegistryError: two entries share a name or a number (both distributions are named), a
            third-party site is numbered below 1000 or not prefixed with its algorithm, or an entry
            refers to a site or preset that does not exist.
    """
    merged = sorted(registry_files, key=lambda registry_file: (registry_file.source, registry_file.path))
    places: dict[str, str] = {}

    def claim(kind: str, value: str, where: str) -> None:
        if (other := places.get(f"{kind} {value}")) is not None:
            raise RegistryError(f"{where}: {kind} {value!r} is taken already by {other}. Choose another in one of them.")
        places[f"{kind} {value}"] = where

    for registry_file in merged:
        for site in registry_file.sites:
            where = registry_file.where("site", site.slug)
            claim("name", site.slug, where)
            claim("number", str(site.number), where)
            if registry_file.source != BUILTIN_SOURCE:
                _check_third_party(site, where)
            _check_tensors(site, where)
        for preset in registry_file.presets:
            claim("name", preset.name, registry_file.where("preset", preset.name))
        for handle in registry_file.handles:
            where = registry_file.where("handle", handle.name)
            claim("name", handle.name, where)
            if handle.number is not None:
                claim("number", str(handle.number), where)

    registry = Registry(
        sites=tuple(sorted((site for file in merged for site in file.sites), key=lambda site: site.number)),
        presets={preset.name: preset for file in merged for preset in file.presets},
        handles={handle.name: handle for file in merged for handle in file.handles},
        sources={site.slug: file.source for file in merged for site in file.sites},
    )
    for registry_file in merged:
        _check_references(registry_file, registry)
    return registry


def _check_third_party(site: Site, where: str) -> None:
    if site.number < FIRST_THIRD_PARTY_NUMBER:
        raise RegistryError(
            f"{where}: key 'number': {site.number} is reserved; plugins number their sites from {FIRST_THIRD_PARTY_NUMBER}."
        )
    if not site.slug.startswith(f"{site.algorithm}-"):
        raise RegistryError(
            f"{where}: the slug must begin with its algorithm's name: [site.{site.algorithm}-{site.slug}]."
        )


def _check_tensors(site: Site, where: str) -> None:
    if site.kind == "broadcast" and not site.tensors:
        raise RegistryError(f"{where}: key 'tensors': a broadcast site names at least one tensor.")
    optional = [spec.optional for spec in site.tensors]
    if optional != sorted(optional):
        raise RegistryError(f"{where}: key 'tensors': optional tensors come last.")


def _check_references(registry_file: RegistryFile, registry: Registry) -> None:
    slugs = [site.slug for site in registry.sites]

    def check(words: Iterable[str], known: Iterable[str], what: str, where: str) -> None:
        for word in words:
            if word not in known:
                raise RegistryError(f"{where}: unknown {what} '{word}'{did_you_mean(word, known)}.")

    for preset in registry_file.presets:
        where = registry_file.where("preset", preset.name)
        check(preset.sites, slugs, "site", f"{where}: key 'sites'")
        check(preset.include, registry.presets, "preset", f"{where}: key 'include'")
        if _includes_itself(preset.name, registry, set()):
            raise RegistryError(f"{where}: key 'include': the preset includes itself.")
    for handle in registry_file.handles:
        check(handle.sites, slugs, "site", f"{registry_file.where('handle', handle.name)}: key 'sites'")


def _includes_itself(name: str, registry: Registry, path: set[str]) -> bool:
    if name in path:
        return True
    known = registry.presets.get(name)
    return known is not None and any(_includes_itself(other, registry, path | {name}) for other in known.include)


def builtin_registry() -> RegistryFile:
    """Read the ``sites.toml`` that ships with specsync."""
    return read_registry(files("specsync_core") / "sites.toml", BUILTIN_SOURCE)  # type: ignore[arg-type]
