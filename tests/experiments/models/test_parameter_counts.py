"""Every recipe builds the network of section S1.2: parameter counts worked out by hand."""

import pytest

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models import ImageModel, RatingModel
from comet_moe.experiments.models.build import build_model

TEN = load_train_config("celeba").data.options["attributes"]


def ratings(users, items):
    return {"name": "ratings", "num_users": users, "num_items": items, "rows": {"train": 1}}


def images(channels, height, width, classes):
    shape = [channels, height, width]
    return {"name": "images", "image_shape": shape, "classes": classes, "rows": {"train": 1}}


TWO_DIGITS = {"top_left": 10, "bottom_right": 10}

# A COMET gate over p features has k (n-1) splits and k n leaves of p weights and a bias each: k (2n-1) (p+1).
# A CNN expert halves what an unpadded convolution leaves: 36 -> 32/2 = 16 -> 12/2 = 6 for kernels of 5.
COUNTS = {
    # Tables (users + items) 128; experts 16 (256 256 + 256) = 1,052,672; gates 2 · 2 · 31 · 257 = 31,868;
    # heads 2 (256 256 + 256 + 256 + 1) = 132,098. In all 1,216,638 and the tables.
    "movielens": (ratings(6040, 3706), (6040 + 3706) * 128 + 1_216_638),
    "movielens-200k": (ratings(1501, 3706), (1501 + 3706) * 128 + 1_216_638),
    "movielens-100k": (ratings(943, 1682), (943 + 1682) * 128 + 1_216_638),
    "ratings": (ratings(10, 20), (10 + 20) * 128 + 1_216_638),
    # Tables of 64; experts 16 (128 128 + 128) = 264,192; gates 2 · 2 · 31 · 129 = 15,996;
    # heads 2 (128 256 + 256 + 256 + 1) = 66,562.
    "jester": (ratings(73_421, 100), (73_421 + 100) * 64 + 264_192 + 15_996 + 66_562),
    # Experts 9 (128 128 + 128) = 148,608; gates 2 · 4 · 17 · 129 = 17,544; heads as for Jester.
    "books": (ratings(18_960, 31_070), (18_960 + 31_070) * 64 + 148_608 + 17_544 + 66_562),
    # 32 -> 14 -> 5. An expert: 10 (3 · 25) + 10 = 760; 20 (10 · 25) + 20 = 5,020; 20 · 5 · 5 = 500 maps to
    # 50: 25,050; 30,830 in all. One gate: 2 · 15 · (3 · 32 · 32 + 1) = 92,190.
    # Head: 50 50 + 50 twice, 50 10 + 10: 5,610.
    "digits": (images(3, 32, 32, {"digit": 10}), 8 * 30_830 + 92_190 + 5_610),
    # An expert: 10 · 25 + 10 = 260; 5,020; 20 · 6 · 6 = 720 to 50: 36,050; 50 to 50: 2,550; 43,880 in all.
    # Gates: 2 · 4 · 31 · (36 · 36 + 1) = 321,656. Heads 2 · 5,610.
    "multimnist": (images(1, 36, 36, TWO_DIGITS), 16 * 43_880 + 321_656 + 11_220),
    # Gates: 2 · 2 · 9 · 1,297 = 46,692.
    "multifashionmnist": (images(1, 36, 36, TWO_DIGITS), 5 * 43_880 + 46_692 + 11_220),
    # An expert: 4 · 27 + 4 = 112; 4 · 36 + 4 = 148 twice; 36 + 1 = 37; 445 in all. 109 -> 53 -> 25 -> 11 -> 4
    # and 89 -> 43 -> 20 -> 9 -> 3: 12 features, a head has 13. Gates: 10 · 2 · 11 · (3 · 109 · 89 + 1).
    "celeba": (images(3, 109, 89, dict.fromkeys(TEN, 2)), 6 * 445 + 220 * 29_104 + 10 * 13),
}


@pytest.mark.parametrize("recipe", COUNTS)
def test_the_network_of_each_recipe_has_the_size_in_the_paper(recipe):
    meta, count = COUNTS[recipe]
    model = build_model(load_train_config(recipe, ["gate=comet"]), meta)
    assert sum(p.numel() for p in model.parameters()) == count
    assert isinstance(model, RatingModel if "num_users" in meta else ImageModel)


# What the other gates of the MovieLens network have over n = 16 and p = 256, for each of the two tasks.
GATES = {
    "softmax": 16 * 257,
    "topk": 16 * 257,
    "dselect": 2 * 4 * 257 + 2 * 257,  # k selectors of 4 bits, k mixing weights
    "hash": 0,
    "comet": 2 * 31 * 257,
}


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("gate", GATES)
def test_a_gate_adds_its_own_parameters_and_a_search_one_matrix_for_all(gate, plus):
    meta, comet = COUNTS["movielens"]
    model = build_model(load_train_config("movielens", [f"gate={gate}{plus}"]), meta)
    expected = comet + 2 * (GATES[gate] - GATES["comet"]) + (16 * 16 if plus else 0)
    assert sum(p.numel() for p in model.parameters()) == expected
