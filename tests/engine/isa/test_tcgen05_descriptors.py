"""The instruction descriptor of tcgen05.mma: the constants of compilers, every usual product there and back, and wrong fields."""

from dataclasses import replace

import pytest

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.tcgen05 import usual_products
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, decode_instruction_descriptor, encode_instruction_descriptor

MMA = "tcgen05.mma.cta_group::1.kind::{}"
CONSTANTS = {  # as Triton 3.9.0 writes them: instruction, descriptor -> product
    ("f16", 0x8110010): "m128n64k16.f32.f16.f16",
    ("tf32", 0x8100910): "m128n64k8.f32.tf32.tf32",
    ("i8", 0x81004A0): "m128n64k32.s32.s8.s8",
    ("f16", 0x8100490): "m128n64k16.f32.bf16.bf16",
}


@pytest.mark.parametrize(("kind", "value"), CONSTANTS)
def test_constants_of_compilers(kind, value):
    op = parse(MMA.format(kind))
    found = decode_instruction_descriptor(op, value)
    assert str(found.product).endswith(CONSTANTS[kind, value]), found
    assert encode_instruction_descriptor(found) == value


def test_every_usual_product_there_and_back():
    shaped = [(op, (64, 32)) for op in usual_products() if op.scaling is None and op.kind != "i8"]
    everything = [*usual_products(), *(replace(op, m=m, n=n) for op, (m, n) in shaped)]
    for op in everything:
        value = encode_instruction_descriptor(op)
        assert decode_instruction_descriptor(op.instruction, value).product == op and value < 1 << 32
    assert len(everything) == 290
    ws = parse("tcgen05.mma.ws.cta_group::1.kind::f16.m32n64k16.f32.f16.f16")
    fields = InstructionDescriptor(ws, negate_a=True, transpose_b=True, max_shift=16)
    assert decode_instruction_descriptor(ws.instruction, encode_instruction_descriptor(fields)) == fields
    sparse = parse("tcgen05.mma.sp.cta_group::2.kind::tf32.m256n32k16.f32.tf32.tf32")
    fields = InstructionDescriptor(sparse, selector=3, negate_b=True)
    assert decode_instruction_descriptor(sparse.instruction, encode_instruction_descriptor(fields)) == fields
    scaled = parse("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.m128n64k32.f32.e4m3.e2m1")
    fields = InstructionDescriptor(scaled, scale_a_id=3, scale_b_id=1)
    assert encode_instruction_descriptor(fields) >> 29 == 3 and encode_instruction_descriptor(fields) >> 4 & 3 == 1
    long_k = parse("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.m128n64k96.f32.e2m1.e2m1")
    assert encode_instruction_descriptor(long_k) >> 31 == 1


RUBIN = {  # K and scales that Rubin alone has -> bits beside those of the usual product: CuTe DSL 4.8
    "kind::mxf4nvf4.block_scale.block16.m128n64k{}.f32.e2m1.e2m1.{}": (("64", "ue4m3"), ("128", "ue5m3"), 1 << 3 | 1 << 24),
    "kind::mxf4nvf4.block_scale.block32.m128n64k{}.f32.e2m1.e2m1.{}": (("64", "ue8m0"), ("64", "ue5m3"), 1 << 23 ^ 1 << 24),
    "kind::mxf8f6f4.block_scale.m128n64k{}.f32.e4m3.e2m1.{}": (("32", "ue8m0"), ("64", "ue8m0"), 1 << 31),
    "kind::f8f6f4.m128n64k{}.f32.e4m3.e5m2{}": (("32", ""), ("64", ""), 1 << 29),
}


@pytest.mark.parametrize("form", RUBIN)
def test_descriptors_of_rubin(form):
    usual, long, bits = RUBIN[form]
    op, other = (parse("tcgen05.mma.cta_group::1." + form.format(*words)) for words in (long, usual))
    value = encode_instruction_descriptor(op)
    assert value ^ encode_instruction_descriptor(other) == bits
    assert decode_instruction_descriptor(op.instruction, value).product == op


WRONG = {  # kind, descriptor -> what the error says
    ("f16", 0x8110014): "bit 2 is 1, but the instruction is dense",
    ("f16", 0x8110020): "the type of D is 2",
    ("f16", 0x8110090): "have one type",
    ("f16", 0x8110050): "bits 6 are reserved",
    ("f16", 0xC8110010): "bits 30 and 31 are reserved",
    ("f16", 0x2110010): "M is one of 64, 128, not 32",
    ("f16", 0x8000010): "N is one of 8",
    ("f8f6f4", 0x8110110): "the type of A is 2",
    ("f8f6f4", 0x8118290): "cannot lie MN-major",
    ("mxf4.block_scale", 0x8100480): "bit 23 says scales of ue4m3",
    ("mxf4nvf4.block_scale.block16", 0x89100488): "the field of K is 3; .kind::mxf4nvf4 has 0 for 64, 1 for 96, 2 for 128",
    ("mxf4nvf4.block_scale.block16", 0x9900480): "bit 23 says type 3 of the scales, but they are ue4m3 or ue8m0 or ue5m3",
    ("mxf4.block_scale", 0x28900480): "SFA_ID is 1, but 2 scales per row take (0, 2)",
}


@pytest.mark.parametrize(("kind", "value"), WRONG)
def test_wrong_descriptors(kind, value):
    with pytest.raises(Unsupported) as caught:
        decode_instruction_descriptor(parse(MMA.format(kind)), value)
    assert WRONG[kind, value] in str(caught.value)
