"""The only module that uses behaviour which JAX and XLA do not document.

`INTERNALS` lists each such behaviour with the first release that has it. `tests/base/test_jax_internals.py` has a canary for each entry,
which fails when a release of JAX changes it; `pyproject.toml` bounds JAX to the releases for which the canaries were run.
"""

import re
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import jax
import numpy as np

import tcemu.base.jax_release  # noqa: F401 - it checks the release, before names are imported that another one may not have

# isort: split
from jax import Array
from jax._src import config, util, xla_bridge
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current, register_exclusion, user_context
from jax.interpreters import ad, batching, mlir
from jax.interpreters.ad import Zero

from tcemu.base.errors import KernelRefused, warn_once

ZeroCotangent = Zero  # the cotangent of an operand that needs none, which a `custom_vjp` equation's backward rule returns


class Internal(NamedTuple):
    """An undocumented behaviour that the package relies on."""

    name: str  # the function of this module that uses it
    relies_on: str
    since: str  # the first release that has it in its source, of JAX or, for XLA's behaviour, of jaxlib


OLDEST_SOURCE = "0.4.16"  # the oldest release whose source was read: what it has may be older

INTERNALS = tuple(Internal(*row) for row in (
    ("name_compilation_unit", "XLA:CPU leaves calls with the attribute compilation_unit in place and compiles equal ones once", "0.10.1"),
    ("reset_compilation_cache", "the persistent cache reads its configuration once, at the first compilation", OLDEST_SOURCE),
    ("COMPILE_EVENTS", "the names of monitored events begin so for tracing, lowering and compiling", OLDEST_SOURCE),
    ("without_source_locations", "jax_traceback_in_locations_limit is a thread-local setting, read while a program is lowered", "0.4.26"),
    ("without_call_stacks", "operations have the call stack of user_context; registered files are left out of locations", OLDEST_SOURCE),
    ("compile_in_short_time",
        "the names of XLA's options in QUICK_OPTIONS, of which JAX 0.11.1 has one fewer, and the message for an unknown one",
        OLDEST_SOURCE),
    ("caches_were_cleared", "functions under jax._src.util.cache forget their results in jax.clear_caches", "0.10.1"),
    ("compilation_cache_hits",
        "the event of a program from the persistent cache, sent by the thread that compiles; XLA:CPU cannot serialise such a program again",
        OLDEST_SOURCE),
    ("varying_axes", "types under shard_map have the mesh axes along which they vary, as `mat.varying`", "0.10.0"),
    ("failed_check_message", "checkify appends ' (`check` failed)' to a message", OLDEST_SOURCE),
    ("backends_are_initialized", "jax._src.xla_bridge knows whether a backend has started", "0.4.26"),
    ("find_trace", "a tracer has its trace as `_trace`", OLDEST_SOURCE),
    ("without_outer_transform", "name stacks begin with the outermost transform; those of inner programs do not repeat it", OLDEST_SOURCE),
    ("is_backward", "name stacks mark equations of a backward pass by a transform named transpose", OLDEST_SOURCE),
    ("refuse_forward_mode",
        "a primitive on a custom_vjp's tangents is evaluated, lowered or batched in forward mode alone, and before JAX refuses it",
        "0.10.0"),
    ("jvp_rule", "the parameters of custom_jvp_call", "0.5.1"),
    ("vjp_rules", "the parameters of custom_vjp_call", "0.6.2"),
    ("split_scan_operands", "the parameters of scan: num_consts and num_carry, from JAX 0.11 on ft_in", OLDEST_SOURCE),
    ("function_name", "programs know the name and the file of the function that was traced", "0.5.3"),
    ("lowers_late_attributes", "an attribute may be an object with __jax_array__, which is read while a program is lowered", "0.4.26"),
    ("call_with_replacement",
        "a lowering rule sees that jax.export lowers the program (for_export), and its platforms; ffi_call has its attributes as pairs",
        "0.4.36"),
))  # fmt: skip


# ---- compiling

COMPILE_EVENTS = "/jax/core/compile/"
COMPILED_EVENT = f"{COMPILE_EVENTS}backend_compile_duration"  # event of one compiled program


def name_compilation_unit(value: Any, name: str) -> Any:
    """Name the operations that compute a value, so that XLA:CPU compiles equal ones once and copies them into no caller.

    The name belongs to the value: a context would pass it on to every operation within.
    """
    return set_xla_metadata(value, compilation_unit=name)


def reset_compilation_cache() -> None:
    """Make JAX read the configuration of its persistent compilation cache again."""
    compilation_cache.reset_cache()


