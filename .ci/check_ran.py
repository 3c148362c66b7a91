"""Fails when no test ran, all skipped included: `check_ran.py RESULTS`, where RESULTS is pytest's JUnit XML."""

import sys
from pathlib import Path
from xml.etree import ElementTree


def ran(results: Path) -> int:
    """The number of tests in `results` that were executed, whatever came of them."""
    suites = ElementTree.parse(results).getroot().iter("testsuite")
    return sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)


def main() -> None:
    results = Path(sys.argv[1])
    try:
        count = ran(results)
    except (OSError, ElementTree.ParseError) as error:
        sys.exit(f"No test ran: {results} holds no test results ({error}).")
    if count == 0:
        sys.exit("No test ran.")


if __name__ == "__main__":
    main()
