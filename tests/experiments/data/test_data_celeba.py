import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from raw_files import jpeg_bytes, write_celeba

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import DATASETS, prepare

BALANCED = DATASETS["celeba"].options["attributes"]
ALL = ["Bald", *BALANCED, "Young"]


def read_labels(folder):
    text = (folder / "list_attr_celeba.txt").read_text().splitlines()
    return {row.split()[0]: dict(zip(ALL, map(int, row.split()[1:]), strict=True)) for row in text[2:]}


def test_images_labels_and_splits_are_those_of_the_published_files(tmp_path):
    write_celeba(tmp_path, ALL, count=30)
    dataset = prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [12, 12, 6]
    assert dataset.meta["image_shape"] == [3, 20, 16]
    assert list(dataset.train.targets) == BALANCED
    expected = read_labels(tmp_path)
    for row, name in enumerate(sorted(expected)[:12]):
        with Image.open(tmp_path / "img_align_celeba" / name) as image:
            assert np.array_equal(dataset.train.features["image"][row], np.asarray(image).transpose(2, 0, 1))
        for attribute in BALANCED:
            assert dataset.train.targets[attribute][row] == (expected[name][attribute] == 1)


def test_without_a_partition_the_seed_splits_and_a_note_says_so(tmp_path):
    write_celeba(tmp_path, ALL, count=30, partition=False)
    dataset = prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [24, 3, 3]
    assert any("80/10/10" in note for note in dataset.meta["notes"])


def test_options_resize_the_images_and_choose_the_attributes(tmp_path):
    write_celeba(tmp_path, ALL)
    dataset = prepare(
        "celeba",
        source=tmp_path,
        cache=tmp_path / "c",
        strict=False,
        size=(10, 8),
        attributes=["Young", "Male"],
    )
    assert dataset.train.features["image"].shape[1:] == (3, 10, 8)
    assert list(dataset.train.targets) == ["Young", "Male"]
    assert dataset.meta["classes"] == {"Young": 2, "Male": 2}
    assert not any("balanced" in note for note in dataset.meta["notes"])
    dataset = prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert any("most balanced labels" in note for note in dataset.meta["notes"])


def test_a_parquet_file_keeps_each_image_with_its_labels(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.choice([-1, 1], (20, len(BALANCED))).astype("int8"), columns=BALANCED)
    frame.insert(0, "jpeg", [jpeg_bytes(level=10 * number) for number in range(20)])
    frame.insert(0, "file", [f"{number + 1:06d}.jpg" for number in range(20)])
    frame.to_parquet(tmp_path / "celeba_first10k_89x109.parquet")
    dataset = prepare("celeba", source=tmp_path, cache=tmp_path / "c")
    level = np.concatenate(
        [p.features["image"].mean(axis=(1, 2, 3)) for p in (dataset.train, dataset.validation, dataset.test)]
    )
    male = np.concatenate([p.targets["Male"] for p in (dataset.train, dataset.validation, dataset.test)])
    order = np.argsort(level)  # levels grow with the row number
    assert np.array_equal(male[order], frame["Male"] == 1)


def test_a_truncated_image_is_an_error_that_names_it_and_leaves_no_file(tmp_path):
    write_celeba(tmp_path, ALL)
    path = tmp_path / "img_align_celeba" / "000007.jpg"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"000007\.jpg is not a readable image"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert list((tmp_path / "c").iterdir()) == []


def test_an_image_of_another_size_is_an_error_that_suggests_resizing(tmp_path):
    write_celeba(tmp_path, ALL)
    (tmp_path / "img_align_celeba" / "000007.jpg").write_bytes(jpeg_bytes(30, 30))
    with pytest.raises(
        DataError, match=r"000007\.jpg is 30x30 where 000001\.jpg is 20x16; set the option size"
    ):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_a_missing_image_or_attribute_list_is_an_error_that_names_it(tmp_path):
    write_celeba(tmp_path, ALL)
    (tmp_path / "img_align_celeba" / "000003.jpg").unlink()
    with pytest.raises(DataError, match=r"000003\.jpg cannot be opened \(No such file"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    (tmp_path / "list_attr_celeba.txt").unlink()
    with pytest.raises(DataError, match=r"list_attr_celeba\.txt is not beside"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text.replace("Male", "Man"), "no column Male; its columns are"),
        (lambda text: text.replace(" 1", " 2"), "a value other than -1 and 1 for 000001.jpg"),
        (lambda text: text[:-7], "a value other than -1 and 1 for 000030.jpg"),
    ],
)
def test_a_damaged_attribute_list_is_an_error_that_names_it(tmp_path, change, reason):
    write_celeba(tmp_path, ALL)
    path = tmp_path / "list_attr_celeba.txt"
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=rf"list_attr_celeba\.txt.*({reason})"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False, attributes=["Male", "Young"])


def test_an_image_that_is_not_in_the_partition_is_an_error_that_names_it(tmp_path):
    write_celeba(tmp_path, ALL)
    path = tmp_path / "list_eval_partition.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"list_eval_partition\.txt does not put 000030\.jpg"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)


@pytest.mark.parametrize("size", [[10], [0, 5], ["a", "b"], 7])
def test_a_size_that_is_not_height_and_width_is_an_error(tmp_path, size):
    write_celeba(tmp_path, ALL)
    with pytest.raises(DataError, match="option size is"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False, size=size)


def test_an_unofficial_number_of_images_is_an_error(tmp_path):
    write_celeba(tmp_path, ALL)
    with pytest.raises(DataError, match=r"30 images where the official release has 202,599.*--any-size"):
        prepare("celeba", source=tmp_path, cache=tmp_path / "c")


def test_a_grey_jpeg_is_repeated_over_three_channels(tmp_path):
    write_celeba(tmp_path, ALL)
    grey = io.BytesIO()
    Image.fromarray(np.full((20, 16), 99, np.uint8)).save(grey, "JPEG")
    (tmp_path / "img_align_celeba" / "000001.jpg").write_bytes(grey.getvalue())
    dataset = prepare("celeba", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert (dataset.train.features["image"][0] == 99).all()
