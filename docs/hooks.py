"""Links from pages to files outside of the documentation lead to the repository."""

from __future__ import annotations

import re
from typing import Any

FILES = "https://github.com/natgrad/natgrad/blob/main/"


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Return a page with absolute links to files of the repository; called by mkdocs."""
    if context["page"].file.src_uri == "scoreboard.md":
        context["page"].meta["hide"] = ["toc"]  # its tables need the width
    if "/" in context["page"].file.src_uri:  # pages in folders link to pages
        return markdown
    return re.sub(r"\]\(\.\./", f"]({FILES}", markdown)
