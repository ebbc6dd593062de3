"""What the documentation says is so: its code runs, its commands parse, its messages and options exist."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from trl import TrlParser

import trl_paddingfree
from scripts.benchmark.__main__ import make_parser as make_benchmark_parser
from tests.helpers.pages import ROOT, blocks, short_and_local
from tests.helpers.tiny import conversations, lora, make_model, preference_data
from tests.helpers.vision import vision_completions
from tests.runs import make_trainer
from trl_paddingfree.cli.main import make_parser
from trl_paddingfree.cli.train import make_parser as make_script_parser
from trl_paddingfree.model.masks import BACKENDS
from trl_paddingfree.trainers.configs import PaddingFreeDPOConfig, PaddingFreeOptions

PACKAGE = Path(trl_paddingfree.__file__).parent  # it may be installed elsewhere
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/benchmarks/README.md"])
}
CHINESE = "README.zh.md"  # says what README.md says
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trl_paddingfree.__path__, "trl_paddingfree.")
    if not module.name.endswith("__main__")
)
SCRIPTS = ("dpo", "sft", "reward", "kto", "grpo", "rloo", "distillation")
COMMANDS = ["inspect", "check", *SCRIPTS, "env", "quickstart"]
# What generated tables stand between, on the pages that have some
MARKERS = {
    "README.md": "benchmark",
    "README.zh.md": "benchmark",
    "docs/benchmarks/README.md": "benchmark-tables",
}


def page_with(head: str) -> str:
    """The page with the table whose first column is called `head`."""
    (page,) = [text for text in PAGES.values() if f"\n| {head} |" in text]
    return page


def table(head: str) -> list[list[str]]:
    """The rows of the one table whose first column is called `head`."""
    _, after = page_with(head).split(f"\n| {head} |")
    lines = [*after.splitlines()[2:], ""]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


# These pages have tests of their own
OTHERS = (CHINESE, "docs/write_a_trainer.md", "docs/any_trainer.md", "docs/packed.md")
PYTHON = [(name, block) for name, page in PAGES.items() if name not in OTHERS for block in blocks(page, "python")]
EXAMPLES = [pytest.param(block, id=name) for name, block in PYTHON if not block.startswith(">>>")]
SESSIONS: dict[str, str] = {}  # by page: what one block defines, the next ones use
for name, block in PYTHON:
    if block.startswith(">>>"):
        SESSIONS[name] = SESSIONS.get(name, "") + block


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_gives_what_it_says(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# Configurations have the options of `PaddingFreeOptions`, and its example
WITH_EXAMPLES = [name for name in trl_paddingfree.__all__ if not name.endswith("Config") and name != "__version__"]


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES))
def test_every_public_name_has_an_example_that_runs(name):
    documented = getattr(trl_paddingfree, name)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(documented))
    assert any(example.want for example in examples), f"{name} has no example with a result"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_and_class_says_what_it_is(name):
    module = importlib.import_module(name)
    own = {x: value for x, value in vars(module).items() if getattr(value, "__module__", "") == name}
    silent = [x for x, value in own.items() if not x.startswith("_") and callable(value) and not value.__doc__]
    assert silent == []


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
    }
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: data[name])
    models = {"Qwen/Qwen3-0.6B": model_dir, "Qwen/Qwen2.5-VL-3B-Instruct": vision_dir}
    names = {}
    exec(short_and_local(example, models, tmp_path), names)
    assert names["trainer"].state.global_step == 1
    assert names["trainer"].method.startswith("padding-free")


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_the_pages_sessions_print_what_they_show(session):
    test = doctest.DocTestParser().get_doctest(session, {}, "page", "page", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0


def commands(text: str) -> list[list[str]]:
    """The commands of all shell blocks, without comments."""
    joined = "\n".join(blocks(text, "bash")).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]


def parses(script: str, argv: list[str]) -> None:
    """Parse the options of a script and of `accelerate launch` as the command does."""
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser: TrlParser = make_script_parser(script)
    argv = [*argv, "--use_cpu", "true", "--bf16", "false"]
    *_, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    launch_command_parser().parse_args([*resolve_accelerate_config_argument(rest), "script.py"])


SHELL = {" ".join(argv): argv for page in PAGES.values() for argv in commands(page)}


@pytest.mark.parametrize("argv", SHELL.values(), ids=SHELL)
def test_the_pages_commands_parse(argv, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = [part for part in argv if not re.match(r"[A-Z_]+=", part)]
    program, command, *options = argv + [""] * (len(argv) == 1)
    if program == "trl-paddingfree" and command in SCRIPTS:
        parses(command, options)
    elif program == "trl-paddingfree":
        assert make_parser().parse_args(argv[1:]).command == command
    elif program in ("accelerate", "torchrun"):
        script = options.index("scripts/dpo.py")
        assert program == "torchrun" or (ROOT / options[options.index("--config_file") + 1]).is_file()
        parses("dpo", options[script + 1 :])
    elif argv[:3] == ["python", "-m", "scripts.benchmark"]:
        make_benchmark_parser().parse_args(argv[3:])
    elif program == "python" and command == "-m":
        assert options[0] == "pytest"
        assert [part for part in options if part.startswith("tests") and not (ROOT / part).exists()] == []
    elif program == "python":
        assert (ROOT / command).is_file()
        source = (ROOT / command).read_text(encoding="utf-8")
        assert [option for option in options if option.startswith("--") and f'"{option}"' not in source] == []
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
    checks = [line.strip().removesuffix(" -q") for line in lines[lines.index("ruff check .") :]]
    others = ("deactivate", "rm ", "((room")
    assert [check for check in checks if check not in documented and not check.startswith(others)] == []


@pytest.mark.parametrize("name", ["README.md", CHINESE])
def test_the_readme_is_short(name):
    assert len([line for line in PAGES[name].splitlines() if line.strip()]) <= 110


def test_every_command_is_documented():
    documented = re.findall(r"`(\w+)`", " ".join(row[0] for row in table("command")))
    assert documented == COMMANDS
    for command in COMMANDS:
        assert f"trl-paddingfree {command}" in page_with("command")


def test_every_option_is_documented_with_its_default():
    rows = table("option")
    config = PaddingFreeDPOConfig("unused", bf16=False)
    fields = [field.strip("`") for field, *_ in rows]
    assert fields == list(PaddingFreeOptions.__dataclass_fields__)
    for field, default, meaning in rows:
        value = getattr(config, field.strip("`"))
        expected = "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
        assert expected in default, field
        choices = get_args(PaddingFreeOptions.__dataclass_fields__[field.strip("`")].type)
        choices = [choice for choice in choices if isinstance(choice, str)]
        if field != "`flat_attention`":  # its choices have a table of their own
            assert [choice for choice in choices if f'`"{choice}"`' not in meaning] == []


def test_every_backend_is_documented():
    documented = [backend.strip("`") for backend, *_ in table("backend")]
    assert documented == [*BACKENDS]


@pytest.mark.parametrize(("head", "budget"), [("in a step", None), ("under a budget", 20)])
def test_a_step_calls_the_functions_of_the_page_in_its_order(head, budget, tokenizer):
    steps = calls_of_steps(tokenizer, max_tokens_per_micro_batch=budget)
    called = [*dict.fromkeys(function for step in steps for function in step)]
    named = [(function.strip("`"), file.strip("`")) for function, file, _ in table(head)]
    assert named == sorted(named, key=called.index)


def calls_of_steps(tokenizer, **options) -> list[dict[tuple[str, str], None]]:
    """Of each of four steps of DPO, the functions of the package that it enters, with their files, in their order."""
    data, given = preference_data(32, 0), {"peft_config": lora(), "processing_class": tokenizer}
    trainer = make_trainer("dpo", "shared", steps=4, model=make_model(), train_dataset=data, **given, **options)
    training_step, steps = trainer.training_step, list[dict[tuple[str, str], None]]()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            steps[-1][code.co_qualname, str(Path(code.co_filename).relative_to(PACKAGE))] = None

    def watched(*args, **kwargs):
        before = sys.getprofile()
        steps.append({})
        sys.setprofile(note)
        try:
            return training_step(*args, **kwargs)
        finally:
            sys.setprofile(before)

    trainer.training_step = watched
    trainer.train()
    return steps


# What a reader of a step has to follow: functions and files of the package, lambdas and generators left out
@pytest.mark.parametrize(
    ("options", "most"), [({}, (48, 14)), ({"memory_budget": 8}, (72, 20))], ids=["plain", "budget"]
)
def test_a_step_enters_few_functions_in_few_files(options, most, tokenizer):
    *_, called = calls_of_steps(tokenizer, **options)
    named = [(function, file) for function, file in called if not function.rpartition(".")[2].startswith("<")]
    assert len(named) <= most[0]
    assert len({file for _, file in named}) <= most[1]


def test_every_logged_figure_is_documented():
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    documented = [name.strip("`") for name, _ in table("figure")]
    assert sorted(documented) == sorted(name for source in sources for name in re.findall(r'"(flat/\w+)"', source))


def messages() -> str:
    """All strings in the package, with the values that they are formatted with left out."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_messages_that_troubleshooting_quotes_exist():
    quoted = [message.strip("`") for message, _ in table("message")]
    everything = messages()
    assert [message for message in quoted if message not in everything] == []
    assert len(quoted) > 15


