"""Arrays on a mesh with explicit axes, which `jax.make_mesh` gives: the bits of one device, sharded as plain JAX shards them."""

import pytest
from support.devices import printed_on
from support.sampling import sampled

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
    wanted = jax.tree.leaves(fn(*operands))
    placed = [put(v, spec) for v, spec in zip(operands, specs, strict=True)]
    found = jax.tree.leaves(jax.jit(fn)(*placed))
    like = found if plain is None else jax.tree.leaves(jax.jit(plain)(*placed))
    given = [P("d", *[None] * (v.ndim - 1)) if plain is None else v.sharding.spec for v in like]
    assert [v.sharding.spec for v in found] == given, (name, found, given)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32), name)
"""
PRODUCTS = """
SHARDED = (P("d"), P()), (P(None, "d"), P()), (P(), P(None, "d"))
a, b = floats(4, 8, 32), floats(32, 6)
gemm = lambda a, b: tcemu.gemm(a, b, op="f16", target="A100")
fp8 = lambda a, b: tcemu.matmul(a, b, recipe="fp8")
einsum = lambda a, b: jnp.einsum("bik,kj->ijb", a, b)
for specs in SHARDED:
    check("gemm", gemm, (a, b), specs, jnp.matmul)
check("emulate", tcemu.emulate(einsum, "bf16"), (a, b), SHARDED[1], einsum)
check("matmul", fp8, (a, b), SHARDED[0], jnp.matmul)
grad = lambda fn: jax.grad(lambda a, b: (fn(a, b) ** 2).sum(), (0, 1))
check("gradients", grad(tcemu.emulate(jnp.matmul, "bf16")), (a, b), SHARDED[1], grad(jnp.matmul))
try:
    jax.jit(gemm)(put(a, P(None, None, "d")), put(b, P("d")))
    print("a sharded K was taken")
except Exception as error:
    assert type(error).__name__ == "ShardingTypeError" and "Contracting dimensions are sharded" in str(error), error
"""
INSTRUCTIONS = """
batch = P("d")
op = tcemu.parse("f16")
registers = lambda op, name: words(4, 32, op.registers(name))
check("mma", lambda *abc: tcemu.mma(op, *abc, target="sm_80"), [registers(op, name) for name in "abc"], (batch, batch, batch))
wmma = tcemu.parse("f16 wmma")
check("wmma", lambda *abc: tcemu.wmma_mma(wmma, *abc, target="sm_80"), [words(4, 32, 8) for _ in "abc"], (batch, batch, batch))
group, shared = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", words(4, 1024)
call = lambda d, a, shared: tcemu.wgmma(group, d, tcemu.descriptor(0, 128, 256, 0), shared, a=a, target="H100")
check("wgmma", call, (words(4, 4, 32, 4), words(4, 4, 32, 4), shared), (batch, batch, batch))
for spelling, target in (("f16", "A100"), ("f64", "H100")):
    op = tcemu.parse(spelling)
    operands = [codes(getattr(op, name), op.matrix(name)) for name in "abc"]
    check("dot", lambda *abc, op=op, target=target: tcemu.dot(op, *abc, target=target), operands, (batch, batch, batch))
"""


@pytest.mark.parametrize("name", sampled(("products", "instructions"), ("products",)))
def test_the_bits_of_one_device_sharded_as_plain_jax_shards_them(name):
    """In a process with two devices."""
    program = COMMON + {"products": PRODUCTS, "instructions": INSTRUCTIONS}[name] + 'print("equal")'
    assert printed_on(2, program) == "equal\n"
