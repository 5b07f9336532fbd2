"""Publishes a head on the Hub, with a card of its measurements.

python scripts/push.py head.path=outputs/medusa/head repo_id=me/my-model-medusa dry_run=true
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.run_record import collect_changed_settings, print_next_command
from conf.errors import InputError
from conf.files import HUB_ID, check_empty_folder, load_json, split_gguf_path
from conf.settings.export import HubLayout, PushRun
from heads.folders import PROFILE, PROVENANCE, check_head_files


def check_push(config: PushRun) -> None:
    """Refuse an invalid Hub name, a head that is no folder, and an `out_dir` that is not empty.

    Raises:
        InputError: names the setting and its allowed values.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    form = f"repo_id={config.repo_id}: must be user/name"
    if config.repo_id.count("/") != 1:
        raise InputError(form)
    try:
        validate_repo_id(config.repo_id)
    except HFValidationError as error:
        raise InputError(f"{form}: {error}") from error
    base = config.base_model
    if base is not None:
        repo_id = (split_gguf_path(base) or (base, ""))[0]
        if repo_id.count("/") != 1 or not HUB_ID.fullmatch(repo_id):
            raise InputError(
                f"base_model={base}: must be the target's Hub id, owner/name; a local folder means "
                "nothing to others"
            )
    if config.dry_run:
        check_empty_folder(config.out_dir)
    if config.measured is not None and not Path(config.measured).is_dir():
        raise InputError(
            f"measured={config.measured}: no such folder; name a folder with acceptance.json or "
            "speedup.json"
        )
    for folder in config.comparisons:
        if not (Path(folder) / "comparison.md").is_file():
            raise InputError(
                f"comparisons={folder}: has no comparison.md; name a folder that "
                "scripts/compare.py wrote"
            )
    if config.head.path is None:
        raise InputError("head.path is unset; name the folder of a trained head")
    if config.head.layers is not None:
        raise InputError(
            f"head.layers={config.head.layers}: a head is published unchanged; leave head.layers "
            "unset, and correct eagle_aux_hidden_state_layer_ids in the head's config.json"
        )
    if not Path(config.head.path).expanduser().is_dir():
        raise InputError(
            f"head.path={config.head.path}: no such folder; name a trained head (training writes "
            "out_dir/head)"
        )
    check_head_files(config.head, None)


COMMAND = Command(__doc__, PushRun, "push", check=check_push)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from data.embedded import is_embedded
from eval.measure.speculation_profile import advise_engine, build_profile, load_profile
from eval.measure.verdict import UNMEASURED, judge_measured_head, measures_another_head
from heads.kinds import find_kind_name, load_head
from scripts.publish.hub import Terms, fetch_terms, format_link, list_files, upload_repositories
from scripts.publish.model_card import (
    CardFacts,
    build_model_card,
    is_hub_id,
    parse_hub_id,
)
from scripts.publish.staging import (
    Renaming,
    check_export_of_head,
    load_export_folders,
    scrub_private_data,
    scrub_provenance,
    stage_export,
    stage_file,
    stage_json,
    verify_staged_export,
)

PICTURES = ("acceptance.png", "speedup.png")
# Other files of a folder stay at home, as optimizer states, logs and data.
OWN_JSON = ("config.json", PROVENANCE, "draft_tree.json", PROFILE)
OWN_SUFFIXES = (".safetensors", ".safetensors.index.json", ".gguf")
NOT_WEIGHTS = ("optimizer", "scheduler", "random_states", "sampler")


