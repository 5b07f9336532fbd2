"""How vLLM writes hidden states, by version.

Source: vLLM's `example_hidden_states_connector.py`, pull requests #33736 (0.18), #37374 (0.22),
#43805 (0.24) and #46301 (0.26).
"""

import re
from dataclasses import dataclass

from conf.errors import InputError

FIRST = (0, 18)
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Writing:
    """How a range of versions writes hidden states.

    Attributes:
        since: first version, as (major, minor).
        options: further arguments of `vllm serve`.
        locks: whether a lock file exists until the file is whole; otherwise the file is whole when
            the server answers.
        outputs: whether a request can also return the states of generated tokens.
        hybrids: whether recurrent targets are written correctly, not as zeros.
    """

    since: tuple[int, int]
    options: tuple[str, ...] = ()
    locks: bool = True
    outputs: bool = True
    hybrids: bool = True


WRITINGS = (
    Writing(FIRST, locks=False, outputs=False, hybrids=False),
    Writing((0, 22), WHOLE_PROMPTS, outputs=False, hybrids=False),
    Writing((0, 24), hybrids=False),
    Writing((0, 26)),
)
"""Formats from the oldest on."""


def writing_of(version: str, who: str) -> Writing:
    """Choose the format of a vLLM version.

    Args:
        version: version as the server gives it; without numbers it is a build of the newest source.
        who: server, for the message.

    Raises:
        InputError: the version is too old.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else WRITINGS[-1].since
    if numbers[0] == 0 and numbers[1] < 2 and match and "dev" in version:
        numbers = WRITINGS[-1].since  # 0.1.dev1, the version of a build without tags
    if numbers < FIRST:
        raise InputError(
            f"{who}: vLLM {version} writes no hidden states; serve with 0.26 or newer (allowed: "
            "0.18 and newer)"
        )
    return [each for each in WRITINGS if each.since <= numbers][-1]
