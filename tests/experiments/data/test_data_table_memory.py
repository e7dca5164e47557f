"""The memory that preparing a table takes does not grow with the number of its rows."""

from pathlib import Path

import pytest

from forked import Forked
from made_tables import customers

ROWS, REPEATS = 20_000, 20
ALLOWED = 100 * 2**20
"""Bytes of growth, until buffers and samples are full. The text file grows by almost four times as much."""

PROGRAM = """
import sys
from pathlib import Path
from comet_moe.experiments.data import prepare

prepare("table", source=Path(sys.argv[1]), cache=Path(sys.argv[2]), targets=["bought", "spend"])
lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(1024 * int(lines["VmHWM"].split()[0]))
"""


def peak_memory(path, store):
    """Bytes that a process of its own has in memory at most while it prepares the table."""
    process = Forked("-c", PROGRAM, path, store)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return int(out)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_twenty_times_the_rows_take_the_same_memory(tmp_path, store, suffix):
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak memory of a process is read from /proc, which is not there")
    table = customers(ROWS).drop(columns=["tags", "customer_id"])
    table["text"] = [f"{row % 50:01000}" for row in range(ROWS)]
    once, often = tmp_path / f"once{suffix}", tmp_path / f"often{suffix}"
    if suffix == ".csv":
        text = table.to_csv(index=False)
        once.write_text(text)
        often.write_text(text + text.partition("\n")[2] * (REPEATS - 1))
        assert often.stat().st_size - once.stat().st_size > 3.5 * ALLOWED
    else:
        once, often = tmp_path / "once", tmp_path / "often"
        for folder, files in ((once, 1), (often, REPEATS)):
            folder.mkdir()
            for index in range(files):
                table.to_parquet(folder / f"{index:02}.parquet", index=False)
    assert peak_memory(often, store) < peak_memory(once, store) + ALLOWED
