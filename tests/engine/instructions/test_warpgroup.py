"""The asynchronous protocol: results after their wait, and every hazard once with and once without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu.instructions import Warpgroup

TARGET = "sm_90a"
OP = "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8"
WIDE = "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8"
BITS = "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc"
SPARSE = "wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8"
RNG = np.random.default_rng(0)
SHARED = RNG.integers(0, 2**32, 2048, np.uint32)  # A at 0, 2 KiB; B at 4096, 256 bytes
A_DESC, B_DESC = tcemu.layouts.descriptor(0, 16, 256, 32), tcemu.layouts.descriptor(4096, 16, 256, 32)
D = RNG.integers(0, 2**32, (4, 32, 4), np.uint32)
A = RNG.integers(0, 2**32, (4, 32, 4), np.uint32)
MODES = pytest.mark.parametrize("how", ["at once", "jit"])


def undefined_error(said):
    return pytest.raises(tcemu.UndefinedBehaviour, match="(?s)" + said)


def start(checked=True, **registers):
    return Warpgroup(SHARED, checked=checked).write(**({"d": D, "a": A} | registers))


def issue(group, d="d", op=OP, **given):
    return group.wgmma(op, d, B_DESC, target=TARGET, **(given or {"a_desc": A_DESC}))


def product(d=D, op=OP, **given):
    return np.asarray(tcemu.wgmma(op, d, B_DESC, SHARED, target=TARGET, **(given or {"a_desc": A_DESC})))


def run_program(how, program):
    """A program of static order raises while it is built, under jit too, without checkify."""
    return program() if how == "at once" else jax.jit(lambda unused: program())(0)


@pytest.mark.parametrize("checked", [True, False])
def test_a_result_is_there_after_the_wait_that_covers_it(checked):
    once, twice = product(), product(product())
    thrice = product(twice)
    group = issue(issue(start(checked).fence()).commit_group()).commit_group()
    group = issue(group).commit_group()
    for left, value in ((3, D), (2, once), (1, twice), (0, thrice)):
        waited = group.wait_group(left)
        np.testing.assert_array_equal(waited.registers["d"], value)
        assert len(waited.groups) == left
    np.testing.assert_array_equal(waited.read("d")[0], thrice)
    np.testing.assert_array_equal(group.wait_group(9).registers["d"], D)


def test_empty_groups_count_and_uncommitted_products_do_not():
    group = issue(start().fence()).commit_group().commit_group()
    np.testing.assert_array_equal(group.wait_group(1).read("d")[0], product())
    later = issue(group.wait_group(0)).wait_group(0)
    np.testing.assert_array_equal(later.registers["d"], product())
    np.testing.assert_array_equal(later.commit_group().wait_group(0).read("d")[0], product(product()))


def test_the_unchecked_warpgroup_shows_the_old_value_until_the_wait():
    group = issue(Warpgroup(SHARED).write(d=D)).commit_group()
    value, group = group.read("d")
    np.testing.assert_array_equal(value, D)
    np.testing.assert_array_equal(group.wait_group(0).read("d")[0], product())


def test_products_read_what_shared_memory_held_when_they_were_issued():
    group = issue(start(False).fence()).commit_group().store(4096, np.zeros(64, np.uint32)).wait_group(0)
    np.testing.assert_array_equal(group.read("d")[0], product())
    assert not np.asarray(group.shared)[1024:1088].any()
    np.testing.assert_array_equal(issue(group).commit_group().wait_group(0).read("d")[0], product())


def test_metadata_and_descriptors_may_be_registers_with_names():
    lanes = lambda desc: np.broadcast_to(np.array([desc & 0xFFFFFFFF, desc >> 32], np.uint32), (4, 32, 2))
    group = start(ad=lanes(A_DESC), bd=lanes(B_DESC), meta=np.full((4, 32, 1), 0x44444444, np.uint32)).fence()
    one = group.wgmma(OP, "d", "bd", a="a", target=TARGET).commit_group().wait_group(0)
    np.testing.assert_array_equal(one.read("d")[0], product(a=A))
    two = group.wgmma(OP, "d", "bd", a_desc="ad", target=TARGET).commit_group().wait_group(0)
    np.testing.assert_array_equal(two.read("d")[0], product())
    sparse = group.wgmma(SPARSE, "d", B_DESC, a="a", sp_meta="meta", sp_sel=0, target=TARGET).commit_group().wait_group(0)
    want = tcemu.wgmma(SPARSE, D, B_DESC, SHARED, a=A, sp_meta=np.full((4, 32), 0x44444444, np.uint32), target=TARGET)
    np.testing.assert_array_equal(sparse.read("d")[0], want)


def test_a_new_accumulator_needs_no_write_where_it_is_not_read():
    group = Warpgroup(SHARED, checked=True).fence().wgmma(OP, "d", B_DESC, a_desc=A_DESC, scale_d=False, target=TARGET)
    np.testing.assert_array_equal(group.commit_group().wait_group(0).read("d")[0], product(np.zeros_like(D)))
    with pytest.raises(ValueError, match="no register is named 'd'; there are none"):
        Warpgroup(SHARED).wgmma(OP, "d", B_DESC, a_desc=A_DESC, target=TARGET)


# ---- hazards of registers: the order of the calls alone tells


@MODES
def test_a_first_product_without_a_fence(how):
    with undefined_error("issued before any wgmma.fence.*9.7.15.7.1"):
        run_program(how, lambda: Warpgroup(SHARED, checked=True).wgmma(OP, "d", B_DESC, a_desc=A_DESC, scale_d=False, target=TARGET))
    run_program(how, lambda: issue(start().fence()))
    run_program(how, lambda: issue(start(False)))


@MODES
@pytest.mark.parametrize("name", ["d", "a"])
@pytest.mark.parametrize("access", ["write", "read"])
def test_a_register_used_by_a_thread_without_a_fence_after_it(how, name, access):
    role = {"d": "accumulator", "a": "A"}[name]
    touch = lambda group: group.write(**{name: A}) if access == "write" else group.read(name)[1]
    with undefined_error(f"register '{name}', the {role} of .*, was used by a thread since the last wgmma.fence"):
        run_program(how, lambda: issue(touch(start().fence()), a="a"))
    run_program(how, lambda: issue(touch(start().fence()).fence(), a="a"))
    run_program(how, lambda: issue(start().fence().write(other=A), a="a"))


@MODES
def test_an_accumulator_of_another_shape_without_a_fence(how):
    first = lambda: issue(start().fence())
    with undefined_error("accumulator 'd' of .*b1.* was last that of a product of shape m64n8k32"):
        run_program(how, lambda: issue(first(), op=BITS))
    run_program(how, lambda: issue(first(), op=OP.replace("s8.s8", "u8.s8")))
    run_program(how, lambda: issue(first().fence(), op=BITS))
    with undefined_error("shape m64n8k32"):  # a wait is no fence
        run_program(how, lambda: issue(first().commit_group().wait_group(0), op=BITS))


@MODES
@pytest.mark.parametrize("access", ["write", "read"])
@pytest.mark.parametrize("name", ["d", "a"])
def test_a_register_used_by_a_thread_before_the_wait(how, name, access):
    touch = lambda group: group.write(**{name: A}) if access == "write" else group.read(name)[1]
    pending = lambda: issue(issue(start().fence(), a="a").commit_group(), d="d", a="a")
    verb = {"write": "written", "read": "read"}[access]
    with undefined_error(f"register '{name}' is {verb} while it is the .* of a pending .*wait_group must cover its group.*9.7.15.7.3"):
        run_program(how, lambda: touch(pending().commit_group()))
    with undefined_error("wait_group must cover"):
        run_program(how, lambda: touch(pending().commit_group().wait_group(1)))
    with undefined_error("no group holds it: commit_group, then wait_group"):
        run_program(how, lambda: touch(pending().wait_group(0)))
    run_program(how, lambda: touch(pending().commit_group().wait_group(0)))
    run_program(how, lambda: pending().write(other=A))


@MODES
def test_a_pending_accumulator_as_the_a_of_another_product(how):
    first = lambda: issue(start(e=D).fence())
    with undefined_error("register 'd', the A of .*, is the accumulator of a pending"):
        run_program(how, lambda: issue(first().fence(), d="e", a="d"))
    run_program(how, lambda: issue(first().commit_group().wait_group(0), d="e", a="d"))
    with undefined_error("register 'a', the accumulator of .*, is the A of a pending"):
        run_program(how, lambda: issue(issue(start().fence(), a="a"), d="a"))
    run_program(how, lambda: issue(issue(start().fence(), a="a").commit_group().wait_group(0), d="a"))
    run_program(how, lambda: issue(issue(start(e=D).fence(), a="a"), d="e", a="a"))  # two products may read one A


# ---- hazards of shared memory and descriptors: the addresses tell


ZEROS = np.zeros(4, np.uint32)


@pytest.mark.parametrize("offset", [0, 2044, 4096 - 12, 4096, 4096 + 252])
def test_shared_memory_overwritten_while_a_product_reads_it(offset):
    pending = issue(start().fence()).commit_group()
    with undefined_error("shared memory is overwritten while .*s8.s8 still reads it"):
        pending.store(offset, ZEROS)
    pending.wait_group(0).store(offset, ZEROS)
    issue(start(False).fence()).store(offset, ZEROS)
    with undefined_error("overwritten"):
        pending.store(offset, ZEROS, proxy="async")
    traced = tcemu.checked(jax.jit(lambda at: issue(start().fence()).store(at, ZEROS).shared))
    with undefined_error("overwritten"):
        traced(offset)


@pytest.mark.parametrize("offset", [2048, 4096 - 16, 4096 + 256, 8192 - 16])
def test_shared_memory_beside_what_is_read_may_be_overwritten(offset):
    after = issue(start().fence()).commit_group().store(offset, ZEROS + 7)
    want = SHARED.copy()
    want[offset // 4 : offset // 4 + 4] = 7
    np.testing.assert_array_equal(after.shared, want)
    traced = tcemu.checked(jax.jit(lambda at: issue(start().fence()).store(at, ZEROS + 7).shared))
    np.testing.assert_array_equal(traced(offset), want)


def test_traced_descriptors_are_followed():
    def program(start_at, offset):
        words = np.array([B_DESC & 0xFFFFFFFF, B_DESC >> 32], np.uint32)
        desc = jnp.asarray(words).at[0].set(start_at >> 4 | words[0] & 0xFFFF0000)
        group = start().fence().wgmma(OP, "d", desc, a="a", target=TARGET)
        return group.commit_group().store(offset, ZEROS).wait_group(0).read("d")[0]

    found = tcemu.checked(jax.jit(program))
    np.testing.assert_array_equal(found(jnp.uint32(4096), 512), product(a=A))
    with undefined_error("overwritten"):
        found(jnp.uint32(512), 512)


def test_stores_of_threads_need_a_proxy_fence():
    stored = start().fence().store(4096, ZEROS)
    with undefined_error("reads shared memory that threads stored since the last fence.proxy.async"):
        issue(stored)
    issue(stored.fence_proxy_async())
    issue(start().fence().store(4096, ZEROS, proxy="async"))
    issue(start().fence().store(4352, ZEROS))  # beside
    twice = stored.store(4352, ZEROS)
    with undefined_error("threads stored"):
        issue(twice)
    with undefined_error("threads stored"):
        tcemu.checked(jax.jit(lambda at: issue(start().fence().store(at, ZEROS)).uncommitted[0].result))(4096)


def test_descriptors_that_differ_between_warps():
    held = np.broadcast_to(np.array([B_DESC & 0xFFFFFFFF, B_DESC >> 32], np.uint32), (4, 32, 2)).copy()
    call = lambda held, checked=True: start(checked, desc=held).fence().wgmma(OP, "d", "desc", a="a", target=TARGET)
    call(held)
    held[3, 31, 0] += 2
    with undefined_error("warp 3, lane 31 holds another one"):
        call(held)
    with undefined_error("warp 3, lane 31"):
        tcemu.checked(jax.jit(lambda held: call(held).uncommitted[0].result))(held)
    call(held, False)


# ---- it is a value


def test_a_pipeline_in_a_scan_equals_the_products_one_by_one():
    """The product under way is part of the loop's state; each step waits for it before it gives A new values."""
    steps = RNG.integers(0, 2**32, (5, 4, 32, 4), np.uint32)

    def step(group, a):
        group = group.wait_group(0).write(a=a).fence()
        return issue(group, a="a").commit_group(), None

    def program(checked):
        first = issue(start(checked, a=steps[0]).fence(), a="a").commit_group()
        return jax.lax.scan(step, first, steps[1:])[0].wait_group(0).read("d")[0]

    want = D
    for a in steps:
        want = product(want, a=a)
    np.testing.assert_array_equal(program(False), want)
    np.testing.assert_array_equal(jax.jit(program, static_argnums=0)(True), want)


