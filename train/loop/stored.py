"""Feature store to train from, with checks that settings and heads fit."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from conf.command.run_record import find_changed_keys, format_changes, make_fingerprint, to_json
from conf.errors import InputError
from conf.settings.data import DataConfig, PackedConfig, TeacherKind
from conf.settings.target import Dtype, TargetConfig
from data.features.store_format import EMBEDDINGS_AND_HEAD, StorePlan
from data.features.store_reader import FeatureStore
from data.prepared.dataset_cache import NON_CONTENT_SETTINGS
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import TargetIdentity, identify_target
from heads.target_model.load import load_config_and_tokenizer
from heads.target_model.model import FeatureLayers


def load_store(data: PackedConfig, target: TargetConfig) -> FeatureStore:
    """Open the store of `data.features`, if it is whole and no setting contradicts it.

    A setting with its default value counts as not given.

    Raises:
        InputError: naming the missing or damaged file, or the contradicting setting.
    """
    assert data.features is not None
    store = FeatureStore(Path(data.features).expanduser())
    plan = store.manifest.plan
    names = [
        field.name
        for field in fields(DataConfig)
        if field.name not in ("features", *NON_CONTENT_SETTINGS)
    ]
    _check_unset("data", data, plan.data, names, data.features)
    _check_target(target, plan, data.features)
    return store


def load_embeddings_and_head(store: FeatureStore, device: torch.device) -> EmbeddingsAndOutputHead:
    """Load the embedding and the output head of the store's target.

    Raises:
        InputError: a file is missing or damaged.
    """
    return EmbeddingsAndOutputHead.from_folder(store.check_file(EMBEDDINGS_AND_HEAD).parent, device)


def identity_of(plan: StorePlan) -> TargetIdentity:
    """Identity of the target that a store was captured from."""
    return TargetIdentity(
        **{field.name: plan.target[field.name] for field in fields(TargetIdentity)}
    )


def check_feature_layers(store: FeatureStore, taps: FeatureLayers) -> None:
    """Refuse a head that reads hidden states the store lacks.

    Raises:
        InputError: naming them and how to capture them.
    """
    contents = store.manifest.plan.contents
    missing = sorted(set(taps.layers) - set(contents.layers))
    if missing:
        wanted = ",".join(map(str, sorted(taps.layers)))
        raise InputError(
            f"head.layers={missing}: not in data.features={store.folder}, which has "
            f"{list(contents.layers)}; name layers of these, or capture with layers=[{wanted}]"
        )
    # Every head reads layers or the last hidden state.
    if not taps.layers and contents.teacher is not TeacherKind.hidden:
        raise InputError(
            f"data.features={store.folder}: captured with teacher={contents.teacher.value}, "
            "without the last hidden states that this head reads; capture with teacher=hidden, or "
            "train an EAGLE-3 head"
        )


def _check_target(target: TargetConfig, plan: StorePlan, folder: str) -> None:
    stored, dtype = plan.target, plan.target["dtype"]
    if target.dtype is not Dtype.auto and target.dtype.value != dtype:
        raise InputError(
            f"target.dtype={target.dtype.value}: data.features={folder} was captured in {dtype}; "
            "leave target.dtype unset, or capture again"
        )
    if target.path is None:
        _check_unset("target", target, stored, ("revision", "adapter", "quantization"), folder)
        return
    given = identify_target(target, load_config_and_tokenizer(target)[1], getattr(torch, dtype))
    before, now = make_fingerprint(target=identity_of(plan)), make_fingerprint(target=given)
    differ = find_changed_keys(before, now)
    if differ:
        raise InputError(
            f"target.path={target.path}: not the target of data.features={folder}: "
            f"{format_changes(before, now, differ)}. Leave target.* unset to train for the store's "
            "target, or capture again"
        )


def _check_unset(
    group: str, config: Any, stored: Mapping[str, Any], names: Iterable[str], folder: str | None
) -> None:
    """Refuse settings that differ from the store's, unless they have their default."""
    for name in names:
        given, default = getattr(config, name), getattr(type(config)(), name)
        if given != default and to_json(given) != stored[name]:
            raise InputError(
                f"{group}.{name}={to_json(given)}: data.features={folder} was captured with "
                f"{group}.{name}={stored[name]}; leave it unset, or capture again"
            )
