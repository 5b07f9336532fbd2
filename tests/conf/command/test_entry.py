import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import commands
import pytest
from commands import ROOT
from doors import COMMANDS, WORKERS
from omegaconf import OmegaConf

from conf.command import help_pages as words
from conf.errors import InputError
from conf.settings.blocks import DFlash2Config, DFlashConfig, DSparkConfig
from conf.settings.data import DataConfig
from conf.settings.drafting import (
    DraftModelConfig,
    DynamicTreeConfig,
    LookaheadConfig,
    LookupConfig,
    RecyclingConfig,
    SelfDraftConfig,
    SuffixConfig,
    TypicalConfig,
)
from conf.settings.eagle import EagleConfig, MtpConfig, PEagleConfig
from conf.settings.measure import AcceptanceRun, ServeRun, SpeedupRun, TreeSearchRun
from conf.settings.medusa import AdapterConfig, JointConfig, MedusaConfig
from conf.settings.scripts import (
    CaptureRun,
    ContestRun,
    ContestTrainConfig,
    PruneRun,
    RegenerateRun,
    RelayRun,
    TargetsRun,
)
from conf.settings.target import TargetConfig
from conf.settings.training import RolloutConfig, TrainConfig

ENTRY_LINE = "sys.path.insert(0, str(Path(__file__).resolve().parents[{}]))  # repo root"
ONE_OF_EACH_FOLDER = (
    "train/medusa2.py",
    *(pytest.param(e, marks=pytest.mark.slow) for e in ("eval/acceptance.py", "scripts/export.py")),
)
PLAIN = (
    "scripts/demo.py", "scripts/embedded/make.py", "scripts/verify_export.py",
)  # fmt: skip
OF_PROCESSES = "scripts/quickstart.py"  # starts others; imports nothing heavy
BENCHES = tuple(f"scripts/bench/{name}.py" for name in ("cpu", "gpu", "measure"))


