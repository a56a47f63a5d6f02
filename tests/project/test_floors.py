"""The rules of the house. A module imports from floors below its own, and from a neighbour only where the table says so.

No modules import each other in a circle, and no private name leaves its module.
"""

import ast
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = (
    "base",
    "formats",
    "isa layouts",
    "arithmetic",
    "architectures",
    "backends",
    "instructions",
    "quantize products functional",
    "emulation explanation study silicon fuzz replay ptx viz",
    "drift torch triton testing data",
    "commands cli pytest_plugin __main__",
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
CHAINS = (  # neighbours on one floor: each may import those before it, and no other neighbour
    "layouts isa",
    "quantize products functional",
    "explanation study emulation silicon fuzz viz replay torch",
    "explanation ptx",
    "commands cli __main__",
)
NEIGHBOURS = {pair[::-1] for chain in CHAINS for pair in combinations(chain.split(), 2)}
PACKAGE_ROOT = Path("tcemu/__init__.py")  # the list of public names may import any floor
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tcemu").rglob("*.py") if path.relative_to(ROOT) != PACKAGE_ROOT)


def imported_modules(tree: ast.AST) -> list[str]:
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
    for name in imported_modules(ast.parse(source)):
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
        ("tcemu/base/bits.py", "def f():\n    from tcemu.formats import F16", "tcemu.formats is on a floor above base"),
        ("tcemu/engine/arithmetic/fma.py", "import tcemu.architectures", "tcemu.architectures is on a floor above arithmetic"),
        (
            "tcemu/engine/layouts/packing.py",
            "from tcemu.isa import parse",
            "tcemu.isa is a neighbour of layouts that CHAINS does not allow",
        ),
        ("tcemu/engine/instructions/mma.py", "from . import wmma", ". is a relative import"),
        ("tcemu/engine/instructions/mma.py", "from ..bits import clz", "..bits is a relative import"),
        ("tcemu/engine/layouts/packing.py", "from tcemu import isa", "tcemu.isa is a neighbour of layouts that CHAINS does not allow"),
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
        ("tcemu/engine/isa/families.py", "from tcemu.formats import Format\nfrom tcemu.layouts import packing"),
        (
            "tcemu/engine/instructions/mma.py",
            "import jax\nfrom tcemu.engine.instructions.operand_checks import check\nfrom tcemu.engine.layouts.packing import pack",
        ),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert offences(Path(path), source) == []


# ---- no circles


def module_name(path: Path) -> str:
    """ "tcemu/engine/isa/grammar.py" -> "tcemu.engine.isa.grammar"; a folder's __init__.py is the folder."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


class ForRuntime(ast.NodeTransformer):
    """Leaves out what stands under `if TYPE_CHECKING:`; its `else` stays."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        return list(node.orelse) if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there are none. sources: by module.

    Every import statement counts, also one inside a function, but not those for type checkers, which never run.
    """
    graph = {}
    for module, source in sources.items():
        named = set()
        for node in ast.walk(ForRuntime().visit(ast.parse(source))):
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
    assert circle({module_name(path): (ROOT / path).read_text() for path in FILES}) == []


@pytest.mark.parametrize(
    ("sources", "length"),
    [
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "def g():\n    from tcemu.a import h"}, 3),
        ({"tcemu.a": "import tcemu.b", "tcemu.b": "from tcemu import c", "tcemu.c": "from tcemu.a import x"}, 4),
        ({"tcemu.p": "from tcemu.p.q import f", "tcemu.p.q": "from tcemu.p import g"}, 3),  # a folder's names, and a file in it
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "if TYPE_CHECKING:\n    from tcemu.a import T"}, 0),
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "if TYPE_CHECKING:\n    pass\nelse:\n    from tcemu.a import T"}, 3),
        ({"tcemu.a": "from tcemu.b import f", "tcemu.b": "import jax", "tcemu.p": "from tcemu.p import q", "tcemu.p.q": ""}, 0),
    ],
)
def test_a_circle_is_seen(sources, length):
    assert len(circle(sources)) == length


# ---- what is private stays in its module


def check_files(check: Callable[[Path, str], list[str]]) -> str:
    """What a check says of all files, a line each; "" if it has nothing to say."""
    return "\n".join(f"{path}: {said}" for path in (PACKAGE_ROOT, *FILES) for said in check(path, (ROOT / path).read_text()))


def private_imports(source: str) -> list[str]:
    """Private names of tcemu's other modules that a file uses: imported, or reached through an imported module."""
    tree, modules, used = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tcemu":
            used += [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name.split(".")[0] == "tcemu"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = modules.get(ast.unparse(node.value))
            used += [f"{owner}.{node.attr}"] if owner is not None and (ROOT / f"{owner.replace('.', '/')}.py").is_file() else []
    return used


def test_no_private_name_leaves_its_module():
    wrong = check_files(lambda path, source: private_imports(source))
    assert not wrong, f"\n{wrong}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tcemu.engine.instructions.dot import _dot", ["tcemu.engine.instructions.dot._dot"]),
        ("def f():\n    from tcemu.base.bits import clz, _jam", ["tcemu.base.bits._jam"]),
        ("from tcemu.backends import dispatch\ndispatch._walk()", ["tcemu.engine.backends.dispatch._walk"]),
        ("import tcemu.base.bits\ntcemu.base.bits._jam", ["tcemu.base.bits._jam"]),
        ("import tcemu.base.bits as b\nb._jam", ["tcemu.base.bits._jam"]),
        ("from tcemu.base.bits import Limbs\nimport jax._src\nrow._replace(a=1)\nself._x\nLimbs.__name__", []),
    ],
)
def test_a_private_name_from_elsewhere_is_seen(source, names):
    assert private_imports(source) == names
