"""Rules for operations that merge elements along axes, or put them in an order of their values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.capturing.placing.cells import check_parameters, repeats_some
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Result, Unproven, Work, over_members, through
from visattn.core.capturing.tokens.codes import same_along


def reduced(work: Work) -> Result:
    """Return the places behind a reduction, such as `mean` over `dim`: merged cells of the image count as one larger cell.

    Raises:
        Unproven: If the axes are unknown, or the merged cells form no grid.
    """
    source, dims = work.main(), work.get("dim")
    ndim = source.codes.ndim
    are_dims_unknown = dims is None and work.shape.numel() > 1 and ndim
    if are_dims_unknown:
        raise Unproven(work.name)
    if dims is None or dims == []:
        dims = range(ndim)
    elif isinstance(dims, int):
        dims = [dims]
    reduced_dims = sorted({dim % ndim for dim in dims}, reverse=True) if ndim else []
    is_scores = source.columns is not None
    reduced_places = _reduced_scores(work, source, reduced_dims) if is_scores else _reduced_tokens(work, source, reduced_dims)
    return [reduced_places if result.shape == reduced_places.shape else work.unknown(result.shape) for result in work.outs]


def _reduced_tokens(work: Work, source: Places, dims: Sequence[int]) -> Places:
    """Return the places of tokens behind a reduction over `dims`, which are in descending order.

    An axis along which all position codes (cells of the image) are equal, such as channels, merges no cells.
    """
    codes, copies = source.codes, source.copies
    merges_cells = any(not same_along(codes, dim) for dim in dims)
    for dim in dims:
        codes = through(work.planes, codes, dim, 1)
        if copies is not None:
            copies = copies.narrow(dim, 0, 1) if same_along(copies, dim) else None
    keeps_dims = codes.ndim == len(work.shape)
    parts = source.codes if merges_cells and keeps_dims else None
    merges_copies = merges_cells and copies is not None and any(not same_along(copies, dim) for dim in range(copies.ndim))
    if not keeps_dims:
        for dim in dims:
            codes = codes.squeeze(dim)
            copies = None if copies is None else copies.squeeze(dim)
    return source._replace(
        codes=codes,
        copies=copies,
        others=None,
        parts=parts,
        mixture=source.mixture or merges_copies,
        leaning=(source.weighted or repeats_some(source.codes)) if merges_cells else source.leaning,
    )


def _reduced_scores(work: Work, source: Places, dims: Sequence[int]) -> Places:
    """Return the places of a score matrix (query, key) behind a reduction: over the keys, it has those of the queries.

    Over the queries, it has those of the keys. Over axes along which neither changes, such as heads, it is still a score matrix.

    Raises:
        Unproven: If both change, or scores are summed over channels (see `over_members`).
    """
    query_codes, key_codes = source.codes, source.columns
    assert key_codes is not None  # noqa: S101 - the caller has checked it
    for kept_codes, summed_codes in ((query_codes, key_codes), (key_codes, query_codes)):
        if not all(same_along(kept_codes, dim) for dim in dims):
            continue
        if all(same_along(summed_codes, dim) for dim in dims):
            scores = source.each(lambda codes: _first_along(codes, dims).reshape(work.shape))
            assert scores is not None  # noqa: S101 - it always fits
            return scores
        if over_members(work, kept_codes, summed_codes):
            raise Unproven(work.name)
        return source._replace(codes=_first_along(kept_codes, dims).reshape(work.shape), columns=None, copies=None, others=None)
    raise Unproven(work.name)


def _first_along(codes: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the first element along some axes, which keep size 1."""
    for dim in dims:
        codes = codes.narrow(dim, 0, 1)
    return codes


def reordered(work: Work) -> Result:
    """Return the places behind `sort`, `topk`, `argmax` or `cumsum` along an axis of one token, such as its channels.

    Raises:
        Unproven: If elements of several tokens change their order.
    """
    source = work.main()
    is_flattened = work.name.startswith("arg") and work.name != "argsort"
    default_dim = 0 if work.name == "msort" else None if is_flattened else -1
    dim = work.get("dim", default_dim)
    is_scores = source.columns is not None
    if is_scores or not isinstance(dim, int) or not same_along(source.codes, dim):
        raise Unproven(work.name)
    is_one_copy = source.copies is None or same_along(source.copies, dim)
    source = source._replace(copies=source.copies if is_one_copy else None, others=None)
    return [_spread_along(source, dim, result.shape) for result in work.outs]


def _spread_along(places: Places, dim: int, shape: torch.Size) -> Places:
    """Return the places of a result of another size along an axis that belongs to one token, or without that axis."""
    keeps_dim = len(shape) == places.codes.ndim

    def spread(codes: Tensor) -> Tensor:
        first = codes.narrow(dim, 0, 1)
        return (first if keeps_dim else first.squeeze(dim)).expand(shape)

    spread_places = places.each(spread)
    assert spread_places is not None  # noqa: S101 - equal codes can always be spread
    return spread_places


def normalized(work: Work) -> Result:
    """Return the places behind a softmax, layer norm or batch norm: each element stays where it is.

    Further results, such as the means, are lost.
    """
    source = work.main()
    check_parameters(work, source, ("weight", "bias", "running_mean", "running_var"))
    normalized_places = source._replace(summed=False, weighted=source.weighted or _weights_cells(work, source))
    return [
        normalized_places if number == 0 and result.shape == source.shape else work.unknown(result.shape)
        for number, result in enumerate(work.outs)
    ]


def _weights_cells(work: Work, source: Places) -> bool:
    """Check whether a normalization multiplies cells of the image, rather than channels, by weights of their own."""
    is_weighted = work.get("weight") is not None or work.get("running_var") is not None
    axes = range(-len(work.get("normalized_shape")), 0) if work.get("normalized_shape") else [1]
    return is_weighted and any(not same_along(source.codes, axis) for axis in axes)
