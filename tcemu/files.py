"""Files written whole."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file beside the old one and puts it in its place. A kill leaves the old file or the new one, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
