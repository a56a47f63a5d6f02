"""Stores do not lean on the order in which XLA applies updates, and threads may run kernels at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx_run_kernels as kernels
from support.ptx_run_kernels import module
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.kernels.ptx.linker import compiled_statements
from tcemu.kernels.ptx.simt import device_memory


def stored_in_turn(words, runs):
    """The words after runs of words, each from an index on, stored one after the other."""
    words = words.copy()
    for index, run in runs:
        words[index : index + len(run)] = run
    return words


@pytest.mark.parametrize("length", [1, 4])
def test_the_last_thread_wins_in_every_word(length):
    rng = np.random.default_rng(length)
    before = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    index = rng.integers(0, 40, (3, 256)).astype(np.int32) * length  # each word has some 19 writers
    mask = rng.random((3, 256)) < 0.9
    values = rng.integers(0, 1 << 32, (length, 3, 256), dtype=np.uint32)
    runs = [(at, values[:, block, thread]) for (block, thread), at in np.ndenumerate(index) if mask[block, thread]]
    found = device_memory.scatter_runs(jnp.asarray(before), jnp.asarray(index), list(map(jnp.asarray, values)), jnp.asarray(mask))
    assert np.array_equal(found, stored_in_turn(before, runs))


NARROW_STORE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry narrow(.param .u64 out) {{
  .reg .b64 %rd<3>; .reg .b32 %r<3>; .reg .b16 %rs<5>;
  ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 1;
  mad.wide.u32 %rd1, %r1, {bytes}, %rd0;
  cvt.u16.u32 %rs0, %r0; mul.lo.u16 %rs0, %rs0, 777;
  add.u16 %rs1, %rs0, 1; add.u16 %rs2, %rs0, 2; add.u16 %rs3, %rs0, 3;
  st.global.v{count}.b{bits} [%rd1], {{{registers}}};
  ret;
}}
"""


@pytest.mark.parametrize(("count", "bits"), [(4, 16), (2, 16), (4, 8), (2, 8)])
def test_vectors_of_narrow_elements_fill_words_and_the_last_thread_wins(count, bits):
    """Two threads store at each address."""
    text = NARROW_STORE.format(count=count, bits=bits, bytes=count * bits // 8, registers=", ".join(f"%rs{i}" for i in range(count)))
    (found,) = ptx.run(text, grid=1, block=64, args=[np.zeros((32, count), f"uint{bits}")], target="sm_80")
    assert np.array_equal(found, (777 * np.arange(1, 64, 2)[:, None] + np.arange(count)).astype(f"uint{bits}"))


def test_no_update_of_a_store_depends_on_an_order():
    """Scatters that assign have one index, or equal values, for each element; the others are maxima."""
    with jax.enable_x64(True):
        at = jax.ShapeDtypeStruct((2, 64), np.int32)
        mask = jax.ShapeDtypeStruct((2, 64), bool)
        program = jax.make_jaxpr(lambda *given: device_memory.scatter_runs(given[0], given[1], given[2:4], given[4]))(
            jax.ShapeDtypeStruct((999,), np.uint32), at, *[jax.ShapeDtypeStruct((2, 64), np.uint32)] * 2, mask
        )
    names = [equation.primitive.name for equation in program.jaxpr.eqns if "scatter" in equation.primitive.name]
    assert names == ["scatter", "scatter-max", "scatter"]


def test_reversed_threads_store_the_same_if_their_numbers_are_reversed():
    """The winner is found from the threads' numbers: an order of updates that the backend chooses cannot change it."""
    words = jnp.zeros(8, jnp.uint32)
    index = jnp.asarray([[3, 3, 5, 3]], jnp.int32)
    value = jnp.asarray([[10, 11, 12, 13]], jnp.uint32)
    everything = jnp.ones((1, 4), bool)
    assert device_memory.scatter_words(words, index, value, everything)[np.array([3, 5])].tolist() == [13, 12]
    assert device_memory.scatter_words(words, index[:, ::-1], value[:, ::-1], everything)[np.array([3, 5])].tolist() == [10, 12]


GIVEN = np.random.default_rng(5).integers(0, 1 << 32, 128, dtype=np.uint32)
SHARED = ".shared .align 8 .b8 bytes[256]; .shared .align 4 .b32 word[4];"
LAUNCHES = {
    "calls": (module(kernels.CALLS, kernels.FUNCTIONS), {}),
    "branches": (module(kernels.SWITCH), {}),
    "bytes": (module(SHARED + kernels.BYTES), {}),
    "barriers": (module(SHARED + kernels.MEETING), {"checked": True}),
    "atomics": (module(SHARED + kernels.ATOMS), {"target": "sm_90a"}),
    "registers": (module(kernels.REGISTERS), {}),
}


def launch(name):
    text, more = LAUNCHES[name]
    return ptx.run(text, grid=2, block=64, args=[GIVEN % 100, np.zeros(128, np.uint32), 77], **{"target": "sm_80", **more})[1]


@pytest.mark.parametrize("names", sample_cases([("branches", "bytes", "atomics"), tuple(LAUNCHES)], 2, lambda names: str(len(names))))
def test_threads_run_kernels_at_once(names):
    """Kernels in eight threads, from empty caches and while another thread empties them, against one thread."""
    expected = {name: launch(name) for name in names}
    caches = [compiled_statements._operation_program, compiled_statements._prepare_step, compiled_statements._compile_step]
    for cache in caches:
        cache.cache_clear()
    order = np.random.default_rng(8).permutation(list(names) * 3)
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(launch, name) for name in order]
        while not all(run.done() for run in runs[: len(runs) // 2]):
            caches[1].cache_clear()
            time.sleep(0.001)
        results = [run.result() for run in runs]
    for name, result in zip(order, results, strict=True):
        assert np.array_equal(result, expected[name]), name


def test_threads_that_fail_name_their_own_fault():
    """Faults of kernels that run at once, each with its own message and place."""
    bodies = {thread: f"setp.eq.u32 %p1, %r2, {thread}; @%p1 trap;" for thread in (3, 40, 66, 127)}

    def fail(thread):
        with pytest.raises(ptx.Trapped) as caught:
            ptx.run(module(bodies[thread]), grid=2, block=64, args=[GIVEN, np.zeros(128, np.uint32), 77], target="sm_80")
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        for thread, message in zip(bodies, pool.map(fail, bodies), strict=True):
            assert f"block ({thread // 64}, 0, 0), thread ({thread % 64}, 0, 0)" in message
