"""Writes the tables of docs/which_encoding.md: parameters, measured costs, and what the evaluations show.

python tools/which_encoding.py --measure     # costs first: about four minutes on one core
python tools/which_encoding.py               # the tables alone
"""

import argparse
import platform
import sys
from pathlib import Path

import pandas as pd

from vitrel.evaluate.environment import environment
from vitrel.evaluate.guide import cost_table, evidence_table, fill, measure_costs, read_costs
from vitrel.files import whole

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the costs anew, into results/encoding_cost/costs.csv")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not what the results give")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "which_encoding.md")
    args = parser.parse_args()
    try:
        _write(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _write(args: argparse.Namespace) -> None:
    costs = args.results / "encoding_cost" / "costs.csv"
    if args.measure:
        costs.parent.mkdir(parents=True, exist_ok=True)
        with whole(costs) as part:
            ran_on = {name: value for name, value in environment("shapes").items() if name not in ("decoder", "resize_backend")}
            ran_on["device"] = f"cpu {platform.machine()}, 1 thread"
            pd.DataFrame(measure_costs()).assign(**ran_on).to_csv(part, index=False)
    text = args.page.read_text("utf-8")
    found = fill(
        text,
        (
            ("costs", cost_table(read_costs(costs))),
            ("evidence", evidence_table(args.results / "study_shapes/shapes/results.csv")),
        ),
    )
    if args.check and found != text:
        sys.exit(f"{args.page} is not what the results give: run python tools/which_encoding.py")
    if not args.check:
        args.page.write_text(found, "utf-8")
        print(args.page)


if __name__ == "__main__":
    main()
