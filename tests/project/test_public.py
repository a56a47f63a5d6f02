"""The public names are those that other programs call, and nothing else by accident."""

import ast
import inspect
import pydoc
import re
import tomllib
import types
from importlib.metadata import version
from pathlib import Path

import tcemu

ROOT = Path(__file__).parents[2]
NAMES = {
    "Instruction", "parse", "check", "targets", "Model", "get_model", "list_models", "evidence", "execution",
    "mma", "mma_sp", "wmma_load", "wmma_mma", "wmma_store", "wgmma", "ldmatrix", "stmatrix", "movmatrix", "checked", "cache_compilations",
    "show_versions",
    "dot", "pack", "unpack", "sparsify", "densify", "prune",
    "gemm", "matmul", "dot_general", "ragged_dot", "attention", "Recipe", "get_recipe",
    "emulate", "compare", "explain",
    "Unsupported", "NotModelled", "UndefinedBehaviour",
}  # fmt: skip
MODULES = {
    "formats", "isa", "layouts", "instructions", "backends", "quantize", "products", "functional", "recipes", "policies",
    "fuzz", "study", "replay", "drift", "silicon", "ptx", "viz",
}  # fmt: skip
DEFAULTS = {
    "'RN'",
    "'lhs'",
    "'fp8_split'",
    "'max'",
    "'tensor'",
    "'2:4'",
    "'ex2.approx'",
    "'rcp.approx'",
}  # words in signatures; annotations are unquoted
FUNCTIONS = sorted(name for name in NAMES if inspect.isfunction(getattr(tcemu, name)))


def test_the_public_names():
    assert len(tcemu.__all__) == len(set(tcemu.__all__))
    assert set(tcemu.__all__) == NAMES | MODULES
    assert all(isinstance(getattr(tcemu, name), types.ModuleType) for name in MODULES)


def test_dir_shows_what_users_need():
    assert {name for name in dir(tcemu) if not name.startswith("_")} == NAMES | MODULES
    assert "__version__" in dir(tcemu)


def test_nothing_else_is_public_but_the_submodules():
    own = {name for name in vars(tcemu) if not name.startswith(("_", "@"))}  # pytest puts names with @ into packages that have a plugin
    others = own - NAMES - MODULES - {"lazy_names", "PUBLIC_NAMES", "TYPE_CHECKING"}
    assert {name: getattr(tcemu, name).__name__ for name in others} == {name: f"tcemu.{name}" for name in others}


def test_every_name_says_what_it_is():
    for name in NAMES | MODULES:
        assert len(inspect.getdoc(getattr(tcemu, name)) or "") > 40, name


def test_the_errors_are_value_errors():
    assert all(issubclass(error, ValueError) for error in (tcemu.Unsupported, tcemu.NotModelled, tcemu.UndefinedBehaviour))


def test_signatures_have_short_names():
    """`help(tcemu.gemm)` begins with "ArrayLike", not with the seven types of that union."""
    long = {name: str(inspect.signature(getattr(tcemu, name))) for name in sorted(NAMES) if inspect.isfunction(getattr(tcemu, name))}
    assert len(long) > 30
    assert {name: text for name, text in long.items() if "Union[" in text or "jaxlib" in text} == {}


def test_help_opens_with_a_readable_signature():
    """A parameter a line, annotations unquoted; what inspect knows of it is what it knew."""
    opened = pydoc.render_doc(tcemu.gemm, renderer=pydoc.plaintext).splitlines()[2:]
    wanted = ["gemm(", "    a: ArrayLike,", "    b: ArrayLike,", "    c: ArrayLike | None = None,", "    *,", "    op: str | Instruction,"]
    assert opened[:6] == wanted
    assert opened[opened.index(") -> Array | np.ndarray") + 1].strip().startswith("Multiply")
    assert str(inspect.signature(tcemu.get_recipe)) == (
        "(name: str, /, target: str | None = None, *, evidence: str | None = None, **changes: Any) -> Recipe"
    )
    for name in FUNCTIONS:
        shown, inner = inspect.signature(getattr(tcemu, name)), inspect.unwrap(getattr(tcemu, name))
        own = inspect.signature(types.FunctionType(inner.__code__, {}, name, None, inner.__closure__))
        assert list(shown.parameters) == list(own.parameters) and not set(re.findall("'[^']*'", str(shown))) - DEFAULTS, name
        ast.parse(f"def f{shown}: ...")


def test_the_version_stands_once():
    """pyproject.toml reads it from the package; the citation, which no tool can fill in, has the same."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in pyproject["project"]["dynamic"]
    assert pyproject["tool"]["hatch"]["version"]["path"] == "tcemu/__init__.py"
    assert version("tcemu") == tcemu.__version__
    assert f"\nversion: {tcemu.__version__}\n" in (ROOT / "CITATION.cff").read_text()
