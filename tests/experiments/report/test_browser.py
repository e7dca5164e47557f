"""The page in a browser."""

import base64
import json

import pytest
from studies import add_runs, write_run, write_study

from comet_moe.experiments.report import write_report
from comet_moe.experiments.training.records import GroupsRecord

pytestmark = pytest.mark.slow

ROUTING_PLOTS = ["frontier", "groups", "information", "effective", "load"]
STUDY_PLOTS = [
    *ROUTING_PLOTS,
    *("losses", "tuning", "experts", "flops", "convergence", "permutation", "trees", "sensitivity"),
]
RUN_PLOTS = [*ROUTING_PLOTS, "losses", "experts", "flops", "convergence", "permutation", "trees"]


def test_a_study_draws_every_plot_without_console_messages_or_requests(page, study_page):
    page.open(study_page).scroll_to_all()
    marks = page.marks()
    assert [name for name, _ in marks] == STUDY_PLOTS
    assert all(count > 0 for _, count in marks), marks
    assert page.console_messages() == []
    assert page.requests() == []


def test_trained_runs_draw_every_plot_without_console_messages_or_requests(page, trained_page):
    page.open(trained_page).scroll_to_all()
    marks = page.marks()
    assert [name for name, _ in marks] == RUN_PLOTS
    assert all(count > 0 for _, count in marks), marks
    assert page.console_messages() == []
    assert page.requests() == []


def test_every_complete_trial_is_a_point(page, study_page, study):
    trials = [json.loads(line) for line in (study / "trials.jsonl").read_text().splitlines()]
    complete = sum(trial["status"] == "complete" for trial in trials)
    marks = dict(page.open(study_page).scroll_to("experts", "flops", "sensitivity").marks())
    assert marks["experts"] == marks["flops"] == marks["sensitivity"] == complete


def test_plots_are_drawn_when_they_come_into_view(page, study_page):
    page.open(study_page)
    assert page.run("return figures.filter((figure) => figure.isDrawn).length") < len(STUDY_PLOTS)


COLUMN = """
const [name, command] = arguments;
for (const table of document.querySelectorAll("#study-1-summary table")) {
  const buttons = [...table.querySelectorAll("thead button")];
  const index = buttons.findIndex((button) => button.textContent === name);
  if (index < 0) continue;
  const header = buttons[index].parentElement;
  if (command === "click") buttons[index].click();
  if (command === "focus") buttons[index].focus();
  if (command === "direction") return header.getAttribute("aria-sort");
  return [...table.querySelectorAll("tbody tr")].map((row) => row.children[index].dataset.value);
}
"""


def summary_column(page, name, command=""):
    """The values of a column of the summary, which has several tables; or the direction it is sorted in."""
    return page.run(COLUMN, name, command)


def losses_in_table(page):
    return [float(value) for value in summary_column(page, "test loss")]


def test_the_table_sorts_both_ways_by_click_and_by_keyboard(page, study_page):
    page.open(study_page)
    before = losses_in_table(page)
    summary_column(page, "test loss", "click")
    assert losses_in_table(page) == sorted(before) != before
    assert summary_column(page, "test loss", "direction") == "ascending"
    summary_column(page, "test loss", "focus")
    page.driver.switch_to.active_element.send_keys("\n")
    assert losses_in_table(page) == sorted(before, reverse=True)
    assert summary_column(page, "test loss", "direction") == "descending"


def test_rows_without_a_value_sort_last_either_way(page, study_page):
    page.open(study_page)
    for _ in range(2):
        summary_column(page, "p vs no search", "click")
        values = summary_column(page, "p vs no search")
        assert values[-1] == ""
        assert values[0] != ""


def shown_permutation(page):
    return page.run("return document.querySelector('figure[data-plot=permutation] .canvas').data[0].z")


