"""The release's CUDA toolkit is whole, its own, proved by a compiled program, and stays as it is."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from kit.program import probe_command
from node import toolkits
from node.plan import Plan
from node.toolkits import Toolkit
from roles.cuda_toolkit import judgement
from roles.cuda_toolkit.facts import Proof, ToolkitFacts


@pytest.fixture(scope="module")
def found(host: Any, plan: Plan) -> dict[str, Any]:
    """What the host says of its toolkits now, in one round trip."""
    command = probe_command(ToolkitFacts.source(), judgement.questions(plan)).get_raw_value()
    answer: dict[str, Any] = _answer(host, command)
    return answer


def _answer(host: Any, command: str) -> Any:
    said = host.run(command)
    assert said.rc == 0 and said.stdout.strip(), f"the host gives no answer: {said.stderr.strip()[-300:]}"
    answer = json.loads(said.stdout.splitlines()[-1])
    assert "found" in answer, f"the host cannot be looked at: {answer}"
    return answer["found"]


def _all(plan: Plan) -> tuple[Toolkit, ...]:
    return (plan.toolkit, *plan.toolkits_beside)


def test_toolkits_are_whole(found: dict[str, Any], plan: Plan) -> None:
    """A toolkit with one header missing serves until the first request that samples, and then fails to compile."""
    problems = judgement.deviations(found, plan)
    assert not problems, "\n".join(map(str, problems))


def test_no_toolkit_borrows_from_another(found: dict[str, Any], plan: Plan) -> None:
    """A header linked from another toolkit compiles today, and miscompiles after either of the two is upgraded."""
    problems = judgement.refusals(found, plan)
    assert not problems, "\n".join(map(str, problems))
    for kit in _all(plan):
        assert found["toolkits"][kit.version]["files"], (
            f"{kit.prefix}: found no file of a toolkit, wanted its own headers and compilers. Fix: deploy again"
        )


def test_each_toolkit_compiles_links_and_runs_a_program(host: Any, found: dict[str, Any], plan: Plan) -> None:
    """The files may all be there and the compiler still refuse them, the host's g++ or the node's GPU architecture."""
    arguments = {"program": toolkits.PROOF, "toolkits": judgement.proofs(found, plan)}
    answers = _answer(host, probe_command(Proof.source(), arguments).get_raw_value())
    problems = [answer["problem"] for answer in answers.values() if not answer["proved"]]
    assert not problems, "\n".join(problems)
    assert set(answers) == {kit.version for kit in _all(plan)}


def test_the_receipt_is_of_these_very_files(found: dict[str, Any], plan: Plan) -> None:
    """What deploy proved is what lies there: compilers, headers, package versions, host compiler, architecture."""
    assert found["receipt"], f"found no {toolkits.RECEIPT}, wanted the receipt of a proof. Fix: deploy again"
    wanted, kept = judgement.evidence(found, plan), found["receipt"].get("evidence", {})
    other = sorted(key for key in wanted if wanted[key] != kept.get(key))
    assert judgement.is_proved(found, plan), (
        f"{toolkits.RECEIPT}: found a proof of other {', '.join(other)}, wanted one of what lies there now. "
        "Fix: deploy again; it proves anew"
    )


def test_the_repository_is_trusted_by_the_pinned_key_alone(host: Any, found: dict[str, Any], plan: Plan) -> None:
    """Whoever holds a key that apt accepts for a repository is root here at the next upgrade."""
    assert found["sources"], f"apt has no source for {plan.repository.address}. Fix: deploy again"
    for source in found["sources"]:
        keys = judgement.keys_of(source)
        assert keys == [plan.repository.fingerprint] and not source["trusted"], (
            f"{source['file']}: found keys {keys or 'of apt itself'}, wanted {plan.repository.fingerprint} alone. "
            f"Fix: rm {source['file']}, then deploy again"
        )
    lists = host.run(
        f"apt-get indextargets {shlex.quote('Repo-URI: ' + plan.repository.address + '/')} "
        "'Created-By: Packages' --format '$(TRUSTED)'"
    )
    assert lists.stdout.split() and set(lists.stdout.split()) == {"yes"}, (
        f"lists of {plan.repository.address}: found {lists.stdout.split() or lists.stderr.strip() or 'none'}, wanted "
        "lists whose signature apt has verified. Fix: apt-get update, and read its W: lines"
    )


def test_an_upgrade_leaves_the_toolkit_alone(host: Any, found: dict[str, Any], plan: Plan) -> None:
    """`apt-get upgrade` run by anybody else must not swap the compiler under a proved release."""
    names = sorted(found["toolkits"][plan.toolkit.version]["packages"])
    assert names, f"no package of CUDA {plan.toolkit.version} is installed. Fix: deploy again"
    upgraded = host.run("LC_ALL=C apt-get --simulate --quiet upgrade")
    assert upgraded.rc == 0, f"apt is not in order: {upgraded.stderr.strip()[-300:]}. Fix: apt-get check"
    moved = [line for line in upgraded.stdout.splitlines() if line.startswith("Inst ") and line.split()[1] in names]
    assert not moved, f"apt-get upgrade would move {moved}. Fix: deploy again; it writes {toolkits.PREFERENCES}"
    wanted = judgement.preferences_text(found, plan)
    kept = host.run(f"cat {toolkits.PREFERENCES}").stdout
    assert kept == wanted, f"{toolkits.PREFERENCES}: found other pins than of what is installed. Fix: deploy again"


def test_the_link_of_others_leads_where_it_led(found: dict[str, Any], plan: Plan) -> None:
    """Programs of the owner compile with /usr/local/cuda; installing the release's toolkit must not move it."""
    receipt = found["receipt"] or {}
    links = receipt.get("alternatives")
    assert links, f"{toolkits.RECEIPT} does not say where {toolkits.ALTERNATIVE} led. Fix: deploy again"
    for name, before in links["before"].items():
        after = links["after"][name]
        assert before["target"] in (None, after["target"]), (
            f"/usr/local/{name}: found {after['target']} after the deploy, wanted {before['target']} as before it. "
            f"Fix: update-alternatives --set {name} {before['target']}"
        )
