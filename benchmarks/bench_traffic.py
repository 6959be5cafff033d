"""Scores of the traffic controller's agents against the exact optimum (see :mod:`agents.traffic_report`).

python benchmarks/bench_traffic.py           a table
python benchmarks/bench_traffic.py --json    the same as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agents.traffic_report import compare_traffic, traffic_table
from inferencegym.traffic import get_traffic_task, list_traffic_tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison of every task."""
    parser = argparse.ArgumentParser(description="Scores of the traffic controller's agents against the exact optimum.")
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    tasks = [get_traffic_task(task_id) for task_id in options.task] if options.task else list_traffic_tasks()
    results = [compare_traffic(task) for task in tasks]
    print(json.dumps(results, indent=2) if options.json else "\n\n".join(map(traffic_table, results)))


if __name__ == "__main__":
    main()
