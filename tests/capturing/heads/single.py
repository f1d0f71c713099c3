"""Heads that read single tokens: the class token, registers, the distillation token, one patch."""

from __future__ import annotations

import torch

from tests.capturing.heads.model import Head

SINGLE: dict[str, Head] = {
    # the class token, in several spellings
    "cls": Head(lambda k, t: t[:, 0]),
    "cls, select": Head(lambda k, t: t.select(1, 0)),
    "cls, split": Head(lambda k, t: t.split([1, 96], 1)[0].squeeze(1)),
    "cls, narrow": Head(lambda k, t: t.narrow(1, 0, 1).flatten(1)),
    "cls, unbind": Head(lambda k, t: t.unbind(1)[0]),
    "cls, chunk": Head(lambda k, t: t.chunk(97, 1)[0][:, 0]),
    "cls, mean of one": Head(lambda k, t: t[:, :1].mean(1)),
    "cls, index_select": Head(lambda k, t: t.index_select(1, torch.tensor([0]))[:, 0]),
    "cls, gather": Head(lambda k, t: t.gather(1, torch.zeros(len(t), 1, t.shape[2], dtype=torch.long))[:, 0]),
    "cls, take_along_dim": Head(lambda k, t: torch.take_along_dim(t, torch.zeros(1, 1, 1, dtype=torch.long), 1)[:, 0]),
    "cls, boolean index": Head(lambda k, t: t[:, k.first.bool()].mean(1)),
    "cls, one-hot and sum": Head(lambda k, t: (t * k.first[:, None]).sum(1)),
    "cls, one-hot and matmul": Head(lambda k, t: k.first @ t),
    "cls, one-hot and einsum": Head(lambda k, t: torch.einsum("n,bnc->bc", k.first, t)),
    "cls, where and sum": Head(lambda k, t: torch.where(k.first.bool()[:, None], t, 0.0).sum(1)),
    "cls, masked_fill and sum": Head(lambda k, t: t.masked_fill(k.first[:, None] == 0, 0).sum(1)),
    "cls, flipped": Head(lambda k, t: t.flip(1)[:, -1]),
    "cls, rolled": Head(lambda k, t: t.roll(1, 1)[:, 1]),
    "cls, difference of sums": Head(lambda k, t: t.sum(1) - t[:, 1:].sum(1)),
    "cls, loop with break": Head(lambda k, t: next(token for token in t.unbind(1))),
    "cls at the end": Head(lambda k, t: t[:, -1], end=True),
    "cls at the end, norm": Head(lambda k, t: t[:, -1], end=True, before="norm"),
    # layers around it
    "cls, norm before": Head(lambda k, t: t[:, 0], before="norm"),
    "cls, norm after": Head(lambda k, t: t[:, 0], after="norm"),
    "cls, pooler with tanh": Head(lambda k, t: t[:, 0], before="norm", after="tanh"),
    "cls, batch norm": Head(lambda k, t: t[:, 0], after="batch norm"),
    "cls, dropout": Head(lambda k, t: t[:, 0], after="dropout"),
    "cls, layers after": Head(lambda k, t: t[:, 0], after="relu"),
    "cls, probabilities": Head(lambda k, t: t[:, 0], after="softmax"),
    "cls, scores of all tokens": Head(lambda k, t: k.scores(t)[:, 0], after="none"),
    "cls, normalized": Head(lambda k, t: torch.nn.functional.normalize(t[:, 0], dim=-1)),
    "cls, two heads averaged": Head(lambda k, t: (k.scores(t[:, 0]) + k.scores2(t[:, 0])) / 2, after="none"),
    # the class token alone has an effect
    "cls, mean detached": Head(lambda k, t: t[:, 0] + t[:, 1:].mean(1).detach()),
    "cls, mean times 0": Head(lambda k, t: t[:, 0] + 0 * t[:, 1:].mean(1)),
    "cls, mean times a zero parameter": Head(lambda k, t: t[:, 0] + k.zero * t[:, 1:].mean(1)),
    "cls, cat with zeros for the mean": Head(
        lambda k, t: torch.cat([k.scores(t[:, 0]), t[:, 1:].mean(1)], -1) @ torch.eye(19, 3, dtype=t.dtype), after="none"
    ),
    "cls and 1e-4 of the mean": Head(lambda k, t: t[:, 0] + 1e-4 * t[:, 1:].mean(1)),
    # one patch
    "one patch": Head(lambda k, t: t[:, 3]),
    "last patch": Head(lambda k, t: t[:, -1]),
    "last patch, no class token": Head(lambda k, t: t[:, -1], prefix=0),
    "first patch, no class token": Head(lambda k, t: t[:, 0], prefix=0),
    "patch in the middle of the map": Head(lambda k, t: k.map(t)[:, :, 4, 6]),
    "one patch, one-hot and sum": Head(lambda k, t: (t[:, 1:] * k.patch[:, None]).sum(1)),
    "one patch, one-hot and matmul": Head(lambda k, t: k.patch @ t[:, 1:]),
    "patch with the largest score": Head(lambda k, t: t[torch.arange(len(t)), k.one(t[:, 1:])[..., 0].argmax(1) + 1]),
    "patch nearest to cls": Head(lambda k, t: t[torch.arange(len(t)), (t[:, 1:] @ t[:, 0, :, None])[..., 0].argmax(1) + 1]),
    # registers and a distillation token
    "cls beside registers": Head(lambda k, t: t[:, 0], prefix=5),
    "first register": Head(lambda k, t: t[:, 1], prefix=5),
    "last register": Head(lambda k, t: t[:, 4], prefix=5),
    "mean of the registers": Head(lambda k, t: t[:, 1:5].mean(1), prefix=5),
    "mean of two registers": Head(lambda k, t: t[:, 1:3].mean(1), prefix=5),
    "maximum of the registers": Head(lambda k, t: t[:, 1:5].amax(1), prefix=5),
    "mean of cls and registers": Head(lambda k, t: t[:, :5].mean(1), prefix=5),
    "cls, all learned tokens in one parameter": Head(lambda k, t: t[:, 0], prefix=5, joint=True),
    "first register, all learned tokens in one parameter": Head(lambda k, t: t[:, 1], prefix=5, joint=True),
    "registers only, no class token": Head(lambda k, t: t[:, :4].flatten(1), prefix=4),
    "cls and distillation, averaged": Head(lambda k, t: (k.scores(t[:, 0]) + k.scores2(t[:, 1])) / 2, after="none", prefix=2),
    "cls and distillation, cat": Head(lambda k, t: torch.cat([t[:, 0], t[:, 1]], -1), prefix=2),
    "cls and distillation, mean": Head(lambda k, t: t[:, :2].mean(1), prefix=2, before="norm"),
    "cls and distillation, 0.95 and 0.05": Head(lambda k, t: 0.95 * t[:, 0] + 0.05 * t[:, 1], prefix=2),
    "distillation alone": Head(lambda k, t: t[:, 1], prefix=2),
    "maximum of cls and distillation": Head(lambda k, t: t[:, :2].amax(1), prefix=2),
}
