"""The command line in this process: what it prints and the code it exits with."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from advantage_probe.analyses import cli


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def command(*arguments: object) -> Result:
    """`advantage-probe` with `arguments`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["advantage-probe", *(str(argument) for argument in arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            err.write(traceback.format_exc())
            code = 1
    return Result(code, out.getvalue(), err.getvalue())


def refused(result: Result, *words: str) -> None:
    """Exit code 2, the last line one sentence that holds `words`, no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("advantage-probe: ")
    for word in words:
        assert word in line, line
