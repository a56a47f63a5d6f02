"""Kernels in LLVM IR: compiled for this machine and others, kept on disk, called in JAX programs, their tasks shared by XLA's threads."""

import ctypes
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread, get_ident

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.compiling import without_kept_programs
from support.sampling import sample_cases

import tcemu
from tcemu.base import errors, stored_code, xla_ffi
from tcemu.engine.backends.llvm import machine_code, xla_call
from tcemu.engine.backends.llvm.ffi_handler import handler_text

ROOT = Path(__file__).parents[3]
calls_here = pytest.mark.usefixtures("llvm")


@pytest.fixture(scope="module")
def llvm():
    if reason := xla_call.missing():
        pytest.skip(reason)


def row_kernel(factor, target=None):
    """y = factor * x + the number of the row, on a matrix of uint32; a task is a row."""
    from llvmlite import ir

    i64, i32, pointer = ir.IntType(64), ir.IntType(32), ir.PointerType()
    module = ir.Module()

    def element(builder, array, index, kind=pointer):
        return builder.load(builder.gep(array, [index], source_etype=kind), typ=kind)

    tasks = ir.Function(module, ir.FunctionType(i64, [pointer]), "rows_tasks")
    builder = ir.IRBuilder(tasks.append_basic_block())
    builder.ret(element(builder, element(builder, tasks.args[0], i64(0)), i64(0), i64))

    run = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64, pointer, pointer]), "rows_task")
    row, buffers, dims = run.args
    builder = ir.IRBuilder(run.append_basic_block())
    columns = element(builder, element(builder, dims, i64(0)), i64(1), i64)
    x, y = (builder.gep(element(builder, buffers, i64(i)), [builder.mul(row, columns)], source_etype=i32) for i in (0, 1))
    before, loop, end = builder.block, run.append_basic_block(), run.append_basic_block()
    builder.cbranch(builder.icmp_signed(">", columns, i64(0)), loop, end)
    builder.position_at_end(loop)
    column = builder.phi(i64)
    value = builder.add(builder.mul(element(builder, x, column, i32), i32(factor)), builder.trunc(row, i32))
    builder.store(value, builder.gep(y, [column], source_etype=i32))
    following = builder.add(column, i64(1))
    column.add_incoming(i64(0), before)
    column.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, columns), loop, end)
    builder.position_at_end(end)
    builder.ret_void()
    return xla_call.Kernel("rows", str(module), target)


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, (rows, columns), np.uint32)


def expected(factor, x):
    return np.uint32(factor) * x + np.arange(len(x), dtype=np.uint32)[:, None]


def call_rows(kernel, x):
    return xla_call.call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), x)[0]


def same(got, wanted):
    return got.shape == wanted.shape and bool((np.asarray(got) == wanted).all())


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv(stored_code.KERNEL_VARIABLE, str(tmp_path / "kernels"))
    stored_code.load_or_compile.cache_clear()
    yield tmp_path / "kernels"
    stored_code.load_or_compile.cache_clear()


# ---- in JAX programs


@calls_here
@pytest.mark.parametrize("shape", [(1000, 37), (2, 5), (1, 64), (0, 5), (5, 0)])
def test_a_call_gives_what_its_tasks_compute(shape):
    x = matrix(*shape)
    assert same(jax.jit(lambda v: call_rows(row_kernel(3), v))(x), expected(3, x))
    assert same(call_rows(row_kernel(3), jnp.asarray(x)), expected(3, x))


@calls_here
def test_calls_that_run_at_once_in_one_program_do_not_disturb_each_other():
    x = matrix(5000, 16)
    program = jax.jit(lambda v: [call_rows(row_kernel(factor), v + factor) for factor in (3, 5, 5, 7)])
    for _ in range(20):
        for factor, got in zip((3, 5, 5, 7), program(x), strict=True):
            assert same(got, expected(factor, x + np.uint32(factor)))


@calls_here
def test_a_thousand_calls_are_all_right():
    program = jax.jit(lambda v: call_rows(row_kernel(3), v))
    x = matrix(64, 8)
    wanted = expected(3, x)
    assert all(same(program(x), wanted) for _ in range(1000))


@calls_here
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # JAX reads what another thread still writes
def test_calls_of_several_threads_are_all_right():
    """Also a kernel that each of them asks for first, within a loop of a program."""

    def run(seed):
        x = matrix(300, 8, seed)
        program = jax.jit(lambda v: jax.lax.fori_loop(0, 30, lambda _, w: call_rows(row_kernel(11), w), v))
        wanted = x
        for _ in range(30):
            wanted = expected(11, wanted)
        return all(same(program(x), wanted) for _ in range(5))

    def run_on_cpu(seed):
        with jax.default_device(jax.devices("cpu")[0]):  # each thread has its own
            return run(seed)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(run_on_cpu, range(6)))


