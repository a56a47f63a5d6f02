"""One instruction on the GPU, inside a program: a kernel that runs the PTX statement on batches of warps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.kernels.calls import numbers, run
from tcemu.arithmetic.kernels.launch import Entry, launch
from tcemu.isa.instructions import Instruction
from tcemu.native.text import ENTRY, LANE, Kernel, kernel, rewrites

BLOCKS = 1 << 16  # in a launch; each goes on to further cases


class Statement(NamedTuple):
    """One instruction with its immediates, as a call on words with the cases in front: see `calls.Call`."""

    op: Instruction
    target: str
    form: int
    immediates: tuple[tuple[str, Any], ...]

    @property
    def kernel(self) -> Kernel:
        return kernel(self.op, self.target, self.form, dict(self.immediates), pointers=True)

    @property
    def read(self) -> list[str]:
        """The parameters that are read, in their order."""
        made = self.kernel
        return [parameter.name for parameter in made.parameters if parameter.name != made.written or rewrites(self.op)]

    @property
    def axes(self) -> tuple[str, ...]:
        ranks = {parameter.name: 2 if parameter.of == LANE else 1 for parameter in self.kernel.parameters}
        own = [" ".join(f"{name.replace('_', '')}{axis}" for axis in range(ranks[name])) for name in self.read]
        return (*own, " ".join(f"result{axis}" for axis in range(ranks[self.kernel.written])))

    @property
    def shared(self) -> tuple[bool, ...]:
        return (False,) * len(self.read)

    def __call__(self, *words: Array) -> Array:
        made, given = self.kernel, dict(zip(self.read, words, strict=True))
        cases = words[0].shape[0]
        image = given["memory"].shape[-1] if "memory" in given else 0
        shape = given[made.written].shape if made.written in given else (cases, made.threads, self.op.registers(made.written))
        if cases == 0:
            return jnp.zeros(shape, jnp.uint32)
        in_place = 1 + self.read.index(made.written) if rewrites(self.op) else None
        entry = Entry(ENTRY, made.text, made.threads, 4 * image if made.shared else 0, is_ptx=True, in_place=in_place)
        result = jax.ShapeDtypeStruct(shape, jnp.uint32)
        return launch(entry, min(cases, BLOCKS), result, numbers(cases, image).astype(jnp.uint32), *words)[0]


def executed(op: Instruction, target: str, form: int, immediates: Mapping[str, Any], words: Mapping[str, Array]) -> Array:
    """What the instruction writes: words with the cases in front, as a `silicon.Runner` takes and gives them."""
    statement = Statement(op, target, form, tuple(sorted(immediates.items())))
    return run(statement, *(words[name] for name in statement.read))