def command(entry: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    return commands.run([sys.executable, str(ROOT / entry), *arguments], cwd, environ)


def test_every_entry_puts_the_repository_first_with_the_same_line() -> None:
    found = [p for d in ("train", "eval", "scripts") for p in (ROOT / d).rglob("*.py")]
    named = {str(p.relative_to(ROOT)): p.read_text() for p in found}
    entries = {e for e in named if "__main__" in named[e] and not e.startswith(WORKERS)}
    started = {each for each in COMMANDS if each.startswith(WORKERS)}
    assert entries == {*COMMANDS, *PLAIN, *BENCHES, OF_PROCESSES} - started
    for entry in entries:
        line = ENTRY_LINE.format(entry.count("/"))
        assert line in (ROOT / entry).read_text().splitlines(), entry


@pytest.mark.parametrize("entry", [*BENCHES, *PLAIN])
def test_waiting_threads_sleep_in_scripts_without_settings_too(entry: str) -> None:
    before, called, behind = (ROOT / entry).read_text().partition("\nset_passive_wait_policy()\n")
    assert called
    assert "import torch" not in before
    assert "import " in behind


@pytest.mark.parametrize(
    ("name", "given", "is_terminal", "found"),
    [
        ("OMP_WAIT_POLICY", None, True, "PASSIVE"),
        ("OMP_WAIT_POLICY", "ACTIVE", True, "ACTIVE"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", None, False, "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", None, True, None),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "0", False, "0"),
    ],
)
def test_threads_sleep_and_bars_stay_out_of_logs_unless_the_user_says_otherwise(
    name: str, given: str | None, is_terminal: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(given))
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "argv", ["train/medusa.py"])
    COMMANDS["train/medusa.py"].parse_command_line()
    assert os.environ.get(name) == found


@pytest.mark.parametrize("entry", ONE_OF_EACH_FOLDER)
def test_settings_are_shown_from_a_folder_with_decoys(entry: str, tmp_path: Path) -> None:
    for name in ("data", "heads", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('decoy')\n")
    shown = command(entry, "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for field in fields(COMMANDS[entry].schema):
        assert f"\n{field.name}:" in "\n" + shown.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["conf", "data", "heads"]


@pytest.mark.parametrize(
    ("entry", "key", "told"),
    [
        ("eval/tree_search.py", "depth", "; eval/acceptance.py, eval/speedup.py, eval/serve.py, "),
        ("eval/serve.py", "dynamic_tree.top_k", "; eval/acceptance.py, eval/speedup.py have it"),
        ("scripts/repair.py", "temperature", "; eval/acceptance.py, "),
        ("scripts/capture.py", "data.features", "; train/dflash.py, "),
        ("train/medusa2.py", "rollout.steps", "; train/dflash.py, "),
        ("train/peagle.py", "head.form", "; train/eagle.py have it"),
        ("train/dflash2.py", "head.own_output_head", "; train/dflash.py, train/dspark.py have it"),
        ("train/eagle.py", "head.qqq", ", see --help"),
        ("train/eagle.py", "head", None),
        ("train/medusa.py", "data.columns.prompt", None),
    ],
)
def test_a_setting_that_a_command_lacks_is_answered_with_who_has_it(entry, key, told) -> None:
    if told is None:
        words.check_setting_exists(COMMANDS[entry].schema, key)
        return
    with pytest.raises(InputError) as refused:
        words.check_setting_exists(COMMANDS[entry].schema, key)
    assert str(refused.value).startswith(f"{key}: this command has no such setting{told}")


def test_every_setting_of_a_command_can_be_typed() -> None:
    for entry in ("train/eagle.py", "eval/speedup.py"):
        schema = COMMANDS[entry].schema
        sections = {each.name: each.default_factory for each in fields(schema)}
        for name, section in sections.items():
            words.check_setting_exists(schema, name)
            if is_dataclass(section):
                for each in fields(section):
                    words.check_setting_exists(schema, f"{name}.{each.name}", "1")


def test_a_sweep_gives_each_job_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "out/0").mkdir(parents=True)
    (tmp_path / "out/0/mine").touch()
    swept = command("train/medusa.py", "--multirun", "seed=1,2", "out_dir=out", cwd=tmp_path)
    assert swept.returncode == 2
    assert "out_dir=out/0: is not empty" in swept.stderr


@pytest.mark.parametrize(
    ("schema", "setting", "value", "message"),
    [
        (DataConfig, "eval_fraction", 1.5, r"data\.eval_fraction=1\.5: must be"),
        (DataConfig, "chat_template_kwargs", "off", r"kwargs=off: .*like 'data\.chat_template"),
        (DataConfig, "columns", "ask", r"data.columns=ask: not a mapping of names"),
        (DataConfig, "columns", {"prompt": 3}, r"not a mapping of names; .* 'data.columns=\{promp"),
        (DataConfig, "columns", {"promt": "ask"}, r"no field is called 'promt'; allowed: mess"),
        (TrainConfig, "warmup_steps", 10, r"train\.warmup_steps=10"),
        (TrainConfig, "learning_rate", "fast", r"learning_rate=fast: must be above 0, o"),
        (TrainConfig, "adam_learning_rate", 0, r"adam_learning_rate=0: .* or auto"),
        (TrainConfig, "batch_tokens", -1, r"train\.batch_tokens=-1: must be above 0"),
        (AcceptanceRun, "temperature", 1.0, r"temperature=1\.0: only greedy"),
        (SpeedupRun, "max_new_tokens", 0, r"max_new_tokens=0: must be above 0"),
    ],
)
def test_checks_name_the_key_and_what_is_allowed(schema, setting, value, message: str) -> None:
    more = {"max_steps": 10} if setting == "warmup_steps" else {}
    with pytest.raises(InputError, match=message):
        schema(**{setting: value}, **more)


RANGES = {
    "above 0": (0, [
        (DynamicTreeConfig, "dynamic_tree", "depth top_k num_tokens"),
        (DraftModelConfig, "draft", "num_tokens max_tokens"),
        (LookupConfig, "lookup", "num_tokens max_ngram min_ngram"),
        (SuffixConfig, "suffix", "num_tokens max_ngram factor"),
        (RecyclingConfig, "recycling", "num_tokens"),
        (LookaheadConfig, "lookahead", "window num_guesses"),
        (SelfDraftConfig, "self_draft", "num_layers num_tokens"),
        (TypicalConfig, "typical", "threshold alpha"),
        (MedusaConfig, "head", "num_heads num_layers loss_decay teacher_temperature"),
        (AdapterConfig, "adapter", "rank alpha"),
        (JointConfig, "joint", "heads_weight heads_lr_multiplier"),
        (MtpConfig, "head", "num_steps step_decay teacher_temperature lk_eta top_k"),
        (EagleConfig, "head", "draft_vocab_size"),
        (PEagleConfig, "head", "num_layers num_anchors num_segments kept_share"),
        (DFlashConfig, "head", "draft_vocab_size"),
        (DFlash2Config, "head", "num_features num_layers num_anchors slot_gamma lk_eta window "
         "teacher_temperature conv_kernel_size conv_group_size selector_rank "
         "selector_top_k"),
        (DSparkConfig, "head", "markov_rank"),
        (TrainConfig, "train", "max_steps num_epochs batch_size batch_tokens micro_batch_size "
         "max_grad_norm max_grad_value eval_steps num_eval_sequences save_steps num_checkpoints "
         "log_steps"),
        (RolloutConfig, "rollout", "steps max_new_tokens batch_size"),
        (TargetConfig, "target", "prefill_chunk"),
        (DataConfig, "data", "num_prompts max_length num_proc"),
        (AcceptanceRun, "", "max_new_tokens depth top_k output_rank num_turns"),
        (SpeedupRun, "", "batch_size num_repeats"),
        (ServeRun, "", "num_repeats"),
        (TreeSearchRun, "", "max_nodes num_repeats"),
        (CaptureRun, "", "top_k micro_batch_size"),
        (RegenerateRun, "", "concurrency batch_size max_new_tokens timeout_s"),
        (RelayRun, "", "port max_age_s"),
        (PruneRun, "", "num_sequences num_replay_prompts max_new_tokens depth"),
        (ContestTrainConfig, "train", "batch_size micro_batch_size"),
        (ContestRun, "", "max_new_tokens num_turns num_repeats"),
        (TargetsRun, "", "timeout"),
    ]),
    "at least 0": (-1, [
        (JointConfig, "joint", "heads_only_steps"),
        (CaptureRun, "", "num_replay_prompts"),
        (RegenerateRun, "", "temperature max_retries"),
        (EagleConfig, "head", "divergence_weight regression_weight top_k_weight text_weight noise"),
        (TrainConfig, "train", "num_replay_prompts weight_decay warmup_steps"),
        (RolloutConfig, "rollout", "temperature"),
        (DFlash2Config, "head", "text_weight divergence_weight selector_weight"),
        (DSparkConfig, "head", "confidence_weight"),
        (AcceptanceRun, "", "temperature"),
        (ServeRun, "", "num_warmups"),
    ]),
    "from 0 to below 1": (1, [
        (DraftModelConfig, "draft", "confidence"),
        (SuffixConfig, "suffix", "min_prob"),
        (AdapterConfig, "adapter", "dropout"),
        (TrainConfig, "train", "average_decay"),
        (AcceptanceRun, "", "min_p"),
        (ServeRun, "", "tolerance"),
    ]),
    "from 0 to 1": (2, [
        (MedusaConfig, "head", "off_path_weight"),
        (PEagleConfig, "head", "kept_share least_share off_path_weight"),
        (DFlash2Config, "head", "off_path_weight"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("allowed", RANGES)
def test_every_number_has_its_range(allowed: str) -> None:
    wrong, sections = RANGES[allowed]
    for kind, section, names in sections:
        for name in names.split():
            key = f"{section}.{name}".lstrip(".")
            with pytest.raises(InputError, match=rf"^{key}={wrong}: must be {allowed}$"):
                kind(**{name: wrong})


EAGLE1 = {
    "form": "eagle1", "num_steps": 1, "step_decay": 0.8, "step_normalizer": "sum",
    "token_normalizer": "supervised", "detach_features": False, "divergence": "kl",
    "divergence_weight": 0.1, "regression_weight": 1.0, "top_k_weight": 0.0, "top_k": 10,
    "noise": 0.2, "fc_norm": False, "norm_output": False, "learn_prompts": False,
    "teacher_temperature": 1.0,
}  # fmt: skip
EAGLE3 = {
    **EAGLE1, "form": "eagle3", "num_steps": 3, "token_normalizer": "all",
    "divergence_weight": 1.0, "regression_weight": 0.0, "noise": 0.0,
    "norm_before_residual": True, "learn_prompts": True, "teacher_temperature": 0.6,
}  # fmt: skip
EAGLE31 = EAGLE3 | {"fc_norm": True, "norm_output": True, "norm_before_residual": False}
HASS = {
    **EAGLE1, "num_steps": 3, "step_decay": 1.0, "step_normalizer": "mean",
    "detach_features": True, "top_k_weight": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "head", "clip"),
    [
        ("eagle1", EAGLE1, (None, 0.5)),
        ("eagle3", EAGLE3, (0.5, None)),
        ("eagle3_1", EAGLE31, (0.5, None)),
        ("hass", HASS, (None, 0.5)),
    ],
)
def test_recipes_are_the_published_ones(recipe: str, head: dict, clip: tuple) -> None:
    run = OmegaConf.to_object(COMMANDS["train/eagle.py"].compose_settings([f"head={recipe}"]))
    found = {name: getattr(run.head, name) for name in head}
    assert {n: v.value if isinstance(v, Enum) else v for n, v in found.items()} == head
    assert (run.train.learning_rate, run.train.optimizer.value) == ("auto", "auto")
    assert run.train.adam_beta2 == 0.95
    assert (run.train.max_grad_norm, run.train.max_grad_value) == clip


def test_objects_are_given_on_the_command_line() -> None:
    given = [
        "data.columns={prompt: ask, response: reply}",
        "data.chat_template_kwargs={enable_thinking: false, style: dry}",
    ]
    run = OmegaConf.to_object(COMMANDS["train/medusa.py"].compose_settings(given))
    assert run.data.columns == {"prompt": "ask", "response": "reply"}
    assert run.data.chat_template_kwargs == {"enable_thinking": False, "style": "dry"}


def test_every_setting_has_a_default() -> None:
    for command in COMMANDS.values():
        assert is_dataclass(command.schema())
