"""Compiling: equal products once in a program, nothing twice in a second process, and nobody's configuration changed."""

import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu.base import compilation
from tcemu.base.compilation import CompileClock, compile_once, jit_wide_vectors
from tcemu.base.execution import execution

ROOT = Path(__file__).parents[2]
E4M3 = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
CALL = r"call @\S+\(.*compilation_unit = \"(\w+)\""


def chain(count):
    """So many equal products, each of what the one before gave."""

    def multiplied(a, b):
        for _ in range(count):
            a = jnp.tanh(tcemu.gemm(a, b, op=E4M3, target="sm_90a"))
        return a

    return multiplied


TIMES = """
import time, jax, jax.numpy as jnp, tcemu
for count in (1, 1, 16):
    def multiplied(a, b):
        for _ in range(count):
            a = jnp.tanh(tcemu.gemm(a, b, op="wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3", target="sm_90a"))
        return a
    matrix = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    lowered = jax.jit(multiplied).lower(matrix, matrix)
    start = time.process_time()
    lowered.compile()
    print(time.process_time() - start)
"""


@pytest.mark.full
def test_sixteen_equal_products_compile_like_one():
    _, one, sixteen = map(float, run_in_process(code=TIMES))
    assert sixteen < 2.5 * one  # each compiled where it stands, they took 8.9 times as long


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap, jax.checkpoint, lambda f: jax.jit(f)], ids=["jit", "vmap", "remat", "nested"])
def test_only_whole_functions_are_units(transform):
    """No operation within them carries the name: XLA would keep each call among them apart, and fuse nothing across it."""
    matrix = jnp.zeros((2, 32, 32))
    with execution("portable"):
        text = jax.jit(transform(chain(2))).lower(matrix, matrix).as_text()
    named = [line for line in text.splitlines() if "compilation_unit" in line]
    assert len(named) == len(re.findall(CALL, text)) >= 1
    assert set(re.findall(CALL, text)) == {"reduce_k"}


def test_a_unit_within_a_unit_is_part_of_it():
    inner = compile_once(0)(lambda times, x: x * times)
    outer = compile_once()(lambda x: inner(3, x) + 1)
    text = jax.jit(lambda x: outer(x) + inner(3, x)).lower(jnp.arange(3)).as_text()
    assert text.count("compilation_unit") == 2
    assert jax.jit(lambda x: outer(x) + inner(3, x))(jnp.arange(3)).tolist() == [1, 7, 13]


def test_the_clock_counts_traces_within_traces_once():
    clock = CompileClock()
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(chain(2))(*np.ones((2, 40, 40), np.float32)))
    passed = time.perf_counter() - start
    assert 0.3 * passed < clock.seconds <= passed
    before = clock.seconds
    jax.block_until_ready(jnp.ones(3))
    assert clock.seconds - before < 0.5 * passed


def test_the_clock_forgets_no_second(monkeypatch):
    """Spans within each other, and more of them than it keeps."""
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", lambda listener: None)
    clock, now = CompileClock(), [0.0]
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: now[0])
    for _ in range(3 * compilation.MAX_SPANS):
        for passed, length in ((1.0, 1.0), (1.0, 0.5), (0.5, 2.5)):  # the third began with the first
            now[0] += passed
            clock._note("/jax/core/compile/jaxpr_trace_duration", length)
        now[0] += 7.0
    clock._note("/jax/core/execute", 5.0)
    assert clock.seconds == 2.5 * 3 * compilation.MAX_SPANS and len(clock._spans) <= compilation.MAX_SPANS


def test_wide_vectors_where_the_call_is_the_whole_program_and_nowhere_else(monkeypatch):
    """JAX refuses options within another `jit`; under its other transformations they may stay. The bits are the same."""
    seen = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, **how: jit(lambda x: seen.append(how.get("compiler_options")) or fn(x), **how))
    twice = jit_wide_vectors()(lambda x: x + x)
    monkeypatch.undo()
    monkeypatch.setattr("tcemu.base.compilation._has_wide_vectors", lambda: True)
    x, wide = jnp.arange(3.0), {"xla_cpu_prefer_vector_width": 512}
    assert twice(x).tolist() == [0, 2, 4] and seen == [wide]
    assert jax.jit(lambda x: twice(x) * 1)(x).tolist() == [0, 2, 4] and seen == [wide, None]
    assert jax.lax.scan(lambda c, _: (twice(c), None), x, None, length=2)[0].tolist() == [0, 4, 8] and seen == [wide, None]
    assert jax.vmap(twice)(x[None]).tolist() == [[0, 2, 4]]
    monkeypatch.setattr("tcemu.base.compilation._has_wide_vectors", lambda: False)
    assert twice(jnp.arange(4.0)).tolist() == [0, 2, 4, 6] and seen[-1] is None


def test_the_width_that_the_user_chose_stays(monkeypatch):
    wide = compilation._has_wide_vectors.__wrapped__
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
    assert not wide()
    monkeypatch.setenv("XLA_FLAGS", "")
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    assert wide() == ("avx512f" in flags)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not wide()


# ---- the cache on disk

CONFIGURED = """
import sys, jax, tcemu
print(tcemu.cache_compilations(*sys.argv[1:]))
print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
"""
PROGRAM = """
import sys, jax, numpy as np, tcemu
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
print(tcemu.cache_compilations(*sys.argv[1:]))
op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
tcemu.gemm(np.ones((8, 16), np.float32), np.ones((16, 8), np.float32), op=op, target="sm_90a")
print(len(hits), jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
"""
OWN = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "TCEMU_COMPILATION_CACHE", "XDG_CACHE_HOME")


