"""The rules of the house. A module imports from floors below its own, and from a neighbour only where the table says so.

No modules import each other in a circle, no private name leaves its module, and files, functions and lists of parameters stay short.
"""

import ast
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

import tcemu

ROOT = Path(__file__).parents[1]
FLOORS = (
    "bits compilation errors executing checking files gradients interrupts meshes plots results signatures text",
    "formats layouts packing",
    "arithmetic sparsity shared_memory memory",
    "isa",
    "architectures",
    "native",
    "operations",
    "quantize linalg",
    "fuzz explanation study emulation silicon verification ptx viz replay torch",
    "cli __main__ commands data",
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
CHAINS = (  # neighbours on one floor: each may import those before it, and no other neighbour
    "errors checking",
    "files interrupts",
    "formats packing",
    "memory shared_memory",
    "quantize linalg",
    "explanation study emulation silicon fuzz verification viz replay torch",
    "explanation ptx",
    "commands cli __main__",
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


# ---- what is private stays in its module


def in_files(check: Callable[[Path, str], list[str]]) -> str:
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
    wrong = in_files(lambda path, source: private_imports(source))
    assert not wrong, f"\n{wrong}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tcemu.operations.dot import _dot", ["tcemu.operations.dot._dot"]),
        ("def f():\n    from tcemu.bits import clz, _jam", ["tcemu.bits._jam"]),
        ("from tcemu.arithmetic import program\nprogram._walk()", ["tcemu.arithmetic.program._walk"]),
        ("import tcemu.bits\ntcemu.bits._jam", ["tcemu.bits._jam"]),
        ("import tcemu.bits as b\nb._jam", ["tcemu.bits._jam"]),
        ("from tcemu.bits import Limbs\nimport jax._src\nrow._replace(a=1)\nself._x\nLimbs.__name__", []),
    ],
)
def test_a_private_name_from_elsewhere_is_seen(source, names):
    assert private_imports(source) == names


# ---- files, functions and lists of parameters stay short

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 400, 60, 8
FACES = (
    "",
    "fuzz",
    "study",
    "replay",
    "silicon",
    "ptx",
    "formats",
    "viz",
    "quantize",
    "recipes",
)  # whose names are public, with those of tcemu


OPTIONAL = ("tcemu/torch/__init__.py",)  # faces that import only with an extra: their public names are read, not imported
BINDINGS = ("mma", "movement", "wgmma", "wmma")  # of operations; a `bind_...` there has the parameters of its public operation


def public_functions() -> set[tuple[str, str]]:
    """(module, qualified name) of every public function, of its binding, and of every method of a public class."""
    found = set()
    for module in (importlib.import_module(f"tcemu.operations.{name}") for name in BINDINGS):
        found |= {(module.__name__, name) for name in vars(module) if name.startswith("bind_")}
    for face in (getattr(tcemu, name) if name else tcemu for name in FACES):
        for name in getattr(face, "__all__", None) or [name for name in vars(face) if not name.startswith("_")]:
            value = getattr(face, name)
            here = hasattr(face, "__path__") or getattr(value, "__module__", "") == face.__name__  # a file's own; a folder lists its names
            if isinstance(value, type):
                found |= {(value.__module__, f"{value.__qualname__}.{method}") for method in vars(value)}
            elif callable(value) and here and not isinstance(value, types.ModuleType):
                value = inspect.unwrap(value)
                found.add((value.__module__, value.__qualname__))
    for path in OPTIONAL:
        imports = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.ImportFrom)]
        found |= {(node.module or "", alias.name) for node in imports for alias in node.names}
    return found


PUBLIC = public_functions()


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file, however deep, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            inner = f"{prefix}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            inner = f"{prefix}{node.name}."
        yield from functions(node, inner)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> int:
    """How many a caller may give; a method's first is not given."""
    args = node.args
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    static = any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in node.decorator_list)
    return len(listed) - (method and not static)


def too_long(source: str) -> list[str]:
    """The file, if it has too many lines, and its functions that have."""
    lines = len(source.splitlines())
    wrong = [f"the file has {lines} lines"] if lines > MOST_LINES else []
    for name, node in functions(ast.parse(source)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        wrong += [f"{name} has {lines} lines"] if lines > MOST_LINES_OF_A_FUNCTION else []
    return wrong


def too_many_parameters(path: Path, source: str, public: set[tuple[str, str]] = PUBLIC) -> list[str]:
    """Functions with too many parameters, unless they are public."""
    wrong = []
    for name, node in functions(ast.parse(source)):
        scope = name.rpartition(".")[0]
        count = parameters(node, method=bool(scope) and not scope.endswith("<locals>"))
        if count > MOST_PARAMETERS and (module_of(path), name) not in public:
            wrong.append(f"{name} has {count} parameters")
    return wrong


def test_files_and_functions_are_short():
    wrong = in_files(lambda path, source: too_long(source))
    assert not wrong, f"\n{wrong}"


def test_only_public_functions_have_many_parameters():
    wrong = in_files(too_many_parameters)
    assert not wrong, f"\n{wrong}"


def test_what_is_too_long_is_seen():
    body = "    x = 1\n" * 60
    assert too_long("x = 1\n" * 400) == [] and too_long("x = 1\n" * 401) == ["the file has 401 lines"]
    assert too_long("def f():\n" + body) == ["f has 61 lines"] and too_long("def f():\n" + body[10:]) == []
    nested = "class C:\n    def m(self):\n        def g():\n" + "            x = 1\n" * 60
    assert too_long(nested) == ["C.m has 62 lines", "C.m.<locals>.g has 61 lines"]


def test_too_many_parameters_are_seen():
    path, eight = Path("tcemu/bits.py"), "a, b, c, d, e, f, g, h"
    assert too_many_parameters(path, f"def f({eight}): ...") == []
    assert too_many_parameters(path, f"def f({eight}, *, i): ...") == ["f has 9 parameters"]
    assert too_many_parameters(path, f"def f({eight}, **i): ...") == ["f has 9 parameters"]
    assert too_many_parameters(path, f"class C:\n    def m(self, {eight}): ...") == []
    assert too_many_parameters(path, f"class C:\n    @staticmethod\n    def m({eight}, i): ...") == ["C.m has 9 parameters"]
    assert too_many_parameters(path, f"def f():\n    def g({eight}, i): ...") == ["f.<locals>.g has 9 parameters"]
    assert too_many_parameters(path, f"def f({eight}, i): ...", {("tcemu.bits", "f")}) == []


def test_public_is_what_the_package_exports():
    assert {("tcemu.operations.mma", "mma"), ("tcemu.formats.coding", "encode"), ("tcemu.fuzz.runs", "run")} <= PUBLIC
    assert ("tcemu.linalg.recipes", "Recipe.what_if") in PUBLIC
    assert not {name for _, name in PUBLIC} & {"_mma", "applied", "dot_add", "must_compute"}
