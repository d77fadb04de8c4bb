"""MkDocs hook: adds the pages that no file in docs/ holds.

The home page is the README. CONTRIBUTING.md, CHANGELOG.md and the examples are taken from where they lie. The command line
reference is read from the program itself, and the Python reference lists every public name.
"""

import inspect
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedselect as fs
from fedselect.cli.program import app

ROOT = Path(__file__).resolve().parents[1]
TAKEN = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
TARGET = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
LINK = re.compile(r"\[([^\[\]]*)" + TARGET.pattern)
CELL = re.compile(r"<td[^>]*>.*?</td>", re.S)
API = {
    "run": (
        "Run and compare",
        "run compare Result load_result Simulation tune Tuned diagnose Diagnosis adapt Adapted load_model Private",
    ),
    "data": ("Data", "load DATA ClientData Federation Schema Images deal_images from_datasets shifted"),
    "models": ("Models", "Model models MODELS lora bias_only norm_only head_only layers_only ADAPTERS"),
    "methods": ("Methods", "METHODS"),
    "tasks": ("Tasks and metrics", "TASKS Task Metric Spread"),
    "training": ("Training and aggregation", "Training OPTIMIZERS SCHEDULES Aggregator AGGREGATORS"),
    "extend": (
        "Write your own",
        "Method Work Pass Up Down Received Partial Selector Fixed layers Fold Optimizer Schedule Tree State Mask merge negate",
    ),
    "errors": ("Errors", "FedselectError"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in {**TAKEN, **{p: p for p in _examples()}}.items():
        text = _moved((ROOT / source).read_text(encoding="utf-8"), source, page)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    for name, text in api_pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links from docs/ to files outside of it lead to their page, or are plain text where there is none."""
    if page.file.generated_by:
        return markdown
    return _moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """In a narrow cell of a table, a line ends before ±, not between it and the number."""
    return CELL.sub(lambda m: m[0].replace("± ", "±&nbsp;"), html)


def _examples() -> Iterable[str]:
    return (p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "examples").rglob("README.md")))


def _moved(text: str, source: str, page: str) -> str:
    """The text with its relative links as they must be from its page on the site; files that are not on it are only named."""
    text = LINK.sub(lambda m: m[0] if _target(m[2], source, page) else m[1], text)
    return TARGET.sub(lambda m: f"]({_target(m[1], source, page) or m[1]}{m[2] or ''})", text)


def _target(link: str, source: str, page: str) -> str | None:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    if path in TAKEN:
        found = TAKEN[path]
    elif path.startswith("docs/"):
        found = path.removeprefix("docs/")
    elif path.startswith("examples/") and path.endswith("README.md"):
        found = path
    else:
        return None
    return posixpath.relpath(found, posixpath.dirname(page) or ".")


# ---- the command line


def command_line() -> str:
    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Made from the program itself. `fedselect COMMAND --help` prints the same. `fedselect methods NAME`, "
        "`fedselect models`, `fedselect tasks` and `fedselect data list` show the options of each method, model, task and data "
        "set, which every command that trains takes as flags too.",
    ]
    for path, command in _commands(root, ("fedselect",)):
        parts.append(_command(path, command))
    return "\n\n".join(parts) + "\n"


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name in command.commands:
            yield from _commands(command.commands[name], (*path, name))
    else:
        yield path, command


def _command(path: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join(" ".join(command.collect_usage_pieces(context)).split())
    lines = [f"## {' '.join(path)}", _prose(command.help or ""), f"```\n{' '.join(path)} {usage}\n```"]
    rows = [row for p in command.get_params(context) if (row := _parameter(p, context))]
    if rows:
        lines.append("| option | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(lines)


def _parameter(p: click.Parameter, context: click.Context) -> str | None:
    if getattr(p, "hidden", False) or p.name == "help":
        return None
    if isinstance(p, click.Argument):
        name = f"`{p.make_metavar(context)}`"
    else:
        name = ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
        if not getattr(p, "is_flag", False):
            name += f" *{p.make_metavar(context).lower()}*"
    said = _prose(getattr(p, "help", None) or "").replace("\n", " ")
    if p.default not in (None, False, "") and "(default" not in said and not callable(p.default) and p.required is False:
        said += f" (default: {_shown(p.default)})"
    return f"| {name} | {said.strip().replace('|', chr(92) + '|')} |"


def _shown(value: object) -> str:
    return "yes" if value is True else str(value)


def _prose(text: str) -> str:
    """Help as Markdown: rich's marks become code, lines are joined."""
    text = inspect.cleandoc(text).replace("\b\n", "")
    text = re.sub(r"\[/?(bold|dim|cyan|green|italic|code)[^\]]*\]", "", text)
    return re.sub(r"(?<!`)(--[a-z][\w-]*)", r"`\1`", text)


# ---- the Python API


def api_pages() -> dict[str, str]:
    placed = {name for _, names in API.values() for name in names.split()}
    rest = _rest(placed)
    pages = {}
    for file, (title, names) in API.items():
        parts = [f"# {title}", *(_entry(name) for name in (*names.split(), *rest.get(file, ())))]
        pages[file] = "\n\n".join(parts) + "\n"
    return pages


def _rest(placed: set[str]) -> dict[str, list[str]]:
    """Public names that no page lists by hand, by the kind of thing they are."""
    kinds = ((fs.Aggregator, "training"), (fs.Optimizer, "training"), (fs.Schedule, "training"), (fs.Task, "tasks"),
             (fs.FedselectError, "errors"))  # fmt: skip
    methods = list(fs.METHODS.values())
    rest: dict[str, list[str]] = {}
    for name in fs.__all__:
        thing = getattr(fs, name)
        if name in placed or name.startswith("__"):
            continue
        if thing in methods:
            page = "methods"
        else:
            page = next((page for kind, page in kinds if inspect.isclass(thing) and issubclass(thing, kind)), "extend")
        rest.setdefault(page, []).append(name)
    return rest


def _entry(name: str) -> str:
    thing = getattr(fs, name)
    if isinstance(thing, dict):
        return f"## fs.{name}\n\nThe table of names: {', '.join(f'`{key}`' for key in thing)}."
    if inspect.ismodule(thing):
        made = "\n\n".join(
            f"::: {thing.__name__}.{n}\n    options: {{heading_level: 3}}" for n in fs.MODELS if hasattr(thing, n)
        )
        return f"## fs.{name}\n\nNetworks of this package. Each is made for a federation: `fs.models.mlp(data)`.\n\n{made}"
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        said = {"Tree": "A dict of tensors by name.", "State": "A dict of trees.", "Mask": "A dict of boolean tensors by name."}
        return f"## fs.{name}\n\n{said.get(name, '')}"
    return f"::: {thing.__module__}.{thing.__qualname__}"
