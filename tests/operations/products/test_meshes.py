"""Arrays on a mesh with explicit axes, which `jax.make_mesh` gives: the bits of one device, sharded as plain JAX shards them."""

import re

import pytest
from support.device_processes import run_on_devices
from support.sampling import sample_cases

COMMON = """
import jax, jax.numpy as jnp, numpy as np, tcemu
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
rng = np.random.default_rng(0)
floats = lambda *shape: rng.normal(size=shape).astype(np.float32)
words = lambda *shape: rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
codes = lambda fmt, shape: words(4, *shape, *[2] * (fmt.words - 1)).astype(fmt.dtype)
put = lambda v, spec: v if spec is None else jax.device_put(v, NamedSharding(mesh, spec))

def check(name, fn, operands, specs, plain=None):
    expected = jax.tree.leaves(fn(*operands))
    placed = [put(v, spec) for v, spec in zip(operands, specs, strict=True)]
    found = jax.tree.leaves(jax.jit(fn)(*placed))
    like = found if plain is None else jax.tree.leaves(jax.jit(plain)(*placed))
    given = [P("d", *[None] * (v.ndim - 1)) if plain is None else v.sharding.spec for v in like]
    assert [v.sharding.spec for v in found] == given, (name, found, given)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32), name)
"""
GEMM = """
SHARDED = (P("d"), P()), (P(None, "d"), P()), (P(), P(None, "d"))
a, b = floats(4, 8, 32), floats(32, 6)
gemm = lambda a, b: tcemu.gemm(a, b, op="f16", target="A100")
check("gemm", gemm, (a, b), SHARDED[1], jnp.matmul)
try:
    jax.jit(gemm)(put(a, P(None, None, "d")), put(b, P("d")))
    print("a sharded K was taken")
except Exception as error:
    assert type(error).__name__ == "ShardingTypeError" and "Contracting dimensions are sharded" in str(error), error
"""
PRODUCTS = (
    GEMM
    + """
fp8 = lambda a, b: tcemu.matmul(a, b, recipe="fp8")
einsum = lambda a, b: jnp.einsum("bik,kj->ijb", a, b)
for specs in (SHARDED[0], SHARDED[2]):
    check("gemm", gemm, (a, b), specs, jnp.matmul)
check("emulate", tcemu.emulate(einsum, "bf16"), (a, b), SHARDED[1], einsum)
check("matmul", fp8, (a, b), SHARDED[0], jnp.matmul)
grad = lambda fn: jax.grad(lambda a, b: (fn(a, b) ** 2).sum(), (0, 1))
check("gradients", grad(tcemu.emulate(jnp.matmul, "bf16")), (a, b), SHARDED[1], grad(jnp.matmul))
"""
)
INSTRUCTIONS = """
batch = P("d")
op = tcemu.parse("f16")
registers = lambda op, name: words(4, 32, op.register_count(name))
check("mma", lambda *abc: tcemu.mma(op, *abc, target="sm_80"), [registers(op, name) for name in "abc"], (batch, batch, batch))
wmma = tcemu.parse("f16 wmma")
check("wmma", lambda *abc: tcemu.wmma_mma(wmma, *abc, target="sm_80"), [words(4, 32, 8) for _ in "abc"], (batch, batch, batch))
group, shared = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", words(4, 1024)
call = lambda d, a, shared: tcemu.wgmma(group, d, tcemu.layouts.descriptor(0, 128, 256, 0), shared, a=a, target="H100")
check("wgmma", call, (words(4, 4, 32, 4), words(4, 4, 32, 4), shared), (batch, batch, batch))
for spelling, target in (("f16", "A100"), ("f64", "H100")):
    op = tcemu.parse(spelling)
    operands = [codes(getattr(op, name), op.matrix_shape(name)) for name in "abc"]
    check("dot", lambda *abc, op=op, target=target: tcemu.dot(op, *abc, target=target), operands, (batch, batch, batch))
"""


AXIS_NAME = """
a, b, whole = floats(8, 32), floats(32, 8), tcemu.get_recipe("bf16", backward="exact")
split = lambda a, b: tcemu.matmul(a, b, recipe=whole, axis_name="d")
part = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P(), check_vma=False))
found, expected = part(put(a, P(None, "d")), put(b, P("d"))), tcemu.matmul(a, b, recipe=whole.replace(split_k=2))
np.testing.assert_array_equal(np.asarray(found).view(np.uint32), np.asarray(expected).view(np.uint32))
"""