def without_generated(text: str) -> str:
    """A page without its generated tables."""
    return re.sub(r"<!-- (benchmark[\w-]*):start -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)


def outline(text: str) -> list[str]:
    """Levels of the headings, and numbers of columns and rows of the tables, in order."""
    text = without_generated(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    kinds = []
    for line in text.splitlines():
        if match := re.match(r"#+ ", line):
            kinds.append(match[0])
        elif line.startswith("|"):
            kinds.append("|" * line.count(" | "))
        elif line.startswith("- "):
            kinds.append("-")
    return kinds


def test_the_chinese_readme_is_in_step():
    ours, theirs = PAGES["README.md"], PAGES[CHINESE]
    assert outline(theirs) == outline(ours)
    for language in ("python", "bash", "text", "bibtex"):
        assert blocks(theirs, language) == blocks(ours, language)
    cells = [re.findall(r"^\| (`[^|]*)", text, re.MULTILINE) for text in (ours, theirs)]
    in_english, in_chinese = ([re.findall(r"`[^`]+`", cell) for cell in column] for column in cells)
    assert in_chinese == in_english
    # Names and numbers in the prose
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in (ours, theirs)]
    for pattern in (r"`[^`\n]+`", r"\d[\d.,]*\d|\d"):
        in_english, in_chinese = (Counter(re.findall(pattern, text)) for text in prose)
        assert in_chinese == in_english
    # What both lead to: the same pages, and one another
    ours, theirs = ([target for target, _ in links(name)] for name in ("README.md", CHINESE))
    assert CHINESE in ours
    assert "README.md" in theirs
    assert set(ours) ^ set(theirs) <= {CHINESE, "README.md"}


def links(name: str) -> list[tuple[str, str]]:
    """Where the links of a page lead inside the repository: paths from its root, and anchors."""
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]) if not target.startswith("https://")]
    found = []
    for target in targets:
        path, _, anchor = target.partition("#")
        full = os.path.normpath(ROOT / Path(name).parent / path) if path else ROOT / name
        found.append((os.path.relpath(full, ROOT), anchor))
    return found