def run_in_process(*words, code=PROGRAM, **variables):
    env = {k: v for k, v in os.environ.items() if k not in OWN} | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env |= {k: str(v) for k, v in variables.items()}
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    first, second = (run_in_process(XDG_CACHE_HOME=tmp_path) for _ in range(2))
    directory = str(tmp_path / "tcemu" / f"jaxlib-{version('jaxlib')}")
    assert first == [directory, f"0 {directory} 0.1"]
    assert second[0] == directory and int(second[1].split()[0]) > 0
    assert list(Path(directory).iterdir())


def test_what_the_user_configured_stays(tmp_path):
    mine = run_in_process(
        tmp_path / "other", code=CONFIGURED, JAX_COMPILATION_CACHE_DIR=tmp_path / "mine", TCEMU_COMPILATION_CACHE=tmp_path / "third"
    )
    assert mine[0] == str(tmp_path / "mine") and mine[1].endswith(f"{tmp_path / 'mine'} 1.0")


@pytest.mark.full
def test_what_else_the_user_configured_stays(tmp_path):
    assert run_in_process(tmp_path / "a", code=CONFIGURED)[0] == str(tmp_path / "a")
    assert run_in_process(tmp_path / "a", code=CONFIGURED, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=7)[1].endswith(" 7.0")
    assert run_in_process(code=CONFIGURED, TCEMU_COMPILATION_CACHE="off") == ["None", "None 1.0"]
    with_cuda = "from tcemu.base import compilation\ncompilation._has_cuda = lambda: True\n" + CONFIGURED
    assert run_in_process(code=with_cuda) == ["None", "None 1.0"]
    assert run_in_process(code=with_cuda, TCEMU_COMPILATION_CACHE=tmp_path / "c")[0] == str(tmp_path / "c")
    assert run_in_process(tmp_path / "b", code=CONFIGURED, JAX_ENABLE_COMPILATION_CACHE="false")[0] == "None"


def test_a_home_that_cannot_be_written_does_no_harm_and_the_variable_names_another_directory(tmp_path):
    (tmp_path / "file").write_text("no directory")
    code = f"{CONFIGURED}\nimport os\nos.environ['TCEMU_COMPILATION_CACHE'] = {str(tmp_path / 'a')!r}{CONFIGURED}"
    found = run_in_process(code=code, XDG_CACHE_HOME=tmp_path / "file")
    assert found[:2] == ["None", "None 1.0"] and found[2] == str(tmp_path / "a")


@pytest.mark.full
def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(AssertionError, match=r"NotADirectoryError|FileExistsError"):
        run_in_process(tmp_path / "file", code=CONFIGURED)


@pytest.mark.full
def test_the_command_line_keeps_its_programs(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((8, 16), np.float32))
    np.save(tmp_path / "b.npy", np.ones((16, 8), np.float32))
    words = ("gemm", tmp_path / "a.npy", tmp_path / "b.npy", "--op", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    said = run_in_process(*words, code="import sys; from tcemu.cli import main; sys.exit(main())", XDG_CACHE_HOME=tmp_path)
    assert any(re.search(r"multiply-accumulates in [\d.]+ s, after [\d.]+ s of compiling", line) for line in said)
    assert list((tmp_path / "tcemu").glob("jaxlib-*/*"))


TWO_RECIPES = """
import jax, jax.numpy as jnp
import tcemu
from tcemu.base.compilation import jit_wide_vectors


@jit_wide_vectors(0, 1)
def gradients(compute, static, operands, g):
    _, pull = jax.vjp(lambda *operands: compute(operands, static), *operands)
    return pull(g)


def affine(operands, recipe):
    return tcemu.matmul(*operands, recipe=recipe)


def batched(operands, static):
    recipe, axes = static
    return tcemu.dot_general(recipe)(*operands, axes, preferred_element_type=jnp.float32)


def layer(recipe, k, n):
    return affine, recipe, (ones(256, k), ones(n, k).T, ones(n)), ones(256, n)


def attention(recipe, axis, keys, width, columns):
    axes = (((3,), (axis,)), ((0, 1), (0, 1)))
    return batched, (recipe, axes), (ones(8, 4, 32, width), ones(8, 4, 32, keys)), ones(8, 4, 32, columns)


ones = lambda *shape: jnp.ones(shape, jnp.float32)
for recipe in (tcemu.get_recipe("bf16", "H100"), tcemu.get_recipe("fp8", "H100")):
    products = layer(recipe, 256, 64), layer(recipe, 64, 256), layer(recipe, 64, 64), attention(recipe, 2, 16, 32, 16)
    for product in (*products, attention(recipe, 3, 16, 16, 32), layer(recipe, 64, 192))[: 6 if recipe.name == "bf16" else 1]:
        jax.block_until_ready(gradients(*product))
        print(recipe.name, flush=True)
"""


@pytest.mark.full
def test_a_second_recipe_in_one_process_terminates():
    """jaxlib 0.10 prepended source lines to operations without end while it compiled the first product of the second recipe."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", None)
    done = subprocess.run([sys.executable, "-c", TWO_RECIPES], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split() == ["bf16"] * 6 + ["fp8"], done.stderr[-2000:]