def main(config: PushRun) -> None:
    """Stage the files, then write them to `out_dir` (dry run) or upload them.

    The upload is one commit per repository.
    """
    check_push(config)
    exports = load_export_folders(config.exports)
    folder = Path(str(config.head.path)).expanduser()
    head = load_head(str(folder))
    for export in exports:
        check_export_of_head(head, export)
    provenance = load_json(folder / PROVENANCE) or {}
    target = name_public_target(config, provenance, head.config.target)
    terms = check_source_terms(config, provenance, target)
    with tempfile.TemporaryDirectory(prefix="headsmith-push-") as name:
        repos = {config.repo_id: Path(name) / "head"}
        renaming = Renaming(head.config.target, target)
        stage_head(folder, repos[config.repo_id], renaming)
        export_facts = []
        for export in exports:
            repo_id, place_in_repo = config.repo_id, export.format.value
            if config.layout is HubLayout.each:
                repo_id, place_in_repo = f"{config.repo_id}-{export.format.value}", ""
                repos[repo_id] = Path(name) / export.format.value
            staged = repos[repo_id] / place_in_repo
            stage_export(export, staged, target)
            export_facts.append(verify_staged_export(export, staged, repo_id, place_in_repo))
        places = [Path(config.measured)] if config.measured else [folder, folder.resolve().parent]
        most = head.max_draft_tokens
        acceptance = load_measurement(places, "acceptance", folder, most)
        profile = build_profile(head, config.repo_id, provenance, acceptance or {})
        head.advice = advise_engine(head, profile or load_profile(folder))
        if profile is not None:
            stage_json(profile, repos[config.repo_id] / PROFILE, renaming)
        of_exports = [words for export in export_facts for words in export.target_weights]
        copied = dict.fromkeys([*head.build_card_facts(provenance).copied, *of_exports])
        holds = f"It holds {', '.join(copied)}" if copied else "It holds no copy of its weights"
        notices = [format_notice(its.name, holds) for its in terms if its.gated]
        pictures = [picture for file in PICTURES if (picture := find_first_file(places, file))]
        facts = CardFacts(
            repo_id=config.repo_id,
            head=head.build_card_facts(provenance),
            num_tokens_reason=head.advice.reason,
            target=target,
            provenance=scrub_provenance(provenance),
            license=config.license.lower() if config.license else None,
            acceptance=scrub_private_data(acceptance),
            speedup=scrub_private_data(load_measurement(places, "speedup", folder, most)),
            verdict=judge_measured_head(folder, find_kind_name(head), places),
            comparisons=[
                (Path(each) / "comparison.md").read_text(encoding="utf-8").strip()
                for each in config.comparisons
            ],
            figures=[picture.name for picture in pictures],
            exports=export_facts,
            notices=notices,
        )
        print(facts.verdict or UNMEASURED)
        for repo_id, staged in repos.items():
            repo_facts = facts
            if repo_id != config.repo_id:
                its_exports = [export for export in export_facts if export.repo_id == repo_id]
                repo_facts = replace(
                    facts, repo_id=repo_id, exports=its_exports, head_repo=config.repo_id
                )
            (staged / "README.md").write_text(str(build_model_card(repo_facts)), encoding="utf-8")
            for picture in pictures:
                shutil.copyfile(picture, staged / picture.name)
            print(repo_id)
            for path in list_files(staged):
                print(f"  {path.relative_to(staged).as_posix()} ({path.stat().st_size:,} bytes)")
        if config.dry_run:
            end_dry_run(config, repos)
        else:
            print("\n".join(upload_repositories(repos, config.private)))


def name_public_target(config: PushRun, provenance: dict[str, Any], target: str) -> str | None:
    """Name the target as others know it: its Hub id; None for the embedded default.

    Raises:
        InputError: the target is a local folder, and `base_model` is unset.
    """
    place, its_file = split_gguf_path(target) or (target, "")
    if config.base_model is not None:
        if its_file and split_gguf_path(config.base_model) is None:
            print(
                f"base_model={config.base_model} names no GGUF file, but the head was trained for "
                f"{its_file}; if that file is on the Hub, type base_model=owner/name/{its_file}"
            )
        return config.base_model
    if is_embedded(_target_settings(provenance).get("path") or ""):
        return None
    if not is_hub_id(place):
        raise InputError(
            f"base_model is unset, but this head's target is {target}, which others cannot find; "
            f"type base_model={'/'.join(filter(None, ('owner/name', its_file)))}, the target's "
            f"{'file' if its_file else 'id'} on the Hub"
        )
    return target


def check_source_terms(
    config: PushRun, provenance: dict[str, Any], target: str | None
) -> list[Terms]:
    """Ask the Hub for the terms of the head's sources, and print its answers.

    Raises:
        InputError: a source is private, but the head would be public.
    """
    adapter = _target_settings(provenance).get("adapter")
    terms = []
    for name in filter(None, (target, adapter)):
        on_hub = name == target or is_hub_id(name)
        asked = fetch_terms(parse_hub_id(name)) if on_hub else "not a Hub id"
        if isinstance(asked, str):
            print(
                f"{name}: {asked}. Its licence and terms are unknown here; check them before you "
                "push"
            )
            continue
        if asked.private and not config.private and not config.publish_private_target:
            raise InputError(
                f"private=false: {name} is a private repository, and a head carries weights and "
                "traces of its target; leave private=true, or set publish_private_target=true if "
                "it may be published"
            )
        if config.license is None and asked.license:
            print(f"license is unset; {name} has {asked.license}; set license= to name one")
        terms.append(asked)
    if config.license is None:
        print("the card will name no licence; license=apache-2.0, for example, names one")
    return terms


