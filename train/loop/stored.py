"""Opens a feature store to train from, and checks that settings and heads fit it."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from conf.command.statement import changed, differences, plain, stated
from conf.errors import InputError
from conf.settings.data import DataConfig, PackedConfig, TeacherKind
from conf.settings.target import Dtype, TargetConfig
from data.features.format import EMBEDDINGS_AND_HEAD
from data.features.manifest import StorePlan
from data.features.reader import FeatureStore
from data.prepared.folder import NOT_DECIDING
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.identity import Identity, identify
from heads.target_model.load import load_tokenizer
from heads.target_model.model import Taps


def open_store(data: PackedConfig, target: TargetConfig) -> FeatureStore:
    """Opens the store that `data.features` names, if it is whole and nothing contradicts it.

    A setting that has its default value was not given, as far as one can see from here.

    Raises:
        InputError: what is missing or damaged, or which setting asks for something else.
    """
    assert data.features is not None
    store = FeatureStore(Path(data.features).expanduser())
    plan = store.manifest.plan
    names = [
        field.name for field in fields(DataConfig) if field.name not in ("features", *NOT_DECIDING)
    ]
    _check_unset("data", data, plan.data, names, data.features)
    _check_target(target, plan, data.features)
    return store


def load_embeddings_and_head(store: FeatureStore, device: torch.device) -> EmbeddingsAndHead:
    """The embedding and the output head of the store's target.

    Raises:
        InputError: a file is missing or damaged.
    """
    return EmbeddingsAndHead.load(store.check_file(EMBEDDINGS_AND_HEAD).parent, device)


def identity_of(plan: StorePlan) -> Identity:
    """The target that a store was captured from."""
    return Identity(**{field.name: plan.target[field.name] for field in fields(Identity)})


def check_taps(store: FeatureStore, taps: Taps) -> None:
    """Refuses a head that reads what the store does not hold.

    Raises:
        InputError: naming it, and how to capture it.
    """
    contents = store.manifest.plan.contents
    missing = sorted(set(taps.layers) - set(contents.layers))
    if missing:
        wanted = ",".join(map(str, sorted(taps.layers)))
        raise InputError(
            f"head.layers: the head reads {missing}, but data.features={store.folder} has "
            f"{list(contents.layers)}: name some of those, or capture with layers=[{wanted}]"
        )
    # Every head reads layers, or else the last hidden state.
    if not taps.layers and contents.teacher is not TeacherKind.hidden:
        raise InputError(
            f"data.features={store.folder} was captured with teacher={contents.teacher.value} and "
            "has no last hidden states, which this head reads: capture with teacher=hidden, or "
            "train an EAGLE-3 head"
        )


def _check_target(target: TargetConfig, plan: StorePlan, folder: str) -> None:
    stored, dtype = plan.target, plan.target["dtype"]
    if target.dtype is not Dtype.auto and target.dtype.value != dtype:
        raise InputError(
            f"target.dtype={target.dtype.value}: data.features={folder} was captured in {dtype}: "
            "leave it unset, or capture again"
        )
    if target.path is None:
        _check_unset("target", target, stored, ("revision", "adapter", "quantization"), folder)
        return
    given = identify(target, load_tokenizer(target)[1], getattr(torch, dtype))
    before, now = stated(target=identity_of(plan)), stated(target=given)
    differ = changed(before, now)
    if differ:
        raise InputError(
            f"target.path={target.path} is not the target that data.features={folder} was "
            f"captured from: {differences(before, now, differ)}. Leave target.* unset to train for "
            "that one, or capture again"
        )


def _check_unset(
    group: str, config: Any, stored: Mapping[str, Any], names: Iterable[str], folder: str | None
) -> None:
    """Refuses settings that were changed, and not to the store's."""
    for name in names:
        given, default = getattr(config, name), getattr(type(config)(), name)
        if given != default and plain(given) != stored[name]:
            raise InputError(
                f"{group}.{name}={plain(given)}: data.features={folder} was captured with "
                f"{group}.{name}={stored[name]}: leave it unset, or capture again"
            )