THREADS = """
declare i64 @pthread_self()
declare i32 @usleep(i32)
define i64 @threads_tasks(ptr %dims) {
  ret i64 20
}
define void @threads_task(i64 %task, ptr %buffers, ptr %dims) {
  %at = getelementptr ptr, ptr %buffers, i64 1
  %y = load ptr, ptr %at
  %thread = call i64 @pthread_self()
  %slept = call i32 @usleep(i32 1000)
  %to = getelementptr i64, ptr %y, i64 %task
  store i64 %thread, ptr %to
  ret void
}
"""  # y: the thread of each task


@calls_here
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else True, reason="a second core is not known")
def test_threads_of_xla_share_the_tasks():
    result = jax.ShapeDtypeStruct((20, 2), jnp.uint32)
    program = jax.jit(lambda v: xla_call.call(xla_call.Kernel("threads", THREADS), result, v)[0])
    threads = (set(np.asarray(program(jnp.zeros(1))).view(np.uint64).ravel().tolist()) for _ in range(200))
    assert any(len(found) > 1 for found in threads)


# ---- the handler, with a pool of the test's own


class Pool:
    """XLA's thread pool and errors for one handler: `schedule` gets each (function, data), and says whether it takes it."""

    def __init__(self, threads, schedule):
        pointer, arguments = ctypes.c_void_p, xla_ffi.ThreadPool_Schedule_Args
        self.errors, self.destroyed, self.threads, self.schedule = 0, [], threads, schedule
        kinds = {"destroy": (None, pointer), "count": (pointer, pointer), "start": (pointer, pointer)}
        self._functions = {name: ctypes.CFUNCTYPE(*kind)(getattr(self, f"_{name}")) for name, kind in kinds.items()}
        destroy, count, start = (ctypes.cast(function, pointer).value for function in self._functions.values())
        self.api = xla_ffi.Api(Error_Destroy=destroy, ThreadPool_NumThreads=count, ThreadPool_Schedule=start)
        self.begin = lambda given: ctypes.CFUNCTYPE(None, pointer)(arguments.from_address(given).task)

    def _error(self):
        self.errors += 1
        return 0x1000 + self.errors

    def _destroy(self, given):
        self.destroyed.append(xla_ffi.Error_Destroy_Args.from_address(given).error)

    def _count(self, given):
        if self.threads is None:
            return self._error()
        at = xla_ffi.ThreadPool_NumThreads_Args.from_address(given).num_threads
        ctypes.c_int64.from_address(at).value = self.threads
        return None

    def _start(self, given):
        data, begin = xla_ffi.ThreadPool_Schedule_Args.from_address(given).data, self.begin(given)
        return None if self.schedule(lambda: begin(data)) else self._error()

    def run(self, x):
        """The rows kernel with this pool."""
        kernel = row_kernel(3)
        kernel.register()
        functions = machine_code.load_functions(xla_call.start_compilation(kernel).result(), ["rows_handler"])
        y = np.zeros_like(x)
        sizes = (ctypes.c_int64 * 2)(*x.shape)
        buffers = [xla_ffi.Buffer(data=v.ctypes.data, rank=2, dims=ctypes.addressof(sizes)) for v in (x, y)]
        lists = [(ctypes.c_void_p * 1)(ctypes.addressof(buffer)) for buffer in buffers]
        operands, results = map(ctypes.addressof, lists)
        frame = xla_ffi.CallFrame(
            api=ctypes.addressof(self.api), args=xla_ffi.Args(size=1, args=operands), rets=xla_ffi.Rets(size=1, rets=results)
        )
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(functions.addresses["rows_handler"])
        assert handler(ctypes.addressof(frame)) is None
        self._functions["owner"] = functions
        return y


@calls_here
@pytest.mark.parametrize(
    ("threads", "rows", "started"), [(1, 50, 0), (4, 1, 0), (4, 0, 0), (4, 50, 3), (4, 3, 2), (100, 5, 4), (None, 50, 0)]
)
def test_no_more_threads_are_started_than_can_have_a_task(threads, rows, started):
    """With an error in place of the number of threads, the calling thread does it all, and the error is destroyed."""
    begun = []
    pool = Pool(threads, lambda begin: begun.append(Thread(target=begin)) or begun[-1].start() or True)
    x = matrix(rows, 7)
    assert same(pool.run(x), expected(3, x))
    for thread in begun:
        thread.join()
    assert len(begun) == started and pool.destroyed == ([] if threads else [0x1001])


@calls_here
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_threads_that_are_refused_are_not_waited_for(accepted):
    begun = []
    pool = Pool(4, lambda begin: len(begun) < accepted and (begun.append(begin) or True))
    x = matrix(50, 7)
    assert same(pool.run(x), expected(3, x))
    assert len(begun) == accepted and pool.destroyed == [0x1001]
    for begin in begun:  # the last of them frees the shared state
        begin()


