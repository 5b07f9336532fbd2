from graphlib import TopologicalSorter

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is not installed")

FOLDERS = ("conf", "data", "heads", "eval", "train", "scripts")


def test_no_module_imports_itself_by_way_of_others_not_even_for_types():
    graph = grimp.build_graph(*FOLDERS, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
