"""What the package does to the process that it runs in: configuration, threads, fork, memory, caches and containers."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import Model
from tcemu.formats import F32

ROOT = Path(__file__).parents[2]
F16_OP = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
WHOLE_TABLES = {  # caches without a bound, each with the reason that it cannot grow
    "_groups": "the layouts of a table", "_names": "the layouts of a table", "_matching_targets": "the needs of a table",
    "_target_rows": "the targets of a table", "_gpu_names": "no argument", "short_names": "no argument",
    "syntax_rows": "no argument", "warn_of_compilations": "no argument", "grammars": "no argument", "_spelling_index": "no argument",
    "what_if_fields": "no argument", "gpu": "no argument", "_has_wide_vectors": "no argument", "compile_clock": "no argument",
    "driver_version": "no argument", "_of_types": "targets and families of a table", "_family": "three generations of wmma's fragments",
    "place_kernel_text": "the instructions of a table", "mma_kernel_text": "the instructions of a table",
    "wgmma_kernel_text": "the instructions of a table", "family_targets": "the families of a table", "usual_products": "no argument",
    "_products_by_operands": "no argument", "instructions_by_name": "no argument", "_empty_call_stack": "no argument",
    "special_function_evidence": "the functions and targets of a table", "field_types": "the records of recipes and models",
    "_allocate": "two widths of an address", "_largest": "the targets and formats of a table",
    "_supported_targets": "the recipes of a table", "_unconstrained_jit_params": "no argument",
    "_file": "the kernels' texts", "version": "no argument", "route": "no argument", "library": "no argument",
    "list_claims": "no argument", "lowers_late_attributes": "no argument", "_threads": "no argument",
    "missing": "no argument", "missing_compiler": "no argument", "host_target": "no argument", "installed_version": "no argument",
    "_linker": "no argument", "_llvm": "no argument",
    "_units_by_name": "no argument", "_units_by_target": "no argument", "_target_names": "no argument",
    "_count_hits": "no argument", "_environment": "no argument", "_probe": "two owners", "shipped_rules": "no argument",
    "_scalar_operation": "the forms of the video instructions", "_packed_operation": "the forms of the video instructions",
    "_offset_operation": "two for each state space of a table", "_room_test": "the state spaces of a table",
}  # fmt: skip

CONTAINERS = {  # which functions fill, each with its bound and the reason for it
    "operations/functional/torch_cuda/numpy_evaluation.py: _programs": "cleared beyond 512",
    "kernels/ptx/runtime/launch_records.py: _recorders": "the recorders that are open",
    "engine/backends/llvm/xla_call.py: _registered": "one for each kernel: XLA keeps its handler as long as the process",
    "base/stored_code.py: _host_calls": "one for each kernel that XLA keeps",
    "base/stored_code.py: _running": "a compilation leaves it when it ends",
    "base/stored_code.py: _unswept": "one for each folder of stored code",
    "kernels/ptx/simt/faults.py: MESSAGES": "the faults of a table, each with the sizes that accesses have",
    "kernels/ptx/simt/faults.py: _codes": "one for each message",
    "faces/torch/module_emulation.py: _by_tag": "weak: what nobody holds goes",
    "faces/torch/operators.py: _names": "the recipes that torch's operators were given: their names must hold as long as the process",
    "faces/torch/operators.py: _registered": "one for each name",
    "faces/torch/shared_products.py: _texts": "one for each name",
    "uses/fuzz/case_formulas.py: FloatSecondFields.VARIANT": "nothing fills it: a field of a word, whose insert returns the word",
    "base/jax_internals.py: _unknown_options": "names of QUICK_OPTIONS",
    **{f"engine/isa/tcgen05_kinds.py: {name}": "nothing fills it: what a kind has not"
       for name in ("sizes", "scales", "shapes", "reserved")},
    "operations/products/recipe_kinds.py: _KINDS": "the kinds of recipes, one for each name in files",
    "base/results.py: facts": "nothing fills it: the facts of a result that has none",
    **{f"uses/fuzz/{file}.py: PlaceFields.{name}": "a bit field, whose insert returns a number"
       for file in ("case_generator", "llvm/drawing_kernel") for name in ("FIELD", "FLIPPED", "NUDGED", "PLACE")},
}  # fmt: skip
FILLING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
EMPTY = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}


def run_in_process(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_help_needs_no_jax_and_names_come_at_first_use():
    """What is not wanted is not loaded: JAX for --help, and for an import."""
    loaded = "sorted(name for name in ('jax', 'numpy') if name in sys.modules)"
    code = f"""
