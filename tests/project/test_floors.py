"""The rules of the house. A module imports from floors below its own, and from a neighbour only where the table says so.

No modules import each other in a circle, and no private name leaves its module.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from support.private_names import PRIVATE_NAMES

ROOT = Path(__file__).parents[2]
WINGS = {  # from the ground up: a wing imports from those before it. Of each its floors, from the ground up too, with their rooms
    "base": (),
    "engine": ("formats", "isa layouts", "arithmetic", "architectures", "backends", "instructions"),
    "operations": ("quantize products functional",),
    "uses": ("emulation explanation study silicon fuzz replay viz", "drift"),
    "kernels": ("ptx", "triton cute xla"),
    "faces": ("torch commands data",),
}
PUBLIC = (  # files with the public names of a room
    "formats", "isa", "layouts", "instructions", "backends", "quantize", "products", "functional",
    "fuzz", "study", "replay", "drift", "silicon", "viz", "ptx", "triton", "cute", "inductor", "xla", "torch", "emulated_functions",
)  # fmt: skip
PROGRAMS = ("testing", "cli", "__main__")  # files that use the wings as a user does
CHAINS = (  # neighbours on one floor: each may import those before it, and no other neighbour
    "layouts isa",
    "quantize products functional",
    "explanation study emulation silicon fuzz viz replay",
    "triton xla",
    "commands cli __main__",
)
NEIGHBOURS = {pair[::-1] for chain in CHAINS for pair in combinations(chain.split(), 2)}
PACKAGE_ROOT = Path("tcemu/__init__.py")  # the list of public names may import any floor
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tcemu").rglob("*.py") if path.relative_to(ROOT) != PACKAGE_ROOT)


def number_floors() -> dict[str, int]:
    """The number of each room's floor, by its path in the package: "engine.formats", or "cli" for a file at the root."""
    floors = [
        [wing] if not rooms else [f"{wing}.{name}" for name in names.split()] for wing, rooms in WINGS.items() for names in rooms or [""]
    ]
    return {name: number for number, names in enumerate([*floors, PUBLIC, PROGRAMS]) for name in names}


FLOOR = number_floors()


def room(module: str) -> str:
    """The room of a module, without "tcemu.": wing and folder, or a file at the root."""
    parts = module.split(".")
    return ".".join(parts[: 2 if WINGS.get(parts[0]) else 1])


class FileFacts(NamedTuple):
    """What the rules ask of a file, which is parsed once."""

    source: str
    imported: list[str]  # see `imported_modules`
    at_runtime: list[tuple[str, str]]  # see `runtime_imports`
    private: list[str]  # see `private_imports`
    reached: list[str]  # see `reached_private_names`


def read_facts(source: str) -> FileFacts:
    nodes = list(ast.walk(ast.parse(source)))
    private, reached = private_imports(nodes), reached_private_names(nodes)
    return FileFacts(source, imported_modules(nodes), runtime_imports(nodes), private, reached)


@cache
def file_facts(path: Path) -> FileFacts:
    return read_facts((ROOT / path).read_text())


