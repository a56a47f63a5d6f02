"""One canary for each undocumented behaviour of JAX and XLA that the package relies on: it fails when a release changes that behaviour."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.config import traceback_in_locations_limit
from jax.experimental import checkify
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from support.device_processes import run_on_devices

from tcemu.base import jax_internals, jax_release
from tcemu.base.errors import KernelRefused, warn_once
from tcemu.base.jax_internals import (
    COMPILE_EVENTS,
    COMPILED_EVENT,
    INTERNALS,
    backends_are_initialized,
    caches_were_cleared,
    call_with_replacement,
    compilation_cache_hits,
    compile_in_short_time,
    failed_check_message,
    find_trace,
    function_file,
    function_name,
    is_backward,
    jvp_rule,
    lowers_late_attributes,
    name_compilation_unit,
    refuse_forward_mode,
    replace_jvp_rule,
    replace_vjp_rules,
    reset_compilation_cache,
    split_scan_operands,
    varying_axes,
    vjp_rules,
    without_call_stacks,
    without_outer_transform,
    without_source_locations,
)
from tcemu.base.jax_release import check_release

ROOT = Path(__file__).parents[2]
X = jnp.arange(4.0)


def test_every_entry_has_a_canary_and_no_other_module_reaches_into_jax():
    source = Path(__file__).read_text()
    assert [entry.name for entry in INTERNALS if not re.search(rf"^def test_{entry.name.lower()}\b", source, re.M)] == []
    assert all(hasattr(jax_internals, entry.name) for entry in INTERNALS)
    private = re.compile(r"jax\._src|jax\.interpreters|\._trace\b|call_wrapped|debug_info\b|compilation_cache import|xla_metadata import")
    files = [path for path in (ROOT / "tcemu").rglob("*.py") if path.name != "jax_internals.py"]
    assert [str(path) for path in files if private.search(path.read_text())] == []


def test_jax_is_bounded_to_the_releases_that_were_tried():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest, bound = (".".join(map(str, release)) for release in (jax_release.OLDEST, jax_release.BOUND))
    assert [line for line in dependencies if line.startswith("jax")] == [f"{name}>={oldest},<{bound}" for name in ("jax", "jaxlib")]


@pytest.mark.parametrize("name", ["0.10.1", "0.10.2", "0.11", "0.12.0.1", "0.12.1.dev20260901"])
def test_releases_that_were_tried_pass_in_silence(name):
    check_release(name)


def test_other_releases_are_refused_or_warned_of():
    for name in ("0.4.38", "0.10.0", "0.9.2"):
        with pytest.raises(ImportError, match=rf"needs JAX 0\.10\.1 or later, below 0\.13, and JAX {name} is installed"):
            check_release(name)
    for name in ("0.13.0", "0.13.1.dev2", "1.0"):
        with pytest.warns(UserWarning, match=rf"was tried with JAX 0\.10\.1 or later, below 0\.13, and JAX {name} is installed"):
            check_release(name)


def test_the_release_is_checked_when_the_package_is_imported():
    code = """
import sys, jax
jax.__version__ = "0.10.0"
try:
    import tcemu
    tcemu.gemm
except ImportError as error:
    print(error)
for name in [name for name in sys.modules if name.partition(".")[0] == "tcemu"]:
    del sys.modules[name]
jax.__version__ = "0.13.0"
import tcemu
tcemu.gemm
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("tcemu needs JAX 0.10.1") and done.stdout.count("\n") == 1
    assert done.returncode == 0 and done.stderr.count("UserWarning: tcemu was tried with JAX") == 1


def test_compile_in_short_time(monkeypatch):
    """XLA knows each option by its name, but one that JAX 0.11.1 dropped; others are left out; and it computes the same."""
    lowered = jax.jit(lambda x: x * 3 - 1).lower(X)
    dropped = {"xla_cpu_use_fusion_emitters"} if tuple(map(int, jax.__version__.split(".")[:3])) >= (0, 11, 1) else set()
    assert jnp.array_equal(compile_in_short_time(lowered)(X), X * 3 - 1) and jax_internals._unknown_options == dropped
    monkeypatch.setitem(jax_internals.QUICK_OPTIONS, "xla_no_option_of_this_name", 1)
    assert jnp.array_equal(compile_in_short_time(lowered)(X), X * 3 - 1)
    assert jax_internals._unknown_options == dropped | {"xla_no_option_of_this_name"}
    jax_internals._unknown_options.discard("xla_no_option_of_this_name")


