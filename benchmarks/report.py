"""Tables from the JSON of `te-ops bench`, on the terminal or in the marked regions of a page.

python benchmarks/report.py RESULTS.json ...                                     print everything
python benchmarks/report.py RESULTS.json ... --page docs/performance/index.md    fill the page
python benchmarks/report.py RESULTS.json ... --plot pipelines.svg                draw the pipelines
python benchmarks/report.py --kernels TABLE.md --page docs/performance/index.md  only the kernels' registers
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.suite import pages, report


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--kernels", type=Path, help="the table that scripts/kernel_report.py --out wrote"
    )
    options = parser.parse_args()
    if not options.results:
        if not (options.kernels and options.page):
            parser.error("name results, or --kernels and --page")
        _fill(options.page, {"kernels": options.kernels.read_text()})
        return 0
    merged = pages.merge([json.loads(path.read_text()) for path in options.results])
    if options.plot and not report.plot(merged, options.plot):
        print("no plot: matplotlib is absent, or there is nothing to draw", file=sys.stderr)
    if not options.page:
        print(report.text(merged))
        return 0
    made = pages.regions(merged)
    if options.kernels:
        made["kernels"] = options.kernels.read_text()
    _fill(options.page, made)
    return 0


def _fill(page: Path, made: dict[str, str]) -> None:
    page.write_text(pages.fill(page.read_text(), made))


if __name__ == "__main__":
    sys.exit(main())
