"""`python -m te_ops`: the command line, see `te_ops.cli`."""

from __future__ import annotations

import sys

from te_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
