"""What the documentation says is so: its code runs, its commands parse, its messages and options exist."""

import ast
import doctest
import importlib
import inspect
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from datasets import Dataset

import trl_paddingfree
from scripts.benchmark import tables
from scripts.benchmark.__main__ import make_parser as make_benchmark_parser
from tests.helpers.pages import ROOT, blocks, short_and_local
from tests.helpers.tiny import conversations, preference_data
from tests.helpers.vision import vision_completions
from tests.test_house import FILES, PACKAGE, calls_of_a_step
from tests.test_package import MODULES
from trl_paddingfree.cli.main import make_parser
from trl_paddingfree.cli.train import make_parser as make_script_parser
from trl_paddingfree.core.model.backends import BACKENDS
from trl_paddingfree.core.trainers.configs import PaddingFreeOptions

pytestmark = pytest.mark.usefixtures("checkout_stays")

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/benchmarks/README.md"])
}
CHINESE = "README.zh.md"  # says what README.md says
SCRIPTS = ("dpo", "sft", "reward", "kto", "grpo", "rloo", "distillation")
COMMANDS = ["inspect", "check", *SCRIPTS, "env", "quickstart"]


def page_with(head):
    """The page with the table whose first column is called `head`."""
    (page,) = [text for text in PAGES.values() if f"\n| {head} |" in text]
    return page


def table(head):
    """The rows of the tables of one page whose first column is called `head`."""
    rows = []
    for after in page_with(head).split(f"\n| {head} |")[1:]:
        lines = [*after.splitlines()[2:], ""]
        rows += lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


# These pages have tests of their own
OTHERS = (CHINESE, "docs/house.md", "docs/write_a_trainer.md", "docs/any_trainer.md", "docs/packed.md")
PYTHON = [(name, block) for name, page in PAGES.items() if name not in OTHERS for block in blocks(page, "python")]
EXAMPLES = [pytest.param(block, id=name) for name, block in PYTHON if not block.startswith((">>>", '"""'))]
SESSIONS = {}  # by page: what one block defines, the next ones use
for name, block in PYTHON:
    if block.startswith(">>>"):
        SESSIONS[name] = SESSIONS.get(name, "") + block


def test_every_example_in_a_docstring_gives_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [name for name in MODULES if doctest.testmod(importlib.import_module(name)).failed] == []


def test_every_public_name_has_an_example_that_runs():
    # Configurations have the options of `PaddingFreeOptions`, and its example
    for name in [name for name in trl_paddingfree.__all__ if not name.endswith("Config") and name != "__version__"]:
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(trl_paddingfree, name)))
        assert any(example.want for example in examples), f"{name} has no example with a result"


def test_the_readme_has_an_example_and_the_pages_have_others():
    assert len([name for name, _ in PYTHON if name == "README.md"]) == 1
    assert len(EXAMPLES) > 1
    assert len(SESSIONS) > 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_pages_python_trains(example, monkeypatch, tmp_path, model_dir, vision_dir):
    data = {
        "trl-lib/ultrafeedback_binarized": preference_data(8, 0),
        "trl-lib/Capybara": conversations(8, 0),
        "trl-lib/llava-instruct-mix": vision_completions(8, 0),
        "openbmb/UltraFeedback": Dataset.from_list(
            [{"instruction": "w1", "completions": [{"response": f"w{i}", "overall_score": i / 2} for i in range(4)]}]
            * 2
        ),
        "berkeley-nest/Nectar": Dataset.from_list(
            [{"prompt": " w1", "answers": [{"answer": f"w{i}", "rank": i} for i in range(1, 8)]}] * 2
        ),
    }
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: data[name])
    models = {"Qwen/Qwen3-0.6B": model_dir, "Qwen/Qwen2.5-VL-3B-Instruct": vision_dir}
    names = {}
    exec(short_and_local(example, models, tmp_path), names)
    assert names["trainer"].state.global_step == 1
    assert names["trainer"].method.startswith("padding-free")