def test_the_slider_shows_the_permutation_of_each_epoch(page, trained_page, trained_runs):
    page.open(trained_page).scroll_to("permutation")
    epochs = [
        json.loads(line) for line in (trained_runs / "comet+" / "metrics.jsonl").read_text().splitlines()
    ]
    order = epochs[-1]["permutations"][0]
    hard = [[float(expert == to) for expert in range(len(order))] for to in order]
    assert shown_permutation(page) == hard
    last = page.find("figure[data-plot=permutation] .heatmaplayer image").get_attribute("href")
    slider = page.find("figure[data-plot=permutation] input[type=range]")
    slider.send_keys("\ue012")  # arrow left
    assert shown_permutation(page) == epochs[0]["soft_permutations"][0]
    assert page.find("figure[data-plot=permutation] .heatmaplayer image").get_attribute("href") != last
    assert page.find("figure[data-plot=permutation] output").text == "1 (soft)"
    assert slider.get_attribute("aria-valuetext") == "1 (soft)"


def test_a_tree_shows_the_shares_of_its_epoch_and_the_permuted_experts(page, trained_page, trained_runs):
    page.open(trained_page).scroll_to("trees")
    result = json.loads((trained_runs / "comet+" / "result.json").read_text())
    epochs = [
        json.loads(line) for line in (trained_runs / "comet+" / "metrics.jsonl").read_text().splitlines()
    ]
    for index in (0, result["best_epoch"] - 1):
        page.choose("trees", "frame", index)
        shares = epochs[index]["train_routing"]["top_left"]["leaf_share"][0]
        order = epochs[index]["permutations"][0]
        labels = page.texts("figure[data-plot=trees] .trees > div:first-child svg text:not(.halo)")
        names = [f"leaf {leaf} \u2192 expert {expert}" for leaf, expert in enumerate(order)]
        assert labels[::2] == names
        assert [parse_share(text) for text in labels[1::2]] == [
            pytest.approx(share, abs=0.006) for share in shares  # percent are shown without decimals
        ]  # fmt: skip


def parse_share(text):
    return float(text.removeprefix("<").removesuffix(" %")) / 100


def test_a_phone_does_not_scroll_sideways(page, study_page, trained_page):
    for file in (study_page, trained_page):
        page.open(file, width=360).scroll_to_all()
        assert page.run("return document.documentElement.scrollWidth") == 360
        assert all(count > 0 for _, count in page.marks())


