"""What each command of the command line does, one file a command; `cli` only reads the words."""


class CommandError(Exception):
    """The user asked for something that cannot be done; the message says what would work. No traceback is shown."""
