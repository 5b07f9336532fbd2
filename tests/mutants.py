"""Mutation testing with mutmut: does a test fail when a line is wrong?

`python tests/mutants.py [file ...]`, all of `TESTS` unless told. What is done is kept under
`.mutants/`: a further run goes on, tries survivors again, and starts anew for changed functions.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".mutants"
SOURCES = ("conf", "data", "heads", "eval", "train", "scripts")
# The tests that cover a file; in each of them only those that call the mutated function are run.
TESTS = {
    "train/batch/data_loader.py": "train/batch/test_data_loader train/loop/test_loop",
    "train/parallel/optimizers.py": "train/parallel/test_optimizers",
    "eval/measure/acceptance_stats.py": "eval/measure/test_acceptance_stats",
    "eval/measure/modes.py": "eval/measure/test_modes",
    "eval/measure/results.py": "eval/measure/test_results",
    "eval/compare/acceptance_files.py": "eval/compare/test_acceptance_files",
    "eval/measure/replay.py": "eval/decode/test_engine",
    "heads/decoding/sampling.py": "heads/decoding/test_sampling eval/decode/test_verification",
    "eval/decode/verification.py": "eval/decode/test_verification",
    "eval/compare/timing.py": "eval/compare/test_timing",
    "eval/compare/speedup_stats.py": "eval/compare/test_speedup_stats",
    "train/loss/divergences.py": "train/loss/test_fused_linear train/test_eagle",
    "train/loss/fused_linear.py": "train/loss/test_fused_linear train/loss/test_medusa "
    "train/test_eagle train/test_blocks",
    "train/medusa.py": "train/loss/test_medusa train/loss/test_fused_linear train/test_medusa "
    "train/test_medusa2 train/test_fresh_heads train/loop/test_memory heads/test_medusa",
    "train/step_objective.py": "train/loss/test_fused_linear train/test_eagle train/test_blocks",
    "train/eagle.py": "train/loss/test_fused_linear train/test_eagle train/test_fresh_heads "
    "train/loop/test_memory heads/eagle/test_eagle",
    "data/prepared/packing.py": "data/prepared/test_packing data/prepared/test_dataset_cache",
    "data/templates/record_encoder.py": "data/templates/test_record_encoder "
    "data/templates/test_encoder_edges",
    "train/parallel/checkpoint.py": "train/parallel/test_checkpoint",
    "train/loop/loop.py": "train/loop/test_non_finite",
    "eval/decode/engine.py": "eval/decode/test_engine eval/decode/test_drafters "
    "eval/compare/test_timing eval/decode/test_many",
}
SURVIVED = (None, 0, 5, 33)  # not tried; no test failed; no test was found
SETTINGS = """\
[mutmut]
source_paths =
    {sources}
only_mutate = {path}
also_copy =
    {others}
pytest_add_cli_args_test_selection =
    {tests}
pytest_add_cli_args =
    -p
    no:cacheprovider
process_isolation = forkserver
do_not_mutate_patterns = tqdm
timeout_multiplier = 4.0
timeout_constant = 2.0
"""


def prepare(path: str) -> Path:
    """A copy of the repository with settings for one file."""
    work = WORK / path.replace("/", ".")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    for name in names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, work / name)
    lists = {
        "sources": SOURCES,
        "others": sorted({name.split("/")[0] for name in names} - {*SOURCES}),
        "tests": [f"tests/{name}.py" for name in TESTS[path].split()],
    }
    lines = {key: "\n    ".join(values) for key, values in lists.items()}
    (work / "setup.cfg").write_text(SETTINGS.format(path=path, **lines))
    return work


def forget(work: Path, path: str) -> None:
    """Tests may be new since the last run: who survived is tried again."""
    (work / "mutants/mutmut-stats.json").unlink(missing_ok=True)
    meta = work / f"mutants/{path}.meta"
    if meta.exists():
        found = json.loads(meta.read_text())
        codes = found["exit_code_by_key"]
        found["exit_code_by_key"] = {k: None if c in SURVIVED else c for k, c in codes.items()}
        meta.write_text(json.dumps(found))


def mutate(path: str) -> str:
    """Runs what is left of a file's mutants; its line of the table."""
    work = prepare(path)
    forget(work, path)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mutmut", "run"]
    subprocess.run(command, cwd=work, env=environ, check=True)
    codes = json.loads((work / f"mutants/{path}.meta").read_text())["exit_code_by_key"]
    survived = [name for name, code in codes.items() if code in SURVIVED]
    for name in survived:
        shown = subprocess.run(
            [sys.executable, "-m", "mutmut", "show", name],
            cwd=work, env=environ, check=True, capture_output=True, text=True,
        )  # fmt: skip
        print(shown.stdout)
    killed = len(codes) - len(survived)
    return f"{path}\t{killed}/{len(codes)} killed"


def main() -> None:
    """A table of killed and all mutants by file."""
    print("\n".join([mutate(path) for path in sys.argv[1:] or TESTS]))


if __name__ == "__main__":
    main()
