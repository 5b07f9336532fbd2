"""The ways in which vLLM writes hidden states, by its version.

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
    """The way in which a range of versions writes.

    Attributes:
        since: first version, as (major, minor).
        options: arguments that `vllm serve` needs besides.
        locks: a file that is not whole yet has a locked one beside it; else it is whole when the
            server answers.
        outputs: a request may also hand out the states of what it generates.
        hybrids: targets with recurrent layers are written right, not as zeros.
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
"""From the oldest on."""


def writing_of(version: str, who: str) -> Writing:
    """The way in which a version of vLLM writes.

    Args:
        version: as the server tells it; one without numbers is a build of its newest source.
        who: the server, for the message.

    Raises:
        InputError: it is too old.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else WRITINGS[-1].since
    if numbers[0] == 0 and numbers[1] < 2 and match and "dev" in version:
        numbers = WRITINGS[-1].since  # 0.1.dev1, what a build without tags calls itself
    if numbers < FIRST:
        raise InputError(
            f"{who}: vLLM {version} hands out no hidden states; serve with 0.26 or newer (allowed: "
            "0.18 and newer)"
        )
    return [each for each in WRITINGS if each.since <= numbers][-1]