def test_batches_and_vmap():
    many = RNG.integers(0, 2**32, (3, 4, 32, 4), np.uint32)
    go = lambda group: issue(group.fence()).commit_group().wait_group(0).read("d")[0]
    whole = np.asarray(go(start(d=many)))
    assert whole.shape == (3, 4, 32, 4)
    np.testing.assert_array_equal(whole[2], product(many[2]))
    np.testing.assert_array_equal(jax.vmap(lambda d: go(start(d=d)))(many), whole)
    moved = Warpgroup(np.stack([SHARED] * 3), checked=True).write(d=many).fence().store(np.array([0, 4096, 8000]), ZEROS)
    for at, offset in enumerate((0, 4096, 8000)):
        assert not np.asarray(moved.shared)[at, offset // 4 : offset // 4 + 4].any()
        assert (np.asarray(moved.shared)[at] != SHARED).sum() == 4
    with undefined_error("threads stored"):
        issue(moved)


def test_unchecked_it_costs_nothing():
    def by_hand(d):
        return tcemu.wgmma(
            OP, tcemu.wgmma(OP, d, B_DESC, SHARED, a_desc=A_DESC, target=TARGET), B_DESC, SHARED, a_desc=A_DESC, target=TARGET
        )

    def by_protocol(d):
        group = Warpgroup(SHARED).write(d=d).fence()
        return issue(issue(group).commit_group()).commit_group().wait_group(0).read("d")[0]

    names = lambda fn: [e.primitive.name for e in jax.make_jaxpr(fn)(D).eqns]
    assert names(by_protocol) == names(by_hand)
    group = issue(issue(Warpgroup(SHARED).write(d=D)).commit_group())
    assert all(pending.reads is None for pending in (*group.groups[0], *group.uncommitted))


def test_bad_arguments_are_explained():
    group = start()
    with pytest.raises(ValueError, match="n: got -1; expected an integer constant"):
        group.wait_group(-1)
    with pytest.raises(ValueError, match="n: got 1"):
        group.wait_group(1.0)
    with pytest.raises(ValueError, match="no register is named 'x'; there are d, a"):
        group.read("x")
    with pytest.raises(ValueError, match=r"x: got uint32\[32, 4\]; expected uint32\[..., 4, 32, n\]"):
        group.write(x=D[0])
    with pytest.raises(TypeError, match=r"x: got int64\[4, 32, 4\]"):
        group.write(x=D.astype(np.int64))
    with pytest.raises(ValueError, match="proxy: got 'tma'"):
        group.store(0, ZEROS, proxy="tma")
    with pytest.raises(ValueError, match="offset: 2 must be a multiple of 4"):
        group.store(2, ZEROS)
    with pytest.raises(ValueError, match=r"offset: 8180 .* 4 words from there must fit the 2048"):
        group.store(8180, ZEROS)
    with pytest.raises(TypeError, match="offset: got float64"):
        group.store(0.5, ZEROS)
    with pytest.raises(TypeError, match="words: got int64"):
        group.store(0, np.zeros(4, np.int64))
    with undefined_error("offset: 2 must be a multiple of 4"):
        tcemu.checked(jax.jit(lambda at: group.store(at, ZEROS).shared))(2)
    with pytest.raises(tcemu.Unsupported, match=r"tcemu\.Warpgroup\.wgmma runs wgmma"):
        group.wgmma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "d", B_DESC, a="a", target=TARGET)