def test_printing_draws_all_plots_in_light_colours(page, study_page):
    page.open(study_page, dark=True)
    dark = page.run("return getComputedStyle(document.body).backgroundColor")
    page.command("Emulation.setEmulatedMedia", media="print",
                 features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    marks = page.wait_for("isPrinting && figures.every((figure) => figure.isDrawn)").marks()
    assert [name for name, _ in marks] == STUDY_PLOTS
    assert all(count > 0 for _, count in marks), marks
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != dark
    ink = "return document.querySelector('figure[data-plot=losses] .canvas').layout.font.color"
    assert page.run(ink) == "#1a1f26"


def test_a_pdf_has_every_plot(page, study_page):
    page.open(study_page)
    printed = page.command("Page.printToPDF", printBackground=True)["data"]
    assert base64.b64decode(printed).startswith(b"%PDF")
    assert page.run("return figures.every((figure) => figure.isDrawn)")
    assert page.run("return document.documentElement.dataset.theme ?? null") is None  # as before printing


def test_plots_have_the_colours_of_the_dark_scheme(page, study_page):
    colours = []
    for dark in (False, True):
        page.open(study_page, dark=dark).scroll_to("losses")
        colours.append(
            page.run("return document.querySelector('figure[data-plot=losses] .canvas').layout.font.color")
        )
    assert colours == ["#1a1f26", "#e7ebf0"]


def test_names_with_markup_are_shown_as_text(page, tmp_path):
    name = "<script>alert(1)</script>"
    folder = write_study(tmp_path / "study", gates=("topk", "comet+"), trials=8, failed=1, name=name)
    trials = folder / "trials.jsonl"
    trials.write_text(
        trials.read_text()
        .replace("the loss is nan", "<img src=x onerror=alert(2)>")
        .replace("watched", "<b>w</b>")
    )
    page.open(write_report([folder], tmp_path / "page.html")).scroll_to_all()
    assert page.find("h1").text == f"{name} (alpha=0.9)"
    assert page.driver.title.startswith(name)
    assert "<img src=x onerror=alert(2)>" in page.find("#study-1-failures").text
    assert "<b>w</b>" in page.find("#study-1-summary").text
    assert page.console_messages() == []
    assert page.requests() == []


def test_a_legend_hides_its_gate_in_every_plot_of_the_section(page, study_page):
    page.open(study_page).scroll_to_all()
    before = dict(page.marks())
    page.find(".legend button[data-gate=comet]").click()
    after = dict(page.marks())
    for plot in ("information", "effective", "losses", "tuning", "experts", "flops", "sensitivity"):
        assert after[plot] < before[plot], plot
    pressed = page.run(
        "return [...document.querySelectorAll('.legend [data-gate=comet]')].map((b) => b.ariaPressed)"
    )
    assert set(pressed) == {"false"}
    for button in page.all("#study-1-convergence .legend button[aria-pressed=true]"):
        button.click()
    assert page.find("figure[data-plot=convergence] .note").text == "All gates of this plot are hidden."
    assert page.console_messages() == []


def test_sensitivity_has_the_axis_of_its_setting(page, study_page):
    page.open(study_page).scroll_to("sensitivity")
    axis = "return document.querySelector('figure[data-plot=sensitivity] .canvas').layout.xaxis"
    assert page.run(axis)["type"] == "log"
    page.choose("sensitivity", "parameter", "gate.normalize")
    assert page.run(axis)["ticktext"] == ["selected", "all"]
    drawn = page.run("return document.querySelector('figure[data-plot=sensitivity] .canvas').data.length")
    assert drawn == 2  # only topk and topk+ have it


def test_local_search_looks_different_without_colour(page, study_page):
    page.open(study_page).scroll_to("tuning")
    lines = page.run("""
        return document.querySelector('figure[data-plot=tuning] .canvas').data
          .filter((trace) => trace.hovertemplate)
          .map((trace) => [trace.hovertemplate.split(',')[0], trace.line.dash, trace.marker.symbol])
    """)
    looks = {gate: (dash, symbol) for gate, dash, symbol in lines}
    assert looks["comet"] == ("solid", "star")
    assert looks["comet+"] == ("dash", "star-open")
    assert len(set(looks.values())) == len(looks)


def test_an_ablation_shows_its_seeds_and_no_tuning_plots(page, tmp_path):
    folder = write_study(tmp_path / "ablation", kind="ablation", gates=("topk", "topk+"), trials=10)
    page.open(write_report([folder], tmp_path / "page.html")).scroll_to_all()
    # Ten runs and a mean per gate.
    assert dict(page.marks()) == {"frontier": 2, "seeds": 2 * 11, "experts": 20, "flops": 20}
    assert "topk+ lower than topk: p" in page.find("#study-1-seeds").text
    assert page.console_messages() == []


@pytest.mark.parametrize("shared", ["gate", "tree"])
def test_large_trees_with_their_own_search_are_drawn_without_small_branches(page, tmp_path, shared):
    folder = write_study(tmp_path / "wide", gates=("comet+", "dselect"), trials=4, experts=48)
    add_runs(folder, per_gate=1, experts=48, shared=shared)
    page.open(write_report([folder], tmp_path / "page.html")).scroll_to_all()
    assert all(count > 0 for _, count in page.marks())
    options = page.texts("figure[data-plot=permutation] [data-name=permutation] option")
    expected = {
        "gate": ["watched", "rating"],
        "tree": [f"{task}, tree {tree}" for task in ("watched", "rating") for tree in (1, 2)],
    }
    assert options == expected[shared]
    epochs = (folder / "runs" / "comet+-000" / "metrics.jsonl").read_text().splitlines()
    best = json.loads(epochs[-2])  # the weights of the last but one epoch are kept
    search = best["permutations"][1]
    order = search[0] if shared == "tree" else search
    page.choose("trees", "gate", "comet+")
    page.choose("trees", "owner", "rating")
    shown = page.texts("figure[data-plot=trees] .trees > div:first-child svg text:not(.halo)")[::2]
    assert [text for text in shown if text.startswith("leaf")] == [
        f"leaf {leaf} \u2192 expert {order[leaf]}"
        for leaf, share in enumerate(best["train_routing"]["rating"]["leaf_share"][0])
        if round(share, 4) >= 0.01  # the page keeps four decimals
    ]
    assert page.console_messages() == []


def test_an_epoch_without_a_finite_loss_does_not_change_the_visible_range(page, tmp_path):
    run = write_run(tmp_path / "runs" / "one", "topk")
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs[-1]["validation"]["loss"] = None
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, epochs)))
    page.open(write_report([tmp_path / "runs"], tmp_path / "page.html")).scroll_to("losses")
    low, _ = page.run("return document.querySelector('figure[data-plot=losses] .canvas').layout.yaxis.range")
    assert low > 40
    assert page.console_messages() == []


