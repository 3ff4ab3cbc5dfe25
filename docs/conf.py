"""Sphinx settings. `make docs` builds the site with warnings as errors; the references are generated first."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402 - it stands beside this file

project = "specsync"
author = "the specsync authors"
release = generate.version()
version = release

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_static"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # options are written --so
nitpicky = True

html_theme = "furo"
html_title = f"specsync {release}"
html_static_path = ["_static"]
html_css_files = ["specsync.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

OPENINGS = {
    "sglang": "run SGLang with its ranks in agreement, and know what is synchronised in your release.",
    "sglang-matrix": "look up who synchronises a site in a release of SGLang: the engine, specsync, or nobody.",
    "vllm": "run vLLM with its ranks in agreement, and know what was run and what was not.",
    "diagnostics": "turn a hang into a named decision, with its step, its ranks and both values.",
    "metrics-and-control": "watch the counters of a running engine, and change its sites without a restart.",
    "bisect": "let a command find the smallest sets of sites that your deployment needs.",
}
"""How pages begin that stand in the checkout for themselves, too."""


def open_page(app: Any, name: str, source: list[str]) -> None:
    """Begin each page with what its reader can do after it; paths that lead out of the site become plain words."""
    text = source[0]
    if name in OPENINGS and generate.OPENING not in text:
        heading, newline, rest = text.partition("\n")
        text = f"{heading}{newline}\n{generate.OPENING} {OPENINGS[name]}\n{rest}"
    text = re.sub(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)", r"\1 (`\2`)", text)
    source[0] = re.sub(r"\[([^\]]+)\]\(([\w-]+\.md)\)", lambda link: link[0 if (HERE / link[2]).exists() else 1], text)


def setup(app: Any) -> None:
    generate.write_all(HERE / "generated")
    app.connect("source-read", open_page)
