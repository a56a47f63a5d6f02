"""Checked mode: behaviour that PTX leaves undefined raises `UndefinedBehaviour`, for traced values too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jax.typing import ArrayLike

from tcemu.base.errors import UndefinedBehaviour
from tcemu.base.jax_internals import failed_check_message


def forbid(undefined: ArrayLike, message: str, **values: Any) -> None:
    """Report the first element for which `undefined` is true.

    If any argument is traced, the function adds a `checkify.check`, which `checked` (or `checkify.checkify`) turns into an error; JAX
    refuses to compile the check otherwise. Concrete arguments raise at once, even while other values are traced.

    Args:
        undefined: Bool array of any shape.
        message: Format string that may name any of `values`.
        **values: Arrays that broadcast to the shape of `undefined`. The message shows their elements at the first true element.

    Raises:
        UndefinedBehaviour: All arguments are concrete, and `undefined` is true for an element.
    """
    if not any(isinstance(value, Tracer) for value in (undefined, *values.values())):
        if np.any(undefined):
            first = np.argmax(np.ravel(undefined))
            at_first = {name: np.broadcast_to(value, np.shape(undefined)).ravel()[first] for name, value in values.items()}
            raise UndefinedBehaviour(message.format(**at_first))
        return
    undefined = jnp.asarray(undefined)
    first = jnp.argmax(undefined.ravel())
    at_first = {name: jnp.broadcast_to(jnp.asarray(value), undefined.shape).ravel()[first] for name, value in values.items()}
    checkify.check(cast(bool, ~jnp.any(undefined)), message, **cast(dict[str, Any], at_first))


def forbid_concrete(undefined: ArrayLike, message: str, checked: bool, **values: Any) -> None:
    """Call `forbid`, but skip traced arguments unless `checked` is set.

    Args:
        undefined: Bool array of any shape.
        message: Format string that may name any of `values`.
        checked: If true, traced arguments are checked as well.
        **values: Arrays that broadcast to the shape of `undefined`.

    Raises:
        UndefinedBehaviour: All arguments are concrete, and `undefined` is true for an element.
    """
    if checked or not any(isinstance(value, Tracer) for value in (undefined, *values.values())):
        forbid(undefined, message, **values)


def checked(fn: Callable) -> Callable:
    """Wrap a function that uses `checked=True` under jit, vmap or grad, so that it raises its failed checks as `UndefinedBehaviour`.

    Args:
        fn: Function whose operations are called with `checked=True`. Its arguments must be arrays or pytrees of arrays, so close over
            spellings and targets.

    Returns:
        A function with the same arguments and result.

    Raises:
        UndefinedBehaviour: Raised by the returned function when PTX leaves the behaviour of an operation undefined for these arguments.
    """

    @wraps(fn)
    def raise_failed_check(*args: Any, **kwargs: Any) -> Any:
        error, result = checkify.checkify(fn, errors=checkify.user_checks)(*args, **kwargs)
        message = error.get()
        if message is not None:
            raise UndefinedBehaviour(failed_check_message(message))
        return result

    return raise_failed_check
