"""`tcemu.emulate`: a JAX function by a policy for its products, or as XLA compiles it for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from chex import PRNGKey

from tcemu.uses.emulation.decisions import Policy
from tcemu.uses.emulation.emulate import EmulatedFunction
from tcemu.uses.emulation.emulate import emulate as emulate_by_policy
from tcemu.uses.emulation.function_choices import FunctionPolicy
from tcemu.uses.emulation.origins import Parameters, Rows

if TYPE_CHECKING:
    from tcemu.kernels.xla.compilation import Emulated

P = ParamSpec("P")
R = TypeVar("R")
FIRST = "emulate: give a policy, as emulate(fn, 'bf16 on H100'), or a GPU, as emulate(fn, gpu='H100')"


@overload
def emulate(
    fn: Callable[P, R],
    policy: Policy,
    *,
    convolutions: bool = False,
    parameters: Parameters = None,
    key: PRNGKey | None = None,
    rows: Rows = None,
    functions: FunctionPolicy = None,
) -> EmulatedFunction[P, R]: ...


@overload
def emulate(
    fn: Callable, *, gpu: str, description: str | None = None, options: Mapping[str, Any] | None = None, checked: bool = False
) -> Emulated: ...


def emulate(
    fn: Callable,
    policy: Policy | EllipsisType = ...,  # None is a policy
    *,
    convolutions: bool = False,
    parameters: Parameters = None,
    key: PRNGKey | None = None,
    rows: Rows = None,
    functions: FunctionPolicy = None,
    gpu: str | None = None,
    description: str | None = None,
    options: Mapping[str, Any] | None = None,
    checked: bool = False,
) -> EmulatedFunction | Emulated:
    """Return a function with every matrix product computed by a policy's choice, or with everything computed as on a GPU.

    With `gpu` and no policy, XLA compiles the function for that GPU, and its kernels run bit for bit without it: see `tcemu.xla.emulate`.
    With a policy everything but the products is unchanged.

    With `functions` its softmaxes, norms and activations are computed by kernels of `tcemu.functional`.

    Products are found wherever they stand in the program; see `EmulatedFunction`. A recipe's A is the
    activation and its B the weight, on either side of the product. An operand that depends on parameters and not on data is a weight; one
    that comes from a cotangent is a gradient, and its product is computed by the recipe's own recipe for gradients, if there is one. Where
    the roles do not tell, lhs is taken as A, with a warning if that matters; a choice `tcemu.dot_general(recipe, a="rhs")` decides.
    A ragged product, such as `jax.lax.ragged_dot`, is one product for each group: see `tcemu.ragged_dot`.

    Args:
        fn: Any JAX function, or a callable pytree such as an equinox module. It is traced at each call as `jax.jit` traces it; put
            `jax.jit` around the result to compile it once. Functions must be pure, except that objects of flax nnx (fn itself, arguments,
            and objects that a method or partial function is bound to) are updated as `nnx.jit` updates them: batch statistics, counters and
            random streams are written back. Other changes of state are refused.
        policy: A `Recipe` or its name for every product; rules from patterns to choices, as a dict or a list of pairs, of which the first
            match counts; a function from a `Product` to a choice; or a policy of `tcemu.policies`, which describes all forms. A choice is a
            `Recipe`, its name ("bf16", "fp8 on H100"), a callable with the signature of `jax.lax.dot_general`, or None, which leaves the
            product unchanged. All forms but functions leave products of anything but real floats, and products without a contracted axis
            such as einsum("btd,btd->btd").
        convolutions: Whether convolutions are products too. Each is then one product of patches (im2col) with the kernel. K runs over the
            positions of the window, and within a position over the input features. Patches of more than 2^22 elements are multiplied in
            pieces by a recipe, with the same bits.
        parameters: Arrays that are parameters: positions or names of arguments, patterns for paths ("layers/0/*"), or a function from a
            path to a bool. None: the arrays of fn itself; else the argument named params, parameters, variables, weights or model; else the
            first argument that is no plain array; else the arrays that fn closes over.
        key: A jax.random key for recipes that round stochastically (rounding "SR"). It may be traced: a new key in each step of a compiled
            loop compiles nothing anew. No two executions of a product share random bits, and equal keys give equal bits; see
            `tcemu.uses.emulation.random_keys`. Under `jax.vmap` with one key all elements of the batch share its bits.
        rows: Positions or names of arguments, or patterns for paths, of the arrays whose first axis counts rows that do not depend on each
            other, such as "tokens". Products then still see all rows at once, and what lies between them is computed row by row, so that
            its bits do not depend on the number of rows. Results that depend on the rows must have them on their first axis. None: XLA
            compiles what lies between products for the whole batch.
        functions: Kernels for softmax, log-softmax, RMSNorm, LayerNorm, SiLU and GELU, found by their formulas, as `jax.nn` and flax have
            them: the name of kernels in `tcemu.functional.KERNELS`, as "liger"; rules, as {"softmax": "triton", "*_norm": "liger"}; or a
            function from a `Function` to a kernel's name, its value or None. None: functions are neither replaced nor listed. See
            `tcemu.uses.emulation.function_choices`. The gradient is that of the formula.
        gpu: The GPU, "H100" or "H200", instead of a policy.
        description: With `gpu`, as in `tcemu.xla.emulate`.
        options: With `gpu`, as in `tcemu.xla.emulate`.
        checked: With `gpu`, as in `tcemu.xla.emulate`.

    Returns:
        A function like fn, whose method `report` lists what is replaced, or with `gpu` each step of the last call. Calls warn if the policy
        replaces nothing or a rule matches no product.

    Raises:
        TypeError: There is neither a policy nor a GPU, or both; a policy, a choice or the key is of another kind; an array is neither JAX's
            nor NumPy's; or a call changes state.
        ValueError: A name is no recipe's or no kernel's, a choice returns another shape, `parameters` or `rows` matches no array, a result
            has no axis for the rows, or a recipe that rounds stochastically gets no key.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> double = tcemu.emulate(lambda x: x @ x, "bf16 on A100")
        >>> double(np.eye(2, dtype=np.float32) * 3)
        Array([[9., 0.],
               [0., 9.]], dtype=float32)
    """
    for_policy = {"convolutions": convolutions, "parameters": parameters, "key": key, "rows": rows, "functions": functions}
    for_gpu = {"description": description, "options": options, "checked": checked}
    if gpu is None:
        unfit = [name for name, value in for_gpu.items() if value]
        if isinstance(policy, EllipsisType) or unfit:
            raise TypeError(f"{FIRST}; {', '.join(unfit) or 'got neither'}")
        return emulate_by_policy(fn, policy, **for_policy)
    unfit = [name for name, value in for_policy.items() if value is not None and value is not False]
    unfit += [] if isinstance(policy, EllipsisType) else ["policy"]
    if unfit:
        raise TypeError(f"{FIRST}; got gpu={gpu!r} with {', '.join(unfit)}")
    if not callable(fn):
        raise TypeError(f"fn: got {fn!r}; emulate takes a JAX function")
    from tcemu.kernels.xla.compilation import emulate as emulate_compiled

    return emulate_compiled(fn, gpu=gpu, **for_gpu)
