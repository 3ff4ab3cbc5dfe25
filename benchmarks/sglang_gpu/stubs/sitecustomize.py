"""Placeholders for modules that the engine imports and this benchmark does not use: grammars and notebooks."""

import importlib.abc
import importlib.machinery
import os
import sys
import types

ABSENT = ("xgrammar", "IPython", *filter(None, os.environ.get("BENCH_ABSENT", "").split(",")))


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _Placeholder(metaclass=_AnyAttribute):
    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else _Placeholder()

    @classmethod
    def __get_pydantic_core_schema__(cls, *args):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):  # torch looks for __file__ when it reports where an operator came from
            raise AttributeError(name)
        return type(name, (_Placeholder,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__, module.__version__ = [], "99.0"
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
