"""The command line: `te-ops info`, `te-ops explain`, `te-ops bench`, `te-ops train` and `te-ops generate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import te_ops
from te_ops.cli import bench, explain, generate, info, train
from te_ops.errors import Error


class Command(Protocol):
    """What a module of this package offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit status."""


COMMANDS: dict[str, Command] = {
    "info": info,
    "explain": explain,
    "bench": bench,
    "train": train,
    "generate": generate,
}


def parser() -> argparse.ArgumentParser:
    """The arguments of every command; each module of `COMMANDS` adds its own."""
    top = argparse.ArgumentParser(prog="te-ops", description="Operator-fusion op graphs.")
    top.add_argument("--version", action="version", version=f"te_ops {te_ops.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0].rstrip(".").partition(": ")[2]
        added = commands.add_parser(name, help=summary, description=f"{summary}.")
        module.add_arguments(added)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if a check failed, 2 for a user's mistake."""
    options = parser().parse_args(arguments)
    try:
        status = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `te-ops explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Error as error:
        print(f"te-ops {options.command}: {error}", file=sys.stderr)
        return 2


__all__ = ["COMMANDS", "main", "parser"]
