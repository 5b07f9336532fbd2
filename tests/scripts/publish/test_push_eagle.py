import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.export import PushRun
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleHeadConfig
from heads.vocab import DraftVocab
from scripts import push
from tests.scripts.publish.test_push import ACCEPTANCE, PROVENANCE

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, num_hidden_layers=1, max_position_embeddings=128,
)  # fmt: skip


def make_head(
    folder: Path, form: EagleForm, settings: dict[str, Any] | None = None, **changes: Any
) -> None:
    torch.manual_seed(0)
    eagle3 = form is EagleForm.eagle3
    config = EagleHeadConfig(
        form=form, llama=LLAMA, target="Qwen/Qwen3-8B", target_hidden_size=32,
        layers=(2, 18, 33) if eagle3 else (), **changes,
    )  # fmt: skip
    vocab = DraftVocab(torch.arange(0, 64, 2), 64) if eagle3 else DraftVocab.make_full(64)
    head = EagleHead(config, vocab)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    trained = {"path": None, "form": form.value, "layers": None, "num_steps": 7}
    of_run: dict[str, Any] = {**PROVENANCE["config"], "head": {**trained, **(settings or {})}}
    head.save(folder, {**PROVENANCE, "config": of_run})


def card_of(run_dir: Path, **changes: Any) -> str:
    staged = run_dir.parent / "staged"
    settings = {"repo_id": "me/qwen-eagle", "dry_run": True, "out_dir": str(staged), **changes}
    push.main(PushRun(head=HeadRef(path=str(run_dir / "head")), **settings))
    assert sorted(path.name for path in staged.iterdir()) == [
        "README.md", "config.json", "headsmith.json", "model.safetensors",
    ]  # fmt: skip
    return (staged / "README.md").read_text()


def contains(card: str, *texts: str) -> None:
    for text in texts:
        assert text in card


def test_card_of_eagle3_with_a_reduced_vocabulary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"path": "/home/ann/old", "revision": "main", "step_decay": 0.8, "fc_bias": False}
    make_head(run / "head", EagleForm.eagle3, settings)
    measured = {**ACCEPTANCE, "dynamic_tree": ACCEPTANCE["static_tree"]}
    measured.pop("static_tree")
    (run / "acceptance.json").write_text(json.dumps(measured))
    card = card_of(run)
    assert yaml.safe_load(card.split("---\n", 2)[1])["tags"] == [
        "speculative-decoding", "eagle3", "draft-head",
    ]  # fmt: skip
    contains(
        card,
        "EAGLE-3 head for speculative decoding of "
        "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B): one decoder layer (hidden size "
        "32, draft vocabulary 32 of the target's 64) on the target's hidden states 2, 18 and 33 "
        "(as `output_hidden_states` counts them), fused. It drafts token by token",
        "Method: EAGLE-3 ([arXiv 2503.01840](https://arxiv.org/abs/2503.01840))",
        "**1.812**",
        "| writing | 2 | 1.750 | few | 2.125 |",
        "| all | 11 | 1.812 | 1.60-2.00 | 2.250 |",
        "(replay, greedy)",
        "| head.form | eagle3 |",
        "| head.num_steps | 7 |",
        "| head.step_decay | 0.8 |",
        "| head.fc_bias | False |",
        "python eval/acceptance.py head.path=me/qwen-eagle target.path=Qwen/Qwen3-8B",
        "Serve with vLLM:\n\n```\nvllm serve Qwen/Qwen3-8B --speculative-config '"
        '{"method": "eagle3", "model": "me/qwen-eagle", "num_speculative_tokens": 2}\'',
    )
    for key in ("head.path |", "head.revision", "head.layers", "Medusa"):
        assert key not in card