@calls_here
def test_a_thread_that_begins_after_the_call_touches_nothing():
    late = []
    pool = Pool(3, lambda begin: late.append(begin) or True)
    x = matrix(50, 7)
    y = pool.run(x)
    assert len(late) == 2 and same(y, expected(3, x))
    y[:] = 0
    for begin in late:
        begin()
    assert not y.any()


@calls_here
def test_a_pool_that_runs_everything_in_the_calling_thread_is_served():
    seen = []
    pool = Pool(3, lambda begin: begin() or seen.append(get_ident()) or True)
    x = matrix(50, 7)
    assert same(pool.run(x), expected(3, x)) and seen == [get_ident()] * 2


# ---- machine code


@calls_here
def test_machine_code_comes_from_disk_unless_it_is_damaged(monkeypatch, kept):
    compiled = []

    def compile_text(text, target):
        compiled.append(target)
        return machine_code.compile_text(text, target)

    compiler = machine_code.COMPILER._replace(compile=compile_text)
    text = row_kernel(3).text
    load = lambda target: stored_code.load_or_compile.__wrapped__(compiler, text, str(target))
    here = machine_code.host_target()
    first = load(here)
    assert load(here) == first and len(compiled) == 1
    (entry,) = kept.iterdir()
    assert entry.name.startswith(f"{here.cpu}-")
    entry.write_bytes(entry.read_bytes()[:-9])
    assert load(here) == first and len(compiled) == 2
    load(here._replace(cpu="x86-64", features=())), load(here)
    assert len(compiled) == 3 and len(list(kept.iterdir())) == 2


@calls_here
def test_code_for_a_cpu_without_avx512_has_no_wide_vectors(kept):
    here = machine_code.host_target()
    if not here.has("avx512f"):
        pytest.skip("this CPU has no AVX-512")
    older = here.without("avx512", "avxvnni")
    assert (machine_code.vector_bits(), older.vector_bits, older.without("avx2").vector_bits) == (512, 256, 128)
    assert here.has("avx512bw") and not older.has("avx512bw") and older.has("avx2")

    def registers(target):
        module = machine_code.optimise(row_kernel(3).text, str(target))
        return set(re.findall(r"%([xyz]mm)\d", machine_code.target_machine(str(target)).emit_assembly(module)))

    assert "zmm" in registers(here) and "ymm" in registers(older) and "zmm" not in registers(older)
    x = matrix(40, 100)
    assert same(call_rows(row_kernel(3, older), x), expected(3, x))
    assert len({xla_call.call_name(row_kernel(3, target)) for target in (None, older, older.without("avx2"))}) == 3


@calls_here
def test_a_text_that_llvm_does_not_take_is_said(kept):
    kernel = row_kernel(3)
    x = matrix(4, 4)
    with pytest.raises(RuntimeError, match="expected type"):
        jax.jit(lambda v: call_rows(kernel._replace(text=kernel.text.replace("i64", "i 64")), v)).lower(x)
    calls_nothing = kernel.text.replace("ret void", "call void @nowhere()\n  ret void") + "\ndeclare void @nowhere()"
    with pytest.raises(RuntimeError, match="Failed to materialize symbols"):
        jax.jit(lambda v: call_rows(kernel._replace(text=calls_nothing), v)).lower(x)


REFUSED = """
declare <4 x i32> @llvm.ctpop.v4i32(<4 x i64>)
define <4 x i32> @refused(<4 x i64> %x) {
  %y = call <4 x i32> @llvm.ctpop.v4i32(<4 x i64> %x)
  ret <4 x i32> %y
}
"""  # an intrinsic with other types than LLVM's, as in another release


@calls_here
@pytest.mark.parametrize("how", sample_cases(["eager", "jit", "vmap", "gradient"], ["eager", "gradient"]))
def test_jax_computes_in_the_place_of_kernels_that_llvm_refuses(kept, monkeypatch, how):
    """With the same bits, and one warning."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 64), (64, 7)))
    product = lambda a: tcemu.matmul(a, b, recipe="mxfp4")
    gradient = jax.grad(lambda a: (tcemu.matmul(a, b, recipe="bf16") ** 2).sum())
    call = {"eager": product, "jit": jax.jit(product), "vmap": jax.jit(jax.vmap(product)), "gradient": jax.jit(gradient)}[how]
    with tcemu.execution("portable"):
        expected = np.asarray(call(a))
    monkeypatch.setattr(xla_call, "handler_text", lambda name: handler_text(name) + REFUSED)
    monkeypatch.setattr(xla_call, "_registered", {})
    jax.clear_caches(), errors.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"llvmlite \S+ with LLVM \S+ does not take the kernel '\w+' \(Intrinsic has incorrect") as caught:
        assert same(call(a), expected) and same(call(a), expected)
    assert len(caught) == len({str(warning.message) for warning in caught}) <= 3  # of the kernels of products, elements and magnitudes
    monkeypatch.undo()
    jax.clear_caches()
    assert same(call(a), expected)


# ---- other processes

LATER = """
import pickle, sys
import jax
from pathlib import Path
from jax import export
from tcemu.engine.backends.llvm import machine_code, xla_call
from tcemu.engine.backends.llvm.ffi_handler import handler_text
from tcemu.base import stored_code
from tcemu.base.jax_internals import compilation_cache_hits

