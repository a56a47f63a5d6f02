"""The handler by which XLA calls a kernel, as LLVM IR: it reads the call's buffers and runs the kernel's tasks on XLA's own threads.

A kernel is two functions. `i64 NAME_tasks(ptr dims)` returns the number of its tasks, which are independent of each other;
`void NAME_task(i64 task, ptr buffers, ptr dims)` runs one. `buffers` is an array of the data of all operands and then all results, `dims`
one of pointers to their int64 sizes.

The threads take tasks by a counter. The calling thread takes tasks too, and then waits for those that another thread has taken, so that it
waits for no thread that has not begun. A thread that begins after the last task finds only the counter, which lives until the last thread
has seen it.

XLA's threads flush subnormal floats. A task runs in the default environment of IEEE 754: floats are rounded to nearest and none is flushed.

The structures of XLA are in `base.xla_ffi`. Each function of the module is one function here.
"""

import ctypes
import platform
from ctypes import c_int64, c_void_p

from tcemu.base.xla_ffi import (
    METADATA,
    Api,
    Api_Version,
    Buffer,
    CallFrame,
    Error_Destroy_Args,
    Extension_Base,
    Metadata,
    Metadata_Extension,
    Struct,
    ThreadPool_NumThreads_Args,
    ThreadPool_Schedule_Args,
    field_offset,
    installed_version,
)

X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")  # machines, by their names in `platform`
MXCSR_DEFAULT = 0x1F80  # x86: rounding to nearest, exceptions masked, without FTZ and DAZ; on AArch64 it is FPCR = 0
SPINS = 1024  # looks at the counter, some 40 us together, before a waiting thread gives its core away each time


class Work(Struct):
    """The shared state of one call."""

    _fields_ = (
        ("next", c_int64),  # the first task that nobody has taken; beyond the last one when all are taken
        ("done", c_int64),  # tasks that are done
        ("owners", c_int64),  # threads that may still read this; the last one frees it
        ("tasks", c_int64),
        ("buffers", c_void_p),  # in the calling thread's stack, as is `dims`
        ("dims", c_void_p),
    )


def handler_text(name: str) -> str:
    """Returns the module with `NAME_handler`. It declares the kernel's functions and those of the C library that it calls."""
    machine = platform.machine()
    functions = (_run, _release, _help, _begin, _read, _failed, _handler)
    return "\n\n".join([_declarations(name, machine), *(function(name, machine) for function in functions)]) + "\n"


def _declarations(name: str, machine: str) -> str:
    declarations, _, _ = _environment(machine)
    return f"""
declare i64 @{name}_tasks(ptr)
declare void @{name}_task(i64, ptr, ptr)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()
{_pause(machine).replace("call", "declare")}
{declarations}"""


def _pause(machine: str) -> str:
    """The instruction by which a waiting thread leaves its core to another one for a moment; "" where there is none."""
    return "call void @llvm.x86.sse2.pause()" if machine in X86 else ""


def _run(name: str, machine: str) -> str:
    """The function that runs one task in the default environment of IEEE 754."""
    _, enter, leave = _environment(machine)
    return f"""define internal void @{name}_run(i64 %task, ptr %buffers, ptr %dims) {{
  {enter}
  call void @{name}_task(i64 %task, ptr %buffers, ptr %dims) noinline
  {leave}
  ret void
}}"""


def _release(name: str, machine: str) -> str:
    """The function by which a thread gives up the shared state; the last one frees it."""
    return f"""define internal void @{name}_release(ptr %work) {{
  {_field("%owners", "%work", Work, "owners")}
  %before = atomicrmw sub ptr %owners, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %free, label %end
free:
  call void @free(ptr %work)
  br label %end
end:
  ret void
}}"""


def _help(name: str, machine: str) -> str:
    """The function that takes tasks and runs them until none is left."""
    return f"""define internal void @{name}_help(ptr %work) {{
  {_field("%next", "%work", Work, "next")}
  {_field("%done", "%work", Work, "done")}
  {_load("%tasks", "i64", "%work", Work, "tasks")}
  br label %take
take:
  %task = atomicrmw add ptr %next, i64 1 monotonic
  %taken = icmp slt i64 %task, %tasks
  br i1 %taken, label %run, label %end
run:
  {_load("%buffers", "ptr", "%work", Work, "buffers")}
  {_load("%dims", "ptr", "%work", Work, "dims")}
  call void @{name}_run(i64 %task, ptr %buffers, ptr %dims)
  %before = atomicrmw add ptr %done, i64 1 release
  br label %take
end:
  ret void
}}"""


def _begin(name: str, machine: str) -> str:
    """The function that a thread of XLA's pool runs."""
    return f"""define internal void @{name}_begin(ptr %work) {{
  call void @{name}_help(ptr %work)
  call void @{name}_release(ptr %work)
  ret void
}}"""


