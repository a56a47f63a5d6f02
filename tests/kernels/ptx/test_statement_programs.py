"""Compiled statements: stored between processes with their fault messages, optimised when hot, one for all statements of a form."""

import jax
import numpy as np
import pytest
from ptx_kernels.manifest import KERNELS
from support.compiling import without_kept_programs
from support.sampling import sample_cases

from tcemu import Unsupported, execution, ptx
from tcemu.base import stored_code
from tcemu.base.stored_code import CACHE_VARIABLE
from tcemu.engine.backends.llvm import xla_call
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.linker import compiled_statements, linked_kernel, statement_programs, statement_runs
from tcemu.kernels.ptx.linker.statement_programs import BY_NUMPY, OPTIMISED, QUICK, SUBFOLDER, store_programs
from tcemu.kernels.ptx.runtime import kernel_runner
from tcemu.kernels.ptx.simt import faults

TEXT = """
.version 7.8 .target sm_80 .address_size 64
.visible .entry scale(.param .u64 to, .param .u32 factor) {
    .reg .b32 %r<4>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [to]; ld.param.u32 %r2, [factor];
    mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
    ld.global.u32 %r1, [%rd0]; mad.lo.u32 %r1, %r1, %r2, 7; st.global.u32 [%rd0], %r1; ret; }
"""
VALUES = np.arange(32, dtype=np.uint32)


def run_scale(values=VALUES):
    return ptx.run(TEXT, grid=1, block=32, args=[values, 5], target="A100")[0]


def forget_programs():
    for cache in (compiled_statements._operation_program, compiled_statements._compile_step, kernel_runner._link_once):
        cache.cache_clear()


@pytest.fixture
def nothing_cached(monkeypatch):
    """Without JAX's own cache of compiled programs, whose programs are not stored a second time, and without the user's."""
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    with without_kept_programs():
        yield


@pytest.fixture
def compilations():
    """The names of the programs that XLA compiles."""
    names = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **facts: names.append(facts) if event.endswith("backend_compile_duration") else None
    )
    return names


@pytest.fixture
def without_numpy(monkeypatch):
    """Every statement is compiled at once."""
    monkeypatch.setattr(statement_programs.StatementProgram, "_interpret", lambda self: False)


def test_a_stored_program_is_not_compiled_again(tmp_path, compilations, nothing_cached, without_numpy, monkeypatch):
    """Its bits are the same, and its fault has its message though the statement was never traced."""
    forget_programs()
    with store_programs(tmp_path):
        first = run_scale()
        files = sorted(tmp_path.iterdir())
        assert files and all(file.name.startswith(f"{QUICK}-") for file in files)
        forget_programs()
        monkeypatch.setattr(faults, "_codes", {})
        count = len(compilations)
        assert np.array_equal(run_scale(), first) and len(compilations) == count
        with pytest.raises(ptx.OutOfBounds, match=r"4 bytes of global memory are out of bounds.*byte 64"):
            run_scale(VALUES[:16])
        assert len(compilations) == count
        forget_programs()
        for file in files:
            file.write_bytes(file.read_bytes()[:100])
        assert np.array_equal(run_scale(), first) and len(compilations) > count
    assert np.array_equal(first, 5 * VALUES + 7)
    forget_programs()


def test_a_program_of_numpy_is_not_traced_again(tmp_path, compilations, nothing_cached, monkeypatch):
    """Nothing is compiled, unless NumPy has taken as long as compiling does; then the words are the same."""
    forget_programs()
    traced, trace = [], compiled_statements._trace_step
    monkeypatch.setattr(compiled_statements, "_trace_step", lambda *given: traced.append(1) or trace(*given))
    with store_programs(tmp_path):
        first = run_scale()
        assert len(traced) == 2 and len(compilations) == 0  # ld and st
        assert all(file.name.startswith(f"{BY_NUMPY}-") for file in tmp_path.iterdir())
        forget_programs()
        monkeypatch.setattr(faults, "_codes", {})
        assert np.array_equal(run_scale(), first) and len(traced) == 2
        with pytest.raises(ptx.OutOfBounds, match=r"4 bytes of global memory are out of bounds.*byte 64"):
            run_scale(VALUES[:16])
        forget_programs()
        monkeypatch.setattr(statement_programs, "NUMPY_SECONDS", 0)
        assert all(np.array_equal(run_scale(), first) for _ in range(2)) and len(compilations) == 2
    forget_programs()


