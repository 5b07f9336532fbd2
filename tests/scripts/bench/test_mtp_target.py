"""A chat model and its MTP layer, trained together."""

import sys
from pathlib import Path

import pytest
import torch
from stores import save_inputs
from transformers import AutoModelForCausalLM

from heads.kinds import load_head
from heads.mtp.mtp import MtpHead
from scripts.bench import mtp_target


@pytest.mark.slow
def test_both_learn_and_are_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, out = save_inputs(tmp_path / "inputs"), tmp_path / "out"
    told = [str(inputs / "target"), str(inputs / "chat.jsonl"), str(out), "--steps", "4"]
    monkeypatch.setattr(sys, "argv", ["mtp_target.py", *told, "--batch", "1"])
    mtp_target.main()
    head = load_head(str(out))
    assert isinstance(head, MtpHead)
    assert head.config.state_before_norm
    before = AutoModelForCausalLM.from_pretrained(inputs / "target").state_dict()
    after = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
