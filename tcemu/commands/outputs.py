"""Where a command writes: nothing that it read, nothing that exists unless asked, and never half a file. Every fault is a CommandError."""

from collections.abc import Mapping
from pathlib import Path

from tcemu.commands import CommandError
from tcemu.files import replace_file


class Output:
    """A file to be written: `Output(...)` refuses a place that cannot take it, before any work is done for it; `write` writes it."""

    def __init__(self, path: Path, overwrite: bool, name: str = "", inputs: Mapping[str, Path] | None = None) -> None:
        """name: of what is written, as messages say it. inputs: the files that the command reads, by name, which it never overwrites."""
        self.path, self.overwrite, self.name, self.inputs = path, overwrite, f"{name}: " if name else "", inputs or {}
        self._check()

    def write(self, content: bytes) -> None:
        """Writes it whole, or leaves the old file as it is."""
        path = self._check()  # others may have written there meanwhile
        try:
            if path.exists() and not path.is_file():  # a device or a pipe takes what comes, and has no place beside it
                with path.open("wb") as file:
                    file.write(content)
            else:
                replace_file(path.resolve(), content)  # a link stays one
        except OSError as error:
            raise CommandError(f"{self.name}{shown(path)} cannot be written: {error.strerror or error}") from error

    def _check(self) -> Path:
        path, name = self.path, self.name
        try:
            if path.is_dir():
                raise CommandError(f"{name}{shown(path)} is a folder; name a file in it")
            if not path.parent.is_dir():
                raise CommandError(f"{name}the folder {shown(path.parent)} does not exist: No such file or directory")
            for read, own in self.inputs.items():
                if path.exists() and own.exists() and path.samefile(own):
                    also = "" if path == own else f", by another name: {shown(own)}"
                    raise CommandError(f"{name}{shown(path)} is {read}{also}. What is read is never overwritten; name another file")
            if path.is_file() and not self.overwrite:
                raise CommandError(f"{name}{shown(path)} exists already; name another file, or add --overwrite")
            path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise CommandError(f"{name}{shown(path)} cannot be written: {getattr(error, 'strerror', None) or error}") from error
        return path


def shown(path: Path) -> str:
    """The name of a file on one line, whatever is in it."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
