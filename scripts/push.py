"""Publishes a head on the Hub, with a card that says what was measured.

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
from conf.settings.export import PushRun
from scripts.refusals import check_push

COMMAND = Command(__doc__, PushRun, "push", check=check_push)
if __name__ == "__main__":
    COMMAND.begin()


from conf.errors import InputError
from conf.settings.export import Layout
from data.embedded import TARGET
from heads.folders import PROVENANCE
from heads.kind import DraftHead
from heads.kinds import kind_of, load_head
from scripts.publish import push_exports
from scripts.publish.card_facts import CardFacts, ExportFacts, copied_weights, is_hub_id
from scripts.publish.hub import Terms, ask_terms, files_of, upload
from scripts.publish.model_card import model_card
from scripts.publish.staging import place, published, read_json, scrubbed, write_json

FIGURES = ("acceptance.png", "speedup.png")
# Nothing else of a folder is a head's own; optimizer states, logs and data stay at home.
OWN_JSON = ("config.json", PROVENANCE, "draft_tree.json", "draft_confidence.json")
OWN_SUFFIXES = (".safetensors", ".safetensors.index.json")
NOT_WEIGHTS = ("optimizer", "scheduler", "random_states", "sampler")


def main(config: PushRun) -> None:
    """Stages, then writes to `out_dir` (dry run) or uploads, in one commit per repository."""
    check_push(config)
    exports = push_exports.open_exports(config.exports)
    folder = Path(str(config.head.path)).expanduser()
    head = load_head(str(folder))
    for export in exports:
        push_exports.check_same(head, export)
    provenance = read_json(folder / PROVENANCE) or {}
    terms = _terms(config, provenance, head.config.target)
    with tempfile.TemporaryDirectory(prefix="headsmith-push-") as name:
        repos = {config.repo_id: Path(name) / "head"}
        _stage_head(folder, provenance, repos[config.repo_id])
        found = [_stage_export(config, export, repos) for export in exports]
        notices = _notices(terms, copied_weights(head, provenance, found))
        facts = replace(_facts(config, head, folder, provenance), exports=found, notices=notices)
        _write_cards(facts, repos, _figures(config, folder))
        for repo_id, staged in repos.items():
            _show(repo_id, staged)
        if config.dry_run:
            _write_out(repos, Path(config.out_dir))
            print(f"dry run: nothing uploaded; what would be is in {config.out_dir}")
        else:
            print("\n".join(upload(repos, config.private)))


def _terms(config: PushRun, provenance: dict[str, Any], target: str) -> list[Terms]:
    """Asks the Hub about what the head was made from, and says what it answers.

    Raises:
        InputError: one of them is private, and the head would be public.
    """
    adapter = _target_settings(provenance).get("adapter")
    found = []
    for name in filter(None, (_target_name(provenance, target), adapter)):
        asked = ask_terms(name) if is_hub_id(name) else "not a Hub id"
        if isinstance(asked, str):
            print(f"{name}: {asked}. Its licence and terms are unknown here: look before you push")
            continue
        if asked.private and not config.private and not config.publish_private_target:
            raise InputError(
                f"private=false: {name} is a private repository, and a head carries weights and "
                "traces of its target; leave private=true, or set publish_private_target=true if "
                "it may be published"
            )
        if config.license is None and asked.license:
            print(f"license is not set; {name} names {asked.license}: set license= to name one")
        found.append(asked)
    if config.license is None:
        print("the card will name no licence")
    return found


def _notices(terms: list[Terms], copied: list[str]) -> list[str]:
    holds = f"It holds {', '.join(copied)}" if copied else "It holds no copy of its weights"
    return [
        f"[{each.name}](https://huggingface.co/{each.name}) is gated: who downloads it agrees to "
        f"its terms, and they apply to this head as far as it was made from it. {holds}."
        for each in terms
        if each.gated
    ]


def _stage_head(folder: Path, provenance: dict[str, Any], staged: Path) -> None:
    """Effects: fills `staged` with the head's own files."""
    staged.mkdir()
    if not provenance:
        print(f"{folder}: no {PROVENANCE}, so the card cannot say how it was trained")
    left_out = []
    for path in sorted(folder.iterdir()):
        if not _is_own(path):
            left_out.append(path.name)
        elif path.name == PROVENANCE:
            write_json(staged / PROVENANCE, published(provenance))
        elif path.name in OWN_JSON:
            write_json(staged / path.name, scrubbed(read_json(path)))
        else:
            place(path, staged / path.name)
    if left_out:
        print(f"not the head's own, left out: {', '.join(left_out)}")


def _is_own(path: Path) -> bool:
    if not path.is_file() or path.name.startswith((".", *NOT_WEIGHTS)):
        return False
    return path.name in OWN_JSON or path.name.endswith(OWN_SUFFIXES)


