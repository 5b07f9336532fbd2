"""Medusa heads: what they compute, and their files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import noisy_head, random_target

from conf.errors import InputError
from heads.kinds import load_head
from heads.medusa import MEDUSA_WEIGHTS, MedusaHead, MedusaHeadConfig
from heads.vocab import DraftVocab

CONFIG = MedusaHeadConfig(hidden_size=8, vocab_size=16, num_heads=2, num_layers=2, target="a/b")


@pytest.fixture
def saved(tmp_path):
    head = noisy_head(random_target())
    head.save(tmp_path / "head")
    return head, tmp_path / "head"


def test_untrained_heads_equal_the_targets_own_next_token_head() -> None:
    target = random_target()
    head = MedusaHead.from_target(target, num_heads=3, num_layers=2)
    hidden = torch.randn(5, target.hidden_size)
    for k in range(3):
        torch.testing.assert_close(head(hidden)[k], target.compute_logits(hidden), rtol=0, atol=0)


def test_a_head_is_residual_blocks_then_a_projection() -> None:
    head = MedusaHead(CONFIG)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 8)
    tensors = head.collect_tensors()
    y = x
    for layer in range(2):
        z = y @ tensors[f"1.{layer}.linear.weight"].T + tensors[f"1.{layer}.linear.bias"]
        y = y + z * torch.sigmoid(z)
    torch.testing.assert_close(head.head_logits(1, x), y @ tensors["1.2.weight"].T)


def test_blocks_and_heads_share_no_parameter() -> None:
    names = [name for name, _ in MedusaHead(CONFIG).named_parameters(remove_duplicate=True)]
    assert len(names) == 2 * (2 * 2 + 1)


def test_a_head_that_was_never_loaded_gives_nan() -> None:
    assert MedusaHead(CONFIG)(torch.ones(1, 8)).isnan().all()


def test_the_published_config_with_a_wrong_count_loads(saved) -> None:
    _, folder = saved
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "v"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(str(folder)).num_heads == 3


@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_every_tensor_is_accounted_for(saved, change: str) -> None:
    _, folder = saved
    tensors = load_file(folder / MEDUSA_WEIGHTS)
    if change == "missing":
        del tensors["1.0.linear.bias"]
    else:
        tensors["1.0.gate.bias"] = torch.zeros(1)
    save_file(tensors, folder / MEDUSA_WEIGHTS)
    with pytest.raises(InputError, match=r"of another shape: \['1\.0\.(linear|gate)"):
        load_head(str(folder))


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(InputError, match=r"hidden_size=8 \(trained for a/b\).*has 64"):
        MedusaHead(CONFIG).attach(random_target())
    other = MedusaHead(MedusaHeadConfig(64, 17, 1, 1, "a/b"))
    with pytest.raises(InputError, match=r"vocab_size=17 .*has 96"):
        other.attach(random_target())


def pruned() -> tuple[MedusaHead, MedusaHead]:
    """Heads of 96 ids, and the same with four of them."""
    head = noisy_head(random_target())
    return head, head.prune_vocab(DraftVocab(torch.tensor([0, 3, 50, 95]), 96))


def test_pruned_heads_are_saved_as_vllm_names_them(tmp_path) -> None:
    _, small = pruned()
    small.save(tmp_path / "head")
    assert load_file(tmp_path / "head" / MEDUSA_WEIGHTS)["token_map"].tolist() == [0, 3, 50, 95]
    config = json.loads((tmp_path / "head/config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (96, 4)
    loaded = load_head(str(tmp_path / "head"))
    assert loaded.config == small.config
    assert loaded.vocab.ids.tolist() == [0, 3, 50, 95]
    assert all(
        torch.equal(loaded.collect_tensors()[name], each)
        for name, each in small.collect_tensors().items()
    )


def test_a_token_map_in_order_of_frequency_is_the_same_heads(tmp_path) -> None:
    _, small = pruned()
    small.save(tmp_path)
    tensors = load_file(tmp_path / MEDUSA_WEIGHTS)
    order = torch.tensor([2, 0, 3, 1])
    moved = {name: each[order] for name, each in tensors.items() if len(each) == 4}
    assert set(moved) == {"token_map", *(f"{k}.1.weight" for k in range(len(small.heads)))}
    save_file(tensors | moved, tmp_path / MEDUSA_WEIGHTS)
    loaded = load_head(str(tmp_path))
    assert loaded.vocab.ids.tolist() == [0, 3, 50, 95]
    assert all(torch.equal(loaded.state_dict()[key], t) for key, t in small.state_dict().items())


@pytest.mark.parametrize(
    "token_map", [[0, 3, 50], [0, 3, 3, 50], [0, 3, 50, 96], [-1, 3, 50, 95], [0.0, 1.0, 2.0, 3.0]]
)
def test_a_token_map_that_is_none_is_refused(tmp_path, token_map: list) -> None:
    _, small = pruned()
    small.save(tmp_path)
    tensors = load_file(tmp_path / MEDUSA_WEIGHTS) | {"token_map": torch.tensor(token_map)}
    save_file(tensors, tmp_path / MEDUSA_WEIGHTS)
    with pytest.raises(InputError, match=r"token_map is .*ids of the 4 rows .*vocab_size=96"):
        load_head(str(tmp_path))
