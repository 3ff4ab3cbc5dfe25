"""``specsync new-plugin``"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zlib import crc32

import typer

import specsync_core
from specsync_core.cli.output import JsonOption, UsageError, print_json
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.registry import Registry
from specsync_core.registry_files import FIRST_THIRD_PARTY_NUMBER

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

LONGEST_NAME = 40
SITES = 4
SUFFIX = ".template"


def new_plugin(
    name: Annotated[str, typer.Argument(help="The algorithm's name: lower case words of letters and digits.")],
    directory: Annotated[
        Path | None, typer.Option(help="Where to write; it must not exist (default: ./specsync-NAME).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plugin that works and passes its own tests, to put your algorithm into."""
    manager = plugin_manager()
    registry = load_registry(manager)
    _check_name(name, registry, {info.name for info in manager.plugins()})
    target = Path(f"specsync-{name}") if directory is None else directory
    written = write_plugin(name, target, _free_number(name, registry))
    if as_json:
        print_json({"directory": str(target), "files": written})
        return
    print(f"wrote {len(written)} files to {target}. Next:")
    print(f"  cd {target}\n  pip install -e '.[test]'\n  python -m pytest\n  specsync demo --algorithm {name}")


def _check_name(name: str, registry: Registry, plugins: set[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > LONGEST_NAME:
        raise UsageError(
            f"'{name}' is no name for a plugin: it must be lower case words of letters and digits joined by '-',"
            f" at most {LONGEST_NAME} characters, and begin with a letter, such as 'lookahead' or 'my-draft'."
        )
    named = registry.words.get(name)
    if named is not None:
        raise UsageError(f"'{name}' is taken: it is the {named.what} {named.name}. Choose another name.")
    if name in plugins:
        raise UsageError(f"'{name}' is taken by an installed plugin (`specsync plugins`). Choose another name.")
    if find_spec(package_of(name)) is not None:
        raise UsageError(f"'{name}' is taken: there is a package {package_of(name)} already. Choose another name.")
    taken = [site.slug for site in registry.sites if site.slug.startswith(f"{name}-")]
    if taken:
        raise UsageError(f"'{name}' is taken: there is a site {taken[0]}. Choose another name.")


def package_of(name: str) -> str:
    """The import package of a plugin's distribution."""
    return f"specsync_{name.replace('-', '_')}"


def _free_number(name: str, registry: Registry) -> int:
    """The first number of a hundred that follows from the name, so that two authors seldom meet, and is free here."""
    numbers = {site.number for site in registry.sites} | {handle.number for handle in registry.handles.values()}
    start = crc32(name.encode()) % 900
    for offset in range(900):
        first = FIRST_THIRD_PARTY_NUMBER + 100 * ((start + offset) % 900) + 1
        if numbers.isdisjoint(range(first, first + SITES)):
            return first
    raise UsageError("no hundred of site numbers is free: remove plugins that you do not use.")


def write_plugin(name: str, target: Path, first_number: int) -> list[str]:
    """Write the template to a directory that does not exist yet, whole or not at all; return the files' names.

    Raises:
        UsageError: the directory exists, or cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists; nothing was written. Give another --directory, or move it away.")
    words = name.split("-")
    values = {
        "NAME": name,
        "PACKAGE": package_of(name),
        "CLASS": "".join(map(str.capitalize, words)),
        "VERSION": specsync_core.__version__,
        **{f"NUMBER{index + 1}": str(first_number + index) for index in range(SITES)},
    }
    try:
        # Beside the target, so that the last step is one rename.
        with tempfile.TemporaryDirectory(prefix=".specsync-", dir=target.absolute().parent) as folder:
            drawn = Path(folder) / "plugin"
            written = sorted(_render(files("specsync_core.cli") / "plugin_template", drawn, values))
            shutil.move(drawn, target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}. Nothing was left there.") from error
    return written


def _render(source: Traversable, target: Path, values: dict[str, str], inside: str = "") -> Iterator[str]:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            name = values["PACKAGE"] if entry.name == "package" else entry.name
            yield from _render(entry, target / name, values, f"{inside}{name}/")
        elif entry.name.endswith(SUFFIX):
            name = entry.name.removesuffix(SUFFIX).replace("gitignore", ".gitignore")
            text = re.sub(r"@([A-Z]+\d?)@", lambda found: values[found[1]], entry.read_text(encoding="utf-8"))
            (target / name).write_text(text, encoding="utf-8")
            yield inside + name