def test_the_idea_in_one_file_equals_padded_trl(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = [block for name, block in PYTHON if block.startswith('"""')]
    assert len(program.splitlines()) <= 150
    assert "trl_paddingfree" not in program
    exec(program, {"__name__": "__main__"})
    computed, padded = map(int, re.search(r"(\d+) tokens computed in place of (\d+)", capsys.readouterr().out).groups())
    assert computed < padded / 2
    sees_all = program.replace("path[: position + 1]", "range(position + 1)")
    assert sees_all != program
    with pytest.raises(AssertionError, match="not close"):
        exec(sees_all, {"__name__": "__main__"})


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_the_pages_sessions_print_what_they_show(session):
    test = doctest.DocTestParser().get_doctest(session, {}, "page", "page", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0


def commands(text):
    """The commands of all shell blocks, without comments."""
    joined = "\n".join(blocks(text, "bash")).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]


def parses(script, argv):
    """Parse the options of a script and of `accelerate launch` as the command does."""
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser = make_script_parser(script)
    argv = [*argv, "--use_cpu", "true", "--bf16", "false"]
    *_, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    launch_command_parser().parse_args([*resolve_accelerate_config_argument(rest), "script.py"])


SHELL = {" ".join(argv): argv for page in PAGES.values() for argv in commands(page)}


def test_the_pages_commands_parse(monkeypatch):
    monkeypatch.chdir(ROOT)
    for argv in SHELL.values():
        assert_parses(argv)


def assert_parses(argv):
    argv = [part for part in argv if not re.match(r"[A-Z_]+=", part)]
    program, command, *options = argv + [""] * (len(argv) == 1)
    if program == "trl-paddingfree" and command in SCRIPTS:
        parses(command, options)
    elif program == "trl-paddingfree":
        assert make_parser().parse_args(argv[1:]).command == command
    elif program in ("accelerate", "torchrun"):
        script = options.index("scripts/dpo.py")
        files = [each for name, each in pairwise(options) if name in ("--config_file", "--config")]
        assert [file for file in files if not (ROOT / file).is_file()] == []
        parses("dpo", options[script + 1 :])
    elif argv[:3] == ["python", "-m", "scripts.benchmark"]:
        make_benchmark_parser().parse_args(argv[3:])
    elif program == "python" and command == "-m":
        assert options[0] == "pytest"
        assert [part for part in options if part.startswith("tests") and not (ROOT / part).exists()] == []
    elif program == "python":
        assert (ROOT / command).is_file()
        source = (ROOT / command).read_text(encoding="utf-8")
        if "from written import" in source:  # its options, too
            source += (ROOT / "scripts" / "written.py").read_text(encoding="utf-8")
        assert [option for option in options if option.startswith("--") and f'"{option}"' not in source] == []
    elif program == "rm":  # how to take a capability out; the package may be installed elsewhere
        roots = (PACKAGE.parent, ROOT)
        assert [part for part in options if not any((root / part).is_dir() for root in roots)] == []
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
    else:
        assert program in ("pip", "ruff", "mypy", "mkdocs")
        assert program != "mkdocs" or (ROOT / options[options.index("-f") + 1]).is_file()
        assert program != "pip" or command == "install"


def test_the_readmes_test_command_is_that_of_ci():
    for name in ("README.md", CHINESE, "CONTRIBUTING.md", ".ci/run"):
        assert "python -m pytest -n 2" in (ROOT / name).read_text(encoding="utf-8"), name


def test_contributing_names_what_ci_checks():
    documented = [" ".join(argv) for argv in commands(PAGES["CONTRIBUTING.md"])]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    stages = [line.removesuffix(" -q").partition("stage ") for line in lines[lines.index("stage ruff check .") :]]
    checks = [before + command for before, is_stage, command in stages if is_stage]
    assert len(checks) > 9
    assert [check for check in checks if check not in documented] == []


def test_every_command_is_documented():
    assert re.findall(r"`(\w+)`", " ".join(row[0] for row in table("command"))) == COMMANDS
    for command in COMMANDS:
        assert f"trl-paddingfree {command}" in page_with("command")


def test_every_choice_of_an_option_is_documented():
    rows, options = table("option"), PaddingFreeOptions.__dataclass_fields__
    assert [name.strip("`") for name, *_ in rows] == [*options]
    for (name, option), (*_, meaning) in zip(options.items(), rows, strict=True):
        if name != "flat_attention":  # its choices have a table of their own
            assert [x for x in get_args(option.type) if isinstance(x, str) and f'`"{x}"`' not in meaning] == []


def test_every_backend_is_documented():
    assert [backend.strip("`") for backend, *_ in table("backend")] == [*BACKENDS]


@pytest.mark.parametrize(("head", "budget"), [("in a step", None), ("under a budget", 20)])
def test_a_step_calls_the_functions_of_the_page_in_its_order(head, budget):
    called = [*dict.fromkeys(calls_of_a_step("dpo", max_tokens_per_micro_batch=budget))]
    named = [(function.strip("`"), file.strip("`")) for function, file, _ in table(head)]
    assert named == sorted(named, key=called.index)


def test_every_logged_figure_is_documented():
    documented = [name.strip("`") for name, _ in table("figure")]
    assert sorted(documented) == sorted(re.findall(r'"(flat/\w+)"', "".join(FILES.values())))


def messages():
    """All strings in the package, with the values that they are formatted with left out."""
    texts = []
    for source in FILES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize(("head", "least"), [("message", 16), ("line", 6)])
def test_the_messages_that_pages_quote_exist(head, least):
    quoted = [message.strip("`") for message, _ in table(head)]
    everything = messages()
    assert [message for message in quoted if message not in everything] == []
    assert len(quoted) >= least


def test_the_chinese_readme_has_the_code_of_the_english_one():
    for language in ("python", "bash", "text"):
        assert blocks(PAGES[CHINESE], language) == blocks(PAGES["README.md"], language)


def links(name):
    """Where the links of a page lead inside the repository: paths from its root, and anchors."""
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]) if not target.startswith("https://")]
    found = []
    for target in targets:
        path, _, anchor = target.partition("#")
        full = os.path.normpath(ROOT / Path(name).parent / path) if path else ROOT / name
        found.append((os.path.relpath(full, ROOT), anchor))
    return found


def anchors(text):
    """What the headings of a page are called in links."""
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]


def test_links_lead_somewhere_and_to_every_page_from_the_readme():
    for name in PAGES:
        for target, anchor in links(name):
            assert (ROOT / target).exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(PAGES[target]), f"{name}: {target}#{anchor}"
    reached, listed = ({target for target, _ in links(name)} for name in ("README.md", "docs/README.md"))
    others = PAGES.keys() - {"README.md", "docs/README.md"}
    assert others <= reached
    assert others <= listed


def test_the_benchmarks_tables_say_what_its_results_say():
    assert tables.update(ROOT, check=True) == 0


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {trl_paddingfree.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {trl_paddingfree.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
