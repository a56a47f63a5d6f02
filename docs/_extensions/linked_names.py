"""Names in code, as `tcemu.gemm` or `tcemu.evidence(op, target)`, lead to their place in the reference, on every page and in docstrings."""

from typing import Any

from docutils import nodes

PREFIX = "tcemu."


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link(app: Any, doctree: nodes.document, page: str) -> None:
    """Makes each name that the reference has a link."""
    known = app.env.get_domain("py").objects
    for code in list(doctree.findall(nodes.literal)):
        name = code.astext().partition("(")[0]
        inside = code.parent
        if not name.startswith(PREFIX) or name not in known or isinstance(inside, nodes.reference | nodes.title):
            continue
        place = known[name]
        at = f"{app.builder.get_relative_uri(page, place.docname)}#{place.node_id}"
        inside.replace(code, nodes.reference("", "", code.deepcopy(), internal=True, refuri=at))
