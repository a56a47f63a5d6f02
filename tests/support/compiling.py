"""How the usual run's programs are compiled: as users do, or in short time.

In short time means without most of XLA's optimisations, and without its emitters of fusions by MLIR: LLVM gets plain loops, which take half
as long to compile and run slower. The bits are the same: what users compile is tested by the files that `conftest.py` names.
"""

import os
from functools import cache

import jax
from jax._src import compiler  # JAX has options of one `jit`, and none of a process that can change

UNOPTIMISED = "jax_disable_most_optimizations"
EMITTERS = "xla_cpu_use_fusion_emitters"
CHOSEN = UNOPTIMISED.upper() in os.environ  # then it stays

_options_of = compiler.get_compile_options


def compile_in_short_time(short: bool) -> None:
    """Says it of this process and of those that it starts. Does nothing where the environment has chosen.

    JAX compiles a function anew where the first of the two options differs; the other goes with it.
    """
    if CHOSEN or jax.config.values[UNOPTIMISED] == short:
        return
    jax.config.update(UNOPTIMISED, short)
    plain = short and _has_option()
    compiler.get_compile_options = _options_without_emitters if plain else _options_of
    _set("XLA_FLAGS", f"--{EMITTERS}=false" if plain else None)
    _set(UNOPTIMISED.upper(), "1" if short else None)


@cache
def _has_option() -> bool:
    """Whether there is a CPU alone, and this jaxlib knows the option. It also has XLA read XLA_FLAGS before it is changed."""
    if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
        return False
    try:
        jax.jit(lambda x: x + 1, compiler_options={EMITTERS: False})(0.0).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _options_without_emitters(*args, **kwargs):
    options = _options_of(*args, **kwargs)
    options.env_option_overrides = [*options.env_option_overrides, (EMITTERS, False)]
    return options


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
