"""Runs on the node for the proofs of the engine: programs in a release's environment, each as the service's user and
in a mount namespace of its own, so that whatever a case changes is seen by it alone and gone with it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Changes below a folder go to memory: overlay FOLDER, then write or remove there.
PRIVATE = """set -e
mount -t tmpfs tmpfs "$WORK/private"
overlay() {
    number=$((${number:-0} + 1))
    mkdir "$WORK/private/$number" "$WORK/private/$number.work"
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$WORK/private/$number,workdir=$WORK/private/$number.work" "$1"
}
"""


def probe(
    program: str, python: str, user: str, cases: list[dict[str, Any]], seconds: int, at_once: int = 2
) -> dict[str, Any]:
    """Case -> {"code", "output", "answer", "seconds"}.

    program: Python source, run by `python` as `user`; it finds an empty folder of its own in $WORK and may leave its
    answer there, answer.json. cases: [{"name", "argument", "environment", "changes"}]: the program's only argument, all
    of its environment but WORK, HOME and TMPDIR, and shell that runs as root in the case's mount namespace before it,
    with the function `overlay` above.
    """
    account = pwd.getpwnam(user)

    def run(case: dict[str, Any]) -> dict[str, Any]:
        work = Path(tempfile.mkdtemp(prefix="kimi-proof-"))
        try:
            (work / "private").mkdir()
            (work / "home").mkdir()
            source = work / "program.py"
            source.write_text(program, encoding="utf-8")
            for path in (work, work / "home"):
                os.chown(path, account.pw_uid, account.pw_gid)
            environment = {
                **{name: value.replace("$WORK", str(work)) for name, value in case["environment"].items()},
                **{"WORK": str(work), "HOME": f"{work}/home", "TMPDIR": f"{work}/home"},
            }
            script = f'{PRIVATE}{case["changes"]}\ncd "$WORK"\nexec "$@"'
            own_mounts = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
            as_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
            began = time.monotonic()
            done = subprocess.run(
                [*own_mounts, *as_user, python, str(source), case["argument"]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
            )
            answer = work / "answer.json"
            return {
                "code": done.returncode,
                "output": done.stdout[-20_000:],
                "answer": answer.read_text() if answer.exists() else "",
                "seconds": round(time.monotonic() - began, 1),
            }
        finally:
            shutil.rmtree(work, ignore_errors=True)

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip((case["name"] for case in cases), pool.map(run, cases), strict=True))
