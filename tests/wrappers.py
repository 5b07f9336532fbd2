"""Vision-language models, tiny and random, each with towers of its own kind."""

from pathlib import Path
from typing import Any

import torch
from toys import CHATML, SMALL, TINY, tokenizer
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig

from heads.target_model.decoder import skip_missing_towers

TEXT = SMALL | {"vocab_size": 300, "num_hidden_layers": 4}
WRAPPERS: dict[str, dict[str, Any]] = TINY["wrappers"]


def whole_model(family: str, seed: int = 3) -> Any:
    """A wrapper with its towers, its weights large enough that its text is not constant."""
    torch.manual_seed(seed)
    parts = WRAPPERS[family]
    config = AutoConfig.for_model(family, **parts | {"text_config": TEXT | parts["text_config"]})
    config.image_token_id = 299
    # Gemma 3n's tower is of a library that is not needed for text.
    with skip_missing_towers(config.get_text_config()):
        model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_wrapper(folder: Path, family: str, template: str | None = CHATML) -> Any:
    """A loadable folder of a wrapper; returns the model with its towers."""
    model = whole_model(family)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model
