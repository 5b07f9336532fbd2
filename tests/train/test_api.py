"""The functions that other programs call: each equals the command that does the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import edited_json
from exports import exported, make, toy_target
from safetensors.torch import load_file
from toys import (
    eagle_head,
    endless_target,
    noisy_head,
    random_model,
    random_target,
    save_target,
    tokenizer,
)
from training_step import KINDS, documents, first_step, grouped_target, objective_of

from conf.command.entry import RECIPES
from conf.errors import InputError
from conf.settings.eagle import Divergence, EagleConfig, EagleForm, OutputHead
from conf.settings.target import Dtype
from data.templates.record_encoder import RecordEncoder
from eval.decode.engine import decode
from eval.measure import acceptance_stats as stats
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from train import api
from train.batch.data_loader import draw_global_batch, hash_seed, stack_sequences


def states_of(target: Target, ids: torch.Tensor, documents: torch.Tensor, layers: Any) -> Any:
    """The states of packed documents, each read alone, as an engine would have given them."""
    last = torch.zeros(*ids.shape, target.hidden_size)
    found = TargetOutput(last, {index: torch.zeros_like(last) for index in layers})
    for row, numbers in enumerate(documents):
        for number in numbers.unique():
            here = numbers == number
            read = target.encode_text(ids[row, here].tolist(), FeatureLayers((*layers,)))
            found.hidden_states[row, here] = read.hidden_states[0]
            for index in layers:
                found.layers[index][row, here] = read.layers[index][0]
    return found


# States that are given are read alike by all kinds.
CASES = [*((kind, False) for kind in KINDS), ("eagle3", True)]


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_a_step_has_the_loss_and_the_gradients_of_the_training_loop(
    kind: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, loss, gradients = first_step(kind, "cpu", Dtype.float32, tmp_path, micro_batch_size=4)
    target = grouped_target("cpu", torch.float32)
    objective, data = objective_of(kind, target), documents()
    chosen = draw_global_batch(0, 4, len(data), seed=0)
    # The loop's draws are by the number of a sequence.
    monkeypatch.setattr(api, "hash_seed", lambda *n: hash_seed(*n[:2], chosen[n[2]]))
    batch = stack_sequences(data, chosen)
    ids, numbers = batch["input_ids"], batch["document_ids"]
    mask = numbers >= 0 if objective.learns_prompts else batch["loss_mask"]
    states = states_of(target, ids, numbers, objective.head.taps.layers) if given else None
    step = api.training_step(objective, ids, mask, states, numbers)
    step.loss.backward()
    assert step.metrics["loss"] == pytest.approx(shown, rel=1e-5)
    assert step.loss.item() == pytest.approx(loss, rel=1e-5)
    trained = {n: p for n, p in objective.head.named_parameters() if p.grad is not None}
    assert trained.keys() == gradients.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6)


def test_the_loss_mask_decides_alone_and_a_step_changes_nothing() -> None:
    objective = api.training_objective("eagle3", random_target(num_hidden_layers=6))
    assert objective.learns_prompts
    ids = torch.randint(3, 90, (2, 12))
    before = {name: each.clone() for name, each in objective.head.state_dict().items()}
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    assert api.training_step(objective, ids, learnt).loss.item() == 0
    learnt[:, 6:] = True
    once, again = (api.training_step(objective, ids, learnt) for _ in range(2))
    assert once.loss.item() == again.loss.item() > 0
    assert once.metrics == again.metrics
    steps = [f"{name}_d{depth}" for depth in (1, 2, 3) for name in ("loss", "top1", "alpha")]
    assert {*once.metrics} == {"loss", *steps}
    for name, each in objective.head.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_padding_on_either_side_is_none_of_the_text() -> None:
    objective = api.training_objective("eagle3", random_target(num_hidden_layers=6))
    text = torch.randint(3, 90, (1, 9))
    mask = torch.arange(9)[None] >= 3
    plain = api.training_step(objective, text, mask).loss.item()
    for left, right in ((0, 4), (4, 0), (2, 2)):
        ids, learnt = (torch.nn.functional.pad(each, (left, right)) for each in (text, mask))
        numbers = torch.nn.functional.pad(torch.zeros_like(text), (left, right), value=-1)
        found = api.training_step(objective, ids, learnt, document_ids=numbers).loss.item()
        # `eagle3` divides by the tokens of the texts.
        assert found == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "recipe", [*(file.stem for file in RECIPES.glob("*.yaml")), "medusa", "mtp"]
)
def test_a_fresh_head_of_every_recipe_learns(recipe: str) -> None:
    mask = {"mask_token_id": 3} if recipe[0] in "dp" else {}
    objective = api.training_objective(recipe, random_target(num_hidden_layers=4), **mask)
    ids = torch.randint(4, 90, (1, 24))
    step = api.training_step(objective, ids, torch.ones_like(ids), seed=1)
    step.loss.backward()
    assert any(each.grad is not None and each.grad.any() for each in objective.head.parameters())
    assert step.metrics["loss"] > 0


def test_a_trained_head_goes_on_and_settings_count(tmp_path: Path) -> None:
    target = endless_target(num_hidden_layers=6)
    eagle_head(target, EagleForm.eagle3, num_updates=1).save(tmp_path)
    head = api.load_head(str(tmp_path), target)
    assert head.lm_head.weight.requires_grad
    settings = {"num_steps": 2, "divergence": "tv", "output_head": "frozen"}
    objective = api.training_objective(head, target, **settings)
    assert not head.lm_head.weight.requires_grad
    assert objective.head is head
    assert objective.config.divergence is Divergence.tv
    assert len(objective.term_weights) == 2


def test_a_head_of_an_unknown_run_takes_the_recipe_of_its_form() -> None:
    target = random_target(num_hidden_layers=6)
    head = api.training_objective("eagle3", target).head
    recipe = EagleConfig(norm_before_residual=True, path="(in memory)", output_head=OutputHead.copy)
    assert api.training_objective(head, target).config == recipe
    head = api.training_objective("eagle1", target).head
    found = api.training_objective(head, target).config
    assert (found.noise, found.regression_weight) == (0.2, 1.0)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("eagle5", {}, "head=eagle5: no such recipe; allowed: eagle3, eagle1, .*medusa, .*mtp"),
        ("medusa", {"heads": 3}, "heads"),
        ("medusa", {"num_heads": 0}, "head.num_heads=0: must be above 0"),
    ],
)
def test_objectives_that_are_refused(recipe: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        api.training_objective(recipe, random_target(), **settings)


def test_states_and_shapes_that_are_refused() -> None:
    target = random_target(num_hidden_layers=6)
    objective = api.training_objective("eagle3", target)
    ids = torch.ones(1, 5, dtype=torch.int64)
    last = torch.zeros(1, 5, target.hidden_size)
    with pytest.raises(InputError, match=r"this head reads \[1, 3, 5\]; give \[1, 5\] too"):
        api.training_step(objective, ids, ids, TargetOutput(last, {3: last}))
    with pytest.raises(InputError, match=r"loss_mask has the shape \[1, 4\], input_ids \[1, 5\]"):
        api.training_step(objective, ids, ids[:, :4])
    with pytest.raises(InputError, match=r"document_ids has the shape \[1, 4\], input_ids"):
        api.training_step(objective, ids, ids, document_ids=ids[:, :4])


def test_parts_of_a_model_that_goes_on_learning() -> None:
    model = random_model(num_hidden_layers=6).train().requires_grad_(True)
    parts = api.frozen_parts(model)
    # It drafts through the model's own output head.
    objective = api.training_objective("dflash", parts, num_layers=1, mask_token_id=3)
    ids = torch.randint(4, 90, (2, 12))
    read = model(ids, output_hidden_states=True).hidden_states
    states = TargetOutput(read[-1], {n: read[n] for n in objective.head.taps.layers})
    first = api.training_step(objective, ids, torch.ones_like(ids), states)
    first.loss.backward()
    assert all(each.grad is None for each in model.parameters())
    assert model.training
    for end in (model.get_output_embeddings(), model.get_input_embeddings()):
        with torch.no_grad():
            end.weight.mul_(0.5)
        now = api.training_step(objective, ids, torch.ones_like(ids), states)
        assert now.loss != first.loss
        first = now


def test_a_target_answers_as_its_generation_config_says(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    with edited_json(path / "generation_config.json") as config:
        config["repetition_penalty"] = 1.5
    target = api.load_target(str(path), dtype="bfloat16", device="cpu")
    assert target.logits_processing == {"repetition_penalty": 1.5}
    assert target.dtype is torch.bfloat16


def test_what_is_generated_is_the_targets_own_and_what_is_replayed_is_what_was_decoded() -> None:
    target = endless_target(num_hidden_layers=6)
    head, prompt = eagle_head(target, EagleForm.eagle3, num_updates=13), [5, 6, 7, 8]
    target.tokenizer = tokenizer()
    own = api.generate(target, None, prompt, 20)
    drafted = api.generate(target, head, prompt, 20)
    assert drafted.token_ids == own.token_ids
    assert own.tau == 1 < drafted.tau
    assert drafted.text == target.tokenizer.decode(own.token_ids, skip_special_tokens=True)
    chain = decode(target, head.make_drafter(Tree.make_chain(3), GREEDY, [0]), prompt, 20)
    replayed = api.acceptance(target, head, prompt, own.token_ids, depth=3)
    assert replayed.tau == stats.tau([stats.PromptSteps("", chain.steps)])
    assert len(replayed.alpha) == 3
    warm = [api.generate(target, head, prompt, 20, 1.0, seed).token_ids for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


def test_prompts_are_questions_conversations_or_ids() -> None:
    target = endless_target(vocab_size=300)
    target.tokenizer = tokenizer()
    asked = [{"role": "user", "content": "hello there"}]
    rendered = RecordEncoder(target.tokenizer).encode_prompt(asked)
    for prompt in ("hello there", asked, rendered):
        assert api.generate(target, None, prompt, 4).prompt_ids == rendered
    written = api.acceptance(target, noisy_head(target), "hello there", "fine, thanks.")
    assert 1 <= written.tau <= 4


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("eagle3", "vllm"), ("eagle3", "sglang"), ("medusa", "vllm"), ("dflash", "vllm")],
)
def test_tensors_are_those_of_an_export(kind: str, engine: str, tmp_path: Path) -> None:
    target = toy_target()
    if kind == "dflash":
        small = {"num_layers": 1, "mask_token_id": 3}
        head = api.training_objective(kind, target, **small).head.eval()
    else:
        head = make(target, kind)
    found = api.engine_tensors(head, engine, torch.bfloat16)
    assert next(head.parameters()).dtype is torch.float32
    head.attach(target, torch.bfloat16)
    (file,) = exported(head, target, engine, tmp_path / "out").glob("*.safetensors")
    written = load_file(file)
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_an_engine_that_cannot_serve_a_head_has_no_tensors() -> None:
    with pytest.raises(InputError, match=r"format=llamacpp: .*; allowed for this head: vllm"):
        api.engine_tensors(make(toy_target(), "medusa"), "llamacpp")
