"""Heads of other trainers, and ours in theirs: the same logits."""

import json
from pathlib import Path

import layouts
import pytest
import torch
from environments import MODELOPT, SPECULATORS, needs, opened, run, unrolled
from safetensors.torch import load_file, save_file
from toys import random_target, save_target

from heads.eagle_formats import load_eagle

AFTER = {"norm_before_residual": True}
EAGLE31 = {"fc_norm": True, "norm_output": True}
NUM_DRAFTS = 4

pytestmark = pytest.mark.engine


@needs(SPECULATORS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="EAGLE-3"),
        pytest.param(AFTER, id="EAGLE-3, norm_before_residual"),
        pytest.param(EAGLE31, id="EAGLE-3.1"),
    ],
)
def test_speculators_unrolls_the_logits_that_we_do(tmp_path: Path, settings) -> None:
    """A head of 24 of 96 ids in the original layout, three steps of the training-time test."""
    target = random_target(num_hidden_layers=4)
    target.model.save_pretrained(tmp_path / "target")
    stated = {"draft_vocab_size": layouts.DRAFT, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = layouts.LLAMA | stated | {"torch_dtype": "float32"} | settings
    norms = layouts.random({f"fc_norm.{i}.weight": [layouts.HIDDEN] for i in range(3)}, seed=6)
    tensors = layouts.eagle3_tensors() | (norms if "fc_norm" in settings else {})
    layouts.write(tmp_path / "head", config, tensors)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(layouts.VOCAB, (25,), generator=generator)
    features = torch.randn(25, 3 * layouts.HIDDEN, generator=generator)
    save_file({"ids": ids, "features": features}, tmp_path / "inputs.safetensors")
    arguments = (tmp_path / name for name in ("head", "target", "inputs.safetensors"))
    run(SPECULATORS, "speculators_logits.py", *arguments, tmp_path / "logits.safetensors")

    theirs = load_file(tmp_path / "logits.safetensors")
    head = load_eagle(str(tmp_path / "head")).attach(target)
    for step, ours in enumerate(unrolled(head, ids, features[:-1], 3)):
        # The last rows have no token left to read.
        num_rows = len(ids) - 1 - step
        wanted = theirs[f"step{step}"][:num_rows]
        torch.testing.assert_close(ours[:num_rows], wanted, rtol=0, atol=1e-4)


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
    head = load_eagle(str(export), layers=[1, 3, 5]).attach(target)
    assert head.vocab.ids.tolist() == (list(range(300)) if ids is None else ids)
    features = head.features(target.read_text(text, head.reads))[0]
    told = torch.tensor(text + theirs["tokens"].tolist())
    steps = unrolled(head, told, features, NUM_DRAFTS)
    torch.testing.assert_close(steps[0], theirs["text"], rtol=0, atol=2e-5)
    ours = torch.stack([step[-1] for step in steps])
    torch.testing.assert_close(ours, theirs["steps"], rtol=0, atol=2e-5)
    assert head.vocab.to_target(ours.argmax(-1)).tolist() == theirs["tokens"][1:].tolist()
