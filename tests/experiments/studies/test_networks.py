"""Names of networks: a gate, or a gate in CGC or PLE."""

import json

import pytest
from made_studies import made_study, trial

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.studies.definition import define_study
from comet_moe.experiments.studies.networks import is_network_name, network_settings, without_search
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.text_tables import result_tables


def test_a_name_with_a_mixture_sets_both():
    assert network_settings("comet+@ple") == ["gate=comet+", "model.mixture=ple"]
    assert network_settings("dense-3x") == ["gate=dense-3x"]


@pytest.mark.parametrize("name", ["comet@mmoe", "dense@cgc", "comet@", "@cgc", "comet@cgc@ple", None])
def test_other_names_are_refused(name):
    assert not is_network_name(name)


@pytest.mark.parametrize("name", ["comet@cg", "dense-2x@cgc", "comet@"])
def test_a_wrong_mixture_is_one_sentence(name):
    with pytest.raises(RecipeError, match="@ puts a gate into cgc or ple, as in comet@cgc, got "):
        network_settings(name)


def test_each_network_of_a_study_has_its_own_mixture_and_seed():
    study = define_study("ablation", "table", ["topk", "topk@cgc", "topk+@ple", "dense"], trials=2)
    mixtures = {name: study.config(name, 1).model.mixture for name in study.gates}
    assert mixtures == {"topk": "mmoe", "topk@cgc": "cgc", "topk+@ple": "ple", "dense": "mmoe"}
    assert study.config("topk+@ple", 1).gate.name == "topk+"


def test_only_tables_have_other_mixtures():
    with pytest.raises(RecipeError, match=r"model\.mixture|no setting mixture"):
        define_study("ablation", "movielens", ["topk@cgc"], trials=1)


def test_local_search_is_tested_against_the_same_network_without():
    assert without_search("topk+@cgc") == "topk@cgc"
    assert without_search("topk@cgc") is None
    networks = {"topk": 3.0, "topk@cgc": 5.0, "topk+@cgc": 4.0}
    lines = [trial(name, seed, loss, loss + seed / 10) for name, loss in networks.items() for seed in (0, 1)]
    study = made_study(lines, kind="ablation")
    rows = {row["gate"]: row for row in compare_gates(study)}
    assert rows["topk+@cgc"]["p_search"] < 0.05
    (table,) = result_tables([(study, list(rows.values()))])
    assert [row[1].tex for row in table.rows] == ["Top-k", "Top-k (CGC)", "Top-k+ (CGC)"]


def test_a_run_folder_in_another_mixture_has_its_name(tmp_path):
    for number, mixture in enumerate(("mmoe", "cgc")):
        run = tmp_path / str(number)
        run.mkdir()
        config = {"recipe": "table", "seed": 0, "gate": {"name": "topk"}, "model": {"mixture": mixture}}
        (run / "config.yaml").write_text(json.dumps(config))
    (study,) = read_studies([tmp_path])
    assert study.gates == ["topk", "topk@cgc"]
