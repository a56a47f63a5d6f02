"""How the usual run's programs are compiled: as users do, or in short time.

In short time means without most of XLA's optimisations, without its emitters of fusions by MLIR, and in one piece: LLVM gets plain
loops, which take half as long to compile and run slower, and is set up once for each program. Operations are lowered without their
places in the source, which saves a twelfth. The bits are the same: what users compile is tested by the files that `conftest.py` names.

A quarter of all programs moves one array outside a `jit`, or casts its integers. In short time NumPy does it, and nothing is compiled.

JAX also makes a context of MLIR, with all its dialects, for each program that it lowers, which takes longer than lowering a small
one. In short time one context serves many programs. What it keeps of them, such as their constants, goes with it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import jax
import numpy as np
from jax import lax
from jax._src import compiler, core  # JAX has options of one `jit`, and none of a process that can change
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache import compilation_cache

UNOPTIMISED = "jax_disable_most_optimizations"
SOURCE_PLACES = "jax_traceback_in_locations_limit"
IN_SHORT_TIME = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}  # options of XLA
CHOSEN = UNOPTIMISED.upper() in os.environ  # then it stays
PROGRAMS_OF_A_CONTEXT = 100


def _broadcast(x: np.ndarray, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...]) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _cast(x: np.ndarray, new_dtype: np.dtype, weak_type: bool) -> np.ndarray | None:
    integers = all(np.dtype(dtype).kind in "biu" for dtype in (x.dtype, new_dtype))
    return x.astype(new_dtype) if integers and not weak_type else None


def _bitcast(x: np.ndarray, new_dtype: np.dtype) -> np.ndarray | None:
    return x.view(new_dtype) if x.dtype.itemsize == np.dtype(new_dtype).itemsize else None


MOVEMENTS = {  # operations of JAX on one array; None: JAX does it
    lax.reshape_p: lambda x, new_sizes, dimensions: x.reshape(new_sizes) if dimensions is None else None,
    lax.squeeze_p: lambda x, dimensions: x.squeeze(dimensions),
    lax.broadcast_in_dim_p: _broadcast,
    lax.convert_element_type_p: _cast,
    lax.bitcast_convert_type_p: _bitcast,
}
NUMPY_KINDS = "biuf"  # and no key of random numbers, nor a narrow number of ml_dtypes

_options_of = compiler.get_compile_options
_source_places = jax.config.values[SOURCE_PLACES]
_new_context = mlir.make_ir_context
_compiled_identity = core.stage_p.impl
_compiled_movements = {primitive: primitive.impl for primitive in MOVEMENTS}
_here = threading.local()  # a context is of one thread


def compile_in_short_time(short: bool) -> None:
    """Says it of this process and of those that it starts. Does nothing where the environment has chosen.

    JAX compiles a function anew where the first of the options differs; the others go with it.
    """
    if CHOSEN or jax.config.values[UNOPTIMISED] == short:
        return
    jax.config.update(UNOPTIMISED, short)
    jax.config.update(SOURCE_PLACES, 0 if short else _source_places)
    options = _known_options() if short else {}
    compiler.get_compile_options = _options_in_short_time if options else _options_of
    mlir.make_ir_context = _shared_context if short else _new_context
    core.stage_p.def_impl(_copy_to_device if short else _compiled_identity)
    for primitive, compiled in _compiled_movements.items():
        primitive.def_impl(partial(_move, primitive) if short and options else compiled)
    _set("XLA_FLAGS", " ".join(f"--{name}={str(value).lower()}" for name, value in options.items()) or None)
    _set(UNOPTIMISED.upper(), "1" if short else None)


@contextmanager
def without_kept_programs() -> Iterator[None]:
    """JAX compiles: a program that comes from its cache cannot be stored a second time."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


@cache
def _known_options() -> dict[str, bool | int]:
    """The options above that this jaxlib knows; none unless there is a CPU alone. It also has XLA read XLA_FLAGS before it is changed."""
    if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
        return {}
    return {name: value for name, value in IN_SHORT_TIME.items() if _knows(name, value)}


def _knows(name: str, value: bool | int) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(0.0).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _options_in_short_time(*args, **kwargs):
    options = _options_of(*args, **kwargs)
    options.env_option_overrides = [*options.env_option_overrides, *_known_options().items()]
    return options


def _copy_to_device(x):
    return x if isinstance(x, jax.Array) else jax.device_put(x, may_alias=False)


def _move(primitive, *operands, **parameters):
    x, others = operands[0], {name: value for name, value in parameters.items() if name != "sharding"}
    if len(operands) == 1 and parameters.get("sharding") is None and _is_plain(x):
        moved = MOVEMENTS[primitive](np.asarray(x), **others)
        if moved is not None and moved.dtype.kind in NUMPY_KINDS:
            return jax.device_put(moved, may_alias=False)
    return _compiled_movements[primitive](*operands, **parameters)


def _is_plain(x) -> bool:
    known = isinstance(x, jax.Array) and isinstance(x.dtype, np.dtype) and x.dtype.kind in NUMPY_KINDS
    return known and not x.weak_type and not x.committed and len(x.devices()) == 1


def _shared_context():
    _here.programs = programs = getattr(_here, "programs", -1) + 1
    if programs % PROGRAMS_OF_A_CONTEXT == 0:
        _here.context = _new_context()
    return _here.context


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
