"""The kernels for CPUs, compiled for other CPUs, on the lattice of a step: `python tests/portability/foreign_cpus.py [CPU ...]`.

An AArch64 CPU's code is linked with `handler_loader.c` and run by qemu-user, with flushed floats before the call. Code of an older x86 CPU
runs here, in a program of JAX. Every word is compared with the exact reference. It needs llvmlite and, for AArch64, the Debian packages
qemu-user-static (or qemu-user), gcc-aarch64-linux-gnu and libc6-dev-arm64-cross. A release needs 0 differences on every CPU.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from support import lattice_paths  # noqa: E402
from support.llvm_products import arithmetics, multiply_by_kernel  # noqa: E402
from support.sampling import in_share  # noqa: E402

from tcemu.engine.backends.llvm import ffi_handler, machine_code, xla_call  # noqa: E402

ARM_TRIPLE, ARM_COMPILER = "aarch64-unknown-linux-gnu", "aarch64-linux-gnu-gcc"
LATTICES = ("spread", "tight", "special", "small")


class Cpu(NamedTuple):
    """A CPU that code is compiled for, by LLVM's name."""

    machine: str  # as `platform.machine` has it
    features: tuple[str, ...] = ()  # those that the choice of a kernel asks for


CPUS = {
    "apple-m1": Cpu("aarch64"), "cortex-a72": Cpu("aarch64"), "neoverse-v1": Cpu("aarch64"),
    "nehalem": Cpu("x86_64"), "sandybridge": Cpu("x86_64"), "znver2": Cpu("x86_64", ("+avx2",)),
}  # fmt: skip


@cache
def emulator() -> str:
    """Return the program that runs AArch64 programs."""
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if found is None or shutil.which(ARM_COMPILER) is None:
        raise SystemExit("AArch64 needs qemu-user-static, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross (apt-get install)")
    return found


def arm_machine(target: str) -> Any:
    """Return LLVM's target machine for an AArch64 CPU."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = llvm.Target.from_triple(ARM_TRIPLE)
    return found.create_target_machine(cpu=target.partition(":")[0], features="", opt=2, reloc="pic", codemodel="small")


def build_program(folder: Path, kernel: xla_call.Kernel) -> Path:
    """Compile and link the loader with a kernel and its handler, once for each kernel."""
    with mock.patch.object(ffi_handler.platform, "machine", lambda: "aarch64"):
        text = kernel.text + machine_code.SEPARATOR + ffi_handler.handler_text(kernel.name)
    target = str(kernel.target or machine_code.host_target())
    name = sha256(f"{target} {text}".encode()).hexdigest()[:24]
    program = folder / name
    if not program.exists():
        with mock.patch.object(machine_code, "target_machine", arm_machine):
            (folder / f"{name}.o").write_bytes(machine_code.compile_text(text, target))
        words = [ARM_COMPILER, "-O1", "-static", f"-DHANDLER={kernel.name}_handler", f"-I{jax.ffi.include_dir()}"]
        subprocess.run([*words, HERE / "handler_loader.c", folder / f"{name}.o", "-o", program], check=True)
    return program


def call_by_emulator(folder: Path, kernel: xla_call.Kernel, results: Any, *operands: Any) -> tuple[Any, ...]:
    """`xla_call.call` by qemu-user, from within a program of JAX."""
    shapes = (results,) if isinstance(results, jax.ShapeDtypeStruct) else tuple(results)
    program = build_program(folder, kernel)

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        arrays = tuple(np.ascontiguousarray(x) for x in arrays)
        head = [len(arrays), len(shapes)]
        for x in (*arrays, *shapes):
            head += [len(x.shape), *x.shape, int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize]
        given = np.array(head, np.int64).tobytes() + b"".join(x.tobytes() for x in arrays)
        done = subprocess.run([emulator(), program], input=given, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{kernel.name}: exit status {done.returncode}: {done.stderr.decode()}")
        found, at = [], 0
        for shape in shapes:
            size = int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize
            found.append(np.frombuffer(done.stdout[at : at + size], shape.dtype).reshape(shape.shape))
            at += size
        return tuple(found)

    return jax.pure_callback(run, shapes, *operands)


def compare(cpu: str, share: str, lattices: tuple[str, ...] = LATTICES) -> Counter:
    """Count the words of every arithmetic on one CPU, and those that differ from the exact reference."""
    row, words = CPUS[cpu], Counter()
    target = machine_code.Target(cpu, row.features)
    path = lattice_paths.Path(partial(multiply_by_kernel, target=target), lattices)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(lattice_paths.PATHS, {cpu: path}))
        stack.enter_context(mock.patch.object(machine_code, "host_target", lambda: target))  # kernels are chosen for that CPU too
        if row.machine == "aarch64":
            emulator()
            stack.enter_context(mock.patch.object(xla_call, "call", partial(call_by_emulator, Path(folder))))
        elif platform.machine() not in ("x86_64", "AMD64"):
            raise SystemExit(f"{cpu}: this machine is {platform.machine()}; code of x86 CPUs is run by one")
        for name, arithmetic in arithmetics().items():
            if not in_share(name, share):
                continue
            for kind, differ, count in lattice_paths.count_differences(arithmetic, cpu):
                words["differ"] += differ
                words["all"] += count
                if differ:
                    print(f"{cpu}, {kind}: {name}: {differ} of {count} words differ", flush=True)
            words["arithmetics"] += 1
            jax.clear_caches()
    return words


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cpus", nargs="*", choices=[[], *CPUS], default=[], metavar="CPU", help=f"of {', '.join(CPUS)}; none: all")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="only the share I of N of the arithmetics")
    args = parser.parse_args(words)
    wrong = 0
    for cpu in args.cpus or CPUS:
        began = time.monotonic()
        found = compare(cpu, args.share)
        wrong += found["differ"] + (not found["all"])
        seconds = time.monotonic() - began
        print(f"{cpu}: {found['differ']} of {found['all']:,} words differ, {found['arithmetics']} arithmetics, {seconds:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
