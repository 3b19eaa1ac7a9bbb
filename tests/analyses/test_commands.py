"""One command line: the same option means the same everywhere, every help has an example, codes are 0, 1 and 2."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import typer
from terminal import command

from advantage_probe.analyses import cli
from advantage_probe.analyses.commands import console

# options whose meaning the command itself narrows: the text may differ, the type may not
OWN_WORDS: dict[str, dict[str, str]] = {
    "--out": {"compare": "a file for one table", "report": "the page", "tunnel train": "the run's folder"},
    "--top": {"ablate": "heads beside random directions", "vocabulary": "tokens each way"},
    "--window": {"ablate": "whole windows", "vocabulary": "whole windows"},
}
NO_JSON = {
    "convert": "says in one line what it rewrote",
    "report": "writes a page",
    "cite": "prints text to paste",
    "version": "prints one word",
}
WRITES = ("analyze", "em", "dynamics", "manifold", "geometry", "in-context")


def commands() -> Iterator[tuple[str, Any]]:
    group: Any = typer.main.get_command(cli.app)
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in found.commands.items())
        else:
            yield name, found


COMMANDS = dict(commands())


def options(found: Any) -> dict[str, Any]:
    return {option: parameter for parameter in found.params for option in parameter.opts if option.startswith("--")}


def test_the_commands_are_those_that_are_promised() -> None:
    assert set(COMMANDS) == {
        *("analyze", "verify", "compare", "report", "cite", "doctor", "version", "convert"),
        *("em", "dynamics", "manifold", "geometry", "in-context", "ablate", "interventions", "vocabulary"),
        *("tunnel list", "tunnel train", "tunnel evaluate"),
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_that_the_command_line_understands(name: str) -> None:
    result = command(*name.split(), "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    example = COMMANDS[name].help.split("Example: ")[1].replace("\n", " ")
    words = shlex.split(example)
    assert words[: 1 + len(name.split())] == ["advantage-probe", *name.split()]
    with COMMANDS[name].make_context(name, words[1 + len(name.split()) :]):
        pass
    assert " ".join(example.split()) in " ".join(result.stdout.split())


def test_the_same_option_has_the_same_type_and_words_everywhere() -> None:
    seen: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, found in COMMANDS.items():
        for option, parameter in options(found).items():
            hints = get_type_hints(found.callback)
            # whether it may be left out is each command's own matter
            kind = str(hints.get(parameter.name, "flag")).removesuffix(" | None").removeprefix("<class '").rstrip("'>")
            words = "" if name in OWN_WORDS.get(option, {}) else str(parameter.help)
            seen[option][(kind, words)].append(name)
            assert parameter.help, (name, option)
            assert option == option.lower()
    for option, uses in seen.items():
        kinds = {kind for kind, _ in uses}
        texts = {words for _, words in uses if words}
        assert len(kinds) == 1, (option, dict(uses))
        assert len(texts) <= 1, (option, dict(uses))


def test_what_goes_with_what() -> None:
    for name, found in COMMANDS.items():
        has = options(found)
        assert ("--json" in has) == (name not in NO_JSON), name
        if name in WRITES:
            assert {"--out", "--overwrite", "--tables", "--json"} <= set(has), name
        if "--example" in has and name != "interventions":  # it reads shipped tunnels, which stay where they are
            assert {"--device", "--dtype"} <= set(has), name
        if "--draws" in has:
            assert "--seed" in has, name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_the_words_is_code_two_and_no_traceback(name: str) -> None:
    result = command(*name.split(), "--no-such-option")
    assert result.returncode == 2
    assert "No such option: --no-such-option" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> str:
        with console.progress("working", 2) as note:
            note(1, 2, "half")
            note(2, 2, "whole")
        taken = capsys.readouterr()
        assert taken.out == ""
        return taken.err

    assert run() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = run()
    assert "working" in shown
    assert "2/2" in shown
