"""How an export is served: the README that carries the command."""

from collections.abc import Sequence
from typing import Any

from conf.settings.export import ExportFormat
from heads.export.engines import ENGINES, LOADERS, dtype_of, template_note
from heads.kind import DraftHead
from heads.kinds import kind_of


def readme(
    head: DraftHead, engine: ExportFormat, layers: Sequence[int], provenance: dict[str, Any]
) -> str:
    """The README of an export; `DIR` stands for its folder."""
    kind = kind_of(head)
    notes = (kind.hint(head, engine), template_note(provenance))
    further = "".join(f"{note}\n\n" for note in notes if note)
    taps = f", reads `output_hidden_states` {list(layers)} of the target" if layers else ""
    return (
        f"# {kind.forms[kind.form(head)]} for {head.target_name}\n\n"
        f"For speculative decoding with {ENGINES[engine]}, {dtype_of(head)} weights{taps}. "
        f"Written by Headsmith after the loaders of {LOADERS[engine]}.\n\n"
        "## Serve\n\n"
        f"```\n{kind.serve_command(head, engine, 'DIR')}\n```\n\n{further}"
        "## Verify\n\n"
        "`parity/parity.safetensors` holds features of the target and the logits of the trained "
        "head on them. On any machine with Headsmith\n\n"
        "```\npython scripts/verify_export.py DIR\n```\n\n"
        "computes the head anew from these files alone, as the engine reads them, and compares.\n"
    )
