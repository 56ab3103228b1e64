"""Let clients in: TLS before the model server, where the inventory names an edge; nobody, where it does not."""

from __future__ import annotations

from pathlib import Path

from kit import files
from kit.refusal import refuse
from kit.role import role
from node import layout
from node.edge import Edge, UnusableKeys
from node.plan import Plan
from node.problems import Problem
from roles.edge import content
from roles.edge.operations import close_edge, open_edge

PROJECT = Path(__file__).resolve().parents[2]


@role("Edge")
def activate(plan: Plan) -> None:
    """The edge answers as planned, or is not there."""
    if plan.edge is None:
        close_edge(unit=layout.EDGE_UNIT, unit_file=content.UNIT_FILE)
        return
    open_edge(
        wanted=[*content.wanted(plan.edge, plan.service), *owners_files(plan.edge)],
        edge=content.on_host(plan.edge),
        unit_file=content.UNIT_FILE,
    )


def owners_files(edge: Edge) -> list[files.Item]:
    """The owner's certificate and client keys, as files of the node. Raises Refusal for what cannot be used."""
    items: list[files.Item] = []
    if edge.client_keys_file:
        path = PROJECT / Path(edge.client_keys_file).expanduser()
        try:
            items += content.client_key_files(path.read_text(encoding="ascii"))
        except (OSError, UnusableKeys, UnicodeDecodeError) as error:
            _refuse("edge_client_keys_file", path, error, "a file with a line `key` or `name key` for each client")
    if edge.certificate_file and edge.key_file:
        certificate, key = (PROJECT / Path(each).expanduser() for each in (edge.certificate_file, edge.key_file))
        problem = content.certificate_problem(certificate, key, edge.name)
        if problem:
            wanted = f"a certificate for {edge.name} that is valid now, and its key without a password"
            refuse(Problem("inventory key edge_certificate_file", problem, wanted, "mend these two files"))
        try:
            items += content.certificate_files(certificate.read_text("ascii"), key.read_text("ascii"))
        except (OSError, UnicodeDecodeError) as error:
            _refuse("edge_certificate_file", certificate, error, "PEM files")
    return items


def _refuse(key: str, path: Path, error: Exception, wanted: str) -> None:
    """An error's text may quote what is in the file; only what is known not to is shown."""
    found = (
        error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, UnusableKeys) else "no text"
    )
    refuse(Problem(f"inventory key {key}", f"{path}: {found}", wanted, "mend that file"))