def compile_text(text, target):
    raise RuntimeError("nothing is compiled here")

machine_code.COMPILER = machine_code.COMPILER._replace(compile=compile_text)
"""
STORED = f"""{LATER}
x, stored, kernel = pickle.loads(Path(sys.argv[1]).read_bytes())
compiled, facts = stored_code.load_program(Path(stored), stored_code.program_entry("rows"), jax.devices()[0])
before = compilation_cache_hits()
traced = jax.jit(lambda v: xla_call.call(kernel, jax.ShapeDtypeStruct(v.shape, v.dtype), v)[0] * 3)
results, hits = (compiled(x), traced(x)), compilation_cache_hits() - before
print([bool((v == y).all()) for v, y in zip(results, facts)], hits)
"""
EXPORTED = f"""{LATER}
x, y, host_calls, program = pickle.loads(Path(sys.argv[1]).read_bytes())
for function in host_calls:
    function.register()
print(bool((export.deserialize(program).call(x) == y).all()))
"""


def run_process(code, kept, given):
    """What another process prints, with kernels and JAX's cache in the folder."""
    (kept.parent / "given").write_bytes(pickle.dumps(given))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))), "JAX_PLATFORMS": "cpu",
        stored_code.KERNEL_VARIABLE: str(kept),
        "JAX_COMPILATION_CACHE_DIR": str(kept.parent / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, str(kept.parent / "given")], env=env, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr[-3000:]


@calls_here
def test_programs_of_another_process_run_and_nothing_is_compiled(kept):
    """A stored program, and one that is traced again and comes from JAX's cache. Their kernels come from disk."""
    x = matrix(60, 9)
    kernels = [row_kernel(13), row_kernel(19)]
    programs = [jax.jit(lambda v, kernel=kernel: call_rows(kernel, v) * 3).lower(x) for kernel in kernels]
    facts = [expected(factor, x) * np.uint32(3) for factor in (13, 19)]
    with without_kept_programs():
        stored_code.store_program(kept.parent / "stored", stored_code.program_entry("rows"), programs[0].compile(), facts)
    for hits in (0, 1):
        assert run_process(STORED, kept, (x, str(kept.parent / "stored"), kernels[1])) == f"[True, True] {hits}\n"


@calls_here
def test_an_exported_program_needs_its_kernels_alone(kept):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialize (pip install flatbuffers)")
    x, kernel = matrix(60, 9), row_kernel(17)
    check = export.DisabledSafetyCheck.custom_call(xla_call.call_name(kernel))
    program = export.export(jax.jit(lambda v: call_rows(kernel, v)), platforms=["cpu"], disabled_checks=[check])(x)
    host_calls = stored_code.find_host_calls(program.mlir_module())
    assert host_calls == [kernel]
    assert run_process(EXPORTED, kept, (x, expected(17, x), host_calls, bytes(program.serialize()))) == "True\n"


# ---- machines that cannot


@pytest.fixture
def found_anew(monkeypatch):
    """What is missing is found once in the test, and once after it."""
    found = (machine_code._llvm, machine_code.missing_compiler, xla_call.missing)
    for function in found:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in found:
        function.cache_clear()


def test_a_missing_llvmlite_is_said(monkeypatch, found_anew):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert "llvmlite cannot be imported" in xla_call.missing() and "pip install" in xla_call.missing()


@calls_here
def test_another_version_of_the_ffi_is_said(monkeypatch, found_anew):
    monkeypatch.setattr(xla_call, "installed_version", lambda: (1, 0))
    assert xla_call.missing() == "jaxlib has version 1.0 of XLA's FFI, and version 0 is needed"


@calls_here
def test_a_probe_that_fails_is_said(monkeypatch, found_anew):
    monkeypatch.setattr(xla_call, "PROBE", xla_call.PROBE.replace("i32 %value, 3", "i32 %value, 5"))
    assert xla_call.missing() == "XLA's call of the probe gave a wrong result"
    xla_call.missing.cache_clear()
    monkeypatch.setattr(xla_call, "PROBE", xla_call.PROBE.replace("mul", "mull"))
    assert xla_call.missing().startswith("XLA did not call the probe (LLVM IR parsing error")
