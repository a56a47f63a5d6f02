"""Surveys as profiles: `python benchmarks/replay_distil.py SURVEY ... --out FOLDER --profiles tcemu/uses/replay/measured`.

SURVEY is a survey.jsonl that `replay_gpu.py` wrote; of a shape that was asked twice, the last line counts. Only what was replayed without
a difference is taken. Written are profiles, LIBRARY-GPU.json.xz, to which shapes are added where such a file is there; the words that the
surveys kept, FOLDER/words.json.xz; and a table of what was not found, FOLDER/undetermined.md, or the end of the page --table, to which rows
are added. What the profiles and that table hold together is printed as a table.
"""

import argparse
import json
import lzma
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay_products import SURVEYS

from tcemu.operations.products.library.kernel_json import from_dict, to_dict
from tcemu.uses.replay.kernel_profiles import PROFILE_KIND, PROFILE_VERSION, read_profile

Shape = tuple[str, int, int, int]  # survey, m, n, k
Lines = dict[Shape, dict[str, Any]]
REFUSED = "cuBLASLt refuses the product"
KNOWN = {  # parts of `Fingerprint.reason`, of today's words and of recorded surveys', or of an error -> cell of a table
    "orders that are not equivalent": "several orders give the same bits",
    "orders that are not one": "several orders give the same bits",
    "no candidate explains": "a known order, scales or a bias enter otherwise",
    "enter in none of the ways": "a known order, scales or a bias enter otherwise",
    "but no arithmetic": "a known order, another arithmetic",
    "no order": "another order",
    "equal operands": "the order varies with the place of the output",
    "the same rows and columns give other bits": "the order varies with the place of the output",
    "CUBLAS_STATUS_NOT_SUPPORTED": REFUSED,
}
GROUP = re.compile(
    r"(splitKreduce|gemv2N|gemv2T|gemvx|gemvNSP|gemmSN_NN|dot_kernel|reduce_1Block|cutlass_\w+?(?=>|\()|sm\d+_xmma_\w+?(?=_aligna|_execute|$))"
)
HEAD = ["| product | M x N x K | what is known | kernels |", "|---|---|---|---|"]
ROW = re.compile(r"\| (\S+) \| (\d+) x (\d+) x (\d+) \| (.*?) \| .*\|")


def read_text(path: Path) -> str:
    """The text of a file, also of one in xz."""
    return lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()


