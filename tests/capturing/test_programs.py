"""Programs do the same under a capture as without one, and no copy of their model keeps a trace of it."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.capturing import own
from tests.capturing.moving import Moving, image, keys_of, see
from visattn.errors import CaptureError, NoAttentionCaptured


def hooks_of(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


class Dropping(nn.Module):
    """Model that skips layers at random (LayerDrop), in training or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.vit, self.always = own.vit(), always

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.vit.patches(x).flatten(2).mT
        for block in [*self.vit.blocks, *self.vit.blocks]:
            if (self.training or self.always) and random.random() < 0.4:
                continue
            tokens = block(tokens)
        return self.vit.head(tokens.mean(1))  # type: ignore[no-any-return]


def trained(capture: bool, steps: int = 12) -> list[Tensor]:
    """Return the parameters after some training steps with skipped layers and dropout, and those of a deepcopy made on the way."""
    random.seed(1)
    torch.manual_seed(1)
    model = Dropping(always=False).train()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recordings = []
    for step in range(steps):
        x = torch.randn(2, 3, *tiny.INPUT)
        if capture:
            try:
                with visattn.capture(model) as recording:
                    loss = F.dropout(model(x), 0.1).square().mean()
                    loss.backward()
                    if step == 5:
                        average = copy.deepcopy(model)
                recordings.append(len(recording))
            except NoAttentionCaptured:  # all layers were skipped
                recordings.append(0)
        else:
            loss = F.dropout(model(x), 0.1).square().mean()
            loss.backward()
            if step == 5:
                average = copy.deepcopy(model)
        optimizer.step()
        optimizer.zero_grad()
    assert not capture or len(set(recordings)) > 1
    assert hooks_of(model) == hooks_of(average) == 0
    return [*model.parameters(), *average.parameters()]


def test_capture_does_not_change_training_with_stochastic_depth() -> None:
    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("training", [True, False])
def test_randomly_skipped_layers_are_not_recorded(training: bool) -> None:
    model = Dropping(always=True).train(training)
    for seed in range(30):
        random.seed(seed)
        expected = sum(random.random() >= 0.4 for _ in range(4))
        random.seed(seed)
        try:
            recording = see(model, tiny.pixels())
        except NoAttentionCaptured:
            assert expected == 0
            continue
        assert len(recording) == expected
        assert {record.reason for record in recording} == {None}


def test_copies_made_inside_a_capture_have_no_hooks_and_can_be_captured() -> None:
    model, x = tiny.vit(), tiny.pixels()
    with torch.no_grad(), visattn.capture(model, values=True, features="all") as recording:
        model(x)
        copied = copy.deepcopy(model)
        unpickled = pickle.loads(pickle.dumps(model))
        memory = io.BytesIO()
        torch.save(model, memory)
        model(x)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert len(recording) == 4
    for other in (model, copied, unpickled, loaded):
        assert hooks_of(other) == 0
        assert not other._forward_pre_hooks_with_kwargs
        assert len(see(other, x)) == 2


def test_hooks_of_the_user_are_kept() -> None:
    model, x, seen = tiny.vit(), tiny.pixels(), list[str]()
    before = model.blocks[0].register_forward_hook(lambda *_: seen.append("before"))
    with torch.no_grad(), visattn.capture(model):
        inside = model.blocks[1].register_forward_hook(lambda *_: seen.append("inside"))
        model(x)
        before.remove()
        model(x)
    with torch.no_grad():
        model(x)
    assert seen == ["before", "inside", "inside", "inside"]
    inside.remove()
    assert hooks_of(model) == 0


