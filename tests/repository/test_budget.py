"""The budget of the repository: what may not grow unseen, each bound with its reason.

A change that needs more says so here, in the same commit; `python tests/repository/size.py` prints today's numbers.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from repository.size import PACKAGE, ROOT, lines_of_configs, size_under

BUDGETS = {
    # Parts of code, as size.py counts them. lightning.pytorch 2.6 has 98,000 of them, in 22,000 lines; ours have 7.2 in
    # a line. What has come since there is a budget, in lines:
    # 2,000 are classes of programs that were refused before: manual optimization, streams and several loaders, one data
    # set per client, one trainer object, configs of LightningCLI.
    # 240 say what a run is (run/identity.py), so that no job goes on with another one's weights; 50 start the processes
    # of a run again that were lost (run/processes.py), and end those of a study with its command (studies/workers.py);
    # 55 evaluate what hooks put into the module, as callbacks with a moving average do, and find frozen parts that
    # training replaces.
    # 110 keep what SECURITY.md promises of foreign folders, files and names (run/trust.py, core/text.py).
    # 630 make a client's round a function of messages (federation/messages.py, elsewhere.py, trainer/client_round.py).
    # 48 are what Windows lacks, in another way (core/files.py, core/machine.py).
    # 183 carry these messages to actors of Ray, and start actors again that were lost (distributed/ray_backend.py).
    # 72 leave vectors with the clients, in two versions, so that no lost answer counts (federation/kept_rows.py).
    # 299 write a run as an app of Flower, and carry these messages to its SuperNodes (distributed/flower_backend.py,
    # commands/deploy.py).
    # 57 read the number of processes from a launcher, and go on when machines leave or join (distributed/fabric.py).
    # 107 have clients elsewhere evaluated there, as they are trained.
    # 13 lead large vectors through a CPU's cache piece by piece (core/devices.py).
    # 35 are what a worker and its server must share beside the model (run/identity.py), 27 compare whole answers
    # (trainer/verification.py).
    # 17 refuse options of no backend, and what cannot be done elsewhere.
    # 168 say what each field of a client's answer may be, and refuse all else (federation/expected.py).
    # 75 do the runs of a study as tasks of Ray (studies/ray_tasks.py).
    # 22 say in which line a user's module cannot be imported, and refuse a key that stands twice in a config (cli/).
    # 6 refuse the start of another run before anything of it is taken over (federation/expected.py).
    # And in parts: 800 tell of clients and metrics that are missing, and follow imports inside of methods (run/,
    # evaluation/, core/origin.py); 1,100 correct comparisons for their number, keep test data from trials, build a
    # study in full before its first run, and plan it within a quarter (studies/, planning/).
    # 2,200 launch recorded steps as CUDA graphs, and read what a cohort has logged at once (engines/): a GPU stands
    # still for nine tenths of the time without. 1,350 read image folders by site and tables beside them, take clients'
    # data by name, and show classes by name (data/, datamodules/); 230 write predictions in one process, refuse a text
    # as secret wherever a config may hold one, and name each part's argument as it was given.
    # 185 tune all algorithms of a study alike by one line, add one of the user's own by a file, and give up a finished
    # run whose table is gone (studies/); 110 are names in any letters that Python knows, and what a file's calls make
    # of its names (run/trust.py, core/origin.py).
    # 60 end a run that nobody answers, for every backend (federation/elsewhere.py), and do a study's other runs where
    # one cannot be written (studies/workers.py).
    # 50 are z's mean over clients and the worst tenth of their own models (evaluation/summary.py); 55 free what a run
    # of a study has made, keep fine-tuning from a teacher, and hold a worker's rows in memory (state/declaration.py).
    # 35 show each client's numbers under each method's models on a study's page, as one who compared hospitals missed,
    # and say in words whose model a metric is of (pages/pages.py).
    # 25 make runs with a backend those of one process also where hooks write frozen parameters and where clients'
    # modules begin with other weights, and tell of what cannot reach them (federation/elsewhere.py, kept_rows.py).
    # 35 tell of files beside a user's images that cannot be read, such as DICOM's (datamodules/image_tree.py), and 20
    # draw figures once instead of twice (studies/drawing.py).
    # 305 end a run whose training nobody answers while its evaluations are answered, refuse that a method's half uses
    # what is not there where it would find old values, or lose new ones, refuse several processes where a backend has
    # them, and name what a backend of one's own may not be or bring.
    # 185 share clients out by how fast each process was, if that is asked for (federation/participation.py).
    # 240 name the line of a user's module that raises without a word, refuse a dotted key beside the section that has
    # it, and tell of images without a row and of empty folders (cli/, core/private_cli.py, datamodules/image_tree.py);
    # 55 call clients by their names where a step of theirs fails or a metric is undefined (core/text.py).
    # 110 name the class that a text in Python is like, as the command line does (core/checks.py); 60 are faster sums of
    # large models (state/); 65 look for what a key is like in its own section, and among other programs' names, first
    # (cli/messages.py). 25 pass over this tool's own pictures below a folder of images (datamodules/image_tree.py).
    PACKAGE: 190_477,
    # Every question about a number ends in the engines, so they must be read in one sitting. 150 record mapped
    # evaluations, too; 190 put back what a trace leaves in the user's objects, on which a later step failed.
    ("fedbc_lightning/engines",): 22_509,
    # What only compares, shows and types must not outgrow what trains.
    tuple(f"fedbc_lightning/{folder}" for folder in ("studies", "pages", "papers", "commands", "cli")): 38_684,
    # As much test as package: more costs every change, and time in CI. 2,900 break users' files in 200 ways; 400 ask
    # the site's own search, a browser, and a count of long sentences about the pages. 33 decode texts, which the
    # package does not need, and misspell keys and classes in more ways; 85 compare a client's distance among others;
    # 26 put runs beside sites; 350 compare recorded evaluations with those as written, and keep things in steps.
    ("tests",): 199_550,
}
CONFIG_LINES = 2_550
"""A config names what differs from the defaults; a copy of the defaults is stale after their first change.

