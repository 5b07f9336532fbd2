"""Heads of other trainers, and ours in theirs: the same logits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from environments import MODELOPT, SPECULATORS, needs, opened, run, unrolled
from exports import eagle, exported, toy_target
from feature_heads import fresh, settings_of
from safetensors.torch import load_file, save_file
from toys import save_target

from conf.settings.export import ExportFormat
from heads.export.writer import compute_reference_tensors, export_head
from heads.kinds import load_head

AFTER = {"norm_before_residual": True}
EAGLE31 = {"fc_norm": True, "norm_output": True}
NUM_DRAFTS = 4

pytestmark = pytest.mark.engine


@needs(SPECULATORS)
@pytest.mark.parametrize(
    ("engine", "num_ids", "settings", "window"),
    [
        pytest.param("original", 24, {}, None, id="speculators convert"),
        pytest.param("speculators", 24, {}, None, id="EAGLE-3"),
        pytest.param("speculators", None, {}, None, id="EAGLE-3, every id"),
        pytest.param("speculators", 24, AFTER, None, id="EAGLE-3, norm_before_residual"),
        pytest.param("speculators", 24, EAGLE31, None, id="EAGLE-3.1"),
        pytest.param("speculators", 24, {}, 6, id="EAGLE-3 in a window"),
    ],
)
def test_speculators_unrolls_an_export_as_we_do_the_head(
    tmp_path: Path, engine: str, num_ids: int | None, settings, window: int | None
) -> None:
    """Three steps of the training-time test.

    Its window hides the text before that of the first step, and vLLM's moves with the drafts. So
    only the first step is equal in a window.
    """
    target = toy_target()
    target.model.save_pretrained(tmp_path / "target")
    target.name = str(tmp_path / "target")
    head = eagle(target, draft_vocab_size=num_ids, **settings)
    head.config = replace(head.config, window=window)
    exported(head, target, engine, tmp_path / "head")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (25,), generator=generator)
    features = torch.randn(25, 3 * target.hidden_size, generator=generator)
    save_file({"ids": ids, "features": features}, tmp_path / "inputs.safetensors")
    arguments = (tmp_path / name for name in ("head", "target", "inputs.safetensors"))
    run(SPECULATORS, "speculators_logits.py", *arguments, tmp_path / "logits.safetensors")

    theirs = load_file(tmp_path / "logits.safetensors")
    for step, ours in enumerate(unrolled(head, ids, features[:-1], 1 if window else 3)):
        # The last rows have no token left to read.
        num_rows = len(ids) - 1 - step
        wanted = theirs[f"step{step}"][:num_rows]
        torch.testing.assert_close(ours[:num_rows], wanted, rtol=0, atol=1e-4)


@needs(SPECULATORS)
@pytest.mark.parametrize("kind", ["dflash", "dflash, reduced", "dflash2", "dspark", "dspark, rnn"])
def test_speculators_drafts_blocks_as_we_do(tmp_path: Path, kind: str) -> None:
    """Exports without the target's ends, which it takes from the target's folder."""
    target = toy_target()
    target.model.save_pretrained(tmp_path / "target")
    target.name = str(tmp_path / "target")
    head = fresh(target, settings_of(kind))
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    values = compute_reference_tensors(head, target, num_rows=5)
    export_head(head, ExportFormat.speculators, values, tmp_path / "head", {})
    num_rows, depth = 12, head.config.num_draft_tokens
    ids = torch.randint(target.vocab_size, (num_rows + depth + 1,), generator=generator)
    states = torch.randn(target.num_layers + 1, num_rows, target.hidden_size, generator=generator)
    features = torch.cat([states[index] for index in head.config.layers], -1)
    save_file({"ids": ids, "features": features}, tmp_path / "inputs.safetensors")
    arguments = (tmp_path / name for name in ("head", "inputs.safetensors", "logits.safetensors"))
    run(SPECULATORS, "speculators_blocks.py", *arguments)

    with torch.no_grad():
        ours = head.compute_reference_logits(
            target, list(states), ids, torch.arange(num_rows)
        ).logits
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(ours[..., head.vocab.ids], theirs, rtol=0, atol=1e-4)


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@needs(MODELOPT)
@pytest.mark.parametrize(
    ("rope", "ids"),
    [
        pytest.param(ROPE, list(range(3, 300, 5)), id="60 ids"),
        pytest.param(YARN, None, id="YaRN, every id by the target's output head"),
    ],
)
def test_an_export_of_modelopt_drafts_what_modelopt_does(tmp_path: Path, rope, ids) -> None:
    folder = save_target(tmp_path / "target", num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 300, (40,), generator=generator).tolist()
    architecture = {
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_scaling": rope,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
    }
    job = {"target": str(folder), "text": text, "architecture": architecture, "ids": ids}
    question, export, answer = (tmp_path / n for n in ("job.json", "head", "logits.safetensors"))
    question.write_text(json.dumps(job))
    run(MODELOPT, "modelopt_export.py", question, export, answer)

    theirs = load_file(answer)
    target = opened(folder)
    # It counts the layer whose output is read.
    head = load_head(str(export), layers=[1, 3, 5]).attach(target)
    assert head.vocab.ids.tolist() == (list(range(300)) if ids is None else ids)
    features = head.collect_features(target.encode_text(text, head.taps))[0]
    told = torch.tensor(text + theirs["tokens"].tolist())
    steps = unrolled(head, told, features, NUM_DRAFTS)
    torch.testing.assert_close(steps[0], theirs["text"], rtol=0, atol=2e-5)
    ours = torch.stack([step[-1] for step in steps])
    torch.testing.assert_close(ours, theirs["steps"], rtol=0, atol=2e-5)
    assert head.vocab.to_target_ids(ours.argmax(-1)).tolist() == theirs["tokens"][1:].tolist()