def anchors(text: str) -> list[str]:
    """What the headings of a page are called in links."""
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target, anchor in links(name):
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in anchors(PAGES[target]), f"{target}#{anchor}"


def test_every_page_can_be_reached_from_the_readme():
    reached, listed = ({target for target, _ in links(name)} for name in ("README.md", "docs/README.md"))
    others = PAGES.keys() - {"README.md", "docs/README.md"}
    assert others <= reached
    assert others <= listed


@pytest.mark.parametrize(("name", "marker"), MARKERS.items(), ids=MARKERS)
def test_the_benchmark_has_its_place(name, marker):
    text = PAGES[name]
    start, end = f"<!-- {marker}:start -->\n", f"<!-- {marker}:end -->\n"
    assert text.count(start) == text.count(end) == 1
    assert text.index(start) < text.index(end)
    if name.startswith("README"):
        assert text.index(end) < text.index("\n## ")  # before everything else
        generated = text.split(start)[1].split(end)[0].splitlines()
        assert len([line for line in generated if line.startswith("| ")]) == 1 + 4


def test_the_version_is_the_same_everywhere():
    for name in ("README.md", CHINESE):
        assert f"version = {{{trl_paddingfree.__version__}}}" in PAGES[name]
    assert f"\n## {trl_paddingfree.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
