"""Start fetching weights early; join the fetch just before the service needs them."""

from __future__ import annotations

from pathlib import Path

from kit.refusal import refuse
from kit.role import role
from node.plan import Plan
from node.problems import Problem
from roles.weights import lay
from roles.weights.operations import begin, wait


@role("Weights: start")
def start(plan: Plan) -> None:
    """The node fetches what is missing by itself from here on. Raises Refusal where the hub token cannot be read."""
    begin(weights=plan.weights, wanted=lay.items(plan, hub_token(plan)), sharing=plan.sharing)


@role("Weights: join")
def join(plan: Plan) -> None:
    """Every snapshot is whole when this ends."""
    wait(weights=plan.weights)


def hub_token(plan: Plan) -> str | None:
    """The token from the controller's file; None where the inventory names none."""
    path = next((weights.hub_token_file for weights in plan.weights if weights.hub_token_file), None)
    if path is None:
        return None
    try:
        token = (lay.ROOT / Path(path).expanduser()).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        refuse(Problem(f"hub token file {path}", str(error), "a file with the token", "mend hub_token_file"))
        raise
    if not token or any(character.isspace() for character in token):
        refuse(Problem(f"hub token file {path}", "no single word", "the token and nothing else", "mend that file"))
    return token
