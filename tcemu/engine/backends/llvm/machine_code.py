"""LLVM IR to machine code of this CPU, by llvmlite: compiled once a machine, kept on disk, loaded into the process.

llvmlite is an optional dependency, the extra `cpu`, so it is imported where it is used.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from tcemu.base import stored_code as store

OPTIMISATION = 2  # LLVM's -O2
WIDE_FEATURES = {512: ("avx512f", "avx512bw", "avx512dq", "avx512vl"), 256: ("avx2",)}  # features that vectors of so many bits need
LEAST_BITS = 128
KEEP_WIDE = "-prefer-256-bit"  # of a CPU with 512: LLVM keeps to 256 bits on some of them
SEPARATOR = "\n; ---- another module\n"


class LoadedFunctions(NamedTuple):
    addresses: dict[str, int]  # by name
    owner: Any  # while it lives, the functions do


class Target(NamedTuple):
    """A CPU for which LLVM compiles."""

    cpu: str  # LLVM's name
    features: tuple[str, ...]  # "+avx2" or "-avx2" for each feature that LLVM knows, sorted

    def has(self, feature: str) -> bool:
        """Returns whether the CPU has a feature, as "avx512vnni"."""
        return f"+{feature}" in self.features

    def without(self, *prefixes: str) -> Target:
        """Returns the same CPU without the features whose names begin with one of the prefixes, as "avx512"."""
        return self._replace(features=tuple(f"-{name[1:]}" if name[1:].startswith(prefixes) else name for name in self.features))

    @property
    def vector_bits(self) -> int:
        """Bits of the vectors that a kernel should use: 512, 256 or 128."""
        return next((bits for bits, needed in WIDE_FEATURES.items() if all(map(self.has, needed))), LEAST_BITS)

    def __str__(self) -> str:
        return f"{self.cpu}:{','.join(self.features)}"


@cache
def _llvm() -> Any:
    """Returns llvmlite.binding, ready to compile for this machine. Raises ImportError, or what LLVM or the system says."""
    import llvmlite.binding

    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    llvmlite.binding.check_jit_execution()
    return llvmlite.binding


@cache
def missing_compiler() -> str:
    """Returns why kernels cannot be compiled in this process; "" if they can. It runs no kernel: `xla_call.missing` does."""
    if sys.platform == "win32":  # and the kernels' FFI handler was never called by Windows' conventions
        return "no kernels on Windows, where llvmlite has no JITLink; JAX's operations compute the same bits, two to four times slower"
    try:
        _llvm()
    except ImportError as error:
        return f"llvmlite cannot be imported ({error}): pip install llvmlite"
    except Exception as error:  # whatever LLVM or the system says
        return f"llvmlite does not work here ({error})"
    return ""


@cache
def host_target() -> Target:
    """Returns this machine's CPU. llvmlite must be there."""
    llvm = _llvm()
    return Target(llvm.get_host_cpu_name(), tuple(sorted(llvm.get_host_cpu_features().flatten().split(","))))


def vector_bits() -> int:
    """Returns the bits of the vectors that a kernel for this machine should use: 512, 256 or 128."""
    return host_target().vector_bits


def compile_text(text: str, target: str) -> bytes:
    """Returns the object file of LLVM IR: modules, joined by SEPARATOR, that are linked and optimised for a target as `str(Target)`.

    Raises RuntimeError, with what LLVM says.
    """
    return target_machine(target).emit_object(optimise(text, target))


def optimise(text: str, target: str) -> Any:
    """Returns the one module of llvmlite that `compile_text` turns into machine code."""
    llvm = _llvm()
    machine = target_machine(target)
    module, *others = map(llvm.parse_assembly, text.split(SEPARATOR))
    for each in (module, *others):
        each.triple, each.data_layout = machine.triple, str(machine.target_data)
    for other in others:
        module.link_in(other)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compiler_name() -> str:
    """Returns the versions of llvmlite and LLVM. llvmlite must be there."""
    import llvmlite

    return f"llvmlite {llvmlite.__version__} with LLVM {'.'.join(map(str, _llvm().llvm_version_info))}"


def _facts() -> tuple[str, ...]:
    return f"-O{OPTIMISATION}", KEEP_WIDE, compiler_name(), _llvm().get_process_triple(), platform.system()


COMPILER = store.KernelCompiler(_facts, compile_text)


def load_functions(binary: bytes, names: Sequence[str]) -> LoadedFunctions:
    """Load an object file of `compile_text` into this process. Raises RuntimeError if it calls a function that is not in the process.

    Args:
        binary: The object file.
        names: Functions of the file.
    """
    llvm = _llvm()
    library = llvm.JITLibraryBuilder().add_object_img(binary).add_current_process()
    for name in names:
        library.export_symbol(name)
    owner = library.link(_linker(), f"kernel {next(_numbers)}")
    return LoadedFunctions({name: owner[name] for name in names}, owner)


_numbers = count()  # of libraries


@cache
def _linker() -> Any:
    """Returns LLVM's linker, which places the code and the constants of a file side by side, and lives as long as the process."""
    llvm = _llvm()
    return llvm.create_lljit_compiler(target_machine(str(host_target())), use_jit_link=True)


def target_machine(target: str) -> Any:
    """Returns LLVM's target machine. Where the CPU has vectors of 512 bits, LLVM does not keep to those of 256."""
    llvm = _llvm()
    cpu, _, features = target.partition(":")
    chosen = f"{features},{KEEP_WIDE}" if "+avx512f" in features.split(",") else features
    found = llvm.Target.from_triple(llvm.get_process_triple())
    return found.create_target_machine(cpu=cpu, features=chosen, opt=OPTIMISATION, reloc="pic", codemodel="small", jit=True)