class Pyramid(nn.Module):
    """Model that calls itself on a smaller image."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Moving()

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self(F.interpolate(x, scale_factor=0.5), False) if again else out


def test_a_recursive_model_is_recorded() -> None:
    model, x = Pyramid(), image()
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            with visattn.capture(model) as recording:
                out = model(x)
            assert torch.equal(out, expected)
            assert [(record.forward, record.call, record.keys.grid) for record in recording] == [(0, 0, (8, 12)), (0, 1, (4, 6))]
            assert recording.input_size == (32, 48)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_a_model_gives_the_same_output_and_its_recording_is_refused() -> None:
    model, x = tiny.vit(), tiny.pixels(3)
    with torch.no_grad():
        expected = torch.vmap(lambda one: model(one[None])[0])(x)
    for _ in range(3):
        with (
            pytest.raises(
                NoAttentionCaptured, match=r"blocks\.1\.attn runs inside torch\.func|blocks\.0\.attn runs inside torch\.func"
            ),
            torch.no_grad(),
            visattn.capture(model),
        ):
            assert torch.equal(torch.vmap(lambda one: model(one[None])[0])(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_a_model_that_attends_in_its_own_forward_is_refused() -> None:
    model = Moving()
    with pytest.raises(NoAttentionCaptured, match=r"Moving runs inside torch\.func"), visattn.capture(model):
        torch.vmap(lambda one: model(one[None])[0])(image(batch=2))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_inside_vmap_is_reported_as_unseen() -> None:
    class Mapped(own.Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.vmap(lambda t: super(Mapped, self).forward(t[None])[0])(x)
            return out

    model = own.vit()
    model.blocks[1].attn = Mapped(F.scaled_dot_product_attention, 2, 2)
    recording = see(model, tiny.pixels(2))
    assert [record.layer for record in recording] == ["blocks.0.attn"]
    assert [(unseen.layer, unseen.reason) for unseen in recording.unseen] == [("blocks.1.attn", "runs inside torch.func")]
    with pytest.raises(visattn.VisattnError, match=r"blocks\.1\.attn runs inside torch\.func, which was not recorded"):
        visattn.methods.rollout(recording)


def test_capture_does_not_change_gradients_by_torch_func() -> None:
    model, x = tiny.vit(), tiny.pixels()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(model, given, (x,))
        return out.square().sum()

    expected = torch.func.grad(loss)(parameters)
    with pytest.raises(NoAttentionCaptured), visattn.capture(model):
        found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_exception_propagates_and_leaves_no_hooks(error: type[BaseException]) -> None:
    model, x, fail = tiny.vit(), tiny.pixels(), [True]

    def failing(*_: object) -> None:
        if fail:
            raise error

    handle = model.blocks[1].register_forward_hook(failing)
    with torch.no_grad(), visattn.capture(model) as recording:
        with pytest.raises(error):
            model(x)
        fail.clear()
        model(x)
    assert len(recording) == 2
    handle.remove()
    assert hooks_of(model) == 0


def test_each_thread_records_its_own_model() -> None:
    models = [tiny.vit(seed) for seed in range(4)]
    expected = [see(model, tiny.pixels())[1].operator.dense() for model in models]
    found: dict[int, list[bool]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for _ in range(4):
            found[i].append(torch.equal(see(models[i], tiny.pixels())[1].operator.dense(), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [True] * 4 for i in range(4)}


SURPRISES: dict[str, Callable[[Tensor], Tensor]] = {
    "legacy empty tensor": lambda t: torch.cat([torch.tensor([]), t], -2),
    "linear layer with a vector": lambda t: (F.linear(t, torch.ones(16)), t)[1],
    "mean of nothing": lambda t: (t[:, :0].mean(1), t)[1],
    "gather with out": lambda t: (torch.gather(t, 1, torch.zeros(1, 1, 16, dtype=torch.int64), out=torch.empty(1, 1, 16)), t)[1],
    "index_select with out": lambda t: (torch.index_select(t, 1, torch.tensor([0]), out=torch.empty(1, 1, 16)), t)[1],
    "unsqueeze in place": lambda t: (lambda y: (y.sigmoid(), y.unsqueeze_(1), t)[2])(t.relu()),
    "transpose in place": lambda t: t.clone().transpose_(0, 1).transpose_(0, 1),
    "squeeze in place": lambda t: t.clone()[None].squeeze_(0),
    "sparse": lambda t: (t[0].to_sparse(), t)[1],
    "nested": lambda t: (torch.nested.as_nested_tensor([t[0], t[0, :4]]), t)[1],
    "zero-dimensional": lambda t: t + t.mean() * 0,
    "complex": lambda t: torch.view_as_real(torch.view_as_complex(t.contiguous().unflatten(-1, (-1, 2)))).flatten(-2),
    "no tensor": lambda t: (torch.tensor(3.0).item(), t)[1],
    "an empty batch of indices": lambda t: (t[:, []], t)[1],
    "meshgrid": lambda t: (torch.meshgrid(t[0, :, 0], t[0, 0], indexing="ij"), t)[1],
    "einsum with an ellipsis": lambda t: torch.einsum("...nc,...c->...nc", t, torch.ones(16)),
    "einsum of three": lambda t: torch.einsum("bnc,c,n->bnc", t, torch.ones(16), torch.ones(96)),
    "addmm": lambda t: torch.addmm(torch.zeros(16), t[0], torch.eye(16))[None],
    "hstack": lambda t: torch.hstack([t[:, :48], t[:, 48:]]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", list(SURPRISES))
def test_no_operation_breaks_the_forward(name: str) -> None:
    model = Moving(lambda _, t: SURPRISES[name](t))
    for seed in range(3):
        record = see(model, image(seed))[0]
        assert record.reason is None
        with torch.no_grad():
            assert torch.allclose(keys_of(record), model.tokens(image(seed)), atol=1e-5)


class Decoder(nn.Module):
    """Model that reads an image once and then runs on words only, as `generate` does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.words = nn.Conv2d(3, 16, 16, 16), nn.Embedding(5, 16)

    def forward(self, pixel_values: Any = None, input_ids: Any = None) -> Tensor:
        t = self.words(input_ids) if pixel_values is None else self.embed(pixel_values).flatten(2).mT
        out: Tensor = F.scaled_dot_product_attention(t[:, None], t[:, None], t[:, None])
        return out