def _read(name: str, machine: str) -> str:
    """The function that copies the data and the sizes of some buffers into two arrays."""
    return f"""define internal void @{name}_read(ptr %from, i64 %count, ptr %buffers, ptr %dims) {{
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %read, label %end
read:
  %i = phi i64 [ 0, %0 ], [ %following, %read ]
  %at = getelementptr ptr, ptr %from, i64 %i
  %buffer = load ptr, ptr %at
  {_load("%data", "ptr", "%buffer", Buffer, "data")}
  {_load("%sizes", "ptr", "%buffer", Buffer, "dims")}
  %to.data = getelementptr ptr, ptr %buffers, i64 %i
  store ptr %data, ptr %to.data
  %to.sizes = getelementptr ptr, ptr %dims, i64 %i
  store ptr %sizes, ptr %to.sizes
  %following = add i64 %i, 1
  %more = icmp slt i64 %following, %count
  br i1 %more, label %read, label %end
end:
  ret void
}}"""


def _failed(name: str, machine: str) -> str:
    """The function that destroys an error and returns whether there was one."""
    return f"""define internal i1 @{name}_failed(ptr %api, ptr %error) {{
  %failed = icmp ne ptr %error, null
  br i1 %failed, label %destroy, label %end
destroy:
  {_arguments("%arguments", Error_Destroy_Args, error="ptr %error")}
  {_load("%function", "ptr", "%api", Api, "Error_Destroy")}
  call void %function(ptr %arguments)
  br label %end
end:
  ret i1 %failed
}}"""


def _handler(name: str, machine: str) -> str:
    """The function that XLA calls: it answers a request for metadata, or shares the tasks with XLA's threads."""
    major, minor = installed_version()
    return f"""define ptr @{name}_handler(ptr %frame) {{
entry:
  {_load("%extension", "ptr", "%frame", CallFrame, "extension_start")}
  %extended = icmp ne ptr %extension, null
  br i1 %extended, label %extension.read, label %call
extension.read:
  {_load("%type", "i32", "%extension", Extension_Base, "type")}
  %asked = icmp eq i32 %type, {METADATA}
  br i1 %asked, label %metadata.write, label %call
metadata.write:
  {_load("%metadata", "ptr", "%extension", Metadata_Extension, "metadata")}
  {_store("i64", ctypes.sizeof(Api_Version), "%metadata", Metadata, "api_version.struct_size")}
  {_store("ptr", "null", "%metadata", Metadata, "api_version.extension_start")}
  {_store("i32", major, "%metadata", Metadata, "api_version.major_version")}
  {_store("i32", minor, "%metadata", Metadata, "api_version.minor_version")}
  {_store("i32", 0, "%metadata", Metadata, "traits")}
  {_store("i64", 0, "%metadata", Metadata, "state_type_id")}
  ret ptr null

call:
  {_load("%operand.count", "i64", "%frame", CallFrame, "args.size")}
  {_load("%operands", "ptr", "%frame", CallFrame, "args.args")}
  {_load("%result.count", "i64", "%frame", CallFrame, "rets.size")}
  {_load("%results", "ptr", "%frame", CallFrame, "rets.rets")}
  %count = add i64 %operand.count, %result.count
  %buffers = alloca ptr, i64 %count
  %dims = alloca ptr, i64 %count
  call void @{name}_read(ptr %operands, i64 %operand.count, ptr %buffers, ptr %dims)
  %result.buffers = getelementptr ptr, ptr %buffers, i64 %operand.count
  %result.dims = getelementptr ptr, ptr %dims, i64 %operand.count
  call void @{name}_read(ptr %results, i64 %result.count, ptr %result.buffers, ptr %result.dims)
  %tasks = call i64 @{name}_tasks(ptr %dims)
  %several = icmp sgt i64 %tasks, 1
  br i1 %several, label %pool, label %alone

pool:
  {_load("%api", "ptr", "%frame", CallFrame, "api")}
  {_load("%ctx", "ptr", "%frame", CallFrame, "ctx")}
  %threads.at = alloca i64
  store i64 1, ptr %threads.at
  {_arguments("%count.arguments", ThreadPool_NumThreads_Args, ctx="ptr %ctx", num_threads="ptr %threads.at")}
  {_load("%num_threads", "ptr", "%api", Api, "ThreadPool_NumThreads")}
  %count.error = call ptr %num_threads(ptr %count.arguments)
  %count.failed = call i1 @{name}_failed(ptr %api, ptr %count.error)
  %threads = load i64, ptr %threads.at
  %one = icmp sle i64 %threads, 1
  %unshared = or i1 %count.failed, %one
  br i1 %unshared, label %alone, label %share
share:
  %work = call ptr @malloc(i64 {ctypes.sizeof(Work)})
  %no.memory = icmp eq ptr %work, null
  br i1 %no.memory, label %alone, label %begin
begin:
  %fewer = icmp slt i64 %tasks, %threads
  %workers = select i1 %fewer, i64 %tasks, i64 %threads
  {_store("i64", 0, "%work", Work, "next")}
  {_store("i64", 0, "%work", Work, "done")}
  {_store("i64", "%workers", "%work", Work, "owners")}
  {_store("i64", "%tasks", "%work", Work, "tasks")}
  {_store("ptr", "%buffers", "%work", Work, "buffers")}
  {_store("ptr", "%dims", "%work", Work, "dims")}
  {_arguments("%arguments", ThreadPool_Schedule_Args, ctx="ptr %ctx", task=f"ptr @{name}_begin", data="ptr %work")}
  {_load("%function", "ptr", "%api", Api, "ThreadPool_Schedule")}
  br label %schedule
schedule:
  %started = phi i64 [ 1, %begin ], [ %started.more, %scheduled ]
  %error = call ptr %function(ptr %arguments)
  %failed = call i1 @{name}_failed(ptr %api, ptr %error)
  br i1 %failed, label %unscheduled, label %scheduled
scheduled:
  %started.more = add i64 %started, 1
  %all = icmp eq i64 %started.more, %workers
  br i1 %all, label %help, label %schedule
unscheduled:
  %absent = sub i64 %workers, %started
  {_field("%owners", "%work", Work, "owners")}
  %owners.before = atomicrmw sub ptr %owners, i64 %absent acq_rel
  br label %help
help:
  call void @{name}_help(ptr %work)
  {_field("%done.at", "%work", Work, "done")}
  br label %wait
wait:
  %spin = phi i64 [ 0, %help ], [ %spin.more, %spinning ], [ %spin, %yielding ]
  %done = load atomic i64, ptr %done.at acquire, align 8
  %complete = icmp eq i64 %done, %tasks
  br i1 %complete, label %release, label %waiting
waiting:
  %patient = icmp slt i64 %spin, {SPINS}
  br i1 %patient, label %spinning, label %yielding
spinning:
  {_pause(machine)}
  %spin.more = add i64 %spin, 1
  br label %wait
yielding:
  %yielded = call i32 @sched_yield()
  br label %wait
release:
  call void @{name}_release(ptr %work)
  ret ptr null

alone:
  %task = phi i64 [ 0, %call ], [ 0, %pool ], [ 0, %share ], [ %task.more, %alone.run ]
  %some = icmp slt i64 %task, %tasks
  br i1 %some, label %alone.run, label %end
alone.run:
  call void @{name}_run(i64 %task, ptr %buffers, ptr %dims)
  %task.more = add i64 %task, 1
  br label %alone
end:
  ret ptr null
}}"""


