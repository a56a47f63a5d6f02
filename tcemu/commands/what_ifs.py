"""The words after --what-if."""

from tcemu.arithmetic.model import Model
from tcemu.arithmetic.what_if import what_if
from tcemu.commands import CommandError
from tcemu.isa.diagnosis import shown


def changed(model: Model, text: str) -> Model:
    """The model that one --what-if asks for. Raises CommandError."""
    try:
        return what_if(model, text)
    except ValueError as error:
        raise CommandError(f"--what-if {shown(text)}: {error}") from error
