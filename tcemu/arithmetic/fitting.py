"""Whether a model fits an instruction, and how the instruction uses it."""

from tcemu.arithmetic.model import PRODUCT_BITS, Model, Signature
from tcemu.arithmetic.order import Order
from tcemu.formats import Format


def fills_k(model: Model, signature: Signature) -> bool:
    """Whether K is filled up to whole instructions; else it is a row of single multiply-adds, of any length."""
    return signature.a.is_integer or model.fraction_bits is not None or model.chain is not None or signature.d != model.result


def fitted(model: Model, signature: Signature, block: int | None) -> Model:
    """The model as the instruction uses it: with the instruction's own rounding, if it states one.

    block: products that share a scale; None: there are no scales. Raises ValueError for a model whose arithmetic is not defined for the
    instruction.
    """
    _check(model, signature, block)
    return model if signature.rounding is None else model.replace(rounding=signature.rounding.upper())


def _check(model: Model, signature: Signature, block: int | None) -> None:
    if model.result.is_integer:
        return
    k, summed, groups, common, scaling = signature.k, model.summed, model.groups, model.common, signature.scale
    if block is None or scaling is None:
        if summed is not None:
            raise ValueError(f"Model(summed={summed}): only products with block scales are summed in groups; give None. PTX ISA 9.7.14.3")
    elif model.fraction_bits is None:
        raise ValueError("Model(fraction_bits=None): exact steps take no block scales; give a number of bits. PTX ISA 9.7.14.3")
    elif summed is None:
        if scaling.mantissa_bits:
            raise ValueError(f"Model(summed=None): scales of {scaling} multiply whole groups; give `summed`, as 16. PTX ISA 9.7.14.3")
    elif block % summed:
        raise ValueError(f"Model(summed={summed}): must divide the {block} products that share a scale. PTX ISA 9.7.14.3")
    else:
        check_exact(signature.a, signature.b, scaling, summed)
    if groups > 1 and k % (2 * groups):
        raise ValueError(f"Model(groups={groups}): the {k} products of an instruction are no {groups} groups of pairs")
    if isinstance(model.chain, int):
        if not isinstance(model.terms, int):
            raise ValueError(f"Model(chain={model.chain}): with a chain of so many products, terms must be known before tracing")
        _check_chain(model.chain, model.together, Order.of(model, k), k)
    if model.fraction_bits is not None and signature.a.words == 2:
        raise ValueError("Model(fraction_bits=...): products of f64 are fused multiply-adds; give fraction_bits=None. PTX ISA 9.7.14.5.14")
    multiplied = (common or signature.a, common or signature.b)
    if model.fraction_bits is not None and sum(fmt.mantissa_bits + 1 for fmt in multiplied) > PRODUCT_BITS:
        raise ValueError(
            f"the model multiplies {multiplied[0]} by {multiplied[1]}, whose products have more than the {PRODUCT_BITS} bits that a fused "
            "step adds; give a narrower multiplicand, such as f16, or fraction_bits=None"
        )
    for fmt in (signature.a, signature.b):
        if common is not None and not common.holds(fmt):
            raise ValueError(
                f"the model converts A and B to {common} first, which does not hold every value of {fmt}; choose a wider format"
            )


def _check_chain(chain: int, together: bool, order: Order, k: int) -> None:
    """Raises ValueError for chains that are no whole steps, or that do not fill an instruction where they are added to each other."""
    steps = order.steps_of_instruction(k)
    whole, rest = divmod(chain * steps, k)
    if rest:
        raise ValueError(f"Model(chain={chain}): an instruction adds its {k} products in {steps} steps, and a chain must be whole steps")
    if together and steps % whole:
        raise ValueError(f"Model(chain={chain}, together=True): the {k} products of an instruction must be whole chains")


def check_exact(a: Format, b: Format, scale: Format, products: int) -> None:
    """Raises ValueError if the sum of so many products, with its scales, would not be exact."""
    largest = [2 ** (fmt.mantissa_bits + 1 + fmt.greatest_exponent - fmt.least_exponent) for fmt in (a, b)]
    finite = all(fmt.specials == "none" and fmt.greatest_exponent - fmt.least_exponent + fmt.mantissa_bits < 8 for fmt in (a, b))
    if not finite or products * largest[0] * largest[1] * 4 ** (scale.mantissa_bits + 1) > 2**24:
        raise ValueError(
            f"summed={products}: the exact sum of {products} products of {a} and {b}, times two scales of {scale}, does not fit 24 bits; "
            "the kinds that sum in groups have e2m1 operands. PTX ISA 9.7.14.3"
        )