def imported_modules(nodes: list[ast.AST]) -> list[str]:
    """Every module that an import statement anywhere in a file names; relative ones begin with a dot."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            holds_rooms = module == "tcemu" or (module.startswith("tcemu.") and WINGS.get(module[6:]))
            names += [f"{module}.{alias.name}" for alias in node.names] if holds_rooms else [module]
    return names


def offences(path: Path, facts: FileFacts) -> list[str]:
    """What in this file, at `tcemu/...`, breaks the floors."""
    module = room(".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__"))
    if WINGS.get(module):
        return [] if not facts.source else [f"{module} is a wing, and has no code of its own"]
    if module not in FLOOR:
        return [f"{module} has no floor: add it to WINGS"]
    found = []
    for name in facts.imported:
        package, _, rest = name.partition(".")
        other = room(rest)
        if name.startswith("."):
            found.append(f"{name} is a relative import")
        elif package == "tcemu" and not other:
            found.append("it imports the package root, which imports every floor")
        elif package == "tcemu" and other not in FLOOR:
            found.append(f"{name} has no floor: add it to WINGS, or import it from its module")
        elif package == "tcemu" and FLOOR[other] > FLOOR[module]:
            found.append(f"{name} is on a floor above {module}")
        elif package == "tcemu" and FLOOR[other] == FLOOR[module] and other != module:
            pair = module.rpartition(".")[2], other.rpartition(".")[2]
            found += [] if pair in NEIGHBOURS else [f"{name} is a neighbour of {module} that CHAINS does not allow"]
    return found


def test_imports_go_down_only():
    assert {str(path): found for path in FILES if (found := offences(path, file_facts(path)))} == {}


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        (
            "tcemu/base/bits.py",
            "def f():\n    from tcemu.engine.formats.coding import x",
            "tcemu.engine.formats.coding is on a floor above base",
        ),
        (
            "tcemu/engine/arithmetic/fma.py",
            "import tcemu.engine.architectures",
            "tcemu.engine.architectures is on a floor above engine.arithmetic",
        ),
        ("tcemu/engine/isa/a.py", "from tcemu.engine import backends", "tcemu.engine.backends is on a floor above engine.isa"),
        ("tcemu/uses/fuzz/a.py", "import tcemu.kernels.ptx", "tcemu.kernels.ptx is on a floor above uses.fuzz"),
        ("tcemu/engine/isa/a.py", "from tcemu import formats", "tcemu.formats is on a floor above engine.isa"),
        (
            "tcemu/engine/layouts/packing.py",
            "from tcemu.engine.isa import x",
            "tcemu.engine.isa is a neighbour of engine.layouts that CHAINS does not allow",
        ),
        ("tcemu/engine/instructions/mma.py", "from . import wmma", ". is a relative import"),
        ("tcemu/engine/instructions/mma.py", "from ..bits import clz", "..bits is a relative import"),
        ("tcemu/cli.py", "from tcemu import mma", "tcemu.mma has no floor: add it to WINGS, or import it from its module"),
        ("tcemu/cli.py", "import tcemu", "it imports the package root, which imports every floor"),
        (
            "tcemu/cli.py",
            "from tcemu.uses.attic import old",
            "tcemu.uses.attic has no floor: add it to WINGS, or import it from its module",
        ),
        ("tcemu/uses/attic/a.py", "", "uses.attic has no floor: add it to WINGS"),
        ("tcemu/attic.py", "", "attic has no floor: add it to WINGS"),
        ("tcemu/uses/__init__.py", "x = 1", "uses is a wing, and has no code of its own"),
    ],
)
def test_an_offence_is_seen(path, source, said):
    assert offences(Path(path), read_facts(source)) == [said]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tcemu/engine/isa/families.py", "from tcemu.engine.formats import x\nfrom tcemu.engine.layouts import packing"),
        (
            "tcemu/engine/instructions/mma.py",
            "import jax\nfrom tcemu.engine.instructions.operand_checks import check\nfrom tcemu.engine.layouts.packing import pack",
        ),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert offences(Path(path), read_facts(source)) == []


# ---- no circles


def module_name(path: Path) -> str:
    """ "tcemu/engine/isa/grammar.py" -> "tcemu.engine.isa.grammar"; a folder's __init__.py is the folder."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def runtime_imports(nodes: list[ast.AST]) -> list[tuple[str, str]]:
    """What the import statements of a file name, each with its module: a name in a module may be a module itself.

    Every statement counts, also one inside a function, but not those under `if TYPE_CHECKING:`, which never run; those of its `else` do.
    """
    named = []
    checked = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")]
    never = {id(node) for each in checked for statement in each.body for node in ast.walk(statement)}
    for node in nodes:
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            named += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    return named


