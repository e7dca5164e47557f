"""Tables as text: what is escaped, marked and rounded, and that CSV loses nothing."""

import csv
import io
import re

import pytest
from made_studies import GATES, made_study, random_trials, trial
from rich.console import Console

from comet_moe.experiments.studies.loss_by_trials import compute_loss_curves, compute_speedups, default_pairs
from comet_moe.experiments.studies.render import (
    TextCell,
    TextColumn,
    TextTable,
    choose_decimals,
    escape_tex,
    flatten_row,
    format_p_value,
    number_cell,
    to_csv,
    to_markdown,
    to_rich,
    to_tex,
)
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.text_tables import (
    curve_table,
    kept_routing_table,
    result_notes,
    result_tables,
    routing_tables,
    speedup_table,
)
from comet_moe.experiments.studies.winner import winner

TABLE = TextTable(
    "50%_a|b [x]",
    [TextColumn("gate", "Gate"), TextColumn("loss", "Loss"), TextColumn("p")],
    [
        [
            TextCell("comet+", tex="COMET+"),
            TextCell("40.69", "0.02", bold=True, starred=True),
            TextCell("<0.001"),
        ],
        [TextCell("my_gate"), TextCell("40.82", "0.02"), TextCell("")],
    ],
)


def printed_on_terminal(table):
    text = io.StringIO()
    Console(file=text, width=120).print(to_rich(table, 120))
    return text.getvalue()


def test_markdown_marks_and_escapes():
    assert to_markdown(TABLE).splitlines() == [
        r"**50%\_a\|b [x]**",
        "",
        "| gate | loss | p |",
        "| --- | --- | --- |",
        r"| comet+ | \* **40.69** ± 0.02 | \<0.001 |",
        r"| my\_gate | 40.82 ± 0.02 |  |",
    ]


def test_tex_is_a_plain_tabular_as_in_the_paper():
    assert to_tex([TABLE, TABLE], ["A note of 5 %."]).splitlines() == [
        "% A note of 5 %.",
        r"\begin{tabular}{|l|l|l|}",
        r"\hline",
        r"Dataset & Gate & Loss \\ \hline",
        r"50\%\_a|b [x] & COMET+ & ${}^*\mathbf{40.69}\pm0.02$ \\",
        r" & my\_gate & $40.82\pm0.02$ \\ \hline",
        r"50\%\_a|b [x] & COMET+ & ${}^*\mathbf{40.69}\pm0.02$ \\",
        r" & my\_gate & $40.82\pm0.02$ \\ \hline",
        r"\end{tabular}",
    ]


def test_tex_escapes_every_special_character():
    assert escape_tex("a&b%c$d#e_f{g}") == r"a\&b\%c\$d\#e\_f\{g\}"
    assert escape_tex("~^\\<>") == (
        r"\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}\textgreater{}"
    )


def test_terminal_prints_titles_without_escapes():
    assert "50%_a|b [x]" in printed_on_terminal(TABLE)
    assert "* 40.69 ± 0.02" in printed_on_terminal(TABLE)


def test_numbers_are_rounded_to_the_first_digit_of_the_smallest_error():
    assert choose_decimals([0.02, 0.14, None, 0.0]) == 2
    assert choose_decimals([0.005, 0.002]) == 3
    assert choose_decimals([0.005, 0.002], digits=2) == 4
    assert choose_decimals([None], least=4) == 4
    assert choose_decimals([1e-9]) == 6
    assert number_cell(21.9062, 0.00512, 3) == TextCell("21.906", "0.005")
    assert number_cell(None, None, 2) == TextCell("")
    assert [format_p_value(p) for p in (None, 0.0004, 0.0316, 0.5)] == ["", "<0.001", "0.032", "0.500"]
    assert format_p_value(0.0004, space=" ") == "< 0.001"


