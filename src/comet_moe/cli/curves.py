"""``comet-moe curves``: test loss by number of trials, and how many fewer trials a gate needs."""

import json
from typing import Annotated, Literal

import typer

from comet_moe.cli._study_options import AsJson, StudyPaths
from comet_moe.cli._text import echo
from comet_moe.experiments.studies.defaults import DEFAULT_REPEATS


def curves(
    paths: StudyPaths,
    format: Annotated[
        Literal["md", "csv"] | None,
        typer.Option(
            help="Markdown, or CSV with the curves alone in full precision.",
            show_default="tables on a terminal, md elsewhere",
        ),
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GATE:BASELINE",
            help="Compute the speedup of a gate over a baseline; repeat for more.",
            show_default="the pairs of the paper",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=2, max=100_000, help="Random draws per budget, and bootstrap resamples.")
    ] = DEFAULT_REPEATS,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="Random seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show test loss and routing by number of trials, and how many fewer trials a gate needs than another.

    For 1, 2, 5, 10, ... trials drawn at random, it shows the test loss (times 100) of the trial with the
    lowest validation loss. The speedup of a gate over a baseline is the ratio of the numbers of trials that
    reach the same loss. The tables show it at half and all of the baseline's trials, --json at every budget.
    """
    from comet_moe.cli.table import print_tables, warn_left_out
    from comet_moe.experiments.studies.loss_by_trials import (
        compute_loss_curves,
        compute_speedups,
        parse_pair,
        select_pairs,
    )
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.experiments.studies.render import to_csv
    from comet_moe.experiments.studies.text_tables import (
        CURVE_NOTE,
        KEPT_ROUTING_NOTE,
        SPEEDUP_NOTE,
        curve_table,
        kept_routing_table,
        speedup_table,
    )

    studies = read_studies(paths)
    selected = select_pairs(studies, [parse_pair(text) for text in pair or []])
    losses = [(study, compute_loss_curves(study, repeats, seed)) for study in studies]
    speedups = [(study, compute_speedups(study, pairs, repeats, seed)) for study, pairs in selected if pairs]
    warn_left_out(studies)
    for study in studies:
        for gate in study.gates:
            if gate not in study.gates_with_results:
                echo(f"{study.title}: {gate} has no complete trial and no curve", err=True)
    rows = [row for _, of_study in losses for row in of_study]
    if as_json:
        speedup_rows = [row for _, of_study in speedups for row in of_study]
        echo(json.dumps({"rows": rows, "speedups": speedup_rows}, allow_nan=False))
    elif format == "csv":
        echo(to_csv(rows), nl=False)
    else:
        curve_tables = [curve_table(study, of_study) for study, of_study in losses if of_study]
        print_tables(curve_tables, [CURVE_NOTE], as_markdown=format == "md")
        routing = [table for study, of_study in losses if (table := kept_routing_table(study, of_study))]
        if routing:
            print_tables(routing, [KEPT_ROUTING_NOTE], as_markdown=format == "md")
        if speedups:
            speedup_tables = [speedup_table(study, of_study) for study, of_study in speedups]
            print_tables(speedup_tables, [SPEEDUP_NOTE], as_markdown=format == "md")