def test_caches_were_cleared():
    """Each owner learns of it once."""
    for owner in ("torch", "ptx"):
        caches_were_cleared(owner)
        assert not caches_were_cleared(owner)
    jax.clear_caches()
    for owner in ("torch", "ptx"):
        assert caches_were_cleared(owner) and not caches_were_cleared(owner)


def test_compilation_cache_hits(tmp_path):
    """A program from the persistent cache is counted. That it cannot be serialised again is why; where XLA can, the count may go."""
    lowered = [jax.jit(lambda x: x * 5 - 7).lower(X) for _ in range(2)]
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    reset_compilation_cache()
    try:
        lowered[0].compile()
        count = compilation_cache_hits()
        found = lowered[1].compile()
        assert compilation_cache_hits() == count + 1
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_compilation_cache()
    with pytest.raises(jax.errors.JaxRuntimeError, match="not found"):
        deserialize_and_load(*serialize(found))(X)


def test_name_compilation_unit():
    """Calls that are named so stay calls in the compiled program; others are inlined. `test_compilation.py` holds the time to it."""
    inner = jax.jit(lambda x: jnp.sin(x) + 1)

    def program(name):
        fn = jax.jit(lambda x: name(inner(name(inner(x)) * 2)))
        return fn, re.findall(r" = \S+ call\(.*", fn.lower(X).compile().as_text())

    fn, calls = program(lambda value: name_compilation_unit(value, "unit"))
    assert len(calls) == 2 and all('compilation_unit="unit"' in call for call in calls)
    without, none = program(lambda value: value)
    assert none == [] and jnp.array_equal(fn(X), without(X))


def test_reset_compilation_cache(tmp_path):
    """A directory that is named after the first compilation is used."""
    jax.jit(lambda x: x * 3)(X)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = [jax.config.values[name] for name in names]
    try:
        for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
            jax.config.update(name, value)
        reset_compilation_cache()
        jax.jit(lambda x: jnp.tan(x * 5) - 7)(X).block_until_ready()
        assert any(tmp_path.iterdir())
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        reset_compilation_cache()


def test_compile_events():
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: events.append(event))
    jax.jit(lambda x: jnp.cosh(x * 11))(X).block_until_ready()
    assert len({event for event in events if event.startswith(COMPILE_EVENTS)}) >= 2
    assert events.count(COMPILED_EVENT) == 1


@pytest.fixture
def source_lines():
    """Programs have them, as users' do: support/compiling.py leaves them out."""
    with traceback_in_locations_limit(10):
        yield


@pytest.mark.usefixtures("source_lines")
def test_without_source_locations():
    """The setting is of this thread, is read while a program is lowered, and does not make JAX trace or compile anew."""

    def fn(x):
        return jnp.exp(x) * 13

    def locations():
        return jax.jit(lambda x: fn(x)).lower(X).as_text(debug_info=True)

    assert Path(__file__).name in locations()
    with without_source_locations():
        assert Path(__file__).name not in locations()
        assert jax.config.jax_traceback_in_locations_limit == 0
    assert jax.config.jax_traceback_in_locations_limit != 0
    traces = []
    once = jax.jit(lambda x: traces.append(0) or x + 1)
    once(X)
    with without_source_locations():
        once(X)
    assert traces == [0]


@pytest.mark.usefixtures("source_lines")
def test_without_call_stacks():
    """Operations inside have no line, those of the caller have theirs, and an error has no misleading cause."""

    @without_call_stacks
    def fn(x):
        if x.shape == (3,):
            raise ValueError("three")
        return jax.jit(lambda x: jnp.exp(x) * 13)(x)

    lines = [equation.source_info.traceback for equation in jax.make_jaxpr(fn)(X).eqns]
    assert lines and all(not summarize_frames(line) for line in lines)
    text = jax.jit(lambda x: fn(x) + 1).lower(X).as_text(debug_info=True)
    assert Path(__file__).name in text
    with pytest.raises(ValueError, match="three") as caught:
        jax.jit(fn)(jnp.ones(3))
    assert caught.value.__cause__ is None or "three" in str(caught.value.__cause__)