def test_result_table_has_the_columns_of_the_paper_and_p_values():
    lines = list(random_trials(GATES, 60, failed=3))
    lines += [
        trial("hash", at, 20.0 + at, 20.0 + at, tasks={"rating": {"loss": 1.0, "mse_5": 0.5}})
        for at in range(60)
    ]
    study = made_study(lines, alpha=0.9)
    rows = compare_gates(study)
    results = [(study, rows)]
    text = to_markdown(result_tables(results)[0])
    assert "| experts | gate | used/complete | failed | test loss x100 | experts per sample |" in text
    assert r"| routing | accuracy | mse\_5 | p vs best existing | p vs no search |" in text
    (comet,) = (row for row in rows if row["gate"] == "comet+")
    (line,) = (line for line in text.splitlines() if "| comet+ |" in line)
    assert line.startswith(f"| 8 | comet+ | 3/57 | 3 | \\* **{comet['test_loss_mean']:.2f}** ± ")
    assert f"| {comet['p_existing']:.3f} ({comet['best_existing']}) | {comet['p_search']:.3f} |" in line
    printed = to_tex(result_tables(results), result_notes(results, 5))
    assert "made (alpha=0.9) & 8 & Softmax & $" in printed
    assert r"mse\_5 \\ \hline" in printed
    body = printed[printed.index(r"\begin") :]
    rows_of_tex = [line for line in body.splitlines() if "&" in line]
    assert {line.count("&") for line in rows_of_tex} == {7}
    assert body.count("{") == body.count("}")
    assert body.count("$") % 2 == 0
    assert not re.search(r"(?<!\\)[%#_]", body)


def test_notes_explain_which_trials_count_and_the_asterisk():
    studies = [made_study(random_trials(["comet"], 3), kind=kind) for kind in ("tuning", "ablation")]
    tuning, ablation = ((study, compare_gates(study)) for study in studies)
    assert [len(result_notes(results, 5)) for results in ([tuning], [ablation], [tuning, ablation])] == [
        4,
        4,
        6,
    ]
    assert "the best 7.5 % of the trials" in result_notes([tuning], 7.5)[3]
    assert "Welch" in result_notes([ablation], 5)[3]


def test_notes_begin_with_the_decision_on_each_study():
    study = made_study(random_trials(["dense", "comet"], 40), kind="ablation")
    result = (study, compare_gates(study))
    (row,) = (row for row in result[1] if row["gate"] == "comet")
    answer = result_notes([result], 5)[0]
    decision = winner(result[1])
    assert (decision.winner, decision.pays, row["p_dense"] < 0.001) == ("comet", True, True)
    assert answer == f"{decision.recommendation} {decision.answer}"
    assert result_notes([result, result], 5)[:2] == [f"made: {answer}"] * 2
    (table,) = result_tables([result])
    assert table.columns[-1].name == "p vs dense"
    assert [cells[-1].text for cells in table.rows] == ["", "<0.001"]


def test_a_table_of_its_own_says_how_the_gates_use_their_experts():
    study = made_study([trial("topk", 0, 1.0, 2.0), trial("comet", 0, 1.0, 2.0, routing={})])
    (table,) = routing_tables([(study, compare_gates(study))])
    assert to_markdown(table).splitlines() == [
        "**made: routing**",
        "",
        "| gate | routing | routing gain | information | effective experts | load ratio | dead experts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| topk | routes / static |  | 0.600 | 4.00 | 1.50 | 3.0 |",
        "| comet |  |  |  |  |  |  |",
    ]
    unrecorded = made_study([trial("comet", 0, 1.0, 2.0, routing={})])
    results = [(unrecorded, compare_gates(unrecorded))]
    assert routing_tables(results) == []
    assert "routing" not in [column.name for column in result_tables(results)[0].columns]


def test_csv_has_the_routing_of_each_task():
    row = flatten_row(compare_gates(made_study([trial("topk", 0, 1.0, 2.0)]))[0])
    assert (row["top_left.verdict"], row["bottom_right.verdict"]) == ("routes", "static")
    assert (row["top_left.information_mean"], row["bottom_right.dead_experts_mean"]) == (1.2, 6.0)
    assert not any(isinstance(value, dict) for value in row.values())