def test_card_of_eagle1_with_nothing_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_head(run / "head", EagleForm.eagle1, {"num_steps": 4, "regression_weight": 1.0})
    card = card_of(run)
    assert yaml.safe_load(card.split("---\n", 2)[1])["tags"] == [
        "speculative-decoding", "eagle", "draft-head",
    ]  # fmt: skip
    contains(
        card,
        "EAGLE-1/2 head for speculative decoding of "
        "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B): one decoder layer (hidden size "
        "32, vocabulary 64) on the target's last hidden state. It drafts token by token",
        "Method: EAGLE-1/2 ([arXiv 2401.15077](https://arxiv.org/abs/2401.15077))",
        "Nothing was measured",
        "| head.regression_weight | 1.0 |",
        '{"method": "eagle", "model": "me/qwen-eagle", "num_speculative_tokens": 4}\'',
    )


@pytest.mark.parametrize(
    ("form", "changes", "settings", "expected"),
    [
        (
            EagleForm.eagle1, {}, {"top_k_weight": 1.0},
            "HASS ([arXiv 2408.15766](https://arxiv.org/abs/2408.15766))",
        ),
        (
            EagleForm.eagle1, {}, {"top_k_weight": 0.0, "detach_features": True},
            "HASS ([arXiv 2408.15766](https://arxiv.org/abs/2408.15766))",
        ),
        (
            EagleForm.eagle3, {"fc_norm": True, "norm_output": True}, {},
            "EAGLE-3.1 ([arXiv 2605.09992](https://arxiv.org/abs/2605.09992))",
        ),
        (
            EagleForm.eagle3, {}, {"num_steps": 7}, '"num_speculative_tokens": 5}',
        ),
        (
            EagleForm.eagle1, {"fc_bias": True}, {}, "vLLM does not load this head: its fusion "
            "layer has a bias (`fc.bias`)",
        ),
    ],
)  # fmt: skip
def test_card_names_the_method_and_what_vllm_takes(
    tmp_path: Path,
    form: EagleForm,
    changes: dict[str, Any],
    settings: dict[str, Any],
    expected: str,
) -> None:
    make_head(tmp_path / "run" / "head", form, settings, **changes)
    card = card_of(tmp_path / "run")
    assert expected in card
    assert ("vllm serve" in card) is not changes.get("fc_bias", False)


def test_without_provenance_three_tokens_are_drafted(tmp_path: Path) -> None:
    head = tmp_path / "run" / "head"
    make_head(head, EagleForm.eagle3)
    (head / "headsmith.json").write_text("{}")
    card = card_of(tmp_path / "run")
    assert '"num_speculative_tokens": 3}' in card
    assert "no record of how it was trained" in card


def test_other_layers_than_the_published_ones_are_refused(tmp_path: Path) -> None:
    head = HeadRef(path=str(tmp_path), layers=[1, 17, 32])
    with pytest.raises(
        InputError, match=r"head\.layers=\[1, 17, 32\]: a head is published unchanged"
    ):
        push.main(PushRun(head=head, repo_id="me/x"))


def test_sampled_measurements_are_not_called_greedy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_head(run / "head", EagleForm.eagle3)
    sampled = {**ACCEPTANCE, "mode": "decode", "temperature": 0.7, "alpha": [0.5] * 6,
               "per_position": [0.1] * 6}  # fmt: skip
    (run / "acceptance.json").write_text(json.dumps(sampled))
    figures = {"tau": 2.0, "tokens_per_s": 31.0, "speedup": 1.55, "efficiency": 0.775}
    figures |= {"speedup_ci95": [1.4, 1.7], "prompts": [{"dialogue": 0}]}
    speedup = {"baseline": "vanilla", "baselines": ["vanilla"], "lossless": None}
    speedup["methods"] = {"eagle_tree": figures, "vanilla": figures}
    (run / "speedup.json").write_text(json.dumps(speedup))
    card = card_of(run)
    contains(
        card,
        "(decode, temperature 0.7)",
        "| eagle_tree | 2.000 | 31.0 | 1.55 | few | 0.78 |",
        '"num_speculative_tokens": 6}',
    )
    assert "texts equal" not in card
