"""Renew what notebooks print: `python tests/renew_notebooks.py notebooks/minilm.ipynb`.

A notebook runs from its beginning, in a kernel of its own. Texts that differ are written anew, and pictures stay as they were; read the
difference before you commit it. It needs `pip install -e '.[notebooks]'`, and what the notebook imports.
"""

import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ExecutePreprocessor


def is_text(output: dict) -> bool:
    return output["output_type"] == "stream" or list(output.get("data", {})) == ["text/plain"]


def join_streams(outputs: list[dict]) -> list[dict]:
    """What one cell printed is one output, however it came."""
    joined: list[dict] = []
    for output in outputs:
        if joined and output["output_type"] == joined[-1]["output_type"] == "stream":
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def main(names: list[str]) -> int:
    for path in map(Path, names):
        kept, again = (nbformat.read(path, as_version=4) for _ in range(2))
        ExecutePreprocessor(timeout=1800, kernel_name="python3").preprocess(again, {"metadata": {"path": str(path.parent)}})
        for before, after in zip(kept.cells, again.cells, strict=True):
            texts = [output for output in after.get("outputs", []) if is_text(output) and output.get("name") != "stderr"]
            others = [output for output in before.get("outputs", []) if not is_text(output)]
            if "outputs" in before:
                before.outputs = join_streams(texts) + others
        nbformat.write(kept, path)
        print(f"{path.name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
