"""Products of matrices with vectors, and what is added to a product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.capturing.steps import at_work, grid, learned, placed, two_images
from tests.capturing.test_operands_that_meet import foreign, one
from tests.capturing.test_products_by_hand import single, tokens, turned
from visattn.core.capturing.placing import pointwise, products
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Unproven
from visattn.core.capturing.tokens.planes import Planes


def by_vector(planes: Planes, name: str, shape: Sequence[int], left: Places, right: Places) -> Places:
    given = {"self": left, {"mv": "vec", "dot": "tensor", "vdot": "tensor"}.get(name, ""): right}
    return single(products.by_vector(at_work(planes, name, shape, **given)))


def test_products_with_vectors() -> None:
    planes = two_images()
    codes, image = grid(planes, 3, 4)[1].flatten(), grid(planes, 1, 1)[1, 0]
    assert torch.equal(by_vector(planes, "mv", (12,), tokens(codes, 5), learned(5)).codes, codes)
    merged = by_vector(planes, "mv", (5,), turned(tokens(codes, 5)), learned(12))
    assert torch.equal(merged.codes, image.expand(5))
    assert (merged.leaning, merged.mixture) == (True, False)
    spread = by_vector(planes, "mv", (7,), learned(7, 12), placed(codes))
    assert torch.equal(spread.codes, image.expand(7))
    assert spread.mixture
    for name in ("dot", "vdot"):
        for left, right in ((placed(codes), learned(12)), (learned(12), placed(codes))):
            result = by_vector(planes, name, (), left, right)
            assert result.shape == ()
            assert torch.equal(result.codes, image[0])


@pytest.mark.parametrize(("name", "names"), [("addmm", ("mat1", "mat2")), ("baddbmm", ("batch1", "batch2"))])
def test_a_term_is_added_unless_its_factor_is_zero(name: str, names: tuple[str, str]) -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)[0].flatten().expand(*((1,) if name == "baddbmm" else ()), 12)
    left, right = tokens(codes, 4), learned(*codes.shape[:-1], 4, 7)
    elsewhere = placed(codes.flip(-1)[..., None].expand(*codes.shape, 7))
    for beta, proven in ((0, True), (1, False), (2, False), (None, False)):
        work = at_work(planes, name, (*codes.shape, 7), self=elsewhere, beta=beta, **dict(zip(names, (left, right), strict=True)))
        work.step.outs = next(work.nodes()), None
        if proven:
            assert torch.equal(single(products.multiplied(work)).codes, codes[..., None].expand(*codes.shape, 7))
            continue
        with pytest.raises(Unproven, match=f"^{name}$"):
            products.multiplied(work)


def add(planes: Planes, made: Places, term: Places) -> Places:
    work = at_work(planes, "addmm", made.shape, self=term, made=made)
    node, result = work.nodes()
    work.step.outs = (result,)
    return pointwise.with_added(work, made, node)


def test_a_term_is_added_to_a_product_as_to_any_tensor() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4).flatten(1)
    made, elsewhere = tokens(codes, 5, behind=(1, "a", 0)), tokens(codes.flip(1), 5)
    for term in (learned(12, 5), foreign(12, 5, positions="given"), foreign(5)):
        assert add(planes, made, term) is made
    assert add(planes, made, tokens(codes, 5, behind=(3, "b", 0))).behind == (3, "b", 0)
    assert torch.equal(add(planes, made, one(planes)).codes, made.codes)
    for term, why in ((foreign(12, 1), "text"), (foreign(12, 1, name=""), "addmm"), (elsewhere, "addmm")):
        with pytest.raises(Unproven, match=f"^{why}$"):
            add(planes, made, term)
    scores = made._replace(columns=made.codes)
    assert add(planes, scores, elsewhere) is scores
    word_product = Places("learned", made.codes)
    assert add(planes, word_product, foreign(12, 1)) is word_product
