"""Captions per second of our beam search and of a loop over images, as JSON: `python -m bench.captions ROUNDS`.

The loop follows the usual PyTorch tutorials: one image at a time, features copied for each hypothesis, one step per word, and lists of
finished captions. It computes the attention's keys again at every step; `keys once` computes them once. The model was trained briefly on
the captions of the images, so that its captions end and vary like those of a fully trained model.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measuring import ratio, series
from bench.shared import THREADS
from visattn.captioning.beam_search import search
from visattn.captioning.vocabulary import Vocabulary
from visattn.data.scenes import Scenes
from visattn.models.local_features import LocalFeatures
from visattn.models.show_attend_tell import END, EncodedImage, ShowAttendTell, costs

PICTURES, BEAM, LONGEST = 64, 5, 50
LESSONS = 150  # steps of Adam


def main(rounds: int) -> dict[str, Any]:
    """Return median seconds for all images, our time relative to the loops', numbers of steps, and how many captions agree."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    scenes = [*map(Scenes(PICTURES, distractors=(0, 2), margin=0.03).scene, range(PICTURES))]
    images = torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2) / 127.5 - 1
    model = taught(images, [scene.caption for scene in scenes])
    runs = {
        "ours": partial(batched, model, images),
        "loop": partial(image_by_image, model, images, keys_once=False),
        "loop, keys once": partial(image_by_image, model, images, keys_once=True),
    }
    told = {name: run() for name, run in runs.items()}
    seconds = series(runs, rounds, warmup=1, back=True)
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratios": {name: ratio(values, seconds["ours"]) for name, values in seconds.items() if name != "ours"},
        "steps": statistics.mean(len(words) + 1 for words in told["ours"]),
        "pictures": PICTURES,
        "alike": sum(len(set(map(tuple, captions))) == 1 for captions in zip(*told.values(), strict=True)),
    }


def taught(images: Tensor, captions: list[str]) -> ShowAttendTell:
    """Return a model of the same size as the shipped one, briefly trained on these captions."""
    vocabulary = Vocabulary.of(captions)
    encoder = LocalFeatures(width=128).features.eval()
    maps = encoder(images).detach()
    model = ShowAttendTell(
        torch.nn.Identity(), 128, len(vocabulary), embed_dim=128, hidden_dim=256, attention_dim=128, grid=(8, 8)
    )
    words = [torch.tensor(vocabulary.encode(caption)) for caption in captions]
    lengths = torch.tensor([len(one) for one in words])
    padded = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(LESSONS):
        optimizer.zero_grad()
        torch.autograd.backward(costs(model(maps, padded, lengths), padded).mean())
        optimizer.step()
    model.encoder = encoder
    return model.eval()


@torch.inference_mode()
def batched(model: ShowAttendTell, images: Tensor) -> list[list[int]]:
    """Caption all images in one batch."""
    found = search(model, model.encode(images), beam_size=BEAM, max_length=LONGEST, allow_unknown=True)
    return [one.words for one in found]


@torch.inference_mode()
def image_by_image(model: ShowAttendTell, images: Tensor, *, keys_once: bool) -> list[list[int]]:
    """Caption one image after the other."""
    captions = []
    for image in images:
        features, keys, grid = model.encode(image[None])
        seen = EncodedImage(features.expand(BEAM, -1, -1), keys.expand(BEAM, -1, -1), grid)
        state, words, scores = model.initial_state(seen), torch.full((BEAM, 1), model.start_token), torch.zeros(BEAM, 1)
        over, over_scores, live = list[list[int]](), list[Tensor](), BEAM
        for t in range(LONGEST):
            step, state = model.step(seen if keys_once else with_keys(model, seen), state, words[:, -1])
            total = scores + step.logits.log_softmax(1)
            best, at = (total.flatten() if t else total[0]).topk(live)  # in the first step all hypotheses are identical
            parent, word = at // model.vocab_size, at % model.vocab_size
            words = torch.cat((words[parent], word[:, None]), 1)
            going = [i for i, number in enumerate(word) if number != END]
            ended = list(set(range(live)) - set(going))
            if ended:
                over.extend(words[ended].tolist())
                over_scores.extend(best[ended])
                live -= len(ended)
            if not live:
                break
            words, scores, parent = words[going], best[going, None], parent[going]
            state = state[0][parent], state[1][parent]
            seen = EncodedImage(seen.features[parent], seen.keys[parent], grid)
        captions.append(over[over_scores.index(max(over_scores))][1:-1])
    return captions


def with_keys(model: ShowAttendTell, seen: EncodedImage) -> EncodedImage:
    """Compute the attention's keys from the features again."""
    keys = model.look.keys(seen.features) if model.look is not None else seen.features
    return seen._replace(keys=keys)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
