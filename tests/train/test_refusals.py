"""Settings of training and of the other commands that cannot be, each with what is said."""

from functools import partial
from typing import Any

import pytest

from conf.errors import InputError
from conf.settings.blocks import DFlashConfig
from conf.settings.data import DataConfig, TeacherKind
from conf.settings.eagle import EagleConfig, EagleForm, MtpConfig, MtpRun, PEagleConfig
from conf.settings.medusa import AdapterConfig, JointConfig, Medusa2Run, MedusaRun
from conf.settings.scripts import CaptureRun, PruneRun, RegenerateRun, RelayRun
from conf.settings.target import TargetConfig
from conf.settings.training import RolloutConfig, TrainConfig

ENGINE = ["http://a:1/v1"]
SERVED = TargetConfig(engine=ENGINE)
STORED = DataConfig(features="store")
RELAYS = ["http://a:8100", "http://b:8100"]
Answers = partial(RegenerateRun, endpoint="http://a:1/v1")

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (DFlashConfig, {"block_size": 1}, "head.block_size=1: must be at least 2"),
    (DFlashConfig, {"text_weight": 0.0, "divergence_weight": 0.0}, "every loss has weight 0"),
    (DFlashConfig, {"draft_vocab_size": 9}, "size=9: .*set head.own_output_head=true"),
    (DFlashConfig, {"off_path_weight": 1.5}, "head.off_path_weight=1.5: must be from 0 to 1"),
    (DFlashConfig, {"num_anchors": 0}, "head.num_anchors=0: must be above 0"),
    (PEagleConfig, {"kept_share": 1.2}, "head.kept_share=1.2: must be from 0 to 1"),
    (PEagleConfig, {"off_path_weight": -0.1}, "head.off_path_weight=-0.1"),
    (PEagleConfig, {"num_layers": 0}, "head.num_layers=0"),
    (PEagleConfig, {"num_segments": 0}, "head.num_segments=0"),
    (EagleConfig, {"num_steps": 0}, "head.num_steps=0"),
    (EagleConfig, {"regression_weight": 1.0}, "head.regression_weight=1.0: an EAGLE-3 head"),
    (EagleConfig, {"divergence_weight": 0.0}, "every loss has weight 0"),
    (EagleConfig, {"noise": -1.0}, "head.noise=-1.0"),
    (EagleConfig, {"form": EagleForm.eagle1, "fc_norm": True}, "fc_norm=True: .*no such part"),
    (MtpRun, {"head": MtpConfig(num_steps=64), "data": DataConfig(max_length=64)},
     "head.num_steps=64: too many .*max_length=64 tokens"),
    (AdapterConfig, {"rank": 0}, "adapter.rank=0: must be above 0"),
    (AdapterConfig, {"dropout": 1.0}, "adapter.dropout=1.0: must be from 0"),
    (JointConfig, {"heads_only_steps": -1}, "joint.heads_only_steps=-1: must be"),
    (Medusa2Run, {"joint": JointConfig(heads_only_steps=9), "train": TrainConfig(max_steps=9)},
     "joint.heads_only_steps=9: leaves no joint step of train.max_steps=9"),
    (Medusa2Run, {"target": TargetConfig(adapter="lora")}, r"scripts/merge_adapter\.py"),
    (Medusa2Run, {"target": TargetConfig(device_map="auto")}, "device_map=auto: .*one dev"),
    (Medusa2Run, {"target": SERVED}, "this command trains the target's layers"),
    (TrainConfig, {"max_grad_norm": 0}, "train.max_grad_norm=0: must be above 0"),
    (TrainConfig, {"max_grad_value": 0}, "train.max_grad_value=0: must be above 0"),
    (RolloutConfig, {"steps": 0}, "rollout.steps=0: must be above 0"),
    (MedusaRun, {"rollout": RolloutConfig(steps=5), "data": STORED},
     "rollout.steps=5: the target must answer during training"),
    (MedusaRun, {"target": SERVED, "data": STORED},
     "already holds the states that the engine would give"),
    (TargetConfig, {"adapter_name": "tuned"}, r"names an adapter .*target\.engine is empty"),
    (TargetConfig, {"relay": RELAYS[:1]}, r"relay=\['http://a:8100'\]: must have one URL per"),
    (TargetConfig, {"relay": RELAYS, "engine": ENGINE}, "must have one URL per server"),
    (CaptureRun, {"top_k": 0}, "top_k=0: must be above 0"),
    (CaptureRun, {"num_replay_prompts": -1}, "num_replay_prompts=-1: must be at least 0"),
    (CaptureRun, {"layers": [], "teacher": TeacherKind.top_k},
     r"layers=\[\]: teacher=top_k stores no hidden state"),
    (PruneRun, {"sizes": [4, 2]}, r"sizes=\[4, 2\]: must be numbers above 0, in rising order"),
    (PruneRun, {"ranks": [0]}, r"ranks=\[0\]: must be numbers above 0, in rising order"),
    (RelayRun, {"folder": "x", "port": 70000}, "port=70000: must be at most 65535"),
    (RegenerateRun, {"concurrency": 0}, "concurrency=0: must be above 0"),
    (RegenerateRun, {"temperature": -1}, "temperature=-1: must be at least 0"),
    (RegenerateRun, {"model": "toy"}, "endpoint is unset"),
    (Answers, {"plain": True}, "plain=true: applies in process only"),
    (Answers, {"data": DataConfig(chat_template_kwargs={"chat_template": "rag"})},
     "a server applies the template it was started with"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused(
    kind: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)


def test_each_server_may_have_its_relay() -> None:
    TargetConfig(engine=["http://a:1/v1", "http://b:1/v1"], relay=RELAYS)
    MtpRun(head=MtpConfig(num_steps=63), data=DataConfig(max_length=64))
