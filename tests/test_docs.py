"""What the documentation says is so: its code runs, its commands parse, its messages and options exist."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
from trl import TrlParser

import trl_paddingfree
from tests.tiny import preference_data, prompt_completions
from trl_paddingfree.cli.main import make_parser
from trl_paddingfree.trainers.configs import PaddingFreeDPOConfig, PaddingFreeOptions

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")
LANGUAGES = {"en": README, "zh": CHINESE}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trl_paddingfree.__path__, "trl_paddingfree.")
    if not module.name.endswith("__main__")
)
COMMANDS = ["inspect", "check", "bench", "dpo", "sft", "env", "quickstart"]
SCRIPTS = {"dpo", "sft"}
HEADS = {"command": "命令", "option": "选项", "route": "路线", "figure": "指标", "message": "信息"}


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def table(language: str, head: str) -> list[list[str]]:
    """The rows of the first table whose first column is called `head`, in English."""
    text, head = LANGUAGES[language], head if language == "en" else HEADS[head]
    lines = text.split(f"\n| {head} |", 1)[1].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


EXAMPLES = [block for block in blocks(README, "python") if not block.startswith(">>>")]


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_gives_what_it_says(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", sorted(set(trl_paddingfree.__all__) - {"__version__"}))
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


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_readmes_python_trains(example, monkeypatch, tmp_path, model_dir):
    data = {"trl-lib/ultrafeedback_binarized": preference_data(8, 0), "trl-lib/Capybara": prompt_completions(8, 0)}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: data[name])
    on_cpu = f'output_dir={str(tmp_path)!r}, bf16=False, use_cpu=True, max_steps=1, report_to="none"'
    for written, runs in {'"Qwen/Qwen3-0.6B"': repr(model_dir), 'output_dir="out"': on_cpu}.items():
        assert written in example
        example = example.replace(written, runs)
    names = {}
    exec(example, names)
    assert names["trainer"].state.global_step == 1
    assert names["trainer"].method.startswith("padding-free")


def test_the_readmes_arithmetic_is_right():
    (session,) = [block for block in blocks(README, "python") if block.startswith(">>>")]
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", "README.md", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0


def commands(text: str) -> list[list[str]]:
    """The commands of all shell blocks, without comments."""
    joined = "\n".join(blocks(text, "bash")).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


def parses(script: str, argv: list[str]) -> None:
    """Parse the options of a script and of `accelerate launch` as the command does."""
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser: TrlParser = importlib.import_module(f"trl_paddingfree.scripts.{script}").make_parser()
    argv = [*argv, "--use_cpu", "true", "--bf16", "false"]
    *_, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    launch_command_parser().parse_args([*resolve_accelerate_config_argument(rest), "script.py"])


@pytest.mark.parametrize("argv", commands(README), ids=" ".join)
def test_the_readmes_commands_parse(argv, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, command, *options = argv
    if program == "trl-paddingfree" and command in SCRIPTS:
        parses(command, options)
    elif program == "trl-paddingfree" and command != "bench":
        assert make_parser().parse_args(argv[1:]).command == command
    elif program == "accelerate":
        script = options.index("scripts/dpo.py")
        assert (ROOT / options[options.index("--config_file") + 1]).is_file()
        parses("dpo", options[script + 1 :])
    else:
        assert argv[:2] in (["pip", "install"], ["python", "-m"], ["trl-paddingfree", "bench"])


def test_the_readmes_test_command_is_that_of_ci():
    assert "python -m pytest -n 2" in README
    assert "python -m pytest -n 2" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_command_is_documented(language):
    documented = re.findall(r"`(\w+)`", " ".join(row[0] for row in table(language, "command")))
    assert documented == COMMANDS
    for command in COMMANDS:
        assert f"trl-paddingfree {command}" in LANGUAGES[language]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_option_is_documented_with_its_default(language):
    rows = table(language, "option")
    config = PaddingFreeDPOConfig("unused", bf16=False)
    fields = [field.strip("`") for field, *_ in rows]
    assert fields == list(PaddingFreeOptions.__dataclass_fields__)
    for field, default, meaning in rows:
        value = getattr(config, field.strip("`"))
        expected = "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
        assert expected in default.replace("无", "none"), field
        choices = PaddingFreeOptions.__dataclass_fields__[field.strip("`")].metadata.get("choices", [])
        if field != "`flat_attention`":  # its choices have a table of their own
            assert [choice for choice in choices if f'`"{choice}"`' not in meaning] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_route_is_documented(language):
    documented = [route.strip("`") for route, *_ in table(language, "route")]
    assert ["auto", *documented] == PaddingFreeOptions.__dataclass_fields__["flat_attention"].metadata["choices"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_logged_figure_is_documented(language):
    source = (ROOT / "trl_paddingfree" / "trainer.py").read_text()
    documented = [name.strip("`") for name, _ in table(language, "figure")]
    assert documented == re.findall(r'"(flat/\w+)"', source)


def messages() -> str:
    """All strings in the package, with the values that they are formatted with left out."""
    texts = []
    for path in (ROOT / "trl_paddingfree").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_messages_that_troubleshooting_quotes_exist(language):
    quoted = [message.strip("`") for message, _ in table(language, "message")]
    everything = messages()
    assert [message for message in quoted if message not in everything] == []
    assert len(quoted) > 15


def outline(text: str) -> list[str]:
    """Levels of the headings, and numbers of columns and rows of the tables, in order."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- benchmark:start -->.*?<!-- benchmark:end -->", "", text, flags=re.DOTALL)
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
    assert outline(CHINESE) == outline(README)
    for language in ("python", "bash", "text", "bibtex"):
        assert blocks(CHINESE, language) == blocks(README, language)
    cells = [re.findall(r"^\| (`[^|]*)", text, re.MULTILINE) for text in (README, CHINESE)]
    english, chinese = ([re.findall(r"`[^`]+`", cell) for cell in column] for column in cells)
    assert chinese == english


@pytest.mark.parametrize("language", LANGUAGES)
def test_links_lead_somewhere(language):
    text = LANGUAGES[language]
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    anchors = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors
        elif not target.startswith("https://"):
            assert (ROOT / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_benchmark_has_its_place(language):
    text = LANGUAGES[language]
    assert text.count("<!-- benchmark:start -->\n") == text.count("<!-- benchmark:end -->\n") == 1
    assert text.index("<!-- benchmark:start -->") < text.index("\n## ")


def test_the_version_is_the_same_everywhere():
    assert f"version = {{{trl_paddingfree.__version__}}}" in README
    assert f"\n## {trl_paddingfree.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
