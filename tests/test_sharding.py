"""Products on a mesh of 8 devices, in a process of its own: the bits of one device, and which collectives the compiler puts in."""

import re

import pytest
from support.devices import printed_on

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
recipe = lambda name, **changes: partial(tcemu.matmul, recipe=tcemu.recipe(name, **changes))
dot = tcemu.dot_general(tcemu.recipe("fp8"))
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
    one = tcemu.recipe(name, split_k=8, backward="exact", **changes)
    part = tcemu.recipe(name, backward="exact", **changes)
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


@pytest.mark.parametrize("which", ["sample", pytest.param("full", marks=pytest.mark.full)])
def test_a_mesh_gives_the_bits_of_one_device(which):
    *free, last = printed_on(8, PROGRAM, which).splitlines()
    if which == "full":
        split = free.pop()
        assert "collective-permute" in split and "all-gather" not in split, split  # parts of D go round; A and B stay where they are
    assert len(free) == (4 if which == "full" else 1)
    for line in free:  # rows and columns cut: devices tell each other only whether an Inf or NaN came, and a tensor's largest magnitude
        sent = re.findall(r"\('(\w+)\[([\d,]*)\]\S*', '([\w-]+)'\)", line)
        assert sent and all(how == "all-reduce" and (kind == "pred" or not shape) for kind, shape, how in sent), line
    assert last == "shard_map, K: the same bits"