def llava() -> nn.Module:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**vision, image_size=32, patch_size=8, projection_dim=32),
        text_config=hf.LlamaConfig(vocab_size=64, **vision, num_key_value_heads=2),
        image_token_index=63,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def trocr() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    words = hf.TrOCRConfig(
        vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64, cross_attention_hidden_size=32
    )
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**sizes, image_size=32, patch_size=8), words, decoder_start_token_id=1, pad_token_id=0
    )
    return hf.VisionEncoderDecoderModel(config).eval()


@pytest.mark.parametrize(("build", "words"), [(llava, [[1, *[63] * 16, 5, 6]]), (trocr, None)], ids=["llava", "trocr"])
def test_generation_is_unchanged_and_its_image_is_recorded(build: Callable[[], nn.Module], words: list[list[int]] | None) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = build()
    given = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), "max_new_tokens": 4}
    if words is not None:
        given |= {"input_ids": torch.tensor(words), "attention_mask": torch.ones(1, len(words[0]), dtype=torch.long)}
    with torch.no_grad():
        expected = model.generate(**given, do_sample=False)
        with visattn.capture(model) as recording:
            made = model.generate(**given, do_sample=False)
    assert torch.equal(made, expected)
    seen = [record for record in recording if record.forward == 0]
    assert len(seen) == 2
    assert all(record.reason is None and record.keys.grid == (4, 4) for record in seen)
    assert len(recording) > 4
    assert all(record.reason for record in recording if record.forward > 0)


class Fused(torch.autograd.Function):
    """Attention with a custom backward pass."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return F.scaled_dot_product_attention(t, t, t)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_attention_in_a_custom_autograd_function_has_weights_and_no_gradients() -> None:
    model = Moving(lambda _, t: Fused.apply(t[:, None])[:, 0])
    assert len(see(model, image())) == 2
    with (
        pytest.raises(CaptureError, match="but Moving runs where autograd records no graph"),
        visattn.capture(model, gradients=True),
    ):
        model(image())


def test_a_forward_pass_without_an_image_is_recorded_without_positions() -> None:
    model = Decoder()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixel_values=tiny.pixels())
        for _ in range(3):
            model(input_ids=torch.tensor([[1, 2]]))
    assert [record.forward for record in recording] == [0, 1, 2, 3]
    assert recording[0].reason is None
    assert {record.reason for record in recording[1:]} == {"the model received no floating-point image in this forward pass"}