50 tune all methods alike, in place of a script."""
FUNCTION_LINES = 60
"""A function fits a screen, without its docstring."""
COMPLEXITY = 15
"""Branches of a function; above this nobody can name the cases that a test must cover."""
ARGUMENTS = 12
"""Arguments of a function; one with more has two jobs."""
OPTION_FILES = 4
"""Files that name a trainer's option: its argument, its use, a test, a page; more is a copy."""

GENERATED = {ROOT / "docs" / "reference" / "settings.md", Path(__file__)}
"""The page that a script makes of the docstrings, and this file, which counts."""

_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


class Function(NamedTuple):
    """A function of the package, and what the budget bounds."""

    place: str
    name: str
    lines: int
    complexity: int
    arguments: int


@cache
def functions() -> list[Function]:
    """Measure every function of the package."""
    return list(_functions())


def _functions() -> Iterator[Function]:
    for path in sorted(path for folder in PACKAGE for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = {
            id(child): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield _measure(node, f"{path.relative_to(ROOT)}:{node.lineno}", owners.get(id(node)))


def _measure(node: ast.FunctionDef | ast.AsyncFunctionDef, place: str, owner: str | None) -> Function:
    documentation = node.body[0] if ast.get_docstring(node) is not None else None
    lines = _span(node) - (_span(documentation) if documentation else 0)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in {"self", "cls"}]
    complexity = 1 + sum(isinstance(inner, _BRANCHES) for inner in ast.walk(node))
    return Function(
        place, f"{owner}.{node.name}" if node.name == "__init__" else node.name, lines, complexity, len(named)
    )


def _span(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]  # functions and statements have both


@pytest.mark.parametrize(("folders", "most"), BUDGETS.items(), ids=["package", "engines", "studies", "tests"])
def test_parts_of_code(folders, most):
    assert size_under(*folders).parts <= most, f"{' + '.join(folders)}: delete something, or raise it with a reason"


def test_lines_of_configs():
    assert lines_of_configs() <= CONFIG_LINES


def test_functions_fit_a_screen():
    assert not [function for function in functions() if function.lines > FUNCTION_LINES]


def test_functions_have_few_branches():
    assert not [function for function in functions() if function.complexity > COMPLEXITY]


def test_functions_have_few_arguments():
    assert not [function for function in functions() if function.arguments > ARGUMENTS]


def test_an_option_of_the_trainer_is_written_down_in_few_files():
    named = [path for path in _texts() if "checkpoint_every_minutes" in path.read_text(encoding="utf-8")]
    assert 0 < len(named) <= OPTION_FILES, named


def _texts() -> Iterator[Path]:
    """All files that a person writes, but for CHANGELOG."""
    for folder in (*PACKAGE, "configs", "tests", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".yaml", ".md", ".ipynb"} and path not in GENERATED:
                yield path
