import errno
import os
from pathlib import Path

import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import RequiredFile, describe_file, find_files, wrap_read_errors

FILES = (RequiredFile("a", ("a.txt", "a.dat")),)


def test_a_file_in_the_folder_is_preferred_to_one_below_it(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a.txt").touch()
    assert find_files(tmp_path, FILES, "random") == {"a": tmp_path / "x" / "y" / "a.txt"}
    (tmp_path / "a.dat").touch()
    assert find_files(tmp_path, FILES, "random") == {"a": tmp_path / "a.dat"}


def test_the_source_may_be_the_file_itself_if_its_name_is_one_of_those_expected(tmp_path):
    for name in ("a.dat", "other"):
        (tmp_path / name).touch()
    assert find_files(tmp_path / "a.dat", FILES, "random") == {"a": tmp_path / "a.dat"}
    with pytest.raises(DataError, match=r"other is not a\.txt or a\.dat"):
        find_files(tmp_path / "other", FILES, "random")


def test_beside_a_source_file_only_its_own_folder_is_searched(tmp_path):
    files = (*FILES, RequiredFile("b", ("b.txt",), required=False))
    (tmp_path / "below").mkdir()
    for name in ("a.txt", "below/b.txt"):
        (tmp_path / name).touch()
    assert find_files(tmp_path / "a.txt", files, "random").keys() == {"a"}
    (tmp_path / "b.txt").touch()
    assert find_files(tmp_path / "a.txt", files, "random").keys() == {"a", "b"}


def test_a_missing_file_is_an_error_unless_it_is_optional_or_for_another_split(tmp_path):
    with pytest.raises(DataError, match=r"has no a\.txt or a\.dat; put the file there"):
        find_files(tmp_path, FILES, "random")
    optional = RequiredFile("b", ("b.txt",), required=False)
    for_authors = RequiredFile("c", ("c.txt",), only_for_split="authors")
    assert find_files(tmp_path, (optional, for_authors), "random") == {}
    with pytest.raises(DataError, match=r"has no c\.txt"):
        find_files(tmp_path, (optional, for_authors), "authors")


def test_two_files_of_the_same_name_are_an_error_that_names_both(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").touch()
    with pytest.raises(DataError, match=r"x/a\.txt and .*y/a\.txt could both be meant"):
        find_files(tmp_path, FILES, "random")


def test_a_source_that_does_not_exist_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_files(tmp_path / "nowhere", FILES, "random")


def test_a_file_is_described_by_its_content_and_a_folder_by_its_names_and_sizes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    # The sha256 of "abc", from FIPS 180-4.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert describe_file(path) == {"file": "a.txt", "bytes": 3, "sha256": digest}
    before = describe_file(tmp_path)
    assert before["bytes"] == 3
    path.write_text("abcd")
    assert describe_file(tmp_path) != before


def test_a_refused_access_is_an_error_that_names_the_file_and_the_reason():
    with (
        pytest.raises(DataError, match=r"x\.csv cannot be opened \(Permission denied\)"),
        wrap_read_errors(Path("x.csv"), "table"),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("error", [KeyError("x"), EOFError(), OSError("odd bytes"), ValueError("two\nlines")])
def test_whatever_a_parser_raises_becomes_one_sentence_that_names_file_and_kind(error):
    with (
        pytest.raises(
            DataError, match=r"^x\.csv is not a readable table \([^\n]+\); it is truncated"
        ) as caught,
        wrap_read_errors(Path("x.csv"), "table"),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_running_out_of_memory_is_not_a_damaged_file():
    with (
        pytest.raises(DataError, match=r"x.csv needs more memory than there is; give a smaller table"),
        wrap_read_errors(Path("x.csv"), "table"),
    ):
        raise MemoryError
