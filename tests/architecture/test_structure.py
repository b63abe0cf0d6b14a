"""How tangled the package may be, as `tools/structure.py` measures it."""

import re

from tools import structure

MAX_FILES_IN_FOLDER = 20
MAX_CLASSES_TO_BASE = 3


def test_a_folder_is_looked_over_at_a_glance_and_a_trainer_has_its_base_near():
    numbers = structure.structure()
    assert numbers["files in the largest folder"] <= MAX_FILES_IN_FOLDER
    assert len(list((structure.ROOT / "examples").glob("*.py"))) <= MAX_FILES_IN_FOLDER
    assert len(chain := structure.trainer_chain()) <= MAX_CLASSES_TO_BASE, chain


def test_nothing_imports_in_a_circle():
    assert structure.circles() == [], "move what both need below them, or pass it in"


def test_text_that_names_own_code_is_an_import_except_in_the_tables_of_registries():
    found = structure.imports_as_text(structure.PACKAGE / "report" / "recorder.py")
    assert [module for _, module in found] == ["nemo_rl.report.page"]
    for name, tables in structure.REGISTRIES.items():
        source = structure.modules()[name].read_text(encoding="utf-8")
        gone = [table for table in tables if not re.search(rf"^ *{table}\b.* = ", source, re.MULTILINE)]
        assert not gone, f"{name} has no {gone}"


def test_the_walks_name_files_that_exist():
    for heading, files in structure.walks().items():
        assert all((structure.ROOT / file).is_file() for file in files), heading