def test_programs_are_stored_by_default(tmp_path, compilations, nothing_cached, monkeypatch):
    """A process that says nothing of caches stores its statements where a later one finds them; "off" stores nothing."""
    forget_programs()
    run_scale()
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(stored_code, "user_cache_folder", lambda: tmp_path)
    forget_programs()
    first = run_scale()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("jaxlib-") and [each.name for each in folder.iterdir()] == [SUBFOLDER]
    assert folder.stat().st_mode & 0o077 == 0 and len([*(folder / SUBFOLDER).iterdir()]) > 1
    forget_programs()
    count = len(compilations)
    assert np.array_equal(run_scale(), first) and len(compilations) == count
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "named"))
    forget_programs()
    run_scale()
    assert [each.name for each in (tmp_path / "named").iterdir()] == [SUBFOLDER]
    forget_programs()


def test_programs_are_dropped_with_those_of_jax():
    """A process that runs hundreds of kernels calls jax.clear_caches() to free memory maps."""
    run_scale()
    assert compiled_statements._operation_program.cache_info().currsize > 0
    jax.clear_caches()
    expected = run_scale()
    kept = compiled_statements._operation_program.cache_info()
    assert kept.currsize == kept.misses and np.array_equal(expected, 5 * VALUES + 7)


def test_hot_programs_are_optimised(tmp_path, nothing_cached, without_numpy, monkeypatch):
    expected = run_scale()
    forget_programs()
    monkeypatch.setattr(compiled_statements, "STEP_PATIENCE", 40)
    monkeypatch.setattr(compiled_statements, "HOST_PATIENCE", 3 * compiled_statements.HOST_OVERHEAD)
    monkeypatch.setattr(compiled_statements, "HOST_CALL", 0)
    with store_programs(tmp_path):
        results = [run_scale() for _ in range(3)]
        names = [file.name for file in tmp_path.iterdir()]
        efforts = [sum(name.startswith(f"{effort}-") for name in names) for effort in (QUICK, OPTIMISED)]  # ld and st; all
        forget_programs()
        results.append(run_scale())
    assert efforts[0] == 2 and efforts[1] > 4 and all(np.array_equal(result, expected) for result in results)
    forget_programs()


def test_parts_of_registers_are_told_apart_in_stored_programs(tmp_path, nothing_cached, monkeypatch):
    """A register may have the name of a selector; its program is none of another selector's."""
    monkeypatch.setattr(compiled_statements, "HOST_PATIENCE", -1)
    values = VALUES * np.uint32(0x01020304)
    text = TEXT.replace("mad.lo.u32 %r1, %r1, %r2, 7;", "mov.b32 NAME, %r1; vadd.u32.u32.u32 %r1, NAME.SELECTOR, %r1;")
    fields = {"b1": values >> 8 & 255, "h1": values >> 16}
    with store_programs(tmp_path):
        for selector, field in fields.items():
            forget_programs()
            named = text.replace(".reg .b64", ".reg .b32 NAME; .reg .b64").replace("SELECTOR", selector).replace("NAME", selector[0])
            found = ptx.run(named, grid=1, block=32, args=[values, 5], target="A100")[0]
            assert np.array_equal(found, values + field), selector
    forget_programs()


def test_operations_are_executed_by_numpy(compilations, nothing_cached):
    """Nothing is compiled for them until they have done much work."""
    forget_programs()
    run_scale()
    count = len(compilations)
    text = TEXT.replace("mad.lo.u32 %r1, %r1, %r2, 7;", "mad.lo.u32 %r1, %r1, %r2, 9; shl.b32 %r1, %r1, 33; add.u32 %r1, %r1, 0xffffffff;")
    shifted = ptx.run(text, grid=1, block=32, args=[VALUES, 5], target="A100")[0]
    assert np.array_equal(shifted, np.full(32, 2**32 - 1, np.uint32)) and len(compilations) == count
    text = TEXT.replace("mad.lo.u32 %r1, %r1, %r2, 7;", "cvt.rn.f32.u32 %f0, %r1; add.rn.f32 %f0, %f0, %f0; mov.b32 %r1, %f0;")
    doubled = ptx.run(text.replace(".reg .b64", ".reg .f32 %f<1>; .reg .b64"), grid=1, block=32, args=[VALUES, 5], target="A100")[0]
    assert np.array_equal(doubled.view(np.float32), 2 * VALUES.astype(np.float32)) and len(compilations) == count
    forget_programs()


