"""FP8 codes of weights kept between passes: made once per generation where chosen, never stale, in no checkpoint."""

import pytest
import torch
from checkpoints_for_tests import build_model
from fusion_for_tests import DEVICE, build, gradients, one_by_one, tokens
from torch.utils.checkpoint import checkpoint

from jetrl import weight_cache
from jetrl.errors import UserError


@pytest.fixture
def generation(monkeypatch):
    monkeypatch.setattr(weight_cache, "_generation", 0)
    monkeypatch.setattr(weight_cache, "_moves", 0)


def made(monkeypatch, run):
    """How many weights were quantized during run()."""
    count, stock = [0], weight_cache._quantize

    def counting(use, weights, scale_format):
        count[0] += len(weights)
        return stock(use, weights, scale_format)

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_quantize", counting)
        run()
    return count[0]


@pytest.mark.parametrize("cache,per_pass", [("step", (14, 0)), ("auto", (14, 0)), ("micro_batch", (14, 14))])
def test_codes_are_made_once_per_generation_only_where_chosen(cache, per_pass, generation, monkeypatch):
    model, _ = build("qwen3", cache=cache)
    for _ in range(weight_cache.FIRST_AUTO_GENERATION):
        weight_cache.weights_changed()
    ids = tokens()
    assert tuple(made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)) == per_pass
    weight_cache.weights_changed()
    assert made(monkeypatch, lambda: model(ids, use_cache=False)) == 14


def test_auto_does_not_take_offloading_for_an_optimizer_step(generation, monkeypatch):
    model, _ = build("qwen3", cache="auto")
    weight_cache.weights_changed()
    for _ in range(weight_cache.FIRST_AUTO_GENERATION):
        weight_cache.weights_changed(moved=True)
    ids = tokens()
    assert [made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)] == [14, 14]


def test_nothing_is_kept_before_somebody_announces_changes(generation, monkeypatch):
    model, _ = build("qwen3", cache="step")
    ids = tokens()
    assert [made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)] == [14, 14]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.slow), "llama-ragged-tied"])
def test_kept_codes_are_never_stale(architecture, announced, generation):
    """After a change in place of a parameter, announced or not, outputs and gradients are those of a model without cache."""
    model, _ = build(architecture, cache="step")
    fresh, _ = build(architecture, cache="micro_batch")
    weight_cache.weights_changed()
    ids = tokens()
    for _ in range(2):
        ours = gradients(model(ids, use_cache=False).logits, ids, model)
        want = gradients(fresh(ids, use_cache=False).logits, ids, fresh)
        assert all(torch.equal(ours[n], want[n]) for n in want if DEVICE == "cpu")
        assert torch.equal(model(ids, use_cache=False).logits, fresh(ids, use_cache=False).logits)
        for m in (model, fresh):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        if announced:
            weight_cache.weights_changed()


def test_a_load_without_notice_is_seen(generation):
    model, _ = build("qwen3", cache="step")
    weight_cache.weights_changed()
    ids = tokens()
    model(ids)
    other = build_model("qwen3", seed=5).bfloat16().to(DEVICE)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(ids, use_cache=False).logits, one_by_one(model, ids))


def _assign_data(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.data


def _assign_state(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def _assign_twice(model, other):
    """Storage that is given back is where an allocator puts the next tensor of that size."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = torch.empty(0, dtype=p.dtype, device=DEVICE)
        p.data = q.data.clone()


def _load_through_data(model, other):
    """How FSDP loads: into storage whose changes no parameter of the model counts."""
    hidden = {name: p.data for name, p in model.named_parameters()}
    for name, q in other.named_parameters():
        hidden[name].copy_(q.data)
    # A part of the model: its layers' hooks run after the copies.
    model.model.load_state_dict({}, strict=False)


def _step_through_data(model, other):
    """How FSDP's optimizer writes: parameters of its own, of which the model's are views."""
    twins = [torch.nn.Parameter(p.data) for p in model.parameters()]
    for t, q in zip(twins, other.parameters(), strict=True):
        t.grad = t.data - q.data
    torch.optim.SGD(twins, lr=1.0).step()


CHANGES = [_assign_data, _assign_state, _assign_twice, _load_through_data, _step_through_data]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.lstrip("_"))
def test_every_other_way_to_change_weights_is_seen_without_notice(change, generation):
    model, _ = build("qwen3", cache="step")
    weight_cache.weights_changed()
    ids = tokens()
    before = model(ids, use_cache=False).logits
    change(model, build_model("qwen3", seed=5).bfloat16().to(DEVICE))
    after = model(ids, use_cache=False).logits
    assert torch.equal(after, one_by_one(model, ids)) and not torch.equal(after, before)


def test_codes_of_a_weight_that_moved_and_came_back_are_made_again(generation, monkeypatch):
    """Offloading that nobody announced: the copies must not outlive the storage that they were made from."""
    model, _ = build("qwen3", cache="step")
    weight_cache.weights_changed()
    ids = tokens()
    model(ids, use_cache=False)
    for p in model.parameters():
        kept = p.data.clone()
        p.data = torch.empty(0, dtype=p.dtype, device=DEVICE)
        p.data = kept
    assert made(monkeypatch, lambda: model(ids, use_cache=False)) == 14
    assert made(monkeypatch, lambda: model(ids, use_cache=False)) == 0


def test_kept_codes_are_in_no_checkpoint_and_are_freed(generation):
    model, _ = build("qwen3", cache="step")
    names = set(model.state_dict())
    weight_cache.weights_changed()
    model(tokens())
    layer = model.model.layers[0]
    assert layer.jetrl_steps.before.qkv.codes._kept and set(model.state_dict()) == names
    assert not any(b.dtype == torch.float8_e4m3fn for b in model.buffers())
    weight_cache.weights_changed()
    assert not layer.jetrl_steps.before.qkv.codes._kept


def test_an_unknown_choice_is_refused():
    with pytest.raises(UserError, match="weight_cache=always is unknown; allowed: auto, step, micro_batch"):
        build("qwen3", cache="always")


def test_checkpoint_of_a_single_step_recomputes_the_same(generation):
    model, _ = build("qwen3", torch.float32)
    layer = model.model.layers[0]
    hidden = torch.randn(1, 20, 256, device=DEVICE, requires_grad=True)
    tables = model.model.rotary_emb(hidden, torch.arange(20, device=DEVICE)[None])

    def run():
        return layer(hidden, position_embeddings=tables).square().sum()

    (plain,) = torch.autograd.grad(run(), hidden)
    (again,) = torch.autograd.grad(checkpoint(run, use_reentrant=False), hidden)
    assert torch.equal(plain, again)
