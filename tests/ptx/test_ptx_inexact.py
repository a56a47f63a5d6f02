"""Which arrays of a kernel may hold something else than the GPU's bits."""

import jax
import numpy as np
import pytest
from ptx_kernels.manifest import KERNELS

from tcemu import ptx
from tcemu.ptx.instruction_interface import Operation
from tcemu.ptx.linker.inexact_arrays import ANYWHERE, find_inexact_places
from tcemu.ptx.linker.linked_kernel import link
from tcemu.ptx.text.parser import parse

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def linked(text, entry=None):
    module = parse(text)
    with jax.enable_x64(True):
        return link(module, module.entries[entry] if entry else next(iter(module.entries.values())), "sm_90a", False)


def places(text, entry=None, inexact=()):
    """Find the places of a kernel in which also the named instructions count as inexact."""
    kernel = linked(text, entry)
    for statement in kernel.statements:
        if statement.statement.name in inexact:
            assert isinstance(statement.semantics, Operation)
            statement.semantics = statement.semantics._replace(exact=False)
    return find_inexact_places(kernel)


def numbers(kernel, found):
    """Return the parameters, counted from 0, among the places."""
    offsets = list(linked(kernel.text("sm_80" if "sm_80" in kernel.texts else "sm_90a"), kernel.entry).parameters.values())
    return {offsets.index(place) for place in found if place in offsets}


def test_kernels_are_exact_but_for_tanh():
    chosen = [
        kernel for kernel in KERNELS if "tanh" in kernel.text("sm_90a") or kernel.name in ("softmax_warp", "attention", "triton_softmax")
    ]
    found = {kernel.name: (kernel, places(kernel.text("sm_90a"), kernel.entry)) for kernel in chosen}
    inexact = {name: numbers(kernel, where) for name, (kernel, where) in found.items() if where}
    assert set(inexact) == {"gelu", "approximations"}
    assert (
        3 in inexact["gelu"]
        and inexact["gelu"].isdisjoint(range(3))
        and 1 in inexact["approximations"]
        and 0 not in inexact["approximations"]
    )


@pytest.mark.parametrize(
    ("name", "instruction", "array"),
    [("softmax_warp", "ex2", 1), ("softmax_online", "ex2", 1), ("attention", "ex2", 3), ("triton_attention", "ex2", 3),
    ("rms_norm", "rsqrt", 2),
     ("triton_softmax", "ex2", 1), ("sgemm", "fma", 2)],
)  # fmt: skip
def test_values_are_followed_through_registers_shared_memory_and_products(name, instruction, array):
    """The output is reached from an instruction in the kernel's middle, through shuffles, shared memory and mma; the inputs are not."""
    kernel = BY_NAME[name]
    found = numbers(kernel, places(kernel.text("sm_80"), kernel.entry, (instruction,)))
    assert array in found and found.isdisjoint(range(array))


THREE_ARRAYS = (
    HEAD
    + """
.visible .entry both(.param .u64 x, .param .u64 y, .param .u64 z)
{
    .reg .b64 %a<4>; .reg .f32 %f<4>; .reg .pred %p;
    ld.param.u64 %a0, [x];
    ld.param.u64 %a1, [y];
    ld.param.u64 %a2, [z];
    cvta.to.global.u64 %a1, %a1;
    ld.global.f32 %f0, [%a0];
    tanh.approx.f32 %f1, %f0;
    ex2.approx.ftz.f32 %f2, %f0;
    BODY
    st.global.f32 [%a1], %f1;
    st.global.f32 [%a2], %f2;
    ret;
}
"""
)


def test_each_array_has_its_own_flag():
    def inexact(body=""):
        x, y, z = np.array([0.5], np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
        return ptx.run(THREE_ARRAYS.replace("BODY", body), grid=1, block=1, args=[x, y, z], target="H100").inexact

    assert inexact() == {1}
    assert inexact("mov.f32 %f1, %f2;") == {1}  # the order of statements does not count
    assert inexact("st.global.f32 [%a0], %f1;") == {0, 1, 2}  # what is loaded from x may be the stored value
    assert inexact("setp.gt.f32 %p, %f1, 0f00000000; @%p add.f32 %f2, %f2, %f2;") == {1, 2}
    assert inexact("setp.gt.f32 %p, %f1, 0f00000000; @%p ret;") == {0, 1, 2}


def test_an_unknown_pointer_may_mean_every_array():
    text = THREE_ARRAYS.replace("BODY", "ld.global.u64 %a3, [%a0]; st.global.f32 [%a3], %f1;")
    assert ANYWHERE in places(text)
    assert places(THREE_ARRAYS.replace("BODY", "").replace("tanh.approx.f32 %f1", "mov.f32 %f1")) == frozenset()