def _environment(machine: str) -> tuple[str, str, str]:
    """Returns declarations, and the instructions that enter the default floating-point environment and leave it."""
    if machine in X86:
        enter = f"""%before = alloca i32
  %default = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  store i32 {MXCSR_DEFAULT}, ptr %default
  call void @llvm.x86.sse.ldmxcsr(ptr %default)"""
        declarations = "declare void @llvm.x86.sse.stmxcsr(ptr)\ndeclare void @llvm.x86.sse.ldmxcsr(ptr)"
        return declarations, enter, "call void @llvm.x86.sse.ldmxcsr(ptr %before)"
    if machine in ARM:
        enter = "%before = call i64 @llvm.aarch64.get.fpcr()\n  call void @llvm.aarch64.set.fpcr(i64 0)"
        declarations = "declare i64 @llvm.aarch64.get.fpcr()\ndeclare void @llvm.aarch64.set.fpcr(i64)"
        return declarations, enter, "call void @llvm.aarch64.set.fpcr(i64 %before)"
    return "", "", ""


def _field(name: str, pointer: str, struct: type[Struct], path: str) -> str:
    """Returns the instruction that makes `name` a field's address."""
    return f"{name} = getelementptr i8, ptr {pointer}, i64 {field_offset(struct, path)}"


def _load(name: str, kind: str, pointer: str, struct: type[Struct], path: str) -> str:
    return f"{_field(f'{name}.at', pointer, struct, path)}\n  {name} = load {kind}, ptr {name}.at"


def _store(kind: str, value: object, pointer: str, struct: type[Struct], path: str) -> str:
    return f"{_field(f'{pointer}.{path}', pointer, struct, path)}\n  store {kind} {value}, ptr {pointer}.{path}"


def _arguments(name: str, struct: type[Struct], **values: str) -> str:
    """Returns the instructions that make `name` the address of a function's arguments."""
    lines = [f"{name} = alloca i8, i64 {ctypes.sizeof(struct)}, align 8"]
    lines += [_store("i64", ctypes.sizeof(struct), name, struct, "struct_size"), _store("ptr", "null", name, struct, "extension_start")]
    for field, value in values.items():
        kind, given = value.split()
        lines.append(_store(kind, given, name, struct, field))
    return "\n  ".join(lines)
