"""Settings of the documentation: `sphinx-build -W -c docs . build/docs`, from the root of the repository.

The root is the source directory, so that a link between two documents is the same on the site and on a code host. ARCHITECTURE.md,
CHANGELOG.md and the notebooks are pages as they stand. Nothing is fetched and no notebook is run.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from docstrings import source_address  # noqa: E402

import tcemu  # noqa: E402

project = "tcemu"
author = "The tcemu developers"
project_copyright = "The tcemu developers, Apache-2.0"
release = version = tcemu.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx_design",
    "docstrings",
    "linked_names",
    "command_line",
    "package_files",
    "tables",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "tests/README.md",
    "tests/golden/README.md",
    "tcemu/*/README.md",
]
exclude_patterns = ["docs/data/*"]  # tables that pages include
html_static_path = ["_static"]
html_css_files = ["tcemu.css"]
html_js_files = ["blocks.js"]
html_theme = "furo"
html_title = f"tcemu {release}"
# the repository's address is not in the tree: hatch_build.py says where it comes from
REPOSITORY = os.environ.get("TCEMU_REPOSITORY", "").rstrip("/")
if REPOSITORY:
    html_theme_options = {
        "source_view_link": f"{REPOSITORY}/blob/main/{{filename}}",
        "source_edit_link": f"{REPOSITORY}/edit/main/{{filename}}",
        "footer_icons": [{"name": "The repository", "url": REPOSITORY, "html": "Repository", "class": ""}],
    }
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of a public name's source, if that of the repository is known."""
    return source_address(REPOSITORY, info["module"], info["fullname"]) if REPOSITORY and domain == "py" else None


myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
nb_execution_mode = "off"
nb_merge_streams = True
suppress_warnings = ["myst.header", "ref.python"]  # an included part may begin at a lower heading; two classes may share a short name

default_role = "code"
smartquotes = False  # an option is --gpus, not a dash
autodoc_typehints = "none"  # docs/_extensions/docstrings.py writes the types as `help` shows them, with short names
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# of tcemu.torch and tcemu.triton only the docstrings are wanted
autodoc_mock_imports = [name for name in ("torch", "triton") if not find_spec(name)]
python_maximum_signature_line_length = 88
pygments_style = "tango"
pygments_dark_style = "monokai"

# the root of the site leads to the first page, whose place is that of its source
html_additional_pages = {"index": "to_first_page.html"}
templates_path = ["_templates"]
