"""The content of the page, and the errors if it cannot be written."""

import html
import json
import re
import resource
import signal
import subprocess
import sys

import pytest
from command import refusal, succeed
from studies import GATES, MARKUP, add_runs, link_runs, write_run, write_study

from comet_moe.exceptions import MissingExtraError, StudyError, WriteError
from comet_moe.experiments.report import write_report
from comet_moe.experiments.report.format import (
    choose_decimals,
    format_mean,
    format_p,
    format_p_equation,
    format_scaled,
    round_number,
)
from comet_moe.experiments.report.page import read_asset
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.gates.registry import gate_kinds


def data_of(file):
    text = file.read_text(encoding="utf-8")
    start = text.index('<script type="application/json" id="data">')
    return json.loads(text[start : text.index("</script>", start)].partition(">")[2])


def headings(file):
    text = file.read_text(encoding="utf-8")
    return [part.partition("</h3>")[0] for part in text[: text.index("<script")].split("<h3>")[1:]]


@pytest.mark.slow
def test_writing_a_report_does_not_import_torch(study, tmp_path):
    code = f"""
import sys
from pathlib import Path
from comet_moe.experiments.report import write_report
write_report([Path({str(study)!r})], Path({str(tmp_path / "page.html")!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_eight_gates_of_500_trials_with_every_epoch_stay_below_15_megabytes(tmp_path):
    folder = write_study(tmp_path / "study", gates=GATES, trials=500, epochs=100)
    link_runs(folder, tmp_path / "runs_of_gates", epochs=100)
    file = write_report([folder], tmp_path / "page.html")
    assert file.stat().st_size < 15e6
    assert all(len(trials["test"]) == 500 for trials in data_of(file)["sections"][0]["trials"].values())


def test_the_table_has_the_means_and_p_values_of_the_analysis(study, study_page):
    text = html.unescape(study_page.read_text(encoding="utf-8"))
    rows = compare_gates(read_studies([study])[0])
    decimals = choose_decimals(row["test_loss_se"] for row in rows)
    for row in rows:
        assert format_mean(row["test_loss_mean"], row["test_loss_se"], decimals) in text
        assert row["p_search"] is None or format_p(row["p_search"]) in text


def test_the_header_says_how_many_trials_of_an_unfinished_study_are_missing(study_page):
    header = study_page.read_text(encoding="utf-8").partition("<main")[0]
    assert "movielens (alpha=0.9): 15 of 120 trials are unfinished" in header


def test_subsections_without_data_are_left_out(tmp_path, runs_page):
    folder = write_study(tmp_path / "study", gates=("topk", "comet"), trials=6)
    assert headings(write_report([folder], tmp_path / "elsewhere.html")) == [
        "What to use",
        "Does it pay? Loss by operations",
        "Summary",
        "Does it route?",
        "Test loss by number of trials",
        "Test loss by cost",
        "Sensitivity to hyperparameters",
        "Configuration and environment",
    ]
    assert headings(runs_page) == [
        "What to use",
        "Does it pay? Loss by operations",
        "What experts specialise in",
        "Summary",
        "Does it route?",
        "Loss by epoch",
        "Test loss by cost",
        "Convergence of the trees",
        "Permutation by epoch",
        "Trees by epoch",
        "Configuration and environment",
    ]


def test_runs_without_flops_have_no_plot_of_flops(tmp_path):
    for name in ("one", "two"):
        run = write_run(tmp_path / "runs" / name, "topk")
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"flops_per_sample": None}))
    text = write_report([tmp_path / "runs"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'data-plot="experts"' in text
    assert 'data-plot="flops"' not in text


def test_a_study_without_a_complete_trial_has_a_page(tmp_path):
    folder = write_study(tmp_path / "study", gates=("topk", "comet"), trials=3, unfinished=3)
    file = write_report([folder], tmp_path / "page.html")
    assert "No run is complete: see the reasons in the study folder." in file.read_text(encoding="utf-8")
    assert headings(file) == ["What to use", "Summary", "Configuration and environment"]


def test_studies_and_runs_share_a_page(study, runs, tmp_path):
    file = write_report([study, runs], tmp_path / "page.html")
    sections = data_of(file)["sections"]
    assert [section["gates"] for section in sections] == [
        ["softmax", "topk", "topk+", "comet", "comet+"],
        ["topk", "comet+"],
    ]
    assert "2 comparisons of gates" in file.read_text(encoding="utf-8")


def test_five_runs_are_drawn_as_lines_and_the_band_is_the_range_of_all(tmp_path):
    folder = write_study(tmp_path / "ablation", kind="ablation", gates=("topk",), trials=8, epochs=12)
    add_runs(folder, per_gate=8)
    losses = data_of(write_report([folder], tmp_path / "page.html"))["sections"][0]["losses"]["topk"]
    assert losses["count"] == 8
    assert len(losses["runs"]) == 5
    every = [
        [json.loads(line)["validation"]["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder / "runs").iterdir()
    ]
    lows, highs = zip(*((min(at), max(at)) for at in zip(*every, strict=True)), strict=True)
    assert losses["validation"]["low"] == pytest.approx(lows, rel=1e-4)  # five digits are kept
    assert losses["validation"]["high"] == pytest.approx(highs, rel=1e-4)


def test_a_permutation_is_soft_while_it_searches_and_then_one_hard_order(tmp_path):
    write_run(tmp_path / "runs" / "one", "comet+", experts=8, epochs=9, search_epochs=5)
    data = data_of(write_report([tmp_path / "runs"], tmp_path / "page.html"))["sections"][0]
    frames = data["routing"]["comet+"]["permutation"]["frames"]
    assert [(frame["epoch"], frame["soft"]) for frame in frames] == [
        (1, True), (2, True), (3, True), (4, True), (5, False),
    ]  # fmt: skip
    first = frames[0]["permutations"][0]
    assert sum(first["matrix"][1::2]) == pytest.approx(8 * 1000, abs=64)  # each of 64 entries is rounded
    assert "matrix" not in frames[-1]["permutations"][0]


def test_long_and_wide_runs_have_fewer_slider_positions(tmp_path):
    write_run(tmp_path / "runs" / "one", "comet", experts=1024, epochs=60)
    file = write_report([tmp_path / "runs"], tmp_path / "page.html")
    frames = data_of(file)["sections"][0]["routing"]["comet"]["trees"]["frames"]
    assert 2 <= len(frames) < 20
    assert (frames[0]["epoch"], frames[-1]["epoch"]) == (1, 59)
    assert file.stat().st_size < 6e6


def test_settings_that_differ_have_a_column_per_gate_and_equal_ones_are_listed_once(runs_page):
    text = runs_page.read_text(encoding="utf-8").partition("<script")[0]
    settings = text[text.index('id="study-1-settings"') :]
    assert settings.count("<code>training.epochs</code>") == 1
    assert "<code>gate.name</code></th><td>topk</td><td>comet+</td>" in settings
    assert "<code>python</code></dt><dd>3.11</dd>" in settings
    assert "<dt>rows.train</dt><dd>900</dd>" in settings


def test_a_folder_without_studies_or_runs_is_an_error(tmp_path):
    with pytest.raises(StudyError, match="has neither a study"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_error_about_a_damaged_epoch_names_its_line(tmp_path):
    run = write_run(tmp_path / "runs" / "one", "comet", experts=4, epochs=3)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(StudyError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        write_report([tmp_path / "runs"], tmp_path / "page.html")


@pytest.mark.slow
def test_a_full_disk_is_an_error_of_one_sentence_and_keeps_the_old_page(study, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # as a disk with a megabyte left

    code = (
        "import sys; from pathlib import Path; from comet_moe.experiments.report import write_report\n"
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


def test_writing_to_a_folder_is_an_error(study, tmp_path):
    with pytest.raises(WriteError, match="is a folder"):
        write_report([study], tmp_path)


def test_the_command_prints_the_path_and_the_size(study, tmp_path):
    page = tmp_path / "new" / "page.html"
    assert succeed("report", study, "-o", page, "--json").json == {
        "file": str(page),
        "bytes": page.stat().st_size,
    }


def test_the_command_rejects_a_folder_without_studies_in_one_sentence(tmp_path):
    sentence = refusal("report", tmp_path, "-o", tmp_path / "page.html")
    assert f"{tmp_path} has neither a study" in sentence


def test_every_text_is_escaped(tmp_path):
    folder = write_study(tmp_path / "study", gates=("topk", MARKUP), trials=4, failed=1, name=MARKUP)
    add_runs(folder, per_gate=3, owners=(MARKUP, "rating"))
    as_json = json.dumps(MARKUP)[1:-1]
    for file in (folder / "study.json", folder / "trials.jsonl", *folder.glob("runs/*/[de]*.json")):
        text = file.read_text()
        for name in ("movielens", "watched", "the loss is nan", "licence", "3.11", "training.epochs=12"):
            text = text.replace(name, as_json)
        file.write_text(text)
    page = write_report([folder], tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 3  # data, plotly, and the scripts of the page
    body = text[text.index("<body>") : text.index("<script")]
    assert MARKUP not in body
    assert html.unescape(body).count(MARKUP) > 20  # title, gates, tasks, settings, reasons, ...
    assert data_of(page)["sections"][0]["gates"] == ["topk", MARKUP]


def test_attributes_hold_the_names_of_gates(tmp_path):
    folder = write_study(tmp_path / "study", gates=("topk", MARKUP), trials=2)
    text = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    attribute = text.partition("data-gates='")[2].partition("'")[0]
    assert json.loads(html.unescape(attribute)) == ["topk", MARKUP]


@pytest.mark.parametrize("module", ["jinja2", "plotly.offline"])
def test_a_missing_dependency_is_an_error_that_names_the_extra(study, tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*pip install 'comet-moe\[report\]'"):
        write_report([study], tmp_path / "page.html")


def test_gates_per_layer_have_the_names_of_layers(tmp_path):
    layers = ("layer 1", "layer 2", "layer 3")
    write_run(tmp_path / "runs" / "one", "comet+", shared="gate", owners=layers)
    write_run(tmp_path / "runs" / "two", "dselect+", shared="all", owners=layers)
    routing = data_of(write_report([tmp_path / "runs"], tmp_path / "page.html"))["sections"][0]["routing"]
    assert routing["comet+"]["permutation"]["names"] == list(layers)
    assert routing["dselect+"]["permutation"]["names"] == ["all gates"]
    for gate in ("comet+", "dselect+"):
        assert set(routing[gate]["load"]) == set(routing[gate]["convergence"]) == set(layers)
        assert all(set(frame["gates"]) == set(layers) for frame in routing[gate]["trees"]["frames"])


def test_epochs_without_a_finite_loss_are_left_out_of_the_range(tmp_path, recwarn):
    run = write_run(tmp_path / "runs" / "one", "topk", epochs=3)
    first, *others = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first["validation"]["loss"] = None
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, [first, *others])))
    page = write_report([tmp_path / "runs"], tmp_path / "page.html")
    losses = data_of(page)["sections"][0]["losses"]["topk"]
    assert [low is None for low in losses["validation"]["low"]] == [True, False, False]
    assert not recwarn.list


def test_numbers_are_rounded_for_readers():
    assert round_number(123456.0) == 123460
    assert round_number(0.1234567) == 0.12346
    assert round_number(float("nan")) is None
    assert choose_decimals([None, 0.023, 1.5]) == 3
    assert choose_decimals([None]) == 2
    assert format_scaled(799728.7) == "800 k"
    assert format_scaled(999_700) == "1 M"
    assert format_p_equation(0.0004) == "p\u00a0<\u00a00.001"
    assert format_p_equation(0.0312) == "p\u00a0=\u00a00.031"
    assert [format_p(p) for p in (None, 0.0004, 0.0312)] == ["-", "<\u00a00.001", "0.031"]


def chapter(file):
    """The text of "Does it route?"."""
    text = html.unescape(file.read_text(encoding="utf-8").partition("<script")[0])
    return text.partition('id="study-1-routes"')[2].partition("</section>")[0]


def test_a_chapter_says_which_gates_route(tmp_path):
    folder = write_study(tmp_path / "study", gates=("dense", "topk", "comet"), trials=3, kind="ablation")
    text = chapter(write_report([folder], tmp_path / "page.html"))
    assert "In a word: topk: routes; comet: static." in text
    assert 'data-gate="dense"' not in text  # nothing can be said of it
    rows = {row["gate"]: row for row in compare_gates(read_studies([folder])[0])}
    for task, described in rows["topk"]["routing"].items():
        assert task in text
        assert f"<td>{described['information_mean']:.3f}</td>" in text


def test_many_layers_have_one_row_per_gate(tmp_path):
    layers = tuple(f"layer {number}" for number in range(1, 7))
    write_run(tmp_path / "runs" / "one", "comet", owners=layers)
    text = chapter(write_report([tmp_path / "runs"], tmp_path / "page.html"))
    assert text.count('<span class="verdict') == 1
    assert "mean of 6" in text


def test_the_page_says_whether_a_mixture_pays(tmp_path):
    folder = write_study(tmp_path / "study", gates=("dense", "comet"), trials=6, kind="ablation")
    text = html.unescape(write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "<dt>Does a mixture pay on this data?</dt>" in text
    assert "p vs dense</abbr></button>" in text


def test_lifts_are_those_of_the_run_and_dense_networks_have_none(tmp_path):
    for gate in ("dense", "topk"):
        write_run(tmp_path / "runs" / gate, gate)
    routing = data_of(write_report([tmp_path / "runs"], tmp_path / "page.html"))["sections"][0]["routing"]
    record = ResultRecord.model_validate_json((tmp_path / "runs" / "topk" / "result.json").read_text())
    for task, gate in record.routing.items():
        shown = routing["topk"]["groups"][task]["genre"]
        assert shown["labels"] == gate.groups["genre"].labels
        for row, expected in zip(shown["lift"], gate.groups["genre"].lift(), strict=True):
            assert row == [None if lift is None else pytest.approx(lift, rel=0.01) for lift in expected]
    assert not {"epochs", "load", "groups"} & routing["dense"].keys()


def test_every_gate_has_a_marker_and_a_colour_of_its_own_in_both_schemes():
    theme, style = (read_asset(name) for name in ("theme.js", "page.css"))
    block = theme.partition("const MARKERS = {")[2].partition("};")[0]
    markers = dict(re.findall(r'"?([\w-]+)"?: "([\w-]+)"', block))
    assert set(gate_kinds()) <= set(markers)
    assert len(set(markers.values())) == len(markers)
    light, dark = style.partition("@media screen and (prefers-color-scheme: dark)")[::2]
    for scheme in (light, dark.partition(":root[data-theme")[0]):
        colours = dict(re.findall(r"--gate-([\w-]+): (#\w{6});", scheme))
        assert set(colours) == {*markers, "other"}
        assert len(set(colours.values())) == len(colours)
    outlines = theme.partition("const OUTLINES = {")[2].partition("};")[0]
    assert {marker for marker in markers.values() if not re.search(rf'"?{marker}"?: "M', outlines)} == set()