def summarize_frames(traceback):
    from jax._src.source_info_util import user_frames

    return list(user_frames(traceback))


def test_varying_axes():
    code = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from tcemu.base.jax_internals import varying_axes
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
seen = []
def fn(x, y):
    seen.append((varying_axes(x), varying_axes(y)))
    return x
jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")))(jnp.arange(4.0), jnp.arange(2.0))
assert seen[0] == (frozenset({"i"}), frozenset()), seen
print("done")
"""
    assert varying_axes(X) == frozenset()
    assert run_on_devices(2, code).endswith("done\n")


def test_failed_check_message():
    error, _ = checkify.checkify(lambda x: checkify.check(jnp.all(x > 0), "{x} is low", x=x[0]), errors=checkify.user_checks)(-X)
    assert failed_check_message(error.get() or "") == f"{-X[0]} is low"


def test_backends_are_initialized():
    X.block_until_ready()
    assert backends_are_initialized() is True


def test_find_trace():
    traces = []

    @jax.make_jaxpr
    def outer(x):
        traces.append(find_trace(x))
        jax.make_jaxpr(lambda y: traces.append(find_trace(y)) or y)(x)
        traces.append(find_trace(x + 1))
        return x

    outer(X)
    assert traces[0] is traces[2] and traces[0] is not traces[1]


def test_is_backward():
    """A scope of the user's own that is named so does not count."""

    def loss(x):
        with jax.named_scope("transpose(mine)"):
            return jnp.sum(jnp.sin(x) @ jnp.ones((4, 2)))

    forward, both = (jax.make_jaxpr(fn)(X).eqns for fn in (loss, jax.grad(loss)))
    assert not any(map(is_backward, forward))
    assert {equation.primitive.name for equation in both if is_backward(equation)} >= {"dot_general"}
    assert not is_backward(both[0])


def test_without_outer_transform():
    """A scope inside the transform stays, and inner programs have names without it."""

    def fn(x):
        with jax.named_scope("vmap(mine)"):
            return jax.jit(jnp.sin)(x) @ x

    program = jax.make_jaxpr(jax.vmap(fn))(jnp.ones((2, 4)))
    names = lambda program: [str(equation.source_info.name_stack) for equation in program.eqns]
    assert set(names(program)) == {"vmap(vmap(mine))"}
    assert set(names(without_outer_transform(program, "vmap"))) == {"vmap(mine)"}
    assert without_outer_transform(program, "jvp").jaxpr.eqns == program.jaxpr.eqns
    assert names(program.eqns[0].params["jaxpr"]) == [""]


def bind_with(equation, params, x):
    return equation.primitive.bind(x, **equation.primitive.get_bind_params(params))[0]


@jax.custom_jvp
def half(x):
    return x / 2


@half.defjvp
def half_jvp(primals, tangents):
    return half(*primals), tangents[0] / 2


def test_refuse_forward_mode():
    """In reverse mode the cotangent passes, whatever is around it; in forward mode the message comes before JAX's own."""

    @jax.custom_vjp
    def function(x):
        return 2 * x

    function.defvjp(lambda x: (function(x), None), lambda _, g: (3 * g,))

    marked = lambda x: function(refuse_forward_mode(x, "the message"))
    looped = lambda x: jax.lax.scan(lambda x, _: (jax.checkpoint(marked)(x), None), x, None, length=2)[0]
    batched = jax.grad(lambda x: jax.vmap(looped)(x).sum())
    for call in (jax.grad(lambda x: looped(x).sum()), jax.jit(jax.vmap(jax.grad(looped))), jax.jacrev(looped), batched):
        assert jnp.array_equal(jnp.sum(call(X)), 9 * X.size)
    assert jnp.array_equal(jax.jit(looped)(X), 4 * X)
    for call in (jax.jacfwd(looped), jax.jit(jax.jacfwd(looped)), lambda x: jax.jvp(looped, (x,), (x,)), jax.linearize(looped, X)[1]):
        with pytest.raises(TypeError, match="the message"):
            call(X)


def test_jvp_rule():
    """The rule is called with a flag per operand, and another rule takes its place."""
    program = jax.make_jaxpr(half)(X)
    (equation,) = program.eqns
    rule, flags = jvp_rule(equation.params), []

    def another(*zeros):
        flags.append(zeros)
        return rule.call(*zeros)

    params = replace_jvp_rule(equation.params, another)
    tangent = jax.jvp(lambda x: bind_with(equation, params, x), (X,), (X,))[1]
    assert flags and jnp.array_equal(tangent, X / 2)


