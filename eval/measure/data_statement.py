"""Statement of the data that a head was trained on, or that a figure was measured on.

A training writes its statement into `headsmith.json` (`trained_on`), and the digests of its prompts
into a file beside it. A measurement writes its own (`data`), and compares both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from conf.files import load_json
from data.rows.row_digests import PROMPTS_FILE, PromptDigests
from heads.folders import PROVENANCE, locate_head

STATED = ("path", "sha256", "chat_template_kwargs", "target_dtype")


@dataclass(frozen=True)
class DataStatement:
    """What a head was trained on, or a figure measured on.

    Attributes:
        path: path of the data, as typed.
        sha256: checksum of the unpacked files.
        chat_template_kwargs: arguments of the target's chat template, from the settings.
        target_dtype: dtype of the target's pass, e.g. `bfloat16`.
        prompts: digests of the first prompts; None if unknown.
    """

    path: str
    sha256: str
    chat_template_kwargs: Mapping[str, Any]
    target_dtype: str
    prompts: PromptDigests | None = None

    @classmethod
    def from_head(cls, path: str, revision: str | None) -> Self | None:
        """Read the statement of a head's training; None if the head has none.

        Raises:
            InputError: the head or its file of digests is damaged.
        """
        place = locate_head(path, revision)
        folder = place if place.is_dir() else place.parent
        stated = (load_json(folder / PROVENANCE) or {}).get("trained_on")
        if stated is None:
            return None
        prompts = PromptDigests.from_file(folder / PROMPTS_FILE)
        return cls(**{name: stated[name] for name in STATED}, prompts=prompts)

    def add_prompts(self, earlier: "DataStatement") -> "DataStatement":
        """Add the prompts of an earlier training of the same head, as far as both are known."""
        if self.prompts is None or earlier.prompts is None:
            return replace(self, prompts=self.prompts or earlier.prompts)
        return replace(self, prompts=self.prompts | earlier.prompts)

    def build_documents(self) -> dict[str, Any]:
        """Build the JSON files of the digests beside a head, by name; none if they are unknown."""
        return {} if self.prompts is None else {PROMPTS_FILE: self.prompts.to_json()}

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON content, with the number of prompts in place of their digests."""
        stated = {name: getattr(self, name) for name in STATED}
        return stated | {"num_prompts": None if self.prompts is None else len(self.prompts)}


def compare_statements(head: str, trained: DataStatement, digests: Sequence[int]) -> dict[str, Any]:
    """Compare what a head was trained on with what it is measured on.

    Args:
        head: path of the head.
        trained: statement of its training.
        digests: digest of the first prompt of each dialogue that is measured.

    Returns:
        JSON content for `format_training_notes`. `num_trained` dialogues begin with a prompt that
        the head was trained on; None if the head does not tell its prompts.
    """
    num_trained = None if trained.prompts is None else trained.prompts.count_known(digests)
    return {
        "head": head,
        **trained.to_json(),
        "num_trained": num_trained,
        "num_dialogues": len(digests),
    }


def format_training_notes(
    measured: Mapping[str, Any], trained: Mapping[str, Any], name: str
) -> Iterator[str]:
    """Format the differences between training and measuring, and what both share, as lines.

    Args:
        measured: JSON content of the measurement's statement.
        trained: result of `compare_statements`.
        name: name of the head, with which each line begins.
    """
    if trained["num_trained"]:
        yield (
            f"{name}: was trained on the first prompts of {trained['num_trained']:,} of "
            f"{trained['num_dialogues']:,} dialogues, so its figures are too good; measure on "
            "other prompts"
        )
    elif trained["num_trained"] is None and trained["sha256"] == measured["sha256"]:
        yield (
            f"{name}: was trained on data.path itself, perhaps without a held-out share, so its "
            "figures may be too good; measure on other prompts"
        )
    yield from format_setting_changes(trained, measured, f"{name}: was trained", "is measured")


def format_setting_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], was: str, is_now: str
) -> Iterator[str]:
    """Format template variables and dtypes that differ between two statements, as lines.

    Args:
        before: JSON content of the earlier statement.
        now: JSON content of the later one.
        was: subject and verb of the earlier one.
        is_now: verb of the later one.
    """
    for key, words, effect in (
        ("chat_template_kwargs", "data.chat_template_kwargs=", "so it sees other prompts"),
        ("target_dtype", "the target in ", "so its states are rounded otherwise"),
    ):
        if before[key] != now[key]:
            old, new = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for value in (before[key], now[key])
            )
            yield f"{was} with {words}{old}, but {is_now} with {words}{new}, {effect}"
