"""Links from pages to files outside of the documentation lead to the repository."""

from __future__ import annotations

from typing import Any

FILES = "https://github.com/natgrad/natgrad/blob/main/"


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Return a page with absolute links to files of the repository; called by mkdocs."""
    if context["page"].file.src_uri == "scoreboard.md":
        context["page"].meta["hide"] = ["toc"]  # its tables need the width
    outside = "../" * (context["page"].file.src_uri.count("/") + 1)
    return markdown.replace(f"]({outside}", f"]({FILES}")
