"""Tests with another Python or another JAX: `python tests/other_versions.py NUMBER`, as .ci/run does with the number of its commits.

The number chooses a row of ENVIRONMENTS, so that NUMBER = 0, 1, 2, ... tries all of them in turn, in an environment that is made for it. A
row whose Python is missing here, or whose packages cannot be installed, is skipped with a line that says so. TESTS and a share of the
recorded words run there. --patient waits as long as it takes, as for the page of platforms; --list shows the rows; --print-oldest shows
the requirements of the first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/base/test_jax_internals.py", "tests/project/test_readme.py", "tests/engine/backends/test_llvm_call.py")
SECONDS = {"install": 150, "run": 90}  # on two idle cores: a minute and two
GOLDEN_SHARES = 24
TOOLS = ("pytest>=8", "hypothesis>=6.100")
OLDEST = {"jax": "0.10.1", "jaxlib": "0.10.1", "ml_dtypes": "0.5.0", "numpy": "2.0.0", "chex": "0.1.90", "llvmlite": "0.48.0"}
ENVIRONMENTS = (  # Python, and the versions that are fixed; other packages are the newest
    ("3.11", OLDEST),
    ("3.12", {"jax": "0.10.2", "jaxlib": "0.10.2"}),
    ("3.13", {"jax": "0.11.0", "jaxlib": "0.11.0"}),
    ("3.14", {}),
    ("3.12", {"jax": "0.11.1", "jaxlib": "0.11.1"}),
    ("3.13", {"jax": "0.11.2", "jaxlib": "0.11.2"}),
    ("3.12", {"jax": "0.12.0", "jaxlib": "0.12.0"}),
    ("3.13", {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}),
)


def find_python(version: str) -> str | None:
    """Return a program that is this Python: on the path, or among those of pyenv, whose shims answer only for chosen versions."""
    places = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for program in (f"python{version}", *map(str, reversed(places))):
        if (path := shutil.which(program)) is None:
            continue
        said = subprocess.run(
            [path, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"], capture_output=True, encoding="utf-8"
        )
        if said.returncode == 0 and said.stdout.strip() == version:
            return path
    return None


def oldest_of_the_project() -> dict[str, str]:
    """Return the lower bounds of pyproject.toml: the dependencies, and llvmlite."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    return dict(re.match(r"(\w+)>=([\d.]+)", bound).groups() for bound in bounds)  # type: ignore[union-attr]


def try_environment(number: int, patient: bool = False) -> int:
    """Install and test one row, and return the exit status: 0 where it cannot be tried. patient: without a limit of time."""
    version, pins = ENVIRONMENTS[number % len(ENVIRONMENTS)]
    name = f"Python {version} with {', '.join(f'{package} {pin}' for package, pin in pins.items()) or 'the newest of everything'}"
    python = find_python(version)
    if python is None:
        print(f"{name}: not tried, there is no Python {version} here")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        requirements = [
            *(f"{package}=={pin}" for package, pin in pins.items()),
            *TOOLS,
            *(() if "llvmlite" in pins else ("llvmlite>=0.48",)),
        ]
        install = [inside, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-e", ROOT, *requirements]
        try:
            if subprocess.run(install, timeout=None if patient else SECONDS["install"], check=False).returncode:
                print(f"{name}: not tried, pip could not install its packages")
                return 0
        except subprocess.TimeoutExpired:
            print(f"{name}: not tried, pip needed more than {SECONDS['install']} s")
            return 0
        shown = "import tcemu; tcemu.show_versions()"
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        subprocess.run([inside, "-c", shown], cwd=ROOT, env=clean, check=True)
        limit = () if patient else ("--stop-after", str(SECONDS["run"]))
        status = subprocess.run([inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *limit, *TESTS], cwd=ROOT, env=clean, check=False)
        share = f"{number % GOLDEN_SHARES}/{GOLDEN_SHARES}"
        replay = [inside, "tests/replay_golden.py", "--share", share]
        replayed = subprocess.run(replay, cwd=ROOT, env=clean, capture_output=True, encoding="utf-8", check=False)
        print(replayed.stderr if replayed.returncode else "", *replayed.stdout.splitlines()[-1:], sep="")
        print(f"{name}: pytest's exit status {status.returncode}, that of share {share} of the recorded words {replayed.returncode}")
        return status.returncode or replayed.returncode


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", type=int, help="which row, modulo their number")
    parser.add_argument("--patient", action="store_true", help="set no limit of time")
    parser.add_argument("--list", action="store_true", help="show the rows, and which Pythons are here")
    parser.add_argument("--print-oldest", action="store_true", help="show the requirements of the oldest environment")
    args = parser.parse_args(words)
    if args.print_oldest:
        print("\n".join(f"{package}=={pin}" for package, pin in OLDEST.items()))
        return 0
    if args.list or args.number is None:
        for number, (version, pins) in enumerate(ENVIRONMENTS):
            print(f"{number}: Python {version} ({'here' if find_python(version) else 'missing'}), {pins or 'the newest of everything'}")
        return 0
    return try_environment(args.number, args.patient)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