RUN = """
.version 7.8 .target sm_80 .address_size 64
.visible .entry mixed(.param .u64 to) {
    .reg .b32 %r<12>; .reg .b64 %rd<3>; .reg .pred %p<3>;
    ld.param.u64 %rd0, [to]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 16, %rd0; mov.u32 %r9, %clock; ld.global.u32 %r1, [%rd0];
    mov.u32 %r2, 7; mov.u32 %r3, %r2; add.u32 %r2, %r2, %r1; setp.lt.u32 %p0, %r1, 40; @%p0 add.u32 %r3, %r3, %r2; @!%p0 mov.u32 %r2, %r0;
    xor.b32 %r4, %r2, %r3; add.cc.u32 %r4, %r4, 0xffffff00; addc.u32 %r5, 0, 0; mov.u32 %r1, %r1; shl.b32 %r6, 1, 33; mov.u32 %r10, %clock;
    @%p0 bra SMALL;
    mul.lo.u32 %r4, %r4, 3; mov.u32 %r7, 5; sub.u32 %r5, %r7, %r5; bra.uni END;
SMALL: mov.u32 %r7, %r4; mov.u32 %r4, %r5; mov.u32 %r5, %r7; sub.u32 %r8, %r10, %r9; add.u32 %r6, %r6, %r8;
END: st.global.v4.u32 [%rd0], {%r2, %r4, %r5, %r6}; ret; }
"""


@pytest.mark.parametrize("threads", [32, 70])  # all lanes of a warp execute, or some
def test_joined_operations_compute_what_single_statements_do(threads, monkeypatch):
    """Guards, threads that diverge, registers that are copied and overwritten, the carry, and a clock that counts statements."""
    values = np.zeros((threads, 4), np.uint32)
    values[:, 0] = np.random.default_rng(threads).integers(0, 80, threads)
    lengths, execute = [], statement_runs.OperationRun.execute
    monkeypatch.setattr(statement_runs.OperationRun, "execute", lambda run, chunk: lengths.append(run.count) or execute(run, chunk))
    joined = ptx.run(RUN, grid=2, block=threads, args=[values], target="A100")[0]
    assert max(lengths) > 10 and sum(lengths) > 20
    assert np.array_equal(ptx.run(RUN, grid=2, block=threads, args=[values], target="A100", watch=lambda event: None)[0], joined)
    small = values[:, 0] < 40
    first = np.where(small, values[:, 0] + 7, np.arange(threads))
    assert np.array_equal(joined[:, 0], first) and len(np.unique(joined[small, 3])) == 1 and (joined[small, 3] > 10).all()


def test_the_key_of_an_operation_says_which_it_is():
    """Stored programs are found by the key alone: statements with equal keys have operations with the same code and constants."""
    operations = {}
    for kernel in KERNELS[::8]:
        target = kernel.targets[0]
        module = ptx.parse(kernel.text(target))
        for linked in linked_kernel.link(module, next(iter(module.entries.values())), target, checked=False).statements:
            if isinstance(linked.semantics, Operation) and linked.semantics is not linked_kernel.NO_OPERATION:
                with jax.enable_x64(True):
                    bound = compiled_statements.BoundOperation(linked.semantics, linked.executed_statement, linked.context, linked.names)
                operations.setdefault(bound.key, set()).add(_identity(linked.semantics))
    assert len(operations) > 100 and [key for key, found in operations.items() if len(found) > 1] == []


def _identity(operation):
    compute = operation.compute
    cells = [cell.cell_contents for cell in getattr(compute, "__closure__", None) or ()]
    return (getattr(compute, "__code__", compute), str([each for each in cells if isinstance(each, int | str | tuple)]))


