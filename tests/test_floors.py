"""The rules of the house. A module imports from floors below its own, and from a neighbour only where the table says so.

No modules import each other in a circle.
"""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "bits errors checking files gradients meshes text",
    "formats layouts packing",
    "arithmetic sparsity shared_memory memory",
    "isa",
    "architectures",
    "operations",
    "quantize linalg",
    "fuzz explanation study emulation silicon verification ptx viz",
    "cli commands data",
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
CHAINS = (  # neighbours on one floor: each may import those before it, and no other neighbour
    "errors checking",
    "formats packing",
    "memory shared_memory",
    "quantize linalg",
    "explanation study emulation silicon fuzz verification viz",
    "commands cli",
)
NEIGHBOURS = {pair[::-1] for chain in CHAINS for pair in combinations(chain.split(), 2)}
PACKAGE_ROOT = Path("tcemu/__init__.py")  # the list of public names may import any floor
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tcemu").rglob("*.py") if path.relative_to(ROOT) != PACKAGE_ROOT)


def imported(tree: ast.AST) -> list[str]:
    """Every module that an import statement anywhere in the tree names; relative ones begin with a dot."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"tcemu.{alias.name}" for alias in node.names] if module == "tcemu" else [module]
    return names


def offences(path: Path, source: str) -> list[str]:
    """What in this file, at `tcemu/...`, breaks the floors."""
    module = path.with_suffix("").parts[1]
    if module not in FLOOR:
        return [f"{module} has no floor: add it to FLOORS"]
    found = []
    for name in imported(ast.parse(source)):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if name.startswith("."):
            found.append(f"{name} is a relative import")
        elif package == "tcemu" and not other:
            found.append("it imports the package root, which imports every floor")
        elif package == "tcemu" and other not in FLOOR:
            found.append(f"{name} has no floor: add it to FLOORS, or import it from its module")
        elif package == "tcemu" and FLOOR[other] > FLOOR[module]:
            found.append(f"{name} is on a floor above {module}")
        elif package == "tcemu" and FLOOR[other] == FLOOR[module] and other != module and (module, other) not in NEIGHBOURS:
            found.append(f"{name} is a neighbour of {module} that CHAINS does not allow")
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down_only(path):
    assert offences(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("tcemu/bits.py", "def f():\n    from tcemu.formats import F16", "tcemu.formats is on a floor above bits"),
        ("tcemu/arithmetic/fma.py", "import tcemu.architectures", "tcemu.architectures is on a floor above arithmetic"),
        ("tcemu/formats.py", "from tcemu.layouts import TILE", "tcemu.layouts is a neighbour of formats that CHAINS does not allow"),
        ("tcemu/operations/mma.py", "from . import wmma", ". is a relative import"),
        ("tcemu/operations/mma.py", "from ..bits import clz", "..bits is a relative import"),
        ("tcemu/packing.py", "from tcemu import layouts", "tcemu.layouts is a neighbour of packing that CHAINS does not allow"),
        ("tcemu/cli.py", "from tcemu import mma", "tcemu.mma has no floor: add it to FLOORS, or import it from its module"),
        ("tcemu/cli.py", "import tcemu", "it imports the package root, which imports every floor"),
        ("tcemu/cli.py", "from tcemu.attic import old", "tcemu.attic has no floor: add it to FLOORS, or import it from its module"),
        ("tcemu/attic.py", "", "attic has no floor: add it to FLOORS"),
    ],
)
def test_an_offence_is_seen(path, source, said):
    assert offences(Path(path), source) == [said]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tcemu/packing.py", "from tcemu.formats import Format\nfrom tcemu import bits"),
        ("tcemu/operations/mma.py", "import jax\nfrom tcemu.operations.shared import check\nfrom tcemu.layouts import TILE"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert offences(Path(path), source) == []


# ---- no circles


def module_of(path: Path) -> str:
    """ "tcemu/isa/grammar.py" -> "tcemu.isa.grammar"; a folder's __init__.py is the folder."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there are none. sources: by module.

    Every import statement counts, also one inside a function.
    """
    graph = {}
    for module, source in sources.items():
        named = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in sources else node.module for name in names.values()}
        graph[module] = named & sources.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle({module_of(path): (ROOT / path).read_text() for path in FILES}) == []


@pytest.mark.parametrize(
    ("sources", "length"),
    [
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "def g():\n    from tcemu.a import h"}, 3),
        ({"tcemu.a": "import tcemu.b", "tcemu.b": "from tcemu import c", "tcemu.c": "from tcemu.a import x"}, 4),
        ({"tcemu.p": "from tcemu.p.q import f", "tcemu.p.q": "from tcemu.p import g"}, 3),  # a folder's names, and a file in it
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "import jax", "tcemu.p": "from tcemu.p import q", "tcemu.p.q": ""}, 0),
    ],
)
def test_a_circle_is_seen(sources, length):
    assert len(circle(sources)) == length
