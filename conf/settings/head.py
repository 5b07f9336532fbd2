"""Settings that name a trained head."""

from dataclasses import dataclass


@dataclass
class HeadRef:
    """A trained head to load."""

    path: str | None = None
    """Folder or Hub id."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Target features that an EAGLE-3 head reads, as indices of `output_hidden_states`, for a
    published head whose config counts them otherwise (SGLang's are one less)."""
