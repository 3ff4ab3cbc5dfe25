"""``specsync check``"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli
import typer

from specsync_core.bounded_file import MAX_TEXT_BYTES, read_bounded
from specsync_core.cli.output import JsonOption, UsageError, print_json
from specsync_core.cli.plan import detect_platform
from specsync_core.cli.startup import startup_checks
from specsync_core.engines.known import ENGINES, points_of
from specsync_core.errors import SpecSyncError
from specsync_core.facts import Facts
from specsync_core.manager import PluginManager
from specsync_core.plan import Plan, resolve_plan
from specsync_core.policy_file import PolicyFile, PolicyTables, find_policy_file, read_policy_file
from specsync_core.registry import Registry
from specsync_core.registry_files import RegistryFile, builtin_registry, merge_registries, read_registry
from specsync_core.settings import Environment, disabled_plugins, read_environment

T = TypeVar("T")


def check(
    file: Annotated[
        Path | None, typer.Argument(help="A policy file or a TOML registry (default: the policy file in force).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check registry, plugins, environment and policy file, and print every problem.

    Of the environment also what an engine would refuse at its start: faults, control socket, directories.
    """
    if file is not None and not file.exists():
        raise UsageError(f"{file}: there is no such file.")
    examination = Examination()
    examination.run(file)
    if as_json:
        print_json({"checked": examination.checked, "problems": examination.problems, "warning": examination.warning})
    else:
        examination.show()
    if examination.problems:
        raise typer.Exit(1)


class Examination:
    """Goes on behind each problem, as far as what follows still has a meaning."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.problems: list[dict[str, str]] = []
        self.warning: str | None = None

    def run(self, file: Path | None) -> None:
        """Examine everything, and ``file`` instead of the policy file in force."""
        environment = self._attempt(read_environment)
        manager = self._load_plugins()
        is_registry = file is not None and _is_registry(file)
        registry = self._merge(manager, file if is_registry else None)
        known = Environment() if environment is None else environment
        policy_file = None if is_registry else self._attempt(lambda: _policy_file(file, known))
        if policy_file is not None:
            self.checked.append(f"policy file {policy_file.path}")
        if registry is None:
            return  # what a policy names cannot be judged
        plan = self._attempt(lambda: _resolve(registry, environment, policy_file, manager))
        self._examine_plugins(manager, registry)
        self.warning = None if plan is None else plan.narrowing_warning()
        for startup_check in startup_checks(known, registry):
            self._attempt(startup_check)

    def _attempt(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except SpecSyncError as error:
            self._note(error)
            return None

    def _note(self, error: SpecSyncError) -> None:
        """Note each line of a message as a problem; an indented line belongs to the one above it."""
        for problem in str(error).replace("\n  ", "\0").split("\n"):
            found = {"error": type(error).__name__, "message": problem.replace("\0", "\n  ")}
            if found not in self.problems:  # what each version of an engine is asked for says it each time
                self.problems.append(found)

    def _load_plugins(self) -> PluginManager:
        self.checked.append("environment")
        manager = PluginManager(keep_going=True)
        self._attempt(lambda: manager.load(disabled_plugins()))
        for problem in manager.problems:
            self._note(problem)
        self.checked.append(f"{sum(info.status == 'active' for info in manager.plugins())} plugins")
        for ask in (manager.algorithms, lambda: manager.policies(Facts())):
            self._attempt(ask)
        return manager

    def _examine_plugins(self, manager: PluginManager, registry: Registry) -> None:
        """Ask for what would be asked only by an engine or the demo."""

        def ask_algorithms() -> None:
            for info, problem in manager.algorithm_problems(registry):
                self._note(info.error(problem))

        self._attempt(ask_algorithms)
        for engine in ENGINES.values():
            for version in engine.versions:
                self._attempt(partial(points_of, engine, version, "cuda", manager))

    def _merge(self, manager: PluginManager, file: Path | None) -> Registry | None:
        def read() -> Registry:
            files: list[RegistryFile] = [builtin_registry(), *manager.registry_files()]
            if file is not None and file.resolve() not in [Path(known.path).resolve() for known in files]:
                files.append(read_registry(file, "the file to check"))
            return merge_registries(files)

        registry = self._attempt(read)
        if registry is not None:
            self.checked.append(f"registry of {len(registry.sites)} sites")
        return registry

    def show(self) -> None:
        """Print the problems, or what was found to be in order."""
        for problem in self.problems:
            print(f"{problem['error']}: {problem['message']}")
        if self.problems:
            print(f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}.")
        else:
            print(f"no problem: {', '.join(self.checked)}.")
        if self.warning is not None:
            print(self.warning, file=sys.stderr)


def _is_registry(path: Path) -> bool:
    try:
        document: dict[str, Any] = tomli.loads(read_bounded(path, MAX_TEXT_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False  # reading it as a policy file says what is wrong
    return not {"site", "preset", "handle"}.isdisjoint(document)


def _policy_file(file: Path | None, environment: Environment) -> PolicyFile | None:
    return find_policy_file(environment.config) if file is None else read_policy_file(file)


def _resolve(
    registry: Registry, environment: Environment | None, policy_file: PolicyFile | None, manager: PluginManager
) -> Plan:
    """Resolve a plan; with a wrong environment, which was noted already, from the other sources."""
    environ: dict[str, str] | None = {} if environment is None else None
    no_file = PolicyFile("", PolicyTables(), {})
    facts = Facts(platform=detect_platform())
    return resolve_plan(registry, environ, policy_file or no_file, facts, manager)
