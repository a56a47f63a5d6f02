"""A stranger's path: the wheel is built and checked, and works in an environment outside the tree that nobody writes.

`python tests/wheel_path.py` builds the wheel and the source distribution, checks them with twine, and installs the wheel in an environment
whose path has spaces and letters outside ASCII. Then it runs the README's blocks and commands there, in an empty folder, and looks at each
file of the environment again: none has changed. Dependencies are those of this Python's environment; with --empty pip installs them from
the index. It needs the extra `release`.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = "räum lich ünd frei 桜"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = (("--version",), ("check", "f16", "--target", "H100"), ("list", "--evidence"), ("demo",))


def run(*words: str | Path, **options) -> str:
    """Run a program and return what it prints, or raise with all that it said."""
    done = subprocess.run(list(map(str, words)), capture_output=True, encoding="utf-8", errors="replace", check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Build the wheel, by way of the source distribution, and check both."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    files = sorted(folder.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert sorted(path.suffix for path in files) == [".gz", ".whl"], files
    return files


def make_environment(folder: Path, wheel: Path, empty: bool) -> Path:
    """Make an environment with the wheel, which nobody may write, and return its Python."""
    venv.create(folder, with_pip=empty, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if empty:
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    else:
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel)
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}  # a path of a .pth file does not read .pth files in its turn
        (packages / "dependencies.pth").write_text("\n".join(sorted(here)) + "\n", encoding="utf-8")
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    return python


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--empty", action="store_true", help="install the dependencies too, from the index")
    parser.add_argument("--only-build", action="store_true", help="build and check, and install nothing")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        files = build(folder / "dist")
        print(f"built and checked: {', '.join(path.name for path in files)}")
        if args.only_build:
            return 0
        environment, elsewhere = folder / PLACE / "environment", folder / PLACE / "empty"
        elsewhere.mkdir(parents=True)
        python = make_environment(environment, next(path for path in files if path.suffix == ".whl"), args.empty)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_", "VIRTUAL_ENV"))}
        clean |= {"PYTHONDONTWRITEBYTECODE": "1"} if not args.empty else {}  # of the dependencies, which are another environment's
        before = contents(environment)
        codes, texts = zip(*BLOCKS, strict=True)
        printed = run(python, "-X", "utf8", "-c", "".join(codes) + "print(tcemu.__file__)", cwd=elsewhere, env=clean)
        if not printed.startswith(expected := "".join(texts) + str(environment)):
            raise SystemExit(f"the README's blocks printed\n{printed}\nin place of\n{expected}")
        for command in COMMANDS:
            run(python, "-m", "tcemu", *command, cwd=elsewhere, env=clean)
        changed = sorted(set(contents(environment).items()) ^ set(before.items()))
        if changed or any(elsewhere.iterdir()):
            raise SystemExit(f"files were written: {changed[:5]}, {sorted(elsewhere.iterdir())}")
        print(f"works in {PLACE!r}: the README's {len(BLOCKS)} blocks and {len(COMMANDS)} commands, {len(before):,} files unchanged")
        for path in (environment, *environment.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o200)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