def _stage_export(
    config: PushRun, export: push_exports.ExportFolder, repos: dict[str, Path]
) -> ExportFacts:
    """Effects: fills a folder of the head's repository, or one that joins `repos`."""
    if config.layout is Layout.one:
        repo_id, folder = config.repo_id, export.format.value
    else:
        repo_id, folder = f"{config.repo_id}-{export.format.value}", ""
        repos[repo_id] = repos[config.repo_id].parent / export.format.value
    staged = repos[repo_id] / folder
    push_exports.stage_export(export, staged)
    return push_exports.verified(export, staged, repo_id, folder)


def _facts(config: PushRun, head: DraftHead, folder: Path, provenance: dict[str, Any]) -> CardFacts:
    """What a card says of the head alone."""
    places = _places(config, folder)
    kind = kind_of(head)
    most = kind.most_tokens(head)
    acceptance = scrubbed(_measurement(places, "acceptance", folder, most))
    return CardFacts(
        repo_id=config.repo_id,
        head=kind.facts(head, provenance, acceptance),
        target=_target_name(provenance, head.config.target),
        provenance=published(provenance),
        license=config.license.lower() if config.license else None,
        acceptance=acceptance,
        speedup=scrubbed(_measurement(places, "speedup", folder, most)),
    )


def _write_cards(facts: CardFacts, repos: dict[str, Path], figures: list[Path]) -> None:
    """Effects: puts a card, with its pictures, into every staged repository."""
    facts = replace(facts, figures=[figure.name for figure in figures])
    for repo_id, staged in repos.items():
        own = facts
        if repo_id != facts.repo_id:
            its = [export for export in facts.exports if export.repo_id == repo_id]
            own = replace(facts, repo_id=repo_id, exports=its, head_repo=facts.repo_id)
        (staged / "README.md").write_text(str(model_card(own)), encoding="utf-8")
        for figure in figures:
            shutil.copyfile(figure, staged / figure.name)


def _target_settings(provenance: dict[str, Any]) -> dict[str, Any]:
    return (provenance.get("config") or {}).get("target") or {}


def _target_name(provenance: dict[str, Any], target: str) -> str | None:
    """Returns the target as others can name it, or None for the embedded default."""
    if _target_settings(provenance).get("path") == TARGET:
        return None
    return target if is_hub_id(target) else Path(target).name


def _places(config: PushRun, folder: Path) -> list[Path]:
    """Where measurements may lie; the first that has a file counts."""
    return [Path(config.measured)] if config.measured else [folder, folder.resolve().parent]


def _figures(config: PushRun, folder: Path) -> list[Path]:
    found = [_find(_places(config, folder), name) for name in FIGURES]
    return [figure for figure in found if figure is not None]


def _measurement(
    places: list[Path], name: str, folder: Path, most: int | None
) -> dict[str, Any] | None:
    """Taps `acceptance.json` or `speedup.json`.

    Args:
        places: folders, the first that has the file counts.
        name: without its suffix.
        folder: of the head.
        most: draft tokens of the head; None for one that drafts to any depth.

    Raises:
        InputError: it lacks what the card quotes, or measured another head.
    """
    path = _find(places, f"{name}.json")
    if path is None:
        looked = ", ".join(str(place) for place in places)
        print(f"no {name}.json in {looked}: the card will not quote it (eval/{name}.py writes it)")
        return None
    found = read_json(path) or {}
    wanted = {
        "acceptance": ("tau", "alpha", "per_position", "by_category", "num_prompts", "mode"),
        "speedup": ("methods", "baseline", "baselines", "lossless"),
    }[name]
    missing = [key for key in wanted if key not in found]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}; measure again with eval/{name}.py")
    other = found.get("head")
    if isinstance(other, str) and Path(other).is_dir() and not Path(other).samefile(folder):
        raise InputError(f"{path}: measures another head, {other}; set measured=")
    if most is not None and len(found.get("alpha", [])) > most:
        raise InputError(
            f"{path}: measures drafts of {len(found['alpha'])} tokens, and this head drafts at "
            f"most {most}"
        )
    return found


def _find(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _show(repo_id: str, staged: Path) -> None:
    print(repo_id)
    for path in files_of(staged):
        print(f"  {path.relative_to(staged).as_posix()} ({path.stat().st_size:,} bytes)")


def _write_out(repos: dict[str, Path], out_dir: Path) -> None:
    """Writes what would be uploaded: a repository, or a folder for each of several."""
    try:
        for repo_id, staged in repos.items():
            there = out_dir if len(repos) == 1 else out_dir / repo_id.rsplit("/")[-1]
            shutil.copytree(staged, there, dirs_exist_ok=True)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: {error}") from error


if __name__ == "__main__":
    COMMAND.run(main)
