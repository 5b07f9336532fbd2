"""`eval/acceptance.py` and `eval/speedup.py` on EAGLE heads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import eagle_head, save_target

from conf.errors import InputError
from conf.settings.drafting import DynamicTreeConfig, HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun, Mode, SpeedupRun
from conf.settings.target import TargetConfig as Target
from data.rows.records import load_records
from data.templates.encoder import Encoder
from eval import acceptance, speedup
from eval.decode.engine import decode
from eval.measure.bench import seed_of
from eval.measure.prompts import first_turns
from eval.measure.stats import PromptSteps, tau
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.eagle.drafter import EagleChain
from heads.kinds import load_head
from heads.target_model.load import load_target
from tests.eval.test_commands import settings


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("eagle")
    path = str(save_target(folder / "target", num_hidden_layers=4))
    target = load_target(Target(path=path), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle3, 150, num_updates=40).save(folder / "eagle3")
    eagle_head(target, EagleForm.eagle1, num_updates=40).save(folder / "eagle1")
    prompts = folder / "prompts.jsonl"
    rows = [{"category": c, "turns": [f"hello {c}, how are you?"]} for c in ("math", "writing")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"target": path, "data": str(prompts), "head": "", "folder": folder}


def measured(setting: dict, out_dir: Path, head: str, **changes) -> dict:
    own = {**settings(setting, out_dir), "head": HeadRef(path=str(setting["folder"] / head))}
    acceptance.main(AcceptanceRun(**{**own, "depth": 3, **changes}))
    assert (out_dir / "acceptance.png").is_file()
    return json.loads((out_dir / "acceptance.json").read_text())


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_replay_and_decoding_agree_to_the_last_digit(setting, tmp_path, head: str) -> None:
    replayed = measured(setting, tmp_path / "r", head)
    decoded = measured(setting, tmp_path / "d", head, mode=Mode.decode)
    names = ("tau", "alpha", "per_position", "by_category", "num_tokens", "dynamic_tree")
    assert {name: replayed[name] for name in names} == {name: decoded[name] for name in names}
    assert len(replayed["alpha"]) == len(replayed["agreement"]) == 3
    assert replayed["tree"] == {"depth": 5, "top_k": 4, "num_tokens": 8}


def test_sampled_acceptance_says_how_it_was_sampled(setting, tmp_path) -> None:
    result = measured(
        setting, tmp_path, "eagle3", mode=Mode.decode, temperature=0.8, top_p=0.9, top_k=20
    )
    assert (result["temperature"], result["top_p"], result["top_k"]) == (0.8, 0.9, 20)
    target = load_target(Target(path=setting["target"]), torch.device("cpu"))
    head = load_head(str(setting["folder"] / "eagle3")).attach(target).eval()
    steps = []
    for prompt in first_turns(load_records(setting["data"]).records, Encoder(target.tokenizer)):
        seed, warm = seed_of(prompt, 0), Sampling(0.8, 0.9, 20)
        drafter = EagleChain(head, 3, warm, drafter_seeds([seed]))
        found = decode(target, drafter, prompt.token_ids, 24, warm, seed)
        steps.append(PromptSteps("", found.steps))
    assert result["tau"] == tau(steps) > 1.0


def test_speedup_runs_eagles_methods_and_is_lossless(setting, tmp_path) -> None:
    own = settings(setting, tmp_path)
    own["head"] = HeadRef(path=str(setting["folder"] / "eagle3"))
    tree = DynamicTreeConfig(depth=3, top_k=2, num_tokens=5)
    methods = ["eagle_chain", "eagle_tree"]
    run = SpeedupRun(**own, num_repeats=1, num_warmups=0, dynamic_tree=tree, methods=methods)
    speedup.main(run)
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert list(result["methods"]) == ["vanilla", "generate", "eagle_chain", "eagle_tree"]
    assert result["lossless"] == {"num_prompts": 2, "num_equal": 2, "first_divergences": []}
    assert result["tree"] == {"depth": 3, "top_k": 2, "num_tokens": 5}
    run = replace(run, temperature=1.0, out_dir=str(tmp_path / "sampled"))
    speedup.main(run)
    assert json.loads((tmp_path / "sampled/speedup.json").read_text())["lossless"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, r"temperature=1\.0: only greedy text can be replayed"),
        ({"temperature": -1.0}, r"temperature=-1\.0: must be at least 0"),
        ({"top_p": 0.0}, r"top_p=0\.0: must be above 0"),
        ({"tree": [[0]]}, r"tree: an EAGLE head drafts dynamic trees"),
    ],
)
def test_bad_settings_are_named(setting, tmp_path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measured(setting, tmp_path / "o", "eagle3", **changes)
    assert not (tmp_path / "o").exists()


def test_layers_of_a_head_that_counts_otherwise(setting, tmp_path) -> None:
    own = settings(setting, tmp_path / "o")
    own["head"] = HeadRef(path=str(setting["folder"] / "eagle3"), layers=[0, 1, 9])
    with pytest.raises(InputError, match=r"head\.layers: \[9\], but .* hidden states 0\.\.4"):
        acceptance.main(AcceptanceRun(**own))
