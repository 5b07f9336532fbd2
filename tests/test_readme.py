import re
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf import schema, schema_capture, schema_eagle, schema_export, schema_measure, schema_medusa2

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SCHEMAS = {
    "medusa": schema.MedusaRun,
    "eagle": schema_eagle.EagleRun,
    "acceptance": schema_measure.AcceptanceRun,
    "speedup": schema_measure.SpeedupRun,
    "tree_search": schema_measure.TreeSearchRun,
    "capture": schema_capture.CaptureRun,
    "regenerate": schema.RegenerateRun,
    "show_mask": schema.ShowMaskRun,
    "push": schema.PushRun,
    "compare": schema.CompareRun,
    "serve_check": schema_measure.ServeCheckRun,
    "export": schema_export.ExportRun,
    "medusa2": schema_medusa2.Medusa2Run,
    "merge_adapter": schema_medusa2.MergeAdapterRun,
    "prune": schema_measure.PruneRun,
}
# Without Hydra; a test of its own runs it.
PLAIN = {"verify_export"}
COMMANDS = re.findall(r"^(?:python|accelerate launch\b.*?) +(\S+/(\w+)\.py)(.*)$", README, re.M)
COMPOSED = [command for command in COMMANDS if command[1] not in PLAIN]


@pytest.mark.parametrize(("path", "name", "rest"), COMPOSED, ids=[c[1] + c[2] for c in COMPOSED])
def test_every_command_composes(path: str, name: str, rest: str) -> None:
    assert (ROOT / path).is_file()
    overrides = [word for word in rest.split("#", maxsplit=1)[0].split() if "=" in word]
    ConfigStore.instance().store(name=f"{name}_schema", node=SCHEMAS[name])
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        OmegaConf.to_object(compose(name, overrides))


def test_the_readme_shows_every_command() -> None:
    assert {name for _, name, _ in COMMANDS} == {*SCHEMAS, *PLAIN}


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z][a-z-]*)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_file_list_is_complete() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folders = ("conf", "data", "heads", "eval", "train", "scripts")
    for file in listed.stdout.split():
        if file.endswith(".py") and file.startswith(folders) and not file.endswith("__init__.py"):
            assert re.search(rf"^ +{Path(file).name} ", README, re.M), f"{file} is not listed"
