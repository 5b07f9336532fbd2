"""Checks an export on any machine: `python scripts/verify_export.py DIR`.

Reads the folder as its engine does, computes the head, and compares its logits with the trained
head's in `parity/`. Needs only torch and safetensors: no engine, no target, no GPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

from conf.command.forms import name_commands
from conf.errors import InputError, format_error
from eval.parity.parity_check import FORMATS, check_parity


def main() -> int:
    """Print one line per check; return 0 if the export computes the trained head, otherwise 2."""
    parser = argparse.ArgumentParser(
        prog=name_commands("scripts/verify_export.py"),
        description=name_commands((__doc__ or "").splitlines()[0]),
    )
    parser.add_argument("folder", type=Path, help="the folder of the export")
    parser.add_argument(
        "--format", choices=FORMATS, help="the engine, if headsmith.json does not name it"
    )
    chosen = parser.parse_args()
    try:
        verdict = check_parity(chosen.folder, chosen.format)
    except InputError as error:
        print(format_error(error, sys.stderr), file=sys.stderr)
        return 2
    print("\n".join(verdict.lines))
    print(
        f"parity: max |difference| {verdict.max_difference:.1e} of logits up to {verdict.scale:.3g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