def lines_of(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The lines of the files. A last one that was cut off is none."""
    for text in (text for path in paths for text in read_text(path).splitlines()):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def lines_by_shape(paths: Iterable[Path]) -> Lines:
    """The lines about shapes; of a shape that was asked again, the last one."""
    return {(line["survey"], line["m"], line["n"], line["k"]): line for line in lines_of(paths) if "survey" in line}


def machine_of(paths: Iterable[Path]) -> dict[str, Any]:
    """What the files say of the machine, and the date. Raises ValueError for two machines, and for none."""
    about: dict[str, Any] = {}
    for line in (line for line in lines_of(paths) if "machine" in line):
        if about and about["machine"] != line["machine"]:
            raise ValueError(f"the lines are of two machines, {about['machine']} and {line['machine']}; distil each by itself")
        about = line | {"date": dates(about.get("date", ""), line["date"])}
    if not about:
        raise ValueError("no line says on which machine; these are no surveys")
    return about


def dates(one: str, other: str) -> str:
    """Two days, or "first to last" ones, as the span of both."""
    days = sorted({day for text in (one, other) if text for day in text.split(" to ")})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def replayed(line: dict[str, Any]) -> bool:
    """A recipe was found, and gave every word on fresh operands."""
    return bool(line.get("recipe")) and line["wrong"] == 0


def profile(name: str, about: dict[str, Any], lines: Lines, before: bytes | None = None) -> dict[str, Any] | None:
    """The profile of one survey: what a file had before, and these lines. None where there is nothing to hold.

    Raises ValueError for a file of another library, version or GPU.
    """
    own = {(m, n, k): line for (survey, m, n, k), line in lines.items() if survey == name}
    known, found, made = about["machine"], {}, {}
    head = {"library": name, "gpu": known.get("gpu") or "CPU", "sm_count": known.get("sm_count") or 0, "date": about["date"]}
    versions = {line["recipe"]["conditions"]["version"] or "" for line in own.values() if replayed(line)}
    if before is not None and own:
        held = read_profile(before)
        versions.add(held.version)
        if (held.library, held.gpu, held.sm_count) != (name, head["gpu"], head["sm_count"]):
            raise ValueError(f"the profile is of {held.library} on {held.gpu}, the lines are of {name} on {head['gpu']}")
        found = {shape: held.recipes[number] for shape, (number, _) in held.shapes.items()}
        made = {shape: outputs for shape, (_, outputs) in held.shapes.items()}
        head["date"] = dates(head["date"], held.date)
    if len(versions) > 1:
        raise ValueError(f"{name}: a profile has one version of a library, not {' and '.join(sorted(versions))}")
    for shape, line in own.items():
        if replayed(line):
            found[shape], made[shape] = line["recipe"], line["fresh"]
        elif line.get("recipe"):  # refuted by fresh operands
            found.pop(shape, None)
    recipes: list[dict[str, Any]] = []
    shapes = []
    for shape in sorted(found):
        recipe = to_dict(from_dict(found[shape]))
        recipe["conditions"] |= {"m": None, "n": None, "evidence": ""}
        recipes += [] if recipe in recipes else [recipe]
        shapes.append([*shape, recipes.index(recipe), made[shape]])
    fixed = {"kind": PROFILE_KIND, "version": PROFILE_VERSION, "library_version": next(iter(versions), "")}
    return fixed | head | {"recipes": recipes, "shapes": shapes} if shapes else None


def words(lines: Lines) -> list[dict[str, Any]]:
    """The words of what was replayed, where a survey kept them, with those on scales and biases of every kind."""
    return [
        {"survey": name, "m": m, "n": n, "k": k, "recipe": line["recipe"]}
        | line["words"]
        | ({"more_words": line["more_words"]} if line.get("more_words") else {})
        for (name, m, n, k), line in sorted(lines.items())
        if replayed(line) and "words" in line
    ]


def undetermined(lines: Lines, before: str, found: set[Shape]) -> list[str]:
    """Rows of what was not found, with what is known of it: those of a table before, and of these lines."""
    rows = {(hit[1], int(hit[2]), int(hit[3]), int(hit[4])): hit[0] for hit in ROW.finditer(before)}
    for (name, m, n, k), line in lines.items():
        said = " ".join(f"{line.get('why', '')} {line.get('error', '')}".split())
        known = next((short for words, short in KNOWN.items() if words in said), said[:90])
        known = "fresh operands refute the order" if line.get("recipe") else known
        kernels = sorted({hit[0] for text in line.get("kernels", ()) for hit in [GROUP.search(text)] if hit})
        rows[name, m, n, k] = f"| {name} | {m} x {n} x {k} | {known} | {', '.join(kernels)} |"
    return [rows[shape] for shape in sorted(rows) if shape not in found]


def counted(found: set[Shape], outputs: dict[str, int], rows: list[str]) -> list[str]:
    """By product: shapes whose order was found, of those that were asked, aligned to 8 and not; what was compared."""
    missing, refused = set(), set()
    for hit in map(ROW.fullmatch, rows):
        assert hit is not None
        (refused if hit[5] == REFUSED else missing).add((hit[1], *map(int, hit.group(2, 3, 4))))
    table = ["| product | aligned | not aligned | outputs |", "|---|---|---|---|"]
    for name in SURVEYS:
        cells = []
        for aligned in (True, False):
            right, wrong = (sum(s[0] == name and (not any(x % 8 for x in s[1:])) == aligned for s in part) for part in (found, missing))
            cells.append(f"{right} of {right + wrong}" if right + wrong else "none asked")
        if any(shape[0] == name for shape in found | missing):
            table.append(f"| {name} | {' | '.join(cells)} | {outputs.get(name, 0):,} |")
    total = f"{len(found):,} of {len(found | missing):,} shapes, {sum(outputs.values()):,} outputs; {len(missing)} undetermined"
    return [*table, "", f"{total}, {len(refused)} more that the library refuses"]


def distil(surveys: list[Path], out: Path, profiles: Path, table: Path) -> None:
    """Writes all files. Raises ValueError for what does not belong together, before anything is written."""
    about, lines = machine_of(surveys), lines_by_shape(surveys)
    gpu = (about["machine"].get("gpu") or "CPU").replace(" ", "-")
    files: dict[Path, bytes] = {}
    found: set[Shape] = set()
    outputs = {}
    for name in SURVEYS:
        path = profiles / f"{name}-{gpu}.json.xz"
        before = path.read_bytes() if path.exists() else None
        made = profile(name, about, lines, before)
        if made is not None:
            files[path] = lzma.compress(json.dumps(made).encode(), preset=9)
        held = files.get(path, before)
        if held is not None:
            shapes = read_profile(held).shapes
            found |= {(name, *shape) for shape in shapes}
            outputs[name] = sum(count for _, count in shapes.values())
            print(f"{path.name}: {len(shapes)} shapes" if path in files else f"{path.name}: as it was")
    text = table.read_text() if table.exists() else "\n".join(HEAD) + "\n"
    rows = undetermined(lines, text, found)
    start = text.partition(HEAD[0])[0]
    out.mkdir(parents=True, exist_ok=True)
    files[out / "words.json.xz"] = lzma.compress(json.dumps({"machine": about, "words": words(lines)}).encode(), preset=9)
    files[table] = (start + "\n".join([*HEAD, *rows, ""])).encode()
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print("\n".join(counted(found, outputs, rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", nargs="+", type=Path, metavar="SURVEY")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the words")
    parser.add_argument("--profiles", type=Path, help="the folder of profiles; else that of the words")
    parser.add_argument("--table", type=Path, help="a Markdown page that ends with the table of what was not found; else a file of its own")
    args = parser.parse_args()
    try:
        distil(args.surveys, args.out, args.profiles or args.out, args.table or args.out / "undetermined.md")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
