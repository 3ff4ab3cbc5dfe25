"""``python -m specsync_core.cli``: the command line where the console script is not on the path."""

from specsync_core.cli import main

main()
