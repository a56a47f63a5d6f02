"""Which backend computes an instruction here, and why not another."""

from tcemu.architectures.lookup import Applied
from tcemu.arithmetic.backends import reasons
from tcemu.arithmetic.fitting import fitted
from tcemu.arithmetic.model import Model, Signature
from tcemu.errors import Unsupported
from tcemu.isa.instructions import Instruction
from tcemu.native.units import target_here, unit_of_instruction, unit_of_product
from tcemu.operations.operands import modelled, signature_of


def backends(op: str | Instruction, *, target: str, model: Model | None = None) -> dict[str, str]:
    """What can add the products of `op` here, in the order in which it is asked: of each backend by name "" if it serves, else why not.

    "native": the instruction itself, or one that computes the same, on the GPU that is here, where `tcemu.execution` chooses it. "cuda":
    kernels in CUDA C++, compiled at first use; "walk": plain JAX, on every platform that no other serves. All give the same bits.
    target, model: as in `mma`. Raises as `mma`.
    """
    applied = modelled(op, target, model, "backends")
    signature = signature_of(applied.op)._replace(native=None)
    native = {"native": _native(applied, signature)}
    if applied.model.result.is_integer:
        return native | {"walk": ""}
    block = None if signature.scale is None else signature.k // signature.scale_vec
    own = fitted(applied.model, signature, block)
    if own.common is not None:
        signature = signature._replace(a=own.common, b=own.common)
    return native | reasons(own, signature)


def _native(applied: Applied, signature: Signature) -> str:
    """Why the GPU that is here does not compute it itself; "" if it does."""
    op, model = applied.op, applied.model
    try:
        target = target_here()
        if op.sparse or op.block_scale:
            unit_of_instruction(op, model, applied.clamped_metadata, signature, target)
        else:
            unit_of_product(op, model, signature, target)
    except Unsupported as error:
        return str(error)
    return ""
