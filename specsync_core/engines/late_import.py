"""Act on an engine's module when the engine imports it, and not a moment before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act`` with a module: now when it is imported already, else right after the engine has imported it.

    A process that is forked before that inherits the wish (VL #27940: plugins lost after fork).
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    sys.meta_path.insert(0, _Wish(name, act))


class _Wish(MetaPathFinder):
    """Finds one module as the others would, and acts once when it has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self._act)
        return spec


class _ActingLoader(Loader):
    def __init__(self, inner: Loader, act: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._act(module)
