"""Every mixture of the installed transformers: which routers are recognised, replaced and copied."""

from pathlib import Path

import pytest
import torch
import transformers
from mixture_families import (
    NOT_COVERED,
    RECORDED,
    REPLACED,
    VOCABULARY,
    WITHOUT_CALL,
    build_family,
    covered_families,
    family_parameters,
    find_mixtures,
    folder_of,
)

from comet_moe.gates import CometGate
from comet_moe.hf import replace_routers, train_only
from comet_moe.hf.routers import GateRouter, find_routers, sizes_of
from comet_moe.mixture.routers import find_adapter

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def inputs():
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", family_parameters(replaced=True))
def test_routers_are_copied_and_replaced(family):
    model = build_family(family)
    assert all(sizes_of(router, find_adapter(model)).k == 2 for router in routers(model))
    with torch.no_grad():
        before = model(**inputs())[0]
        if folder_of(family) in REPLACED:
            with pytest.raises(ValueError, match=r"Router routes in a way that TopKGate does not have: pass"):
                replace_routers(model)
        else:
            replace_routers(model)
            real = inputs()["attention_mask"].bool()
            # Sums in another order; logits are of size 3.
            torch.testing.assert_close(model(**inputs())[0][real], before[real], atol=2e-5, rtol=1e-5)
    replace_routers(model, CometGate)
    model.train()(**inputs())[0].float().square().sum().backward()
    called = [router for router in routers(model) if router.gate.split_weight.grad is not None]
    assert len(called) == len(routers(model)) - WITHOUT_CALL.get(folder_of(family), 0)
    for router in called:
        assert isinstance(router, GateRouter)
        assert router.tokens.mask is not None
        assert router.gate.split_weight.grad.any()
    assert train_only(model, "experts").by_part["experts"] > 0


def routers(model):
    return find_routers(model, find_adapter(model)).values()


def table():
    """The table of the page, from what is tested."""
    tested = {folder_of(name) for name in covered_families()}
    names = lambda folders: ", ".join(sorted(folders))  # noqa: E731
    rows = [
        f"| routers replaced, or copied as `TopKGate` | {names(tested - REPLACED - set(RECORDED))} |",
        f"| routers replaced | {names(REPLACED)} |",
        *(f"| audit, record and replay only: {why} | {name} |" for name, why in RECORDED.items()),
        *(f"| no: {why} | {name} |" for name, why in NOT_COVERED.items()),
    ]
    return "\n".join(rows)


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.22."), reason="the page is of transformers 5.22"
)
def test_the_page_has_every_mixture_of_transformers():
    assert {*NOT_COVERED, *RECORDED, *REPLACED} < find_mixtures()
    assert table() in PAGE.read_text(encoding="utf-8")
