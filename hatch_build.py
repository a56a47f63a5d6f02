"""The part of the package's metadata that depends on where the repository is public.

That address is not in the tree. It is the environment variable TCEMU_REPOSITORY at the time of the build, which the release workflow sets
to the repository that it runs in: the wheel then has URLs, and the links of its description lead there. Without it the wheel has no URLs,
and the description has the words of a link alone, so that none is dead.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "TCEMU_REPOSITORY"
FENCE = "```"
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:)([^)\s]+)\)")


def repository_address() -> str:
    """Return the address of the public repository without a slash at its end, or "" if it is not known."""
    return os.environ.get(VARIABLE, "").rstrip("/")


def portable_links(text: str, address: str) -> str:
    """Return Markdown whose relative links and pictures lead into a repository, or are gone if there is no address."""

    def replace(match: re.Match) -> str:
        picture, words, target = match.groups()
        if not address:
            return "" if picture else words
        path, _, anchor = target.partition("#")
        place = f"{address}/{'raw' if picture else 'blob'}/main/{path or 'README.md'}{'#' + anchor if anchor else ''}"
        return f"{picture}[{words}]({place})"

    parts = text.split(FENCE)  # every second one is a block of code, where kernel[grid](x) is no link
    return FENCE.join(part if number % 2 else RELATIVE_LINK.sub(replace, part) for number, part in enumerate(parts))


def project_urls(address: str) -> dict[str, str]:
    """Return the `[project.urls]`."""
    if not address:
        return {}
    pages = {"Changelog": "blob/main/CHANGELOG.md", "Documentation": "blob/main/docs/index.md", "Issues": "issues"}
    return {"Repository": address, **{name: f"{address}/{path}" for name, path in pages.items()}}


class AddressHook(MetadataHookInterface):
    """Fills in `readme` and `urls`, which pyproject.toml declares dynamic."""

    def update(self, metadata: dict) -> None:
        address = repository_address()
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": portable_links(text, address)}
        if address:
            metadata["urls"] = project_urls(address)
