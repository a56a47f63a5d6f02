"""The portable backend: plain JAX operations, for every model on any device."""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.checkify import debug_check

from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.integer_dot import decode_integers, dot_add_clamped, integer_dot, min_value, xor_popcount
from tcemu.engine.arithmetic.model import Model, clip_to_limits
from tcemu.engine.arithmetic.order import products_per_clamp
from tcemu.engine.arithmetic.other_steps import flush_subnormals
from tcemu.engine.arithmetic.product_spec import ProductSpec, Scales
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.arithmetic.small_products import are_small_products, reduce_small_products
from tcemu.engine.backends.product_requests import MatrixProduct, Program, PromotedProduct, RegisterProduct
from tcemu.engine.formats.coding import limbs_to_codes, recode
from tcemu.engine.formats.number_formats import Format


def registers_program(product: RegisterProduct) -> Program:
    """Registers go through matrices, which `multiply_matrices` multiplies."""
    by_matrices, op, clamped, model = product.forms.by_matrices, product.op, product.clamped_metadata, product.model
    return lambda operands: by_matrices(op, clamped, model, operands)  # it keeps no operand alive


def promoted_program(product: PromotedProduct) -> Program:
    """Chunks are multiplied one after the other by `multiply_matrices`."""
    return product.by_chunks


def matrices_program(product: MatrixProduct) -> Program:
    """K is reduced step by step: see `arithmetic.reduction`."""
    spec = product.spec
    if product.model.result.is_integer:
        return lambda a, b, c, scales: _integer_product(product.model, spec, a, b, c)
    model, multiplied = specialize(product.model, spec, product.scale_block)
    model, inside = clip_to_limits(model)

    def reduce_any(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        a, b = flush_subnormals(spec.a, a, model.flush), flush_subnormals(spec.b, b, model.flush)
        a, b = recode(spec.a, multiplied.a, a), recode(spec.b, multiplied.b, b)
        return reduce_k(model, multiplied, a, b, recode(spec.c, model.result, c), scales)

    def program(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        if are_small_products(model, multiplied, c.shape, a.shape[-1]):
            small = partial(reduce_small_products, model, spec, multiplied)
            d = lax.platform_dependent(a, b, c, cpu=small, default=lambda a, b, c: reduce_any(a, b, c, None))
        else:
            d = reduce_any(a, b, c, scales)
        return d if inside is None else _nan_unless(inside, spec.d, d)

    return program


def _nan_unless(inside: Array, fmt: Format, d: Array) -> Array:
    """NaN where a traced field of the model is outside its limits, so that no number comes of it. Checked mode raises there."""
    debug_check(inside, "a traced field of the model is outside its limits, which tcemu.Model states")
    nan = limbs_to_codes(fmt, tuple(jnp.asarray(fmt.nan >> 32 * limb & 0xFFFFFFFF, jnp.uint32) for limb in range(fmt.words)))
    return jnp.where(inside, d, nan)


def _integer_product(model: Model, spec: ProductSpec, a: Array, b: Array, c: Array) -> Array:
    """Exact sums in s32, wrapped, or clamped step by step."""
    x, y = decode_integers(spec.a, a), decode_integers(spec.b, b)
    lowest = min_value(spec.a), min_value(spec.b)
    total = c.astype(jnp.int32)
    if spec.bit_op == "xor":
        return (total + xor_popcount(x, y)).astype(jnp.uint32)
    if not spec.clamp:
        return (total + integer_dot(x, y, lowest)).astype(jnp.uint32)
    return dot_add_clamped(total, x, y, lowest, spec.k, products_per_clamp(model, spec.k)).astype(jnp.uint32)
