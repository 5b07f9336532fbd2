"""Writes a trained head for a serving engine, and checks the result.

python scripts/export.py head.path=outputs/eagle/head format=vllm out_dir=outputs/eagle-vllm
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.forms import name_commands
from conf.command.run_record import collect_changed_settings, print_next_command, prompts_for
from conf.errors import InputError
from conf.files import find_local_path, load_json, split_gguf_path
from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat, ExportRun
from eval.preflight_checks import check_inputs
from heads.folders import PROFILE, PROVENANCE, locate_head

SOURCE = "exported_from"
"""Key of an export's `headsmith.json`: the head's absolute path or Hub id."""


def check_export(config: ExportRun) -> None:
    """Refuse to overwrite anything but the same export, and a missing head or vocabulary.

    Raises:
        InputError: names the setting and its allowed values.
    """
    if config.head.path is None:
        raise InputError("head.path is unset; type a folder with a trained head, or a Hub id")
    check_export_folder(config)
    words = config.tokenizer_gguf
    if words is not None and config.format is not ExportFormat.llamacpp:
        raise InputError(
            f"tokenizer_gguf={words}: format={config.format.value} has no place for it; leave "
            "tokenizer_gguf unset, or set format=llamacpp"
        )
    if words is not None and not Path(words).expanduser().is_file():
        raise InputError(f"tokenizer_gguf={words}: no such file; name a GGUF file")
    if config.curve is not None:
        load_curve(config.curve)
        if config.format is not ExportFormat.vllm:
            raise InputError(
                f"curve={config.curve}: format={config.format.value} has no place for a schedule; "
                "leave curve unset, or set format=vllm"
            )
    check_inputs(config)


def load_curve(path: str) -> dict[str, Any]:
    """Load a `serve.json` with a schedule that vLLM takes.

    Raises:
        InputError: the file is missing, or holds no such schedule.
    """
    file = Path(path).expanduser()
    file = file / "serve.json" if file.is_dir() else file
    result = load_json(file, f"curve={path}: ")
    if result is None:
        raise InputError(
            f"curve={path}: no such file; name a serve.json that eval/serve.py wrote, or its folder"
        )
    schedule, tokens, last = result.get("schedule"), result.get("draft_tokens"), 0
    if not schedule or not isinstance(tokens, int):
        raise InputError(
            f"curve={path}: holds no schedule; let eval/serve.py time the server with drafts and "
            "without (baseline=)"
        )
    for row in schedule:
        numbers = isinstance(row, list) and [type(each) for each in row] == [int, int, int]
        if not numbers or row[0] != last + 1 or row[1] < row[0] or not 0 <= row[2] <= tokens:
            raise InputError(
                f"curve={path}: schedule has {row} after {last} requests in flight; must be "
                f"{last + 1}, the last number of requests, and 0 to {tokens} draft tokens; measure "
                "again with eval/serve.py"
            )
        last = row[1]
    return result


def name_head(head: HeadRef) -> str:
    """Name a head for the record of its exports: its absolute path, or its Hub id."""
    local = find_local_path("head.path", str(head.path))
    return str(head.path) if local is None else str(local.absolute())


def check_export_folder(config: ExportRun) -> None:
    """Refuse an `out_dir` that holds anything but an earlier export of the same head and format.

    Raises:
        InputError: names what is found.
    """
    folder, head = Path(config.out_dir), name_head(config.head)
    there = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    if not there:
        return
    remedy = "name another out_dir, or move the folder away"
    made = load_json(folder / PROVENANCE) or {}
    record = made.get("export") or {}
    known = record.get("files", [])
    unknown = [name for p in there if (name := p.relative_to(folder).as_posix()) not in known]
    if unknown:
        raise InputError(
            f"out_dir={folder}: holds files that no export wrote there: {', '.join(unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''}; {remedy}"
        )
    found = {"format": record.get("format"), "head": made.get(SOURCE)}
    if found != {"format": config.format.value, "head": head}:
        raise InputError(
            f"out_dir={folder}: holds the export of head.path={found['head']} for "
            f"format={found['format']}, which stays; {remedy}"
        )


COMMAND = Command(__doc__, ExportRun, "export", check=check_export)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch

from data.embedded import TARGET_PATH, is_embedded
from eval.measure.speculation_profile import advise_engine, build_profile, load_profile
from eval.measure.verdict import (
    UNMEASURED,
    judge_measured_head,
    load_head_result,
    measures_another_head,
)
from eval.parity.parity_check import check_parity
from heads.draft_head import UNKNOWN, DraftHead
from heads.export.writer import (
    ENGINE_NAMES,
    SCHEDULE_KEY,
    check_export_target,
    check_format,
    compute_reference_tensors,
    export_head,
    find_target_problem,
    format_version_limit,
)
from heads.gguf_target import load_gguf_target
from heads.kinds import find_kind_name, load_local_head
from heads.target_model.identity import format_target_change, identify_target
from heads.target_model.load import load_target

NO_RESULT = name_commands("no acceptance.json of today's eval/acceptance.py lies beside this head")
PORTS = {
    ExportFormat.vllm: 8000, ExportFormat.speculators: 8000, ExportFormat.sglang: 30000,
    ExportFormat.llamacpp: 8080,
}  # fmt: skip
"""Default addresses of the engines that eval/serve.py asks."""


def main(config: ExportRun) -> None:
    """Write `out_dir` completely or not at all, then read it back as the engine would.

    Raises:
        InputError: the export does not compute the trained head, or the target is unknown.
    """
    check_export(config)
    out_dir, head_path = Path(config.out_dir), str(config.head.path)
    folder = locate_head(head_path, config.head.revision)
    head = load_local_head(folder, head_path, config.head.layers)
    check_format(head, config.format)
    provenance = load_json(folder / PROVENANCE) or {}
    provenance.pop("export", None)  # of an earlier export
    provenance[SOURCE] = name_head(config.head)
    add_advice(config, head, folder, provenance)
    path = config.target.path or head.config.target
    if is_embedded(path):
        path = TARGET_PATH
    if path == UNKNOWN:
        raise InputError(
            f"target.path is unset, and head.path={head_path} does not name its target; set "
            "target.path"
        )
    location = replace(config.target, path=path)
    target = load_target(location, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    identity = identify_target(location, target.tokenizer, target.dtype)
    target_change = format_target_change("head.path", head_path, config.head.revision, identity)
    if target_change is not None:
        print(target_change, file=sys.stderr)
    head.attach(target, getattr(torch, config.dtype.value)).eval()
    head.config = replace(head.config, target=target.name)  # its current name
    check_export_target(head, config.format)
    tokenizer_file = config.tokenizer_gguf
    if tokenizer_file is None and split_gguf_path(path):
        tokenizer_file = str(load_gguf_target(path, location.revision).file)
    source = None if tokenizer_file is None else Path(tokenizer_file).expanduser()
    replaced = out_dir.is_dir() and any(out_dir.iterdir())
    export_head(
        head, config.format, compute_reference_tensors(head, target), out_dir, provenance, source
    )
    try:
        parity = check_parity(out_dir)
    except InputError as error:
        raise InputError(f"{error}. {out_dir} is kept, but do not serve it") from error
    print(*parity.lines, sep="\n")
    print(
        f"parity: max |difference| {parity.max_difference:.2g} of logits up to {parity.scale:.2g}"
    )
    wrote = f"wrote {out_dir}{' in place of its earlier export' if replaced else ''}"
    if target_problem := find_target_problem(head, config.format):
        print(f"{wrote}; do not serve it: {target_problem}")
        return
    print_serving(config, head, folder, wrote)
    if (port := PORTS.get(config.format)) is not None:
        kept_settings = collect_changed_settings(config, "head", "target") | {"target.path": path}
        server = {"endpoint": f"http://localhost:{port}"}
        if config.format is ExportFormat.llamacpp:
            print(
                "\nto be checked to the unit, it takes -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd "
                "f32 besides; otherwise, and with quantised weights, give "
                f"{name_commands('eval/serve.py')} a tolerance"
            )
        print_next_command("export", server | kept_settings | prompts_for(path))


def add_advice(
    config: ExportRun, head: DraftHead, folder: Path, provenance: dict[str, Any]
) -> None:
    """Tell a head what the engine should draft, from its record and the curve of a server.

    Raises:
        InputError: the curve is of another head or of another number of draft tokens, or the engine
            takes no schedule for the head.
    """
    measured = load_head_result("acceptance.json", folder, (folder, folder.resolve().parent))
    profile = build_profile(head, str(config.head.path), provenance, measured)
    head.advice = advice = advise_engine(head, profile or load_profile(folder))
    if config.curve is None:
        return
    curve, setting = load_curve(config.curve), f"curve={config.curve}"
    if measures_another_head(curve.get("head"), folder):
        raise InputError(
            f"{setting}: measures another head, {curve['head']}; name the curve of head.path"
        )
    if curve["draft_tokens"] != advice.num_tokens:
        raise InputError(
            f"{setting}: of a server that drafts {curve['draft_tokens']} tokens, but this export "
            f"drafts {advice.num_tokens}; start the server with the line of an export without "
            "curve, and measure again"
        )
    reason = f"{advice.reason} The schedule is of the machine of {config.curve}."
    head.advice = replace(advice, schedule=curve["schedule"], reason=reason)
    if SCHEDULE_KEY not in head.plan_export(config.format).command:
        raise InputError(
            f"{setting}: {ENGINE_NAMES[config.format]} takes no schedule for {head.title}; leave "
            "curve unset"
        )


def print_serving(config: ExportRun, head: DraftHead, folder: Path, wrote: str) -> None:
    """Print the verdict on a head, its draft tokens, and the command that serves its export."""
    assert head.advice is not None
    print(
        judge_measured_head(folder, find_kind_name(head), (folder, folder.resolve().parent))
        or UNMEASURED
    )
    if head.advice.profile is None:
        print(f"no {PROFILE} is written: {NO_RESULT}")
    print(head.advice.reason)
    limit = format_version_limit(head, config.format)
    plan = head.plan_export(config.format, config.out_dir)
    print(f"{wrote}; serve it with{limit and f' ({limit})'}\n\n{plan.command}")
    if plan.hint:
        print(f"\n{plan.hint}")


if __name__ == "__main__":
    COMMAND.run(main)
