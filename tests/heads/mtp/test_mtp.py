"""The words of an MTP layer: its card, its readings, the refusal of exports."""

from pathlib import Path

import pytest
import torch
from mtp_targets import TARGETS, saved, target_with_layer

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat, ExportRun
from conf.settings.target import TargetConfig
from heads.mtp.mtp import MtpHead
from heads.vocab import DraftVocab
from scripts import export


def test_the_card_says_what_it_is_and_where_engines_read_it() -> None:
    _, head = target_with_layer("Qwen3NextForCausalLM")
    facts = head.build_card_facts({"config": {"head": {"num_steps": 3}}}, None)
    assert (facts.tag, facts.num_draft_tokens, facts.vllm_method) == ("mtp", 3, None)
    assert "multi-token prediction of Qwen3NextForCausalLM (hidden size 64)" in facts.description
    assert "only from the target's own folder; write it there with" in facts.vllm_problem


def test_files_may_have_meant_the_other_order() -> None:
    target, head = target_with_layer("MiMoForCausalLM")
    readings = dict(head.attach(target).iter_config_variants())
    assert list(readings) == ["state_first=false", "feeds_back_normed=false", "zeroes_first=false"]
    ids = list(range(5, 25))
    output = target.encode_text(ids[:-1], head.taps)

    def drafts(reading: MtpHead) -> list[int]:
        return reading.compute_candidates(output, ids, 4, 3, 1).flatten().tolist()

    assert drafts(readings["state_first=false"]) != drafts(head)
    (again,) = (
        r
        for told, r in readings["state_first=false"].iter_config_variants()
        if "state_first" in told
    )
    assert drafts(again) == drafts(head)


def test_an_export_names_the_command_that_stitches(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    run = ExportRun(
        head=HeadRef(path=str(folder)), target=TargetConfig(path=str(folder)),
        format=ExportFormat.vllm, out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"write it there with `scripts/mtp\.py action=stitch`"):
        export.main(run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", TARGETS)
def test_no_weight_of_a_fresh_layer_is_left_to_memory(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that nobody has filled is NaN here."""
    target, head = target_with_layer(architecture)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        fresh = MtpHead(head.config, DraftVocab.make_full(target.vocab_size))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, parameter in fresh.initialise(target, seed=0).named_parameters():
        assert parameter.isfinite().all(), name
