"""Which backend computes an instruction here, and why not another."""

from tcemu.arithmetic.backends import reasons
from tcemu.arithmetic.fitting import fitted
from tcemu.arithmetic.model import Model
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import modelled, signature_of


def backends(op: str | Instruction, *, target: str, model: Model | None = None) -> dict[str, str]:
    """What can add the products of `op` here, in the order in which it is asked: of each backend by name "" if it serves, else why not.

    "cuda": kernels in CUDA C++, compiled at first use; "walk": plain JAX, on every platform that no other serves. All give the same bits.
    target, model: as in `mma`. Raises as `mma`.
    """
    applied = modelled(op, target, model, "backends")
    signature = signature_of(applied.op)
    if applied.model.result.is_integer:
        return {"walk": ""}
    block = None if signature.scale is None else signature.k // signature.scale_vec
    own = fitted(applied.model, signature, block)
    if own.common is not None:
        signature = signature._replace(a=own.common, b=own.common)
    return reasons(own, signature)
