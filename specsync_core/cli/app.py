"""The commands, each imported only when it runs: most need no plugin, no policy file, and none needs torch to start."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specsync_core
from specsync_core.cli.output import UsageError
from specsync_core.errors import did_you_mean

COMMANDS = ("sites", "plan", "plugins", "check", "demo", "bench", "bisect", "engines", "doctor", "ctl", "new-plugin")
"""Each is the function of that name in the module of that name beside this one, with ``_`` for ``-``."""


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            hint = did_you_mean(cmd_name, COMMANDS)
            raise UsageError(f"unknown command {cmd_name!r}{hint}. Known: {', '.join(COMMANDS)}.")
        name = cmd_name.replace("-", "_")
        module = import_module(f"specsync_core.cli.{name}")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(getattr(module, name))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps tensor-parallel ranks in agreement during speculative decoding.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"specsync {specsync_core.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps tensor-parallel ranks in agreement during speculative decoding."""
