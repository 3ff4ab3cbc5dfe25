"""The command ``specsync``. Data goes to stdout, messages to stderr; 0 fine, 1 a finding, 2 usage."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from specsync_core.errors import SpecSyncError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit. An error that is not specsync's own shows its traceback.

    Args:
        arguments: the words after the program's name; None takes the process's own.
    """
    from specsync_core.cli.app import app
    from specsync_core.cli.output import UsageError

    try:
        app(args=None if arguments is None else list(arguments), prog_name="specsync")
    except UsageError as problem:
        print(f"specsync: {problem}", file=sys.stderr)
        sys.exit(2)
    except SpecSyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"specsync: standard output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(1)  # closing standard output would raise once more
