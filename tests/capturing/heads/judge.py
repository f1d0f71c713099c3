"""Judge of explained queries, by the shares of the tokens that a head reads (`tests.capturing.heads.truth`).

A claim is a sum of parts with weights that sum to 1: single tokens (`cls`, `register0`, ...), `mean` (all patches, 1/N each) or `all`
(all tokens, 1/N each). It is right if for each image and each score

- tokens without a part have shares of at most `OUTSIDE` in all, so `cls` needs a share of 99 % of the class token alone;
- tokens within `mean` or `all` have equal shares: each is within `EQUAL` of their mean;
- the ratio of share and weight of two parts differs by at most `RATIO`: `cls+mean` (half each) needs a share of cls between 1/4 and
  3/4. The factor is large, since `cls+mean` is also the name of a linear layer on both, with weights of its own.

A claim about the latent tokens of a pooling attention is judged by their shares. It is wrong if the score also depends on tokens that
bypass them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import visattn
from tests.capturing.heads.truth import OUTSIDE, SAME, SCORES, Case, Truth, truths
from visattn.core.records import Recording
from visattn.errors import OptionError, VisattnError

EQUAL, RATIO = 0.01, 3.0
WORST = ("failed", "wrong", "refused although provable", "refused", "right")
METHOD = re.compile("layers cannot be (multiplied|combined)")  # refusals that are not about the query
Claims = dict[str, str]  # setting -> query, or the refusal behind "refused: "


@dataclass
class Verdict:
    """Verdict on one head.

    Attributes:
        verdict: The worst verdict of all settings: one of `WORST`.
        claims: Query that each setting claims, or its refusal; several are separated by ` / `.
        wrong: What is wrong, one line for each setting.
        provable: Query that is right for all scores and images; empty if there is none.
        read: Verdict on `query="read"`: `right`, `wrong: ...` or why it was not judged.
        share: Share of the prefix tokens and of the patch with the largest share, of the first image without a score.
    """

    verdict: str
    claims: Claims
    wrong: list[str] = field(default_factory=list)
    provable: str = ""
    read: str = ""
    share: str = ""


# claims


def weights_of(claim: str, prefix: Sequence[str], count: int) -> Tensor | None:
    """Return the parts of a claim, `(parts, tokens)`, with weights; None if a token is unknown. Tokens are prefix, then patches."""
    parts = []
    for name in claim.split("+"):
        part = torch.zeros(count, dtype=torch.float64)
        if name in ("mean", "all"):
            part[len(prefix) if name == "mean" else 0 :] = 1
        elif name in prefix:
            part[prefix.index(name)] = 1
        else:
            return None
        parts.append(part / part.sum())
    return torch.stack(parts) / len(parts)


def error_of(parts: Tensor, shares: Tensor) -> str:
    """Return how a claim contradicts the shares of one image; empty if it does not."""
    claimed = parts.sum(0) > 0
    outside = float(shares[~claimed].sum())
    if not float(shares.sum()):
        return "the score depends on no token"
    if not outside <= OUTSIDE:
        return f"the others have a share of {outside:.1%}"
    ratios = []
    for part in parts:
        ratio = shares[part > 0] / part[part > 0]
        mean = float(ratio.mean())
        spread = float((ratio - mean).abs().max()) / max(mean, 1e-300)
        if not spread <= EQUAL:
            return (
                f"a token has {float(ratio.max()) / mean:.2f} times, another {float(ratio.min()) / mean:.2f} times the mean share"
            )
        ratios.append(mean)
    if not max(ratios) <= RATIO * min(ratios):
        return f"the share of a part is {max(ratios) / max(min(ratios), 1e-300):.3g} times that of another"
    return ""


def judged(claim: str, prefix: Sequence[str], shares: Sequence[Tensor]) -> str:
    """Return the first error of a claim over images; empty if it is right."""
    if not shares:
        return "the score does not read these tokens alone"
    parts = weights_of(claim, prefix, shares[0].shape[-1])
    if parts is None:
        return "no such token"
    return next((error for image in torch.cat([*shares]) if (error := error_of(parts, image))), "")


def claim_of(method: Callable[[], Any]) -> str:
    """Return the query that a method states, or its refusal."""
    try:
        return str(method().provenance.parameters["query"])
    except VisattnError as error:
        return f"{'not for this model' if METHOD.search(str(error)) else 'refused'}: {error}"


def captured(case: Case, inputs: tuple[Tensor, ...]) -> tuple[Recording, Recording, Any]:
    """Return a recording without gradients, one with them, and the output of the second."""
    with torch.no_grad(), visattn.capture(case.model) as plain:
        case.model(*inputs)
    with visattn.capture(case.model, gradients=True) as graded:
        output = case.model(*inputs)
    return plain, graded, output


def settings(plain: Recording, graded: Recording, scores: Tensor) -> dict[str, tuple[str, str, Recording]]:
    """Return what each setting claims: its score (`""` for none), the query, and the recording."""
    found = {"reads": ("", plain.reads or "refused: recording.reads is empty", plain)}
    for name in ("rollout", "attention"):
        method = getattr(visattn.methods, name)
        found[name] = "", claim_of(lambda method=method: method(plain)), plain  # type: ignore[misc]
    for i in range(min(SCORES, scores.shape[1])):
        try:
            scored = graded.gradients(scores[:, i].sum())
        except OptionError as error:  # the score depends on no attention
            found[f"relevance of score {i}"] = str(i), f"refused: {error}", graded
        else:
            found[f"relevance of score {i}"] = str(i), claim_of(lambda scored=scored: visattn.methods.relevance(scored)), scored  # type: ignore[misc]
    return found


def attention_map(recording: Recording, query: str | Tensor) -> Tensor:
    """Return the attention of a query in the last layer, `(B, N)`."""
    found = visattn.methods.attention(recording, query=query, fusion="mean", dtype=torch.float64)
    return found.values.flatten(1).double()


def differs(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of maps: the largest over images."""
    return float(((found - expected).abs().sum(1) / expected.abs().sum(1)).max())