def without_source_locations() -> AbstractContextManager:
    """Return a context in which programs are lowered without the source lines of their operations; see `without_call_stacks`.

    The setting holds for this thread alone, and the user's setting is back after the context.
    """
    return config.traceback_in_locations_limit(0)


@cache
def _empty_call_stack() -> Any:
    """Return a traceback without a user's frame: that of a thread in which only this file runs, which JAX leaves out of locations."""
    register_exclusion(__file__)
    stacks, done = [], Lock()
    done.acquire()

    def note_stack() -> None:
        stacks.append(current().traceback)
        done.release()

    start_new_thread(note_stack, ())
    done.acquire()
    return stacks[0]


def without_call_stacks(fn: Callable) -> Callable:
    """Return the function, traced to operations without source lines.

    jaxlib 0.10 prepends a call's source lines to those of each operation inside, unless these begin with them
    (`xla::PropagateCallMetadata`). JAX traces a function once and calls it from several places, so that lines pile up on paths through
    nested calls, and compiling a second recipe in one process does not end. Operations without lines take those of their caller.
    """

    @wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with user_context(_empty_call_stack()):
            return fn(*args, **kwargs)

    return traced


_probe_lock = Lock()


@cache
def _probe(owner: str) -> Any:
    """Return a function with one result, which `jax.clear_caches` drops with all others. Nothing is compiled for it."""
    return util.cache(1, trace_context_in_key=False)(lambda: owner)


def caches_were_cleared(owner: str) -> bool:
    """Return whether `jax.clear_caches` has run since this owner's last call; True at its first call."""
    with _probe_lock:
        probe = _probe(owner)
        cleared = probe.cache_info().currsize == 0
        probe()
    return cleared


_hits = local()


