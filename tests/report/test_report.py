"""What the page holds, and what happens where it cannot be made."""

import json
import resource
import signal
import subprocess
import sys
import time

import pytest
from studies import GATES, add_runs, link_runs, write_run, write_study

from comet_moe.analysis.reading import read_studies
from comet_moe.analysis.table import summarise_gates
from comet_moe.exceptions import StudyError, WriteError
from comet_moe.report import write_report
from comet_moe.report.format import brief, decimals, p_said, p_value, plus_minus, scaled
from comet_moe.report.markup import element
from comet_moe.report.page import as_data


def data_of(file):
    text = file.read_text(encoding="utf-8")
    start = text.index('<script type="application/json" id="data">')
    return json.loads(text[start : text.index("</script>", start)].partition(">")[2])


def headings(file):
    text = file.read_text(encoding="utf-8")
    return [part.partition("</h3>")[0] for part in text[: text.index("<script")].split("<h3>")[1:]]


def test_the_report_needs_no_torch(study, tmp_path):
    code = f"""
import sys
from pathlib import Path
from comet_moe.report import write_report
write_report([Path({str(study)!r})], Path({str(tmp_path / "page.html")!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_eight_gates_of_500_trials_with_every_epoch_stay_below_15_megabytes(tmp_path):
    folder = write_study(tmp_path / "study", gates=GATES, trials=500, epochs=100)
    link_runs(folder, tmp_path / "stock", epochs=100)
    started = time.process_time()
    file = write_report([folder], tmp_path / "page.html")
    assert file.stat().st_size < 15e6
    assert time.process_time() - started < 60  # of this process alone; it takes less than ten
    assert all(len(trials["test"]) == 500 for trials in data_of(file)["chapters"][0]["trials"].values())


def test_the_table_has_the_figures_of_the_analysis(study, study_page):
    text = study_page.read_text(encoding="utf-8")
    rows = summarise_gates(read_studies([study])[0])
    places = decimals(row["test_loss_se"] for row in rows)
    for row in rows:
        assert plus_minus(row["test_loss_mean"], row["test_loss_se"], places) in text
        assert row["p_search"] is None or p_said(row["p_search"]).removeprefix("p\u00a0=\u00a0") in text


def test_an_unfinished_study_says_so_at_the_top(study_page):
    header = study_page.read_text(encoding="utf-8").partition("<main")[0]
    assert "Unfinished. movielens (alpha=0.9): 15 of 120 trials are unfinished" in header


def test_parts_that_there_is_nothing_for_are_left_out(tmp_path, real_page):
    folder = write_study(tmp_path / "study", gates=("topk", "comet"), trials=6)
    assert headings(write_report([folder], tmp_path / "elsewhere.html")) == [
        "Summary",
        "Test loss by tuning budget",
        "Test loss against cost",
        "Sensitivity to the settings",
        "Configuration and environment",
    ]
    assert headings(real_page) == [
        "Summary",
        "Loss by epoch",
        "Test loss against cost",
        "Expert usage",
        "Convergence of the trees",
        "The permutation as it hardens",
        "The trees",
        "Configuration and environment",
    ]


def test_runs_without_flops_have_no_plot_of_them(tmp_path):
    run = write_run(tmp_path / "runs" / "one", "topk")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"flops_per_sample": None}))
    text = write_report([tmp_path / "runs"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'data-plot="experts"' in text
    assert 'data-plot="flops"' not in text


def test_a_study_without_a_complete_trial_has_a_page(tmp_path):
    folder = write_study(tmp_path / "study", gates=("topk", "comet"), trials=3, unfinished=3)
    file = write_report([folder], tmp_path / "page.html")
    assert "No trial is complete yet." in file.read_text(encoding="utf-8")
    assert headings(file) == ["Summary", "Configuration and environment"]


def test_studies_and_runs_share_a_page(study, real_runs, tmp_path):
    file = write_report([study, real_runs], tmp_path / "page.html")
    chapters = data_of(file)["chapters"]
    assert [chapter["gates"] for chapter in chapters] == [
        ["softmax", "topk", "topk+", "comet", "comet+"],
        ["topk", "comet+"],
    ]
    assert "2 comparisons of gates" in file.read_text(encoding="utf-8")


def test_few_runs_are_drawn_one_by_one_and_all_make_the_band(tmp_path):
    folder = write_study(tmp_path / "ablation", kind="ablation", gates=("topk",), trials=8, epochs=12)
    add_runs(folder, per_gate=8)
    losses = data_of(write_report([folder], tmp_path / "page.html"))["chapters"][0]["losses"]["topk"]
    assert losses["count"] == 8
    assert len(losses["runs"]) == 5
    every = [
        [json.loads(line)["validation_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder / "runs").iterdir()
    ]
    lows, highs = zip(*((min(at), max(at)) for at in zip(*every, strict=True)), strict=True)
    assert losses["validation"]["low"] == pytest.approx(lows, rel=1e-4)  # five digits are kept
    assert losses["validation"]["high"] == pytest.approx(highs, rel=1e-4)


def test_a_permutation_is_soft_while_it_searches_and_then_one_hard_order(tmp_path):
    write_run(tmp_path / "runs" / "one", "comet+", experts=8, epochs=9, search_epochs=5)
    found = data_of(write_report([tmp_path / "runs"], tmp_path / "page.html"))["chapters"][0]
    frames = found["best"]["comet+"]["permutation"]["frames"]
    assert [(frame["epoch"], frame["soft"]) for frame in frames] == [
        (1, True), (2, True), (3, True), (4, True), (5, False),
    ]  # fmt: skip
    first = frames[0]["searches"][0]
    assert sum(first["matrix"][1::2]) == pytest.approx(8 * 1000, abs=64)  # each of 64 entries is rounded
    assert "matrix" not in frames[-1]["searches"][0]


def test_long_and_wide_runs_keep_fewer_moments(tmp_path):
    write_run(tmp_path / "runs" / "one", "comet", experts=1024, epochs=60)
    file = write_report([tmp_path / "runs"], tmp_path / "page.html")
    frames = data_of(file)["chapters"][0]["best"]["comet"]["trees"]["frames"]
    assert 2 <= len(frames) < 20
    assert (frames[0]["epoch"], frames[-1]["epoch"]) == (1, 59)
    assert file.stat().st_size < 6e6


def test_settings_that_differ_are_beside_one_another_and_equal_ones_said_once(real_page):
    text = real_page.read_text(encoding="utf-8").partition("<script")[0]
    settings = text[text.index('id="study-1-settings"') :]
    assert settings.count("<code>training.epochs</code>") == 1
    assert "<code>gate.name</code></th><td>topk</td><td>comet+</td>" in settings
    assert "<code>torch</code>" in settings
    assert "multidigits" in settings


def test_what_is_no_study_is_one_sentence(tmp_path):
    with pytest.raises(StudyError, match="holds neither a study"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_damaged_epoch_is_named_by_its_line(tmp_path):
    run = write_run(tmp_path / "runs" / "one", "comet", experts=4, epochs=3)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(StudyError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        write_report([tmp_path / "runs"], tmp_path / "page.html")


def test_a_full_disk_is_one_sentence_and_leaves_the_old_page(study, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # as a disk with a megabyte left

    code = (
        "import sys; from pathlib import Path; from comet_moe.report import write_report\n"
        "try: write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "except ValueError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, study, page], preexec_fn=full, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"WriteError {page} cannot be written (")
    assert done.stdout.count("\n") == 1
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_a_place_that_is_a_folder_is_one_sentence(study, tmp_path):
    with pytest.raises(WriteError, match="cannot be written"):
        write_report([study], tmp_path)


def comet_moe(*arguments):
    return subprocess.run([sys.executable, "-m", "comet_moe", *arguments], capture_output=True, text=True)


def test_the_command_prints_the_path_and_the_size(study, tmp_path):
    page = tmp_path / "new" / "page.html"
    done = comet_moe("report", study, "-o", page, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"file": str(page), "bytes": page.stat().st_size}


def test_the_command_refuses_in_one_sentence(tmp_path):
    done = comet_moe("report", tmp_path, "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path} holds neither a study" in done.stderr


def test_the_data_block_cannot_end_its_element():
    said = as_data({"name": "</script><!--"})
    assert "<" not in said
    assert json.loads(said) == {"name": "</script><!--"}


def test_texts_are_escaped_unless_they_are_html():
    bold = element("b", "a < b")
    assert bold == "<b>a &lt; b</b>"
    assert element("p", bold, "&", title='"x"', hidden=True, id=None) == (
        '<p title="&quot;x&quot;" hidden><b>a &lt; b</b>&amp;</p>'
    )


def test_numbers_are_said_briefly():
    assert brief(123456.0) == 123460
    assert brief(0.1234567) == 0.12346
    assert brief(float("nan")) is None
    assert decimals([None, 0.023, 1.5]) == 3
    assert decimals([None]) == 2
    assert scaled(799728.7) == "800 k"
    assert p_said(0.0004) == "p\u00a0<\u00a00.001"
    assert p_said(0.0312) == "p\u00a0=\u00a00.031"
    assert [p_value(p) for p in (None, 0.0004, 0.0312)] == ["-", "<\u00a00.001", "0.031"]