def offers_read(recording: Recording) -> str:
    """Return why `query="read"` cannot be judged; empty if the option exists."""
    try:
        visattn.methods.attention(recording, query="read")
    except OptionError as error:
        return "query='read' does not exist" if str(error).startswith("unknown query") else ""
    return ""


def read_error(recording: Recording, truth: Truth, same: float = SAME, query: str = "read") -> str:
    """Return how the map of a query differs from that of the measured shares; empty if it does not."""
    found = attention_map(recording, query)
    off = min(differs(found, attention_map(recording, shares)) for shares in (truth.tokens, truth.stream))
    return "" if off <= same else f"the map differs by {off:.1%} from that of the measured shares"


def refusal_error(text: str, recording: Recording) -> str:
    """Return why a refusal is not one line that names a query which works; empty if it is."""
    if text == "recording.reads is empty":
        return ""
    if "\n" in text.strip():
        return "the refusal has several lines"
    if "no gradient of the score" in text:
        return ""
    named = re.findall(r"\b(?:cls|mean|all|read|distillation|patch:\d+,\d+|(?:register|query):?\d+)\b", text)
    if not named:
        return f"the refusal names no query: {text}"
    for query in dict.fromkeys(named):
        try:
            visattn.methods.attention(recording, query=query)
        except VisattnError as error:
            return f"the refusal names {query}, which does not work: {error}"
    return ""


# verdicts


