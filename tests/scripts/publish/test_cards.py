"""What is published of each kind of head: the card says what it is, and the files are the head."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from exports import EAGLE31, build, toy_target

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.export import PushRun
from heads.kinds import load_head
from scripts import push
from tests.scripts.publish.test_push import ACCEPTANCE, PROVENANCE

QWEN = "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B)"
MEASURED = {**ACCEPTANCE, "dynamic_tree": ACCEPTANCE["static_tree"]}
MEASURED.pop("static_tree")


def saved(folder: Path, name: str, recorded: dict[str, Any], **settings: Any) -> Path:
    """A head in `folder/run/head`, trained with some settings."""
    target = toy_target()
    target.name = "Qwen/Qwen3-8B"
    of_run = {**PROVENANCE["config"], "head": {"path": None, "layers": None, **recorded}}
    build(target, name, **settings).save(folder / "run/head", {**PROVENANCE, "config": of_run})
    return folder / "run"


def card_of(run_dir: Path, **changes: Any) -> str:
    staged = run_dir.parent / "staged"
    settings = {"repo_id": "me/qwen", "dry_run": True, "out_dir": str(staged), **changes}
    push.main(PushRun(head=HeadRef(path=str(run_dir / "head")), **settings))
    measured = ["speculation_profile.json"] if (run_dir / "acceptance.json").exists() else []
    assert sorted(path.name for path in staged.iterdir()) == [
        "README.md", "config.json", "headsmith.json", "model.safetensors", *measured,
    ]  # fmt: skip
    head, published = load_head(str(run_dir / "head")), load_head(str(staged))
    assert vars(published.config) == vars(head.config)
    assert all(published.state_dict()[n].equal(t) for n, t in head.state_dict().items())
    return (staged / "README.md").read_text()


def arxiv(number: str) -> str:
    return f"([arXiv {number}](https://arxiv.org/abs/{number}))"


EAGLE1, EAGLE3, HASS = arxiv("2401.15077"), arxiv("2503.01840"), arxiv("2408.15766")
IN_ONE_PASS = ["hidden states 1, 2 (as", "tokens in one pass", "**1.812**"]
CARDS: list[tuple[str, dict[str, Any], dict[str, Any], str, list[str]]] = [
    (
        "eagle3", {}, {"form": "eagle3", "num_steps": 7, "step_decay": 0.8, "fc_bias": False,
                       "path": "/home/ann/old", "revision": "main"}, "eagle3",
        [
            f"EAGLE-3 head for speculative decoding of {QWEN}: one decoder layer (hidden size "
            "64, draft vocabulary 24 of the target's 96) on the target's hidden states 2, 4 and 5 "
            "(as `output_hidden_states` counts them), fused. It drafts token by token",
            f"Method: EAGLE-3 {EAGLE3}", "**1.812**", "| writing | 2 | 1.750 | few | 2.125 |",
            "| all | 11 | 1.812 | 1.60-2.00 | 2.250 |", "(replay, greedy)",
            "| head.form | eagle3 |", "| head.num_steps | 7 |", "| head.step_decay | 0.8 |",
            "| head.fc_bias | False |",
            "python eval/acceptance.py head.path=me/qwen target.path=Qwen/Qwen3-8B",
            "Serve with vLLM:\n\n```\nvllm serve Qwen/Qwen3-8B --speculative-config '"
            '{"method": "eagle3", "model": "me/qwen", "num_speculative_tokens": 2}\'',
            "Draft tokens: 2. By depth, 0.60, 0.21 of all passes accepted a draft token, and each",
        ],
    ),
    (
        "eagle1", {}, {"num_steps": 4, "regression_weight": 1.0}, "eagle",
        [
            f"EAGLE-1/2 head for speculative decoding of {QWEN}: one decoder layer (hidden size "
            "64, vocabulary 96) on the target's last hidden state. It drafts token by token",
            f"Method: EAGLE-1/2 {EAGLE1}", "Nothing was measured",
            "| head.regression_weight | 1.0 |",
            '{"method": "eagle", "model": "me/qwen", "num_speculative_tokens": 5}\'',
            "Draft tokens: 5, the usual number, as nobody knows by depth what is accepted",
        ],
    ),
    ("eagle1", {}, {"top_k_weight": 1.0}, "eagle", [f"HASS {HASS}"]),
    ("eagle1", {}, {"top_k_weight": 0.0, "detach_features": True}, "eagle",
     [f"HASS {HASS}"]),
    ("eagle3", EAGLE31, {}, "eagle3", [f"EAGLE-3.1 {arxiv('2605.09992')}"]),
    ("eagle3", {}, {"num_steps": 7}, "eagle3", ['"num_speculative_tokens": 5}']),
    ("eagle1, bias", {}, {}, "eagle",
     ["vLLM does not load this head: its fusion layer has a bias (`fc.bias`)"]),
    ("dflash", {}, {}, "dflash",
     [f"DFlash head for speculative decoding of {QWEN}", f"DFlash {arxiv('2602.06036')}, on",
      '"method": "dflash"', '"num_speculative_tokens": 4}', *IN_ONE_PASS]),
    ("dflash2", {}, {}, "dflash2",
     [f"DFlash-2 head for speculative decoding of {QWEN}", "DFlash-2, on a frozen target",
      '"method": "dflash"', '"num_speculative_tokens": 4}', *IN_ONE_PASS]),
    ("dspark", {}, {}, "dspark",
     [f"DSpark head for speculative decoding of {QWEN}", f"DSpark {arxiv('2607.05147')}, on",
      '"method": "dspark"', '"num_speculative_tokens": 5}',
      "drafts 5 tokens in one pass, each from the previous token", *IN_ONE_PASS]),
    ("dspark, rnn", {}, {}, "dspark",
     ["vLLM does not load this head", "markov_head_type=vanilla only, and this head has rnn",
      *IN_ONE_PASS]),
    ("peagle", {}, {}, "peagle",
     [f"P-EAGLE head for speculative decoding of {QWEN}", f"P-EAGLE {arxiv('2602.01469')}, on",
      "drafts 4 tokens in one pass", '"method": "eagle3"',
      '"num_speculative_tokens": 4, "parallel_drafting": true}', *IN_ONE_PASS]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "recorded", "tag", "texts"), CARDS)
def test_the_card_says_what_the_head_is_and_how_to_serve_it(
    tmp_path, name, settings, recorded, tag, texts
) -> None:
    run = saved(tmp_path, name, recorded, **settings)
    if "**1.812**" in texts:
        (run / "acceptance.json").write_text(json.dumps(MEASURED))
    card = card_of(run)
    tags = yaml.safe_load(card.split("---\n", 2)[1])["tags"]
    assert tags == ["speculative-decoding", tag, "draft-head"]
    for text in texts:
        assert text in card
    for unsaid in ("head.path |", "head.revision", "head.layers", "Medusa"):
        assert unsaid not in card
    assert ("vllm serve" in card) is ("vLLM does not load this head" not in card)


def test_without_figures_the_usual_number_of_tokens_is_drafted(tmp_path: Path) -> None:
    run = saved(tmp_path, "eagle3", {})
    (run / "head/headsmith.json").write_text("{}")
    card = card_of(run)
    assert '"num_speculative_tokens": 5}' in card
    assert "no record of how it was trained" in card


def test_other_layers_than_the_published_ones_are_refused(tmp_path: Path) -> None:
    head = HeadRef(path=str(tmp_path), layers=[1, 17, 32])
    with pytest.raises(InputError, match=r"head\.layers=\[1, 17, 32\]: a head is published unchan"):
        push.main(PushRun(head=head, repo_id="me/x"))


def test_the_card_has_a_row_of_each_mode(tmp_path: Path) -> None:
    run = saved(tmp_path, "eagle3", {})
    row = {"tau": 1.25, "tau_ci95": [1.125, 1.375], "num_dialogues": 8}
    by_mode = {"text": {"tool call": row, "prose": row | {"tau": 2.5, "num_dialogues": 3}}}
    tree = {**MEASURED["dynamic_tree"], "by_mode": {"text": {"prose": row}}}
    (run / "acceptance.json").write_text(
        json.dumps({**MEASURED, "by_mode": by_mode, "dynamic_tree": tree})
    )
    lines = [
        "| mode | dialogues | tau | 95% interval | tau, tree |",
        "|---|---|---|---|---|",
        "| text: tool call | 8 | 1.250 | 1.12-1.38 | - |",
        "| text: prose | 3 | 2.500 | few | 1.250 |",
    ]
    assert "\n".join(lines) in card_of(run)


def test_sampled_measurements_are_not_called_greedy(tmp_path: Path) -> None:
    run = saved(tmp_path, "eagle3", {})
    sampled = {"mode": "decode", "temperature": 0.7, "alpha": [0.5] * 6, "per_position": [0.1] * 6}
    # Each token costs more than it saves, so as few as can be.
    (run / "acceptance.json").write_text(json.dumps({**ACCEPTANCE, **sampled}))
    figures = {"tau": 2.0, "tokens_per_s": 31.0, "speedup": 1.55, "efficiency": 0.775}
    figures |= {"speedup_ci95": [1.4, 1.7], "prompts": [{"dialogue": 0}]}
    speedup = {"baseline": "vanilla", "baselines": ["vanilla"], "lossless": None}
    speedup["methods"] = {"eagle_tree": figures, "vanilla": figures}
    (run / "speedup.json").write_text(json.dumps(speedup))
    card = card_of(run)
    for text in ("(decode, temperature 0.7)", "| eagle_tree | 2.000 | 31.0 | 1.55 | few | 0.78 |",
                 '"num_speculative_tokens": 1}'):  # fmt: skip
        assert text in card
    assert "texts equal" not in card
