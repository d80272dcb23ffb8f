"""Fields of dataclasses as a command's options. (Annotations are no strings: one names a local.)"""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from model.cli.shared.common import command
from model.cli.shared.options import Choose
from runtime.planning.option import SettingError, option


@dataclass(frozen=True)
class Oven:
    degrees: int = option(180, "How hot.", "N", kind=int, least=50)
    fan: bool = option(False, "With a fan.", kind=bool)
    mode: bool | str = option(
        False, "Grill.", "on|off", text="off", read={"on": True, "off": False}.__getitem__
    )
    grill_minutes: int = option(0, "How long.", "N", kind=int)
    colour: str = "white"

    def __post_init__(self) -> None:
        if self.mode and self.fan:
            raise SettingError("mode", self.mode, 'Give fan="no", or grill_minutes', "with a fan")


def ran(choose: Choose, *words: str) -> tuple[int, str, str]:
    """Exit code and streams of a command that prints its oven."""
    app = typer.Typer()

    @app.command()
    @command
    def bake(oven: Annotated[Oven, choose], loaves: int = 1) -> None:
        print(loaves, oven)

    result = CliRunner().invoke(app, words)
    return result.exit_code, result.stdout, result.stderr


def test_a_command_is_given_the_object() -> None:
    assert ran(Choose())[:2] == (0, f"1 {Oven()}\n")
    typed = "--degrees", "220", "--mode", "on", "--loaves", "3"
    assert ran(Choose(), *typed)[1] == f"3 {Oven(220, mode=True)}\n"
    assert ran(Choose(), "--fan")[1] == f"1 {Oven(fan=True)}\n"


def test_a_command_chooses_fields_names_and_defaults() -> None:
    chosen = Choose(but=("mode",), names={"degrees": "heat"}, defaults={"degrees": 90})
    assert ran(chosen)[1] == f"1 {Oven(90)}\n"
    assert ran(chosen, "--heat", "100")[1] == f"1 {Oven(100)}\n"
    assert ran(chosen, "--mode", "on")[0] == 2
    assert ran(Choose(only=("fan",)), "--degrees", "90")[0] == 2
    assert "--no-fan" not in ran(chosen, "--help")[1] and "How hot." in ran(chosen, "--help")[1]


def test_what_is_wrong_is_said_of_the_option() -> None:
    assert ran(Choose(), "--degrees", "20")[0] == 2
    assert ran(Choose(), "--mode", "warm")[2] == "error: --mode warm. Give on, off.\n"
    named = Choose(names={"mode": "grill"})
    told = "error: --grill on with a fan. Give --fan no, or --grill-minutes.\n"
    assert ran(named, "--grill", "on", "--fan")[2] == told
