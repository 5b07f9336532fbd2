"""The check of a target is made once, and again when anything that it depends on is another."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import save_target
from transformers import AutoConfig, AutoModelForCausalLM

from conf.errors import InputError
from conf.settings.target import Dtype, TargetConfig
from heads.target_model import check as checking
from heads.target_model import load
from heads.target_model.check import check_target_support
from heads.target_model.load import load_target
from heads.target_model.model import Target

CPU = torch.device("cpu")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The attention of each target that was checked; a check is remembered at any speed."""
    found: list[str] = []

    def check(target: Target) -> None:
        found.append(target.config._attn_implementation)
        check_target_support(target)

    monkeypatch.setattr(checking, "check_target_support", check)
    monkeypatch.setattr(checking, "WORTH_S", 0.0)
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "cache"))
    return found


def settings(folder: Path, **changes: object) -> TargetConfig:
    return TargetConfig(path=str(folder), **changes)


def test_a_second_load_checks_nothing_and_knows_what_the_first_found(
    checked: list[str], tmp_path: Path
) -> None:
    folder = save_target(tmp_path / "t", "lfm2")
    first, second = (load_target(settings(folder), CPU) for _ in range(2))
    assert checked == ["sdpa"]
    # Of a convolution, 64 channels with two tokens before each, and its own.
    assert second.state_bytes == first.state_bytes == 64 * 3 * 4
    assert [list(each) for each in first.attention_calls] == [
        list(each) for each in second.attention_calls
    ]
    assert second.needs_masks == first.needs_masks == ""
    assert second.attention_description == first.attention_description
    moved = (tmp_path / "t").rename(tmp_path / "elsewhere")
    load_target(settings(moved), CPU)
    assert checked == ["sdpa"]


def test_what_needs_masks_still_does(checked: list[str], tmp_path: Path, monkeypatch) -> None:
    from heads.target_model.architecture import AttentionPattern

    folder = save_target(tmp_path / "t")
    monkeypatch.setattr(AttentionPattern, "windows", [7, 7])
    found = [load_target(settings(folder), CPU).needs_masks for _ in range(2)]
    assert found == ["LlamaForCausalLM does not attend through transformers' interface"] * 2
    assert checked == ["sdpa"]


def other_weight(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def appended(patch: pytest.MonkeyPatch, line: str) -> None:
    """Has a module of the heads end with another line."""
    read_text = Path.read_text

    def read(path: Path, *args: object, **how: object) -> str:
        return read_text(path, *args, **how) + (line if path.name == "cache.py" else "")

    patch.setattr(Path, "read_text", read)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "a weight": other_weight,
    "dtype": lambda *_: {"dtype": Dtype.bfloat16},
    "attention": lambda *_: {"attention": "eager"},
    "code": lambda _, patch: appended(patch, "other = 1\n"),
    "transformers": lambda _, patch: patch.setattr(checking.transformers, "__version__", "9.0.0"),
    # As where machines of a cluster share a cache.
    "processor": lambda _, patch: patch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "another"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_target_is_checked_again(
    checked: list[str], tmp_path: Path, monkeypatch, change: Callable
) -> None:
    folder = save_target(tmp_path / "t")
    load_target(settings(folder), CPU)
    how = change(folder, monkeypatch) or {}
    for _ in range(2):
        load_target(settings(folder, **how), CPU)
    assert len(checked) == 2


def test_other_words_in_the_code_check_nothing(
    checked: list[str], tmp_path: Path, monkeypatch
) -> None:
    folder = save_target(tmp_path / "t")
    load_target(settings(folder), CPU)
    appended(monkeypatch, "# other\n")
    load_target(settings(folder), CPU)
    assert checked == ["sdpa"]


def test_a_target_that_was_refused_is_checked_again(
    checked: list[str], tmp_path: Path, monkeypatch
) -> None:
    folder = save_target(tmp_path / "t")

    def refuse(target: Target) -> None:
        checked.append(target.name)
        raise InputError("it differs")

    with monkeypatch.context() as patch:
        patch.setattr(checking, "check_target_support", refuse)
        with pytest.raises(InputError, match="it differs"):
            load_target(settings(folder), CPU)
    assert len(checked) == 2  # with SDPA and with eager attention
    load_target(settings(folder), CPU)
    assert len(checked) == 3


def test_a_check_that_is_quick_is_not_remembered(
    checked: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(checking, "WORTH_S", 1000.0)
    folder = save_target(tmp_path / "t")
    for _ in range(2):
        load_target(settings(folder), CPU)
    assert len(checked) == 2
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_no_error(
    checked: list[str], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "file"))
    folder = save_target(tmp_path / "t")
    for _ in range(2):
        load_target(settings(folder), CPU)
    assert len(checked) == 2


# --- Which attention is taken.


def test_the_attention_that_is_asked_for_is_taken(checked: list[str], tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t")
    ids = [5, 17, 40, 8]
    expected = load_target(settings(folder), CPU).encode_text(ids).hidden_states
    target = load_target(settings(folder, attention="eager"), CPU)
    torch.testing.assert_close(target.encode_text(ids).hidden_states, expected)
    assert checked == ["sdpa", "eager"]


@pytest.mark.parametrize("name", ["flashy", "flex_attention"])
def test_an_attention_that_cannot_be_had_is_named(tmp_path: Path, name: str) -> None:
    """FlexAttention on a CPU would end the process."""
    folder = save_target(tmp_path / "t")
    with pytest.raises(InputError, match=rf"target\.attention={name}: .* on cpu: sdpa, eager$"):
        load_target(settings(folder, attention=name), CPU)


def test_eager_attention_is_taken_where_sdpa_differs(
    checked: list[str], tmp_path: Path, monkeypatch
) -> None:
    folder = save_target(tmp_path / "t")

    def differs(target: Target) -> None:
        checked.append(target.config._attn_implementation)
        if checked[-1] == "sdpa":
            raise InputError("sdpa differs")
        check_target_support(target)

    monkeypatch.setattr(checking, "check_target_support", differs)
    assert load_target(settings(folder), CPU).config._attn_implementation == "eager"
    assert checked == ["sdpa", "eager"]
    with pytest.raises(InputError, match="sdpa differs"):
        load_target(settings(folder, attention="sdpa"), CPU)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_sinks_and_soft_caps_go_without_sdpa(family: str, checked: list, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t", family)
    assert load.choose_attentions(load_target(settings(folder), CPU).config) == ["eager"]
    assert checked == ["eager"]
    load_target(settings(folder), CPU)
    assert checked == ["eager"]


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_a_text_read_token_by_token_is_that_of_one_pass(model_type: str) -> None:
    """Mamba takes a mask of the whole text for one of the new token."""
    sizes = {"num_heads": 8, "head_dim": 16, "n_groups": 2} if model_type == "mamba2" else {}
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=16, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    target, ids = SimpleNamespace(model=model, config=config), torch.arange(3, 15)[None]
    torch.testing.assert_close(
        checking._compute_decoded_logits(target, ids, 4),
        checking._compute_own_logits(target, ids, 4),
        atol=1e-4, rtol=0,
    )  # fmt: skip
