"""The registry: sites, presets and handles as data.

The data lives in TOML files with tables ``[site.SLUG]``, ``[preset.NAME]`` and ``[handle.NAME]``: the
built-in ``sites.toml``, and more from plugins. Reading and merging them is
`specsync_core.registry_files`' work; finding the plugins' files is `specsync_core.manager`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from specsync_core.errors import RegistryError, did_you_mean

Phase = Literal["init", "draft", "plan", "accept", "target", "state"]
Kind = Literal["broadcast", "consensus", "check"]
Cause = Literal["memory", "rng", "float", "host"]

DType = Literal[
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "complex64",
    "complex128",
]

Slug = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")]
ShapeLetter = Annotated[str, Field(pattern=r"^[A-Z]$")]


class Table(BaseModel):
    """A TOML table whose every key is known; types are never converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorSpec(Table):
    """One tensor of a site's payload."""

    name: str
    shape: tuple[ShapeLetter, ...] = Field(strict=False)
    """One letter per dimension; equal letters are equal sizes within one call."""
    dtypes: tuple[DType, ...] = Field(min_length=1, strict=False)
    """Accepted dtypes, as torch names them without ``torch.``."""
    optional: bool = False
    """May be left out of a call (only at the end of the list)."""


class Site(Table):
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
    platforms: tuple[Slug, ...] = Field(strict=False)
    """Platforms where the site is on by default; anywhere else it is opt-in."""
    summary: str

    def __str__(self) -> str:
        return self.slug


class Where(Table):
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


class Preset(Table):
    """A named selection of sites: other presets, listed slugs, and conditions, united."""

    name: Slug
    summary: str
    include: tuple[str, ...] = Field(default=(), strict=False)
    sites: tuple[str, ...] = Field(default=(), strict=False)
    where: Where | None = None


class Handle(Table):
    """Another name for one or more sites: an alias, or a name that is no longer used."""

    name: Slug
    number: int | None = Field(default=None, ge=1)
    status: Literal["alias", "retired"]
    sites: tuple[str, ...] = Field(min_length=1, strict=False)
    summary: str


@dataclass(frozen=True)
class Named:
    """What one word of the policy grammar stands for."""

    what: Literal["preset", "site", "algorithm", "alias", "retired"]
    name: str
    """The name itself, also where the word was a number."""
    sites: frozenset[Site]


class ReadableFile(Protocol):
    """What `read_registry` needs of a path: ``Path`` and importlib's ``Traversable`` both fit."""

    def read_bytes(self) -> bytes: ...


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

    @cached_property
    def words(self) -> Mapping[str, Named]:
        """Every word of the policy grammar: names, and numbers in decimal."""
        words = {name: Named("preset", name, self.preset_sites(name)) for name in self.presets}
        for algorithm in self.algorithms:
            members = frozenset(site for site in self.sites if site.algorithm == algorithm)
            words[algorithm] = Named("algorithm", algorithm, members)
        for site in self.sites:
            words[site.slug] = words[str(site.number)] = Named("site", site.slug, frozenset({site}))
        for handle in self.handles.values():
            words[handle.name] = Named(
                handle.status, handle.name, frozenset(self._by_key[slug] for slug in handle.sites)
            )
            if handle.number is not None:
                words[str(handle.number)] = words[handle.name]
        return words

    def site(self, key: Site | str | int) -> Site:
        """Return the site with this slug or number.

        Raises:
            RegistryError: there is no such site.
        """
        if isinstance(key, Site):
            key = key.slug
        if isinstance(key, str) and (found := self._by_key.get(key)) is not None:
            return found
        word = str(key).strip().lower().replace("_", "-")
        if (found := self._by_key.get(word)) is not None:
            return found
        if (named := self.words.get(word)) is not None:
            members = ", ".join(sorted(site.slug for site in named.sites)) or "no site"
            raise RegistryError(f"{word!r} is no single site, it is the {named.what} of {members}.")
        raise RegistryError(
            f"unknown site {key!r}{did_you_mean(word, self._by_key)}. List the sites with `specsync sites`."
        )

    def preset_sites(self, name: str) -> frozenset[Site]:
        """Return the sites of a preset, following its includes."""
        preset = self.presets[name]
        selected = {self._by_key[slug] for slug in preset.sites}
        if preset.where is not None:
            selected.update(site for site in self.sites if preset.where.accepts(site))
        return frozenset(selected).union(*(self.preset_sites(included) for included in preset.include))