MMA = """
.version 7.8 .target sm_80 .address_size 64
.visible .entry product(.param .u64 to) {
    .reg .b32 %r<12>; .reg .f32 %f<8>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [to]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
    ld.global.u32 %r1, [%rd0]; xor.b32 %r2, %r1, 0x3c00; cvt.rn.f32.u32 %f4, %r0; div.rn.f32 %f5, %f4, 0f40400000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r2, %r1, %r2}, {%r1, %r2}, {%f5, %f5, %f5, %f5};
    mov.b32 %r3, %f3; st.global.u32 [%rd0], %r3; ret; }
"""


@pytest.mark.parametrize("at_once", sample_cases([True, False], [True]))
def test_the_choice_of_who_computes_holds_for_statements(tmp_path, nothing_cached, monkeypatch, at_once):
    """Also in the threads that compile them, and for programs that another choice has stored."""
    kernels = []
    call = xla_call.call
    monkeypatch.setattr(xla_call, "call", lambda *arguments: kernels.append(arguments[0].name) or call(*arguments))
    if not at_once:
        monkeypatch.setattr("tcemu.kernels.ptx.runtime.scheduler.compile_together", lambda *_: None)

    def run(choice):
        forget_programs(), jax.clear_caches(), kernels.clear()
        with execution(choice):
            return ptx.run(MMA, grid=1, block=32, args=[0x3C003800 + VALUES], target="A100")[0], len(kernels)

    with store_programs(tmp_path):
        emulated, used = run("emulated")
        assert (used > 0) == (not xla_call.missing())
        stored = set(tmp_path.iterdir())
        portable, used = run("portable")
        assert used == 0 and np.array_equal(portable, emulated) and set(tmp_path.iterdir()) > stored
        assert np.array_equal(run("auto")[0], emulated)
        with pytest.raises(Unsupported, match=r'line \d+, column \d+: mma.*execution\("native"\) cannot run it'):
            run("native")
        forget_programs()
        assert np.array_equal(run("emulated")[0], emulated)
    forget_programs()


def test_pointer_tables():
    """A kernel finds addresses in memory; the arrays behind them are returned after those of the arguments."""
    text = """
    .version 7.8 .target sm_80 .address_size 64
    .visible .entry follow(.param .u64 table, .param .u64 own) {
        .reg .b32 %r<3>; .reg .b64 %rd<6>;
        ld.param.u64 %rd0, [table]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 8; add.u64 %rd0, %rd0, %rd1;
        ld.global.u64 %rd2, [%rd0]; ld.global.u32 %r1, [%rd2]; add.u32 %r1, %r1, 100; st.global.u32 [%rd2], %r1; ret; }
    """
    left, right, own = np.arange(4, dtype=np.int32), np.arange(10, 14, dtype=np.int32), np.arange(20, 24, dtype=np.int32)
    pointers = {0: ptx.BufferPointer(left, 4), 8: ptx.BufferPointer(right), 16: ptx.BufferPointer(1, 8), 24: ptx.BufferPointer(left)}
    args = [ptx.PointerTable(np.zeros(4, np.uint64), pointers), own]
    outputs = ptx.run(text, grid=1, block=4, args=args, target="A100")
    assert len(outputs) == 4 and outputs[1].tolist() == [20, 21, 122, 23]
    assert outputs[2].tolist() == [100, 101, 2, 3] and outputs[3].tolist() == [110, 11, 12, 13] and left[0] == 0
    with pytest.raises(ptx.OutOfBounds, match="memory behind table"):
        ptx.run(
            text, grid=1, block=1, args=[ptx.PointerTable(np.zeros(1, np.uint64), {0: ptx.BufferPointer(left, 16)}), own], target="A100"
        )
    with pytest.raises(ValueError, match="pointers: got the position 4"):
        ptx.PointerTable(np.zeros(4, np.uint64), {4: ptx.BufferPointer(left)})
    with pytest.raises(ValueError, match="one launch"):
        ptx.run(text, grid=1, block=1, args=[args[0], np.zeros((2, 4), np.int32)], target="A100", cases=2)
