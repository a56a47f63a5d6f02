"""The named errors. Each message says what was asked, what is so, what would work, and where it is written."""


class Unsupported(ValueError):
    """PTX forbids it: the spelling is not an instruction, or the target does not have it."""


class NotModelled(ValueError):
    """PTX allows it, but nobody has evidence of what this target computes, so tcemu refuses to guess."""


class UndefinedBehaviour(ValueError):
    """PTX leaves the result open; raised in checked mode only."""