@cache
def _count_hits() -> None:
    def note(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _hits.count = getattr(_hits, "count", 0) + 1

    jax.monitoring.register_event_listener(note)


def compilation_cache_hits() -> int:
    """Return how many programs this thread has taken from JAX's persistent compilation cache, since the first call of this function."""
    _count_hits()
    return getattr(_hits, "count", 0)


QUICK_OPTIONS = {  # of XLA on CPUs: machine code in half the time, which is slower and has the same bits
    "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}  # fmt: skip
FAST_OPTIONS = {**QUICK_OPTIONS, "xla_backend_optimization_level": 2}  # code as fast as by default, in half the time


def compile_in_short_time(lowered: jax.stages.Lowered, *, optimised: bool = False) -> jax.stages.Compiled:
    """Compile a program in half of XLA's time on a CPU, elsewhere as usual. Options that XLA does not know are left out.

    Args:
        lowered: The program.
        optimised: The machine code is as fast as usual; otherwise compiling takes half of that time again.
    """
    while jax.default_backend() == "cpu":
        wanted = FAST_OPTIONS if optimised else QUICK_OPTIONS
        options = {name: value for name, value in wanted.items() if name not in _unknown_options}
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] not in options:
                raise
            _unknown_options.add(unknown[1])
    return lowered.compile()


_unknown_options: set[str] = set()  # names in QUICK_OPTIONS that this release of XLA has rejected


class _LateAttribute:
    CODE = b"code"

    def __jax_array__(self) -> bytes:
        return self.CODE


@cache
def lowers_late_attributes() -> bool:
    """Return whether JAX lowers an attribute that is an object with `__jax_array__`."""
    with mlir.make_ir_context():
        try:
            return mlir.ir_attribute(_LateAttribute()) == mlir.ir_attribute(_LateAttribute.CODE)
        except TypeError:
            return False


_replaceable = Primitive("tcemu_kernels")


def call_with_replacement(program: Callable[..., Array], replacement: Callable[..., Array], *operands: Any) -> Array:
    """Call a program of kernels. Another one replaces it in a program that `jax.export` writes, and where a compiler refuses a kernel.

    Only lowering shows either. So the replacement, which takes long to trace, is traced there, if it is needed.

    Args:
        program: Returns one array. Its late attributes (see `lowers_late_attributes`) say their platform as `platform`, and reading one may
            raise `KernelRefused`.
        replacement: Gives the same bits. It uses no tracer but its operands.
        *operands: Pytrees of arrays.
    """
    leaves, tree = jax.tree.flatten(operands)

    def of_leaves(fn: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *leaves: fn(*jax.tree.unflatten(tree, leaves))

    return _call_or_trace(of_leaves(program), of_leaves(replacement), *leaves)


def _call_or_trace(program: Callable[..., Array], replacement: Callable[..., Array], *operands: Any) -> Array:
    if is_tracing():
        return _replaceable.bind(*operands, jaxpr=jax.make_jaxpr(program)(*map(jax.typeof, operands)), replacement=replacement)
    try:
        return program(*operands)
    except KernelRefused as refused:
        _warn_of_refusal(refused)
        return replacement(*operands)


def is_tracing() -> bool:
    """Return whether new values become part of a program that is being traced."""
    return isinstance(jax.device_put(np.float32(0)), Tracer)  # unlike jnp.zeros, device_put compiles nothing outside a trace


def _call_traced(program: ClosedJaxpr) -> Callable[..., Array]:
    return lambda *operands: jaxpr_as_fun(program)(*operands)[0]


@_replaceable.def_impl
def _compute(*operands: Any, jaxpr: ClosedJaxpr, replacement: Callable[..., Array]) -> Array:
    return _call_or_trace(_call_traced(jaxpr), replacement, *operands)


@_replaceable.def_abstract_eval
def _type_of_result(*_: Any, jaxpr: ClosedJaxpr, replacement: Callable[..., Array]) -> Any:
    return jaxpr.out_avals[0]


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr, replacement: Callable[..., Array]
) -> tuple[Array, int]:
    batched = (jax.vmap(fn, in_axes=tuple(axes)) for fn in (_call_traced(jaxpr), replacement))
    return _call_or_trace(*batched, *operands), 0


def _lower(ctx: Any, *operands: Any, jaxpr: ClosedJaxpr, replacement: Callable[..., Array]) -> Any:
    replaced = ctx.module_context.lowering_parameters.for_export
    if not replaced:
        try:
            for attribute in _late_attributes(jaxpr.jaxpr):
                if attribute.platform in (ctx.platforms or ctx.module_context.platforms):
                    attribute.__jax_array__()
        except KernelRefused as refused:
            _warn_of_refusal(refused)
            replaced = True
    return mlir.lower_fun(replacement if replaced else _call_traced(jaxpr), multiple_results=False)(ctx, *operands)


mlir.register_lowering(_replaceable, _lower)
batching.primitive_batchers[_replaceable] = _batch


def _warn_of_refusal(refused: KernelRefused) -> None:
    warn_once(f"{refused.summary}. JAX's operations compute in its place, with the same bits but slower")


def _late_attributes(program: Jaxpr) -> Iterator[Any]:
    for equation in program.eqns:
        if equation.primitive.name == "ffi_call":
            yield from (value for _, value in equation.params["attributes"] if hasattr(value, "__jax_array__"))
        for inner in inner_programs(equation.params):
            yield from _late_attributes(inner)


def backends_are_initialized() -> bool:
    """Return whether JAX has started a backend in this process."""
    return xla_bridge.backends_are_initialized()


# ---- traced values


def varying_axes(array: Array) -> frozenset:
    """Return the mesh axes along which the array's type says that devices may hold different values; none under `check_vma=False`."""
    manual = getattr(jax.typeof(array), "mat", None)  # types that are no arrays have none
    return frozenset() if manual is None else manual.varying


def find_trace(tracer: Any) -> Any:
    """Return the trace to which a tracer belongs."""
    return tracer._trace


def failed_check_message(message: str) -> str:
    """Return the message of a failed `checkify.check` as it was given."""
    return message.removesuffix(" (`check` failed)")


# ---- programs


def inner_programs(value: Any) -> Iterator[Jaxpr]:
    """Yield the programs among an equation's parameters."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from inner_programs(item)


def is_backward(equation: JaxprEqn) -> bool:
    """Return whether an equation belongs to a backward pass. Equations of inner programs do not show it."""
    stack = equation.source_info.name_stack.stack
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for part in stack)


def without_outer_transform(program: ClosedJaxpr, name: str) -> ClosedJaxpr:
    """Return a program whose equations' names do not show the outermost transform, if that is `name`."""

    def rename(equation: JaxprEqn) -> JaxprEqn:
        names = equation.source_info.name_stack
        if not names.stack or (type(names.stack[0]).__name__, names.stack[0].name) != ("Transform", name):
            return equation
        return equation.replace(source_info=equation.source_info.replace(name_stack=type(names)(names.stack[1:])))

    return program.replace(jaxpr=program.jaxpr.replace(eqns=[rename(equation) for equation in program.jaxpr.eqns]))


def function_name(program: Jaxpr) -> str:
    """Return the name of the function from which a program was traced."""
    return program.debug_info.func_name


def function_file(program: Jaxpr) -> Path | None:
    """Return the file of the function from which a program was traced, or None if it is unknown."""
    source = program.debug_info.func_filename
    return Path(source) if source else None


def split_scan_operands(params: Mapping[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    """Split values that belong to a scan's operands into those of the constants, of the carry and of the scanned arrays."""
    if "ft_in" in params:  # JAX 0.11 and later
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    carry = params["num_consts"] + params["num_carry"]
    return [list(values[: params["num_consts"]]), list(values[params["num_consts"] : carry]), list(values[carry:])]


def _refuse_tangent(*_: Any, message: str, **__: Any) -> Any:
    raise TypeError(message)


_names_only = jax.make_user_context(False)  # part of the key of `jit`'s cache
named_call = Primitive("tcemu_named_call")  # stands for a function of arrays of one type, and is never compiled
named_call.def_abstract_eval(lambda *operands, name, dtype: operands[0] if dtype is None else operands[0].update(dtype=dtype))
batching.defbroadcasting(named_call)


def traced_by_name(fn: Callable[..., Array], *, dtype: np.dtype | None = None) -> Callable[..., Array]:
    """Decorate a function of arrays of one type: under `tracing_names` its calls are traced as one `named_call` with its name.

    Args:
        fn: The function, of arrays of one shape.
        dtype: Dtype of its result; None: that of its operands.
    """

    @wraps(fn)
    def choose(*operands: Any) -> Array:
        return named_call.bind(*operands, name=fn.__name__, dtype=dtype) if _names_only.value else fn(*operands)

    return choose


def tracing_names() -> AbstractContextManager:
    """Return a context in which functions of `traced_by_name` are not traced. What is traced there is for interpreters: XLA refuses it."""
    return _names_only(True)


# A custom_jvp would not do: under vmap its rule is batched, and a batched tangent is that of jax.jacfwd
_tangent = Primitive("tcemu_reverse_mode_tangent")  # the identity; reverse mode transposes it, and nothing may evaluate it
_tangent.def_abstract_eval(lambda tangent, message: tangent)
_tangent.def_impl(_refuse_tangent)
mlir.register_lowering(_tangent, _refuse_tangent)
ad.deflinear2(_tangent, lambda cotangent, _, message: [cotangent])
batching.primitive_batchers[_tangent] = _refuse_tangent
_marked = Primitive("tcemu_reverse_mode_operand")  # the identity
_marked.def_abstract_eval(lambda x, message: x)
_marked.def_impl(lambda x, message: x)
mlir.register_lowering(_marked, lambda _, x, message: [x])
batching.defvectorized(_marked)


def _mark_jvp(primals: Sequence[Any], tangents: Sequence[Any], message: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    return refuse_forward_mode(x, message), tangent if isinstance(tangent, Zero) else _tangent.bind(tangent, message=message)


ad.primitive_jvps[_marked] = _mark_jvp


def refuse_forward_mode(x: Any, message: str) -> Any:
    """Return x. In reverse mode its cotangent passes; in forward mode its tangent raises TypeError with the message."""
    return _marked.bind(x, message=message)


class DerivativeRule(NamedTuple):
    """A derivative rule of a `custom_jvp` or `custom_vjp` equation."""

    call: Callable[..., Any]  # of the `jvp` and forward rules: (program, constants, ...)
    debug_info: Any

    def replace(self, call: Callable[..., Any]) -> Any:
        """Return another rule as the equation's parameter."""
        return wrap_init(call, debug_info=self.debug_info)


class VjpRules(NamedTuple):
    """The rules of a `custom_vjp` equation."""

    forward: DerivativeRule
    backward: DerivativeRule
    out_trees: Callable[[], tuple]  # trees of the results and residuals, and for each residual the operand that it is, or None


def jvp_rule(params: Mapping[str, Any]) -> DerivativeRule:
    """Return the rule of a `custom_jvp` equation with these parameters."""
    return DerivativeRule(params["jvp_jaxpr_fun"].call_wrapped, params["jvp_jaxpr_fun"].debug_info)


def replace_jvp_rule(params: Mapping[str, Any], call: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a `custom_jvp` equation with another rule."""
    return {**params, "jvp_jaxpr_fun": jvp_rule(params).replace(call)}


def vjp_rules(params: Mapping[str, Any]) -> VjpRules:
    """Return the rules of a `custom_vjp` equation with these parameters."""
    forward, backward = (DerivativeRule(params[name].call_wrapped, params[name].debug_info) for name in ("fwd_jaxpr_thunk", "bwd"))
    return VjpRules(forward, backward, params["out_trees"])


def replace_vjp_rules(
    params: Mapping[str, Any], forward: Callable[..., Any], backward: Callable[..., Any], out_trees: Callable[[], tuple]
) -> dict[str, Any]:
    """Return the parameters of a `custom_vjp` equation with other rules."""
    rules = vjp_rules(params)
    changes = {"fwd_jaxpr_thunk": rules.forward.replace(forward), "bwd": rules.backward.replace(backward), "out_trees": out_trees}
    return {**params, **changes}