def format_notice(name: str, holds: str) -> str:
    """Format the notice on a gated source; `holds` says what of its weights the head contains."""
    return (
        f"[{name}](https://huggingface.co/{name}) is gated: users agree to its terms before they "
        "download it, and the terms apply to this head to the extent that it was made from it. "
        f"{holds}."
    )


def stage_head(folder: Path, staged: Path, renaming: Renaming) -> None:
    """Fill `staged` with the head's own files."""
    staged.mkdir()
    if not (folder / PROVENANCE).is_file():
        print(f"{folder}: has no {PROVENANCE}, so the card cannot tell how it was trained")
    left_out = []
    for path in sorted(folder.iterdir()):
        own = path.name in OWN_JSON or path.name.endswith(OWN_SUFFIXES)
        if not own or not path.is_file() or path.name.startswith((".", *NOT_WEIGHTS)):
            left_out.append(path.name)
        else:
            stage_file(path, staged, renaming)
    if left_out:
        print(f"not part of the head, skipped: {', '.join(left_out)}")


def _target_settings(provenance: dict[str, Any]) -> dict[str, Any]:
    return (provenance.get("config") or {}).get("target") or {}


def load_measurement(
    places: list[Path], name: str, folder: Path, most: int | None
) -> dict[str, Any] | None:
    """Load `acceptance.json` or `speedup.json`, and check that it suits the head.

    Args:
        places: folders; the first that has the file is used.
        name: file name without suffix.
        folder: folder of the head.
        most: most draft tokens of the head; None for any depth.

    Raises:
        InputError: the file lacks figures of the card, or measures another head.
    """
    path = find_first_file(places, f"{name}.json")
    if path is None:
        looked = ", ".join(str(place) for place in places)
        print(
            f"no {name}.json in {looked}, so the card has no figures of it (eval/{name}.py writes "
            "it)"
        )
        return None
    result = load_json(path) or {}
    tree = "dynamic_tree" if "dynamic_tree" in result else "static_tree"
    wanted = {
        "acceptance": (
            "tau", "tau_ci95", "alpha", "per_position", "by_category", "num_prompts", "prompts",
            "mode", tree,
        ),
        "speedup": ("methods", "baseline", "baselines", "lossless"),
    }[name]  # fmt: skip
    missing = [key for key in wanted if key not in result]
    rows = result.get("methods", {}).values()
    row_keys = ("speedup_ci95", "prompts")
    missing += [f"methods.*.{key}" for key in row_keys if any(key not in row for row in rows)]
    if missing:
        raise InputError(f"{path}: lacks {', '.join(missing)}; measure again with eval/{name}.py")
    if measures_another_head(other := result.get("head"), folder):
        raise InputError(
            f"{path}: measures another head, {other}; set measured= to this head's results"
        )
    if most is not None and len(result.get("alpha", [])) > most:
        raise InputError(
            f"{path}: measures drafts of {len(result['alpha'])} tokens, but this head drafts at "
            f"most {most}; measure again with eval/{name}.py"
        )
    return result


def find_first_file(places: list[Path], name: str) -> Path | None:
    """Return the path of a file in the first folder that has it; None if no folder does."""
    return next((place / name for place in places if (place / name).is_file()), None)


def end_dry_run(config: PushRun, repos: dict[str, Path]) -> None:
    """Write the files of an upload: one repository, or a folder for each of several."""
    out_dir = Path(config.out_dir)
    try:
        for repo_id, staged in repos.items():
            folder = out_dir if len(repos) == 1 else out_dir / repo_id.rsplit("/")[-1]
            shutil.copytree(staged, folder, dirs_exist_ok=True)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: {error}") from error
    print(f"dry run: nothing was uploaded; the files are in {config.out_dir}")
    print(f"links after upload: {', '.join(map(format_link, repos))}")
    changed_settings = collect_changed_settings(config)
    for key in ("dry_run", "out_dir"):
        changed_settings.pop(key, None)
    print_next_command("dry run", changed_settings)


if __name__ == "__main__":
    COMMAND.run(main)