def circle(facts: Mapping[str, FileFacts]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there are none. facts: by module."""
    graph = {}
    for module, own in facts.items():
        graph[module] = {name if name in facts else of for name, of in own.at_runtime} & facts.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle({module_name(path): file_facts(path) for path in FILES}) == []


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
    assert len(circle({module: read_facts(source) for module, source in sources.items()})) == length


# ---- what is private stays in its module


def private_imports(nodes: list[ast.AST]) -> list[str]:
    """Private names of tcemu's other modules that a file uses: imported, or reached through an imported module."""
    modules, used = {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tcemu":
            used += [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name.split(".")[0] == "tcemu"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = modules.get(ast.unparse(node.value))
            used += [f"{owner}.{node.attr}"] if owner is not None and (ROOT / f"{owner.replace('.', '/')}.py").is_file() else []
    return used


def test_no_private_name_leaves_its_module():
    assert {path: names for path in (PACKAGE_ROOT, *FILES) if (names := file_facts(path).private)} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tcemu.engine.instructions.dot import _dot", ["tcemu.engine.instructions.dot._dot"]),
        ("def f():\n    from tcemu.base.bits import clz, _jam", ["tcemu.base.bits._jam"]),
        ("from tcemu.engine.backends import dispatch\ndispatch._walk()", ["tcemu.engine.backends.dispatch._walk"]),
        ("import tcemu.base.bits\ntcemu.base.bits._jam", ["tcemu.base.bits._jam"]),
        ("import tcemu.base.bits as b\nb._jam", ["tcemu.base.bits._jam"]),
        ("from tcemu.base.bits import Limbs\nimport jax._src\nrow._replace(a=1)\nself._x\nLimbs.__name__", []),
    ],
)
def test_a_private_name_from_elsewhere_is_seen(source, names):
    assert read_facts(source).private == names


# private names of other libraries that a file uses; tests/support/private_names.py has them, and tests of torch and Triton that they exist
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def reached_private_names(nodes: list[ast.AST]) -> list[str]:
    """Private attributes of objects that the file itself does not define: methods and fields of other modules, or of libraries."""
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_class = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_class and node.attr not in own | NAMED_TUPLES:
                found.append(ast.unparse(node))
    return sorted(set(found))


def test_private_attributes_of_others_are_listed():
    found = {path.as_posix(): names for path in FILES if (names := file_facts(path).reached)}
    assert found == {path: sorted(names) for path, names in PRIVATE_NAMES.items()}


def test_a_private_attribute_is_seen():
    source = "class A:\n    _own = 1\n    def f(self, x): return self._mine, x._own, x._other(), x._replace(a=1), x.__class__"
    assert read_facts(source).reached == ["x._other"]


# ---- a wing that can be removed


WITHOUT_KERNELS = """
import numpy as np, tcemu
from tcemu.cli import main
one = np.ones((1, 1), np.float16)
main(["show", "f16"])
print(tcemu.gemm(one, one, op="f16", target="H100"))
"""


def test_only_faces_of_kernels_import_them():
    outside = {path.as_posix() for path in FILES if any(name.startswith("tcemu.kernels") for name in file_facts(path).imported)}
    allowed = {
        "tcemu/ptx.py",
        "tcemu/triton.py",
        "tcemu/cute.py",
        "tcemu/inductor.py",
        "tcemu/xla.py",
        "tcemu/emulated_functions.py",
        *(f"tcemu/faces/commands/{name}_command.py" for name in ("run", "launches")),
    }
    assert {path for path in outside if not path.startswith("tcemu/kernels/")} <= allowed


@pytest.mark.full
def test_the_rest_works_without_the_kernels(tmp_path):
    shutil.copytree(ROOT / "tcemu", tmp_path / "tcemu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "tcemu" / "kernels")
    done = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("[[1.]]\n"), done.stdout + done.stderr