def lift_texts(page):
    """The table of lifts as rows of texts, with its headings."""
    return page.run(
        "return [...document.querySelectorAll('figure[data-plot=groups] tr')].slice(1)"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )


def test_the_table_of_lifts_is_that_of_the_chosen_gate_and_task(page, trained_page, trained_runs):
    page.open(trained_page).scroll_to("groups")
    for gate, task in (("topk", "top_left"), ("comet+", "bottom_right")):
        page.choose("groups", "gate", gate)
        page.choose("groups", "owner", task)
        page.choose("groups", "column", task)
        record = json.loads((trained_runs / gate / "result.json").read_text())["routing"][task]["groups"][
            task
        ]
        groups = GroupsRecord.model_validate(record)
        used = [expert for expert, lift in enumerate(groups.lift()[0]) if lift is not None]
        heading, *rows = lift_texts(page)
        first = ["samples", "routing gain"]
        assert heading == [task, *first, *map(str, used)]
        assert [row[:2] for row in rows] == [
            [label, f"{count:,}"] for label, count in zip(groups.labels, groups.samples, strict=True)
        ]
        shown = {text for row in rows for text in row[1 + len(first) :]}
        assert shown == {as_ratio(row[expert]) for row in groups.lift() for expert in used}
    assert page.console_messages() == []


def as_ratio(lift):
    value = float(f"{lift:.3g}")  # as many digits as the page keeps
    return "0" if value == 0 else "<0.1" if value < 0.05 else f"{value:.{1 if value < 9.95 else 0}f}"


def test_information_can_be_shown_for_one_task(page, runs_page, runs):
    page.open(runs_page).scroll_to("information")
    page.choose("information", "owner", "rating")
    curves = page.run(
        "return document.querySelector('figure[data-plot=information] .canvas').data.map((trace) => trace.y)"
    )
    for gate, curve in zip(("topk", "comet+"), curves, strict=True):
        lines = (runs / gate / "metrics.jsonl").read_text().splitlines()
        expected = [json.loads(line)["validation"]["routing"]["rating"]["information"] for line in lines]
        assert curve == pytest.approx(expected, rel=1e-4)  # five digits are kept


def test_load_is_divided_by_its_mean(page, runs_page, runs):
    page.open(runs_page).scroll_to("load")
    shares = json.loads((runs / "topk" / "result.json").read_text())["routing"]["watched"]["share_of_samples"]
    texts = page.run("return document.querySelector('figure[data-plot=load] .canvas').data[0].customdata[0]")
    mean = sum(shares) / len(shares)
    assert [text == "0" for text in texts] == [share == 0 for share in shares]
    for text, share in zip(texts, shares, strict=True):
        assert text == "<0.1" or float(text) == pytest.approx(share / mean, abs=0.051)  # one decimal