PROGRAMS = {"gemm": GEMM, "products": PRODUCTS, "instructions": INSTRUCTIONS, "K cut over an axis": AXIS_NAME}


@pytest.mark.parametrize("name", sample_cases(PROGRAMS, ("K cut over an axis",)))
def test_the_bits_of_one_device_sharded_as_plain_jax_shards_them(name):
    """In a process with two devices."""
    program = COMMON + PROGRAMS[name] + 'print("equal")'
    assert run_on_devices(2, program) == "equal\n"


# ---- Products on a mesh of 8 devices, in a process of its own: the bits of one device, and which collectives the compiler puts in.


PROGRAM = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tcemu

assert len(jax.devices()) == 8
FULL = sys.argv[1] == "full"
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
rng = np.random.default_rng(0)
a, b = rng.standard_normal((32, 256)).astype(np.float32), rng.standard_normal((256, 16)).astype(np.float32)
BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
COLLECTIVE = r"= (\\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)[-(]"

def check(name, fn, specs, result, forbidden=None):
    want = np.asarray(fn(jnp.asarray(a), jnp.asarray(b)))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs)]
    compiled = jax.jit(fn, out_shardings=NamedSharding(mesh, result)).lower(*placed).compile()
    got = compiled(*placed)
    assert got.sharding.spec == result, got.sharding
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))
    print(name, sorted(set(re.findall(COLLECTIVE, compiled.as_text()))))

gemm = partial(tcemu.gemm, op=BF16, target="sm_90a")
recipe = lambda name, **changes: partial(tcemu.matmul, recipe=tcemu.get_recipe(name, **changes))
dot = tcemu.dot_general(tcemu.get_recipe("fp8"))
general = lambda a, b: dot(a, b, (((1,), (0,)), ((), ())))
if FULL:
    check("gemm, data", gemm, (P("rows"), P()), P("rows"))
    check("gemm, tensor", gemm, (P(), P(None, "columns")), P(None, "columns"))
    check("gemm, both", gemm, (P("rows"), P(None, "columns")), P("rows", "columns"))
    check("dot_general, fp8, both", general, (P("rows"), P(None, "columns")), P("rows", "columns"))
else:
    check("matmul, both", recipe("bf16"), (P("rows"), P(None, "columns")), P("rows", "columns"))
split = Mesh(np.array(jax.devices()), ("k",))
mesh = split
if FULL:
    check("split_k=8, K", recipe("bf16", split_k=8), (P(None, "k"), P("k")), P())

cases = (("bf16", {}), ("fp8", {}), ("bf16", {"reduction": "tree"}))
for name, changes in cases if FULL else cases[:1]:
    one = tcemu.get_recipe(name, split_k=8, backward="exact", **changes)
    part = tcemu.get_recipe(name, backward="exact", **changes)
    bits = jax.jit(jax.shard_map(
        lambda x, y: tcemu.matmul(x, y, recipe=part, axis_name="k"), mesh=split, in_specs=(P(None, "k"), P("k")), out_specs=P(),
        check_vma=False,
    ))
    want = tcemu.matmul(a, b, recipe=one)
    np.testing.assert_array_equal(np.asarray(bits(a, b)).view(np.uint32), np.asarray(want).view(np.uint32))
if FULL:
    plain = np.asarray(tcemu.matmul(a, b, recipe=part))
    assert (plain.view(np.uint32) != np.asarray(want).view(np.uint32)).any(), "the order of the reduction shows in the bits"
g = lambda fn: FULL and jax.grad(lambda x, y: jnp.sum(jnp.sin(fn(x, y))), (0, 1))(a, b)
for got, want in zip(g(bits), g(lambda x, y: tcemu.matmul(x, y, recipe=one))) if FULL else ():
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
print("shard_map, K: the same bits")
"""


@pytest.mark.full
@pytest.mark.parametrize("which", ["sample", "full"])
def test_a_mesh_gives_the_bits_of_one_device(which):
    *free, last = run_on_devices(8, PROGRAM, which).splitlines()
    if which == "full":
        split = free.pop()
        assert "collective-permute" in split and "all-gather" not in split, split  # parts of D go round; A and B stay where they are
    assert len(free) == (4 if which == "full" else 1)
    for line in free:  # rows and columns cut: devices tell each other only whether an Inf or NaN came, and a tensor's largest magnitude
        sent = re.findall(r"\('(\w+)\[([\d,]*)\]\S*', '([\w-]+)'\)", line)
        assert sent and all(how == "all-reduce" and (kind == "pred" or not shape) for kind, shape, how in sent), line
    assert last == "shard_map, K: the same bits"
