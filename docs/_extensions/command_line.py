"""The directive `command-line`: every command of tcemu with its options, from the parser itself."""

import argparse
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from tcemu.cli import parser


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class CommandLine(SphinxDirective):
    """A section for each command: what it does, its words, an example."""

    def run(self) -> list[nodes.Node]:
        return [self.section(name, command, text) for name, command, text in commands()]

    def section(self, name: str, command: argparse.ArgumentParser, text: str) -> nodes.section:
        """One command."""
        title = f"tcemu {name}"
        section = nodes.section(ids=[nodes.make_id(title)], names=[title])
        section += nodes.title("", "", nodes.literal("", title))
        section += nodes.paragraph(text=command.description or text)
        rows = [(words(action), sentence(action, command)) for action in command._actions if not isinstance(action, argparse._HelpAction)]
        section += definitions(rows)
        if command.epilog:
            lead, _, line = command.epilog.partition(": ")
            section += nodes.paragraph(text=f"{lead[0].upper()}{lead[1:]}:")
            line = line.replace("; ", "\n")
            section += nodes.literal_block(line, line, language="sh")
        self.state.document.note_implicit_target(section, section)
        return section


def commands() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Each command's name, parser and line of help."""
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            yield from ((name, command, said.get(name, "")) for name, command in action.choices.items())


def words(action: argparse.Action) -> str:
    """How an argument is written."""
    takes = action.metavar or (action.dest.upper() if not action.choices else "|".join(map(str, action.choices)))
    takes = " ".join(takes) if isinstance(takes, tuple) else takes
    repeated = {"+": " ...", "*": " ..."}.get(str(action.nargs), "")
    if not action.option_strings:
        return f"{takes}{repeated}"
    value = "" if action.nargs == 0 else f" {takes}{repeated}"
    return ", ".join(f"{option}{value}" for option in action.option_strings)


def sentence(action: argparse.Action, command: argparse.ArgumentParser) -> str:
    """What it is, and whether it must be given."""
    text = command._get_formatter()._expand_help(action) if action.help else ""
    for group in command._mutually_exclusive_groups:
        if group.required and action in group._group_actions:
            others = ", ".join(other.option_strings[0] for other in group._group_actions if other is not action)
            return f"{text} (required: this or {others})"
    return f"{text} (required)" if action.required and action.option_strings else text


def definitions(rows: list[tuple[str, str]]) -> nodes.definition_list:
    """Terms in code, each with its sentence."""
    made = nodes.definition_list(classes=["options"])
    for term, text in rows:
        item = nodes.definition_list_item()
        item += nodes.term("", "", nodes.literal("", term))
        item += nodes.definition("", nodes.paragraph(text=text))
        made += item
    return made