def claim_error(claim: str, recording: Recording, truth: Truth, prefix: Sequence[str], same: float = SAME) -> str:
    """Return how a claim about a recording contradicts the truth, or the library's own map; empty if it does not."""
    last = recording[-1].queries
    if len(last) != truth.tokens.shape[1] and (last.grid or claim.startswith("pool") or {*claim.split("+")} <= {*last.prefix}):
        pooled = [truth.latents] if truth.latents is not None and truth.latents.shape[1] == len(last) else []
        everything = "+".join(last.prefix) or "mean"  # what a pooling reads: all of its queries
        return judged(everything if claim.startswith("pool") else claim, last.prefix, pooled)
    if claim.startswith("read"):
        return read_error(recording, truth, same, "auto")
    if error := judged(claim, prefix, [truth.tokens]):
        return error
    parts = weights_of(claim, prefix, truth.tokens.shape[1])
    if parts is None or len(recording[-1].queries) != truth.tokens.shape[1]:
        return ""
    off = differs(attention_map(recording, "auto"), attention_map(recording, parts.sum(0)))
    return "" if off <= 1e-4 else f"it states {claim}, but its map is another one"


def candidates(prefix: Sequence[str]) -> list[str]:
    """Return the claims that are tried where the library refuses."""
    pairs = [f"cls+{other}" for other in (*prefix[1:], "mean")] if "cls" in prefix else []
    return [*prefix, "mean", "all", *pairs] + ["+".join(prefix)] * (len(prefix) > 2)


def _provable(truth: Sequence[Truth], prefix: Sequence[str]) -> str:
    tokens = [one.tokens for one in truth]
    latents = [one.latents for one in truth if one.latents is not None]
    if latents and len(latents) == len(truth):
        names = [f"query{i}" for i in range(latents[0].shape[1])]
        if not judged("+".join(names), names, latents):
            return "pool"
    return next((claim for claim in candidates(prefix) if not judged(claim, prefix, tokens)), "")


def verdict(*cases: Case) -> Verdict:
    """Judge all claims about one head, on one or more models with other weights."""
    made, worst = Verdict("right", {}), {"right"}
    known: list[Truth] = []
    prefix: tuple[str, ...] = ()
    for number, (case, inputs) in enumerate((one, inputs) for one in cases for inputs in one.inputs):
        try:
            truth = truths(case, inputs)
            known += [one for score, one in truth.items() if score or case.pooled]
            plain, graded, output = captured(case, inputs)
            layouts = [record.queries for record in plain if len(record.queries) == len(case.order)]
            prefix = layouts[-1].prefix if layouts else ()
            for name, (score, claim, recording) in settings(plain, graded, case.scores(output)).items():
                made.claims[name] = " / ".join(dict.fromkeys([*made.claims.get(name, claim).split(" / "), claim]))
                if claim.startswith("not for this model: ") or not (score or case.pooled):
                    error = ""
                elif claim.startswith("refused: "):
                    error = refusal_error(claim.removeprefix("refused: "), recording)
                    worst.add("failed" if error else "refused")
                else:
                    error = claim_error(claim, recording, truth[score], prefix, case.same)
                    worst.add("wrong" if error else "right")
                if error:
                    made.wrong.append(f"run {number}, {name}: {claim}: {error}")
                if score and not made.read.startswith("wrong"):
                    made.read = _read(recording, truth[score], case.same)
        except Exception as error:  # any other error is a verdict
            worst.add("failed")
            made.wrong.append(f"run {number}: {type(error).__name__}: {error}")
    made.provable = _provable(known, prefix) if known else ""
    if made.provable and "refused" in worst:
        worst.add("refused although provable")
    made.verdict = next(one for one in WORST if one in worst)
    if known:
        image, count = known[0].tokens[0], cases[0].prefix
        made.share = (
            f"prefix {float(image[:count].sum()):.0%}, patches {float(image[count:].min()):.1%}-{float(image[count:].max()):.1%}"
        )
    return made


def _read(recording: Recording, truth: Truth, same: float) -> str:
    if truth.pools:
        return "not judged: the head has attention of its own"
    if not float(truth.tokens.sum()):
        return "not judged: the score reads no token"
    return offers_read(recording) or (f"wrong: {error}" if (error := read_error(recording, truth, same)) else "right")