def test_csv_has_every_number_in_full_precision():
    rows = [flatten_row(row) for row in compare_gates(made_study(random_trials(GATES, 60)))]
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert len(read) == len(rows)
    for written, row in zip(read, rows, strict=True):
        assert written.keys() >= row.keys()
        for name, value in row.items():
            if isinstance(value, float):
                assert float(written[name]) == value
            else:
                assert written[name] == ("" if value is None else str(value))


def test_curves_are_shown_a_column_a_gate_and_factors_at_half_and_all_of_the_budget():
    lines = [*random_trials(["topk", "comet"], 20), *random_trials(["topk+"], 10)]
    study = made_study(lines, trials=20)
    rows = compute_loss_curves(study, repeats=50)
    text = to_markdown(curve_table(study, rows)).splitlines()
    assert text[2] == "| trials | topk | comet | topk+ |"
    assert [line.split(" | ")[0] for line in text[4:]] == ["| 1", "| 2", "| 5", "| 10", "| 15", "| 20"]
    assert text[-1].endswith("|  |")  # topk+ has 10 trials
    first = rows[0]
    assert f"| 1 | {first['expected']:.2f} ({first['low']:.2f}-{first['high']:.2f}) |" in text[4]
    speedups = compute_speedups(study, default_pairs(study), repeats=50)
    lines = to_markdown(speedup_table(study, speedups)).splitlines()[4:]
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| topk+", "topk", "10"],
        ["| topk+", "topk", "20"],
        ["| comet", "topk", "10"],
        ["| comet", "topk", "20"],
    ]


def test_a_speedup_that_does_not_exist_is_printed_as_none():
    lines = [
        *(trial("comet", at, 2.0, 2.0) for at in range(5)),
        *(trial("topk", at, 1.0, 1.0) for at in range(5)),
    ]
    study = made_study(lines)
    rows = compute_speedups(study, [("comet", "topk")], repeats=10)
    last = to_markdown(speedup_table(study, rows)).splitlines()[-1]
    assert last == "| comet | topk | 5 | 1.00 | 1 | none | none | none to none | 100 % |"


@pytest.mark.parametrize("count", [1, 3])
def test_tables_of_few_trials(count):
    study = made_study(random_trials(["topk", "comet"], count))
    assert to_markdown(curve_table(study, compute_loss_curves(study))).count("\n") == 4 + len(
        {1, 2} & set(range(1, count + 1))
    )
    assert "comet" in to_markdown(result_tables([(study, compare_gates(study))])[0])
    assert to_markdown(speedup_table(study, compute_speedups(study, [("comet", "topk")]))).count("\n") >= 5


def test_curves_have_a_table_of_how_the_kept_trial_routes():
    gate = {"experts": 8, "experts_per_sample": 2.0, "load_ratio": 1.0, "dead_experts": 0}
    lines = [
        trial("topk", at, float(at), 1.0, routing={"a": {**gate, "information": at, "effective_experts": 4}})
        for at in range(2)
    ]
    lines += [trial("comet", at, 1.0, 1.0, routing={}) for at in range(2)]
    study = made_study(lines)
    table = kept_routing_table(study, compute_loss_curves(study, repeats=2))
    assert [column.name for column in table.columns] == ["trials", "topk"]
    assert [[cell.text for cell in row] for row in table.rows] == [["1", "0.50 (4.0)"], ["2", "0.00 (4.0)"]]
    without = made_study(lines[2:])
    assert kept_routing_table(without, compute_loss_curves(without, repeats=2)) is None


def test_a_narrow_terminal_leaves_out_details_and_names_them():
    columns = [
        TextColumn("gate"),
        TextColumn("loss"),
        TextColumn("p", detail=1),
        TextColumn("fit s", detail=2),
    ]
    table = TextTable("A title", columns, [[TextCell(text) for text in ("comet", "40.69", "0.010", "1.5")]])
    for width, missing in ((40, []), (30, ["fit s"]), (10, ["p", "fit s"])):
        printed = to_rich(table, width)
        assert [str(column.header) for column in printed.columns] == [
            column.name for column in columns if column.name not in missing
        ]
        assert printed.caption == (f"Too narrow for: {', '.join(missing)}." if missing else None)