@jax.custom_vjp
def third(x):
    return x / 3


third.defvjp(lambda x: (third(x), x), lambda x, g: (g / 3,))


def test_vjp_rules():
    """Forward, backward and the trees of results and residuals; other rules take their place."""
    (equation,) = jax.make_jaxpr(third)(X).eqns
    rules, calls = vjp_rules(equation.params), []

    def forward(*nonzeros):
        calls.append("forward")
        return rules.forward.call(*nonzeros)

    def backward(*args):
        calls.append("backward")
        return rules.backward.call(*args)

    params = replace_vjp_rules(equation.params, forward, backward, rules.out_trees)
    gradient = jax.grad(lambda x: jnp.sum(bind_with(equation, params, x)))(X)
    assert calls == ["forward", "backward"] and jnp.allclose(gradient, 1 / 3)
    results, residuals, numbers = rules.out_trees()
    assert results.num_leaves == residuals.num_leaves == len(numbers) == 1


def test_split_scan_operands():
    def fn(scale, start, xs):
        return lax.scan(lambda carry, x: (carry + scale * x, carry), start, xs)

    (equation,) = (e for e in jax.make_jaxpr(fn)(jnp.float32(2), jnp.float32(1), X).eqns if e.primitive.name == "scan")
    consts, carry, scanned = split_scan_operands(equation.params, equation.invars)
    assert [len(part) for part in (consts, carry, scanned)] == [1, 1, 1]
    assert scanned[0].aval.shape == X.shape and carry[0].aval.shape == ()


def test_function_name():
    (equation,) = jax.make_jaxpr(jax.jit(half))(X).eqns
    program = equation.params["jaxpr"].jaxpr
    assert function_name(program) == "half" and function_file(program) == Path(__file__)


def test_lowers_late_attributes():
    assert lowers_late_attributes()


@dataclass(frozen=True)
class LateName:
    """An attribute of a call for a platform, which a compiler may refuse."""

    platform: str
    refusal: str = ""

    def __jax_array__(self):
        if self.refusal:
            raise KernelRefused(self.refusal, "the whole text")
        return b"name"


TRANSFORMS = {"none": lambda f: f, "vmap": jax.vmap, "vmap of jit": lambda f: jax.vmap(jax.jit(f)), "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_call_with_replacement(transform, nested):
    """A call of foreign code is in a program, unless the program is exported or a kernel of the lowered platform is refused."""
    x = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    traced = []

    def program(on_cpu, on_cuda=""):
        def call(v):
            ffi = jax.ffi.ffi_call("tcemu_none", jax.ShapeDtypeStruct(v.shape, v.dtype), vmap_method="broadcast_all")
            calls = {
                name: lambda v, late=LateName(name, refusal): ffi(v, name=late) for name, refusal in (("cpu", on_cpu), ("cuda", on_cuda))
            }
            chosen = lambda v: lax.platform_dependent(v, **calls)
            return lax.cond(v.sum() > -1, chosen, chosen, v) if nested else chosen(v)

        return jax.jit(TRANSFORMS[transform](lambda v: call_with_replacement(call, lambda v: traced.append(v) or v * 3, v)))

    for refused_on_cuda in ("", "refused by another"):
        assert "tcemu_none" in program("", refused_on_cuda).lower(x).as_text() and not traced
    for platforms in (["cpu"], ["cuda"], ["tpu"], ["cpu", "tpu"]):
        exported = jax.export.export(program("refused by nobody"), platforms=platforms)(x)
        assert "custom_call" not in exported.mlir_module() and traced
    traced.clear()
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"refused by nobody\. JAX's operations compute in its place") as caught:
        for _ in range(2):
            assert program("refused by nobody")(x).tolist() == (3 * x).tolist() and traced
    assert len(caught) == 1


@pytest.mark.parametrize("index", range(len(INTERNALS)), ids=[entry.name for entry in INTERNALS])
def test_entries_say_what_they_rely_on(index):
    entry = INTERNALS[index]
    assert len(entry.relies_on) > 20 and re.fullmatch(r"0\.\d+(\.\d+)?", entry.since)
