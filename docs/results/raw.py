"""The results of all runs of a study, in one file beside its page: python raw.py FOLDER > runs.jsonl

A line is {"run": NAME, "result": ...}. NAME is the folder of a run's result.json (or peer.json) in FOLDER, or
the name of another .json file directly in it. The table.py of a study reads either FOLDER or this file.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]


def read(path: Path) -> Runs:
    """The result of each run by its name, from the folder of the runs or from ``runs.jsonl``."""
    if path.is_file():
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return {entry["run"]: entry["result"] for entry in entries}
    files = {file.relative_to(path).with_suffix("").as_posix(): file for file in path.glob("*.json")}
    for name in ("result.json", "peer.json"):
        files |= {file.parent.relative_to(path).as_posix(): file for file in path.rglob(name)}
    return {name: json.loads(files[name].read_text()) for name in sorted(files)}


def of(runs: Runs, name: str) -> list[dict[str, Any]]:
    """The runs called ``name`` and a seed: ``comet-0``, ``comet-1``, ..."""
    return [result for run, result in runs.items() if re.fullmatch(rf"{re.escape(name)}-\d+", run)]


if __name__ == "__main__":
    for run, result in read(Path(sys.argv[1])).items():
        print(json.dumps({"run": run, "result": result}, separators=(",", ":")))
