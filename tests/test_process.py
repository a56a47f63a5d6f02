"""What the package does to the process that it runs in: configuration, threads, fork, memory, caches."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import Model
from tcemu.formats import F32

ROOT = Path(__file__).parents[1]
F16_OP = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
WHOLE_TABLES = {  # caches without a bound, each with the reason that it cannot grow
    "_groups": "the layouts of a table", "_names": "the layouts of a table", "_meeting": "the needs of a table",
    "_rows_of": "the targets of a table", "_gpu_names": "no argument", "short_names": "no argument", "_homes": "no argument",
    "syntax_rows": "no argument", "grammars": "no argument", "_by_spelling": "no argument",
    "known_fields": "no argument", "gpu": "no argument", "_has_wide_vectors": "no argument", "compile_clock": "no argument",
    "driver_version": "no argument", "_of_types": "targets and families of a table", "equalities": "the targets of a table",
    "place": "the instructions of a table", "tiled": "the instructions of a table", "by_fragments": "the instructions of a table",
    "targets_of": "the units of a table", "_targets_of": "the recipes of a table", "_free_operand": "no argument",
    "_file": "the kernels' texts", "version": "no argument", "route": "no argument", "library": "no argument",
    "published": "no argument", "_opened": "one function of torch",
}  # fmt: skip


def in_a_process(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_changes_nothing_in_the_configuration_of_jax():
    shown = "{k: repr(v) for k, v in jax.config.values.items()}"
    said = in_a_process(
        f"import os, jax; before, env = {shown}, dict(os.environ); import tcemu; print({shown} == before, dict(os.environ) == env)"
    )
    assert said == "True True\n"


def test_help_needs_no_jax_and_importing_no_backend():
    """What is not wanted is not loaded: JAX for --help, and for an import; its backends before a product."""
    loaded = "sorted(name for name in ('jax', 'numpy') if name in sys.modules)"
    for words in ("--help", "--version"):
        code = f"import sys; from tcemu.cli import main\ntry: main(['{words}'])\nexcept SystemExit: print({loaded})"
        assert in_a_process(code).splitlines()[-1] == "[]"
    assert in_a_process(f"import sys, tcemu; print(tcemu.__version__, {loaded})") == f"{tcemu.__version__} []\n"
    backends = "from jax._src import xla_bridge; print(len(xla_bridge._backends))"
    assert in_a_process(f"import tcemu; [getattr(tcemu, name) for name in tcemu.__all__]; {backends}") == "0\n"
    assert in_a_process(f"import tcemu; tcemu.parse('f16'); tcemu.recipe('bf16'); tcemu.model('f16', 'H100'); {backends}") == "0\n"


def test_every_public_name_comes_at_first_use():
    """Also modules that are not public; and what there is not is said."""
    used = "import tcemu; print([getattr(tcemu, name).__name__ for name in ('gemm', 'fuzz', 'recipes', 'study', 'Recipe')])"
    assert in_a_process(used) == "['gemm', 'tcemu.fuzz', 'tcemu.linalg.recipes', 'tcemu.study', 'Recipe']\n"
    assert in_a_process("from tcemu import *; print(gemm.__name__, fuzz.__name__, len(Recipe.__doc__) > 9)") == "gemm tcemu.fuzz True\n"
    assert set(tcemu._homes()) == set(tcemu.__all__)
    for name in ("gem", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'tcemu' has no attribute '{name}'"):
            getattr(tcemu, name)
    with pytest.raises(ImportError, match="cannot import name 'gem' from 'tcemu'"):
        exec("from tcemu import gem")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_is_forked_after_the_import_computes():
    """Before JAX was used: its threads do not come along afterwards."""
    code = f"""
import os, tcemu
child = os.fork()
d = tcemu.gemm([[2.0]], [[3.0]], op={F16_OP!r}, target="sm_90a")
print(float(d[0, 0]), flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    assert in_a_process(code) == "6.0\n6.0\n"


def test_eight_threads_at_once_give_what_one_gives():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 8), np.float32)
    models = [Model(F32, fraction_bits=bits) for bits in (25, 12, 8)]
    product = lambda model: np.asarray(tcemu.gemm(a, b, op=F16_OP, target="sm_90a", model=model))  # noqa: E731
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(product, models * 8))
    alone = [product(model) for model in models]
    assert all((found == alone[at % len(models)]).all() for at, found in enumerate(together))
    assert (alone[0] != alone[2]).any()


def unbounded_caches(source: str) -> set[str]:
    """The functions of a file whose results are all kept."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    unbounded = ("cache", "functools.cache", "lru_cache(maxsize=None)", "functools.lru_cache(maxsize=None)")
    return {node.name for node in functions if any(ast.unparse(decorator) in unbounded for decorator in node.decorator_list)}


def test_every_cache_has_a_bound_or_cannot_grow():
    assert set().union(*(unbounded_caches(path.read_text()) for path in (ROOT / "tcemu").rglob("*.py"))) == set(WHOLE_TABLES)
    planted = "@cache\ndef f(x): ...\n@lru_cache(maxsize=8)\ndef g(x): ...\n@functools.cache\ndef h(x): ..."
    assert unbounded_caches(planted) == {"f", "h"}


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
    assert 1024 * int(in_a_process(code)) < 1.5 * 2**30 + 8 * 4 * 4096**2  # not getrusage, which also counts the parent before exec


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