import sys, tcemu
print(tcemu.__version__, {loaded})
from tcemu.cli import main
for words in ("--help", "--version"):
    try:
        main([words])
    except SystemExit:
        print({loaded})
print([getattr(tcemu, name).__name__ for name in ("gemm", "fuzz", "recipes", "study", "Recipe")])
"""
    lines = run_in_process(code).splitlines()
    assert lines[0] == f"{tcemu.__version__} []" and lines[1:].count("[]") == 2
    assert lines[-1] == "['gemm', 'tcemu.fuzz', 'tcemu.operations.products.recipes', 'tcemu.study', 'Recipe']"


def test_importing_changes_nothing_in_the_configuration_of_jax():
    """And initialises no backend, so that a child that is forked afterwards computes: JAX's threads would not come along."""
    shown = "{k: repr(v) for k, v in jax.config.values.items()}"
    code = f"""
import os, jax
before, env = {shown}, dict(os.environ)
import tcemu
print({shown} == before, dict(os.environ) == env)
from tcemu import *
print(gemm.__name__, fuzz.__name__, len(Recipe.__doc__) > 9)
tcemu.parse("f16"), tcemu.get_recipe("bf16"), tcemu.get_model("f16", "H100"), [getattr(tcemu, name) for name in tcemu.__all__]
from jax._src import xla_bridge
print({shown} == before, len(xla_bridge._backends), flush=True)
child = os.fork() if hasattr(os, "fork") else 0
d = gemm([[2.0]], [[3.0]], op={F16_OP!r}, target="sm_90a")
print(float(d[0, 0]), flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    computed = "6.0\n" * (2 if hasattr(os, "fork") else 1)
    assert run_in_process(code) == "True True\ngemm tcemu.fuzz True\nTrue 0\n" + computed


def test_every_public_name_is_there_and_no_other():
    """Also modules that are not public; and what there is not is said."""
    assert all(getattr(tcemu, name) is not None for name in tcemu.__all__)
    for name in ("gem", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'tcemu' has no attribute '{name}'"):
            getattr(tcemu, name)
    with pytest.raises(ImportError, match="cannot import name 'gem' from 'tcemu'"):
        exec("from tcemu import gem")


def test_eight_threads_at_once_give_what_one_gives():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 8), np.float32)
    models = [Model(F32, fraction_bits=bits) for bits in (25, 12, 8)]
    product = lambda model: np.asarray(tcemu.gemm(a, b, op=F16_OP, target="sm_90a", model=model))
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(product, models * 8))
    alone = [product(model) for model in models]
    assert all((found == alone[at % len(models)]).all() for at, found in enumerate(together))
    assert (alone[0] != alone[2]).any()


@cache
def package_facts() -> tuple[set[str], set[str]]:
    """The caches without a bound, and the containers that functions fill, of the package; each file is parsed once, and its tree goes."""
    folder, caches, containers = ROOT / "tcemu", set(), set()
    for path in folder.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text)
        caches |= unbounded_caches(tree) if "cache" in text else set()
        containers |= {f"{path.relative_to(folder).as_posix()}: {name}" for name in filled_containers(tree)}
    return caches, containers


def unbounded_caches(tree: ast.Module) -> set[str]:
    """The functions of a file whose results are all kept."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    unbounded = ("cache", "functools.cache", "lru_cache(maxsize=None)", "functools.lru_cache(maxsize=None)")
    return {node.name for node in functions if any(ast.unparse(decorator) in unbounded for decorator in node.decorator_list)}


