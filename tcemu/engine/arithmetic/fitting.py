"""Models specialised to an instruction, and the check that they fit it."""

from tcemu.engine.arithmetic.model import DEALING_WIDTHS, PRODUCT_BITS, Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.formats.number_formats import F16, Format


def needs_whole_instructions(model: Model, spec: ProductSpec) -> bool:
    """Returns whether K is filled up to whole instructions; else it is a row of single multiply-adds, of any length."""
    single = model.fraction_bits is None and model.step_kind is None and not model.is_exact_sum
    single = single and model.chain is None and model.groups == 1
    return spec.a.is_integer or not single or spec.d != model.result


def specialize(model: Model, spec: ProductSpec, block: int | None) -> tuple[Model, ProductSpec]:
    """Brings a model and a product to the form in which steps are computed.

    Args:
        model: The arithmetic.
        spec: The instruction's formats and modes.
        block: Products that share a block scale; None where there are no scales.

    Returns:
        The model with the instruction's own rounding, if it states one, and the spec with the formats that are multiplied. That spec names
        no family, so that the programs of equal arithmetics are shared.

    Raises:
        ValueError: The model's arithmetic is not defined for the instruction.
    """
    _check(model, spec, block)
    if spec.rounding is not None:
        model = model.replace(rounding=spec.rounding.upper())
    spec = spec._replace(family="")
    if block is None:
        spec = spec._replace(scale=None, scale_vec=0)
    return model, spec if model.common_format is None else spec._replace(a=model.common_format, b=model.common_format)


def _check(model: Model, spec: ProductSpec, block: int | None) -> None:
    if model.result.is_integer:
        return
    k, summed, groups, common, scaling = spec.k, model.summed, model.groups, model.common_format, spec.scale
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
        check_exact(spec.a, spec.b, scaling, summed)
    width = DEALING_WIDTHS[model.dealing]
    if groups > 1 and k % (width * groups):
        pairs = {2: " of pairs", 4: " of four"}.get(width, "")
        raise ValueError(f"Model(groups={groups}): the {k} products of an instruction are no {groups} groups{pairs}")
    _check_step_kind(model, spec, block)
    if isinstance(model.chain, int):
        if not isinstance(model.terms, int):
            raise ValueError(f"Model(chain={model.chain}): with an integer chain, terms must be known before tracing")
        _check_chain(model.chain, model.together, Order.from_model(model, k), k)
    if model.fraction_bits is not None and spec.a.words == 2:
        raise ValueError("Model(fraction_bits=...): products of f64 are fused multiply-adds; give fraction_bits=None. PTX ISA 9.7.14.5.14")
    multiplied = (common or spec.a, common or spec.b)
    if model.fraction_bits is not None and sum(fmt.mantissa_bits + 1 for fmt in multiplied) > PRODUCT_BITS:
        raise ValueError(
            f"the model multiplies {multiplied[0]} by {multiplied[1]}, whose products have more than the {PRODUCT_BITS} bits that a fused "
            "step adds; give a narrower multiplicand, such as f16, or fraction_bits=None"
        )
    for fmt in (spec.a, spec.b):
        if common is not None and not common.can_represent(fmt):
            raise ValueError(
                f"the model converts A and B to {common} first, which does not hold every value of {fmt}; choose a wider format"
            )


def _check_step_kind(model: Model, spec: ProductSpec, block: int | None) -> None:
    """Raises ValueError where a step of another maker's unit does not fit the instruction."""
    if model.step_kind is None and not model.is_exact_sum:
        return
    if block is not None:
        raise ValueError(f"Model(step_kind={model.step_kind!r}): such steps take no block scales; give None")
    terms, groups = int(model.terms), model.groups
    room = spec.k if model.step_kind == "joined" else spec.k // groups
    if min(terms, room) & (min(terms, room) - 1) or room % min(terms, room):
        raise ValueError(f"Model(terms={terms}, step_kind={model.step_kind!r}): {room} products of an instruction are no whole steps")
    if model.step_kind in ("complement", "floored") and max(spec.a.mantissa_bits, spec.b.mantissa_bits) > F16.mantissa_bits:
        raise ValueError(f'Model(step_kind="{model.step_kind}"): A and B have at most 11 significant bits, {spec.a} and {spec.b} have more')
    if model.is_exact_sum and max(spec.a.mantissa_bits, spec.b.mantissa_bits) >= 16:
        raise ValueError(
            f"Model(terms={terms}, fraction_bits=None): products of {spec.a} and {spec.b} have more than 32 bits; "
            "A and B have at most 16 each"
        )


def _check_chain(chain: int, together: bool, order: Order, k: int) -> None:
    """Raises ValueError for chains that are no whole steps, or that do not fill an instruction where they are added to each other."""
    steps = order.steps_per_instruction(k)
    whole, rest = divmod(chain * steps, k)
    if rest:
        raise ValueError(f"Model(chain={chain}): an instruction adds its {k} products in {steps} steps, and a chain must be whole steps")
    if together and steps % whole:
        raise ValueError(f"Model(chain={chain}, together=True): the {k} products of an instruction must be whole chains")


def check_exact(a: Format, b: Format, scale: Format, products: int) -> None:
    """Raise ValueError if the sum of `products` products, with its scales, would not be exact."""
    largest = [2 ** (fmt.mantissa_bits + 1 + fmt.max_exponent - fmt.min_exponent) for fmt in (a, b)]
    finite = all(fmt.specials == "none" and fmt.max_exponent - fmt.min_exponent + fmt.mantissa_bits < 8 for fmt in (a, b))
    if not finite or products * largest[0] * largest[1] * 4 ** (scale.mantissa_bits + 1) > 2**24:
        raise ValueError(
            f"summed={products}: the exact sum of {products} products of {a} and {b}, times two scales of {scale}, does not fit 24 bits; "
            "the kinds that sum in groups have e2m1 operands. PTX ISA 9.7.14.3"
        )
