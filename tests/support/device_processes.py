"""Programs in a process of their own, where JAX has several CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_on_devices(devices: int, program: str, *words: str, seconds: float = 1500) -> str:
    """What a Python program prints on so many CPU devices. It may import tcemu and tests/support; `words` are its sys.argv[1:].

    Raises AssertionError with the end of its standard error where it fails.
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, *sorted({path.parent for path in TESTS.rglob("test_*.py")})))),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