def test_every_cache_has_a_bound_or_cannot_grow():
    assert package_facts()[0] == set(WHOLE_TABLES)
    planted = "@cache\ndef f(x): ...\n@lru_cache(maxsize=8)\ndef g(x): ...\n@functools.cache\ndef h(x): ..."
    assert unbounded_caches(ast.parse(planted)) == {"f", "h"}


def filled_containers(tree: ast.Module) -> set[str]:
    """The containers of a file, and of the files that it imports from, which live as long as the process and may grow.

    They are empty at first, in the module or in a class, or a function writes into them: by index, by name, or by a method that fills.
    """
    found, imported = set(), None
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        if node.value is not None and _is_empty(node.value):
            found |= {ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    for written, local in _writes(tree):
        root = next((node for node in ast.walk(written) if isinstance(node, ast.Name | ast.Call)), None)
        last = (written.attr if isinstance(written, ast.Attribute) else root.id) if isinstance(root, ast.Name) else ""
        if not isinstance(root, ast.Name) or root.id in local:
            continue
        imported = imported_names(tree) if imported is None else imported
        if root.id not in imported or last.isupper() or last.startswith("_"):
            found.add(ast.unparse(written))
    return found


def imported_names(tree: ast.Module) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in EMPTY and (name == "defaultdict" or not value.args + value.keywords)
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def _writes(tree: ast.AST):
    """What the functions of a file write into, each with the names of its function and of those within it."""
    outside = [tree]
    while outside:
        node = outside.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            outside += ast.iter_child_nodes(node)
            continue
        inner = list(ast.walk(node))
        written = []
        for each in inner:
            if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
                written.append(each.value)
            elif isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
                written.append(each.target)
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in FILLING:
                written.append(each.func.value)
        if not written:
            continue
        others = {name for each in inner if isinstance(each, ast.Global) for name in each.names}
        stored = {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)} - others
        local = stored | {each.arg for each in inner if isinstance(each, ast.arg)}
        yield from ((value, local) for value in written)


def test_every_container_that_grows_has_a_bound():
    assert package_facts()[1] == set(CONTAINERS)
    planted = """
import numpy as np
from tcemu.ptx import faults
empty: dict[int, str] = {}
full = {"a": 1}
table = {"b": 2}
line = []
class Kept:
    seen = WeakSet()
def f(x, mine):
    local = []
    local.append(x), mine.append(x), np.add(x, 1)
    full[x] = 1
    def inner():
        global total
        total += [x]
        faults.MESSAGES.setdefault(x, table[x])
        local[0] = x
"""
    assert filled_containers(ast.parse(planted)) == {"empty", "line", "seen", "full", "total", "faults.MESSAGES"}


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_gemm_of_4096_cubed_stays_near_its_matrices():
    """Peak memory of a process that does nothing else, in bytes: three matrices of f32, their codes, and 1.5 GiB for JAX and XLA."""
    code = f"""
import numpy as np, tcemu
a = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
np.asarray(tcemu.gemm(a, a, op={F16_OP!r}, target="sm_90a"))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    assert 1024 * int(run_in_process(code)) < 1.5 * 2**30 + 8 * 4 * 4096**2  # not getrusage, which also counts the parent before exec


@pytest.mark.full
def test_models_in_arrays_cost_no_memory_and_static_ones_can_be_freed():
    a, b = jnp.ones((16, 16)), jnp.ones((16, 8))
    program = jax.jit(lambda model: tcemu.gemm(a, b, op=F16_OP, target="sm_90a", model=model))
    for at in range(500):
        program(Model(F32, fraction_bits=jnp.int32(1 + at % 40), floor=jnp.int32(-133 - at)))
    assert program._cache_size() == 1
    for bits in range(1, 21):
        program(Model(F32, fraction_bits=bits))
    assert program._cache_size() == 21
    jax.clear_caches()
    assert program._cache_size() == 0
