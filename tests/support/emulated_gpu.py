"""A runner that stands where a GPU would: the emulation, from the words of the kernel's parameters."""

import jax.numpy as jnp
import pytest

import tcemu
from tcemu.engine.backends.cuda.xla_launch import compute_capabilities

without_gpu = pytest.mark.skipif(bool(compute_capabilities()), reason="it stands in for a GPU, and this machine has one")


class EmulatedGpu:
    """`fault(op, words)` may change what it gives back."""

    def __init__(self, target="sm_90a", fault=None):
        self.target, self.name, self.fault, self.calls = target, "emulation", fault, 0

    def facts(self):
        return {"device": self.name, "target": self.target, "driver": "none", "compiler": "none"}

    def __call__(self, op, form, immediates, words):
        self.calls += 1
        found = self.run(op, op.operand_forms[form], immediates, words)
        return found if self.fault is None else self.fault(op, found)

    def run(self, op, operands, immediates, words):
        target = {"target": self.target}
        if op.family in ("mma", "mma.sp"):
            given = {name: words[name][..., 0] for name in ("scale_a", "scale_b") if name in words}
            given |= {name: immediates[name] for name in ("selector_a", "selector_b") if name in immediates}
            abc = [words[name] for name in "abc"]
            if op.sparse:
                return tcemu.mma_sp(op, *abc, words["e"][..., 0], selector=immediates["f"], **given, **target)
            return tcemu.mma(op, *abc, **given, **target)
        if op.family == "wmma.mma":
            return tcemu.wmma_mma(op, *(words[name] for name in "abc"), **target)
        if op.family in ("wmma.load", "wmma.store"):
            bits = op.format.bits
            place = {"offset": words["address"][:, 0].astype(jnp.int32) * 8 // bits}
            if "stride" in operands:
                place["stride"] = words["stride"][:, 0].astype(jnp.int32)
            if op.family == "wmma.load":
                return tcemu.wmma_load(op, words["memory"], **place, **target)
            return tcemu.wmma_store(op, words["memory"], words["r"], **place, **target)
        if op.family == "movmatrix":
            return tcemu.movmatrix(op, words["a"])
        address = words["address"][..., 0].astype(jnp.int32) if "address" in words else None
        if op.family == "ldmatrix":
            return tcemu.ldmatrix(op, words["memory"], address, **target)
        if op.family == "stmatrix":
            return tcemu.stmatrix(op, words["memory"], address, words["r"], **target)
        warps = lambda x: x.reshape(x.shape[0], 4, 32, -1)
        given = {name: value for name, value in immediates.items() if name.startswith("imm")}
        given |= {"a": warps(words["a"])} if "a" in operands else {"a_desc": words["a_desc"]}
        if op.sparse:
            given |= {"sp_meta": warps(words["sp_meta"])[..., 0], "sp_sel": immediates["sp_sel"]}
        scale_d = words["scale_d"][:, 0] != 0
        d = tcemu.wgmma(op, warps(words["d"]), words["b_desc"], words["memory"], scale_d=scale_d, **given, **target)
        return d.reshape(d.shape[0], 128, -1)
