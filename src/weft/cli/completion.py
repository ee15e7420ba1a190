"""`weft completion`: scripts by which a shell completes commands and options.

They list everything there is, so that a shell needs no Python, and no seconds, to complete a word.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weft.cli.console import Json, print_json
from weft.errors import Unsupported, nearest

SHELLS = ("bash", "zsh", "fish")

Tree = dict[str, list[tuple[str, str]]]
"""By command ("weft machine new"): the subcommands and options that may follow, with their help."""

_BASH = """_weft() {{
  local path=weft word words
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
{commands}
    esac
  done
  case "$path" in
{words}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _weft weft
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def register(app: typer.Typer) -> None:
    @app.command()
    def completion(
        context: typer.Context,
        shell: Annotated[str, typer.Argument(help=f"One of {', '.join(SHELLS)}.")],
        json: Json = False,
    ) -> None:
        """Prints a script that completes commands and options in a shell."""
        root = context.find_root().command
        if json:
            print_json({path: dict(after) for path, after in tree_of(root).items()})
            return
        print(script(shell, tree_of(root)), end="")


def tree_of(command: Any, path: str = "weft") -> Tree:
    """Everything that may follow each command."""
    inner: dict[str, Any] = getattr(command, "commands", {})
    after = [(name, one.get_short_help_str(60)) for name, one in sorted(inner.items())]
    for option in command.params:
        if option.param_type_name == "option":
            said = (getattr(option, "help", None) or "").split(". ")[0]
            after += [(name, said) for name in option.opts if name.startswith("--")]
    tree = {path: [*after, ("--help", "Show what a command does.")]}
    for name, one in sorted(inner.items()):
        tree |= tree_of(one, f"{path} {name}")
    return tree


def script(shell: str, tree: Tree) -> str:
    """The script for a shell."""
    if shell not in SHELLS:
        raise Unsupported(
            f"there is no completion for {shell!r}{nearest(shell, SHELLS)}; "
            f"the shells are {', '.join(SHELLS)}"
        )
    if shell == "fish":
        return _fish(tree)
    commands = "\n".join(f'      "{path}") path="{path}" ;;' for path in tree if path != "weft")
    words = "\n".join(
        f'    "{path}") words="{" ".join(name for name, _ in after)}" ;;'
        for path, after in tree.items()
    )
    return (_ZSH if shell == "zsh" else "") + _BASH.format(commands=commands, words=words)


def _fish(tree: Tree) -> str:
    lines = ["complete -c weft -e"]
    for path, after in tree.items():
        above = path.split()[1:]
        inner = [one.split()[-1] for one in tree if one.rpartition(" ")[0] == path]
        conditions = [f"__fish_seen_subcommand_from {name}" for name in above]
        if inner:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(inner)}")
        where = f" -n '{'; and '.join(conditions)}'" if conditions else ""
        for name, said in after:
            word = f"-l {name[2:]}" if name.startswith("--") else f"-f -a {name}"
            quoted = said.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ")
            lines.append(f"complete -c weft{where} {word} -d '{quoted}'")
    return "\n".join(lines) + "\n"
