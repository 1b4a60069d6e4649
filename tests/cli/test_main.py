from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import te_ops
from te_ops.cli import COMMANDS, main


def test_the_script_of_the_package_is_main() -> None:
    assert EntryPoint("te-ops", "te_ops.cli:main", "console_scripts").load() is main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"te_ops {te_ops.__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_names_the_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (COMMANDS if not command else ["usage", command[0]]))


def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "no_such_block"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("te-ops explain: 'no_such_block' is no block")


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m te_ops explain linear | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
