"""Write the golden plans anew: `python -m tests.compiler.update_golden`; then review the diff."""

from __future__ import annotations

import json
import sys

from tests.compiler.golden import CASES, FOLDER, differences, dumps


def main() -> None:
    """Write what changed, remove what no case has, and say so."""
    wanted = {case.path for case in CASES}
    for path in sorted(FOLDER.rglob("*.json")):
        if path not in wanted:
            path.unlink()
            sys.stdout.write(f"removed {path.relative_to(FOLDER)}\n")
    for case in CASES:
        plan = case.plan()
        old = json.loads(case.path.read_text()) if case.path.exists() else None
        changes = ["new"] if old is None else differences(old, plan)
        if changes:
            case.path.parent.mkdir(parents=True, exist_ok=True)
            case.path.write_text(dumps(plan) + "\n")
            sys.stdout.write(f"{case.path.relative_to(FOLDER)}: {changes[0]}")
            sys.stdout.write(f" and {len(changes) - 1} more\n" if changes[1:] else "\n")


if __name__ == "__main__":
    main()
