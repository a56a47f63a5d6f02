"""`show_versions`: the versions and the machine, as a bug report needs them."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import jax

PACKAGES = (  # those that compute, then those that are optional
    "jax", "jaxlib", "numpy", "ml_dtypes", "chex", "llvmlite", "flax", "equinox", "dm-haiku", "torch", "triton", "nvidia-cuda-nvrtc",
    "cuda-core", "matplotlib",
)  # fmt: skip
SETTINGS = ("JAX_", "XLA_", "TCEMU_")  # beginnings of environment variables that change what is computed, or how


def show_versions() -> None:
    """Print the versions of tcemu, of Python and of the packages that it uses, the devices, and whether kernels for CPUs run.

    Paste the text into a bug report. It has no names of users, folders or machines, except in values of environment variables that begin
    with JAX_, XLA_ or TCEMU_.

    Example:
        >>> import tcemu
        >>> tcemu.show_versions()  # doctest: +ELLIPSIS
        tcemu ...
    """
    print("\n".join(f"{name:<18} {text}" for name, text in installation().items()))


def installation() -> dict[str, str]:
    """Return the lines of `show_versions` by their names."""
    from tcemu.engine.backends.llvm import xla_call

    lines = {"tcemu": sys.modules["tcemu"].__version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    lines["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} logical processors"
    for name in PACKAGES:
        try:
            lines[name] = version(name)
        except PackageNotFoundError:
            lines[name] = "not installed"
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    lines["devices"] = ", ".join(f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices))
    lines["kernels for CPUs"] = xla_call.missing() or "yes"
    return lines | {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
