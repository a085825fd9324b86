"""A copy of the tree to mutate, and pytest in it: with a /dev/shm, a /tmp and processes of its own where possible."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from patches import ROOT

#: Seconds that the tests of one patch may take; beyond it they hang.
LIMIT = 120.0
#: In namespaces of their own: whatever a mutant leaves behind ends with it, and nobody else's tests see it.
_ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Scratch:
    """The copied tree at `root`. `run` runs tests of it; `alone`: they cannot touch anything outside."""

    def __init__(self, root: Path, tmp: Path) -> None:
        self.root = root
        self._tmp = tmp
        #: What runs in it now.
        self._process: subprocess.Popen[str] | None = None
        # Not to be hidden by a /tmp of its own.
        self._private_tmp = not any(
            str(path).startswith("/tmp/") for path in (ROOT, root, Path(sys.prefix), Path(sys.base_prefix))
        )
        self.alone = os.geteuid() == 0 and shutil.which("unshare") is not None
        self.alone = self.alone and self._call(["true"], 30.0)[0] == 0
        if not self.alone:
            print("mutate: no namespaces here: what mutants leave is swept at the end", file=sys.stderr)

    @property
    def environment(self) -> dict[str, str]:
        """The copy's packages come first. Mutants leave no bytecode."""
        # Of pytest's plugins setup.cfg wants this one; each of the others costs every start.
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
        # Wide, so that a failure's reason is not cut off.
        shown = {"NO_COLOR": "1", "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **plugins, **shown, "PYTHONPATH": str(self.root)}

    def check(self) -> None:
        """SystemExit if another copy of the product would be imported."""
        told = subprocess.run(
            [sys.executable, "-c", "import connector, runner_adapter; print(connector.__file__)"],
            cwd=self.root.parent, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not told.stdout.startswith(f"{self.root}{os.sep}"):
            raise SystemExit(f"mutate: not the copy's connector is imported: {told.stdout or told.stderr}")

    def run(self, tests: Iterable[str], limit: float = LIMIT) -> tuple[dict[str, str], bool]:
        """(outcome by full test id, whether the time was over): PASSED, or FAILED or ERROR and the reason."""
        options = ["-p", "no:cacheprovider", "-q", "--tb=no", "--show-capture=no", "-rA"]
        code, out = self._call([sys.executable, "-m", "pytest", *options, *tests], limit)
        outcomes: dict[str, str] = {}
        for line in out.splitlines():
            word, _, rest = line.partition(" ")
            if word in ("PASSED", "FAILED", "ERROR") and "::" in rest:
                # A test may pass and then fail in its teardown: what is worse is told.
                name, _, reason = rest.partition(" - ")
                if outcomes.get(name, "PASSED") == "PASSED":
                    outcomes[name] = f"{word} {reason[:100]}".rstrip()
        return outcomes, code is None

    def _call(self, command: list[str], limit: float) -> tuple[int | None, str]:
        """(exit code, standard output); None when it was killed after `limit` seconds."""
        if self.alone:
            bind = f'mount --bind "{self._tmp}" /tmp && ' if self._private_tmp else ""
            command = [*_ALONE, "sh", "-c", f'mount -t tmpfs tmpfs /dev/shm && {bind}"$@"; exit $?', "sh", *command]
        process = subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self._process = process
        try:
            out, _ = process.communicate(timeout=limit)
            return process.returncode, out
        except subprocess.TimeoutExpired:
            return None, _killed(process)

    def stop(self) -> None:
        """End what runs in it."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _killed(process: subprocess.Popen[str]) -> str:
    """Ends the whole group; what it had said."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    out, _ = process.communicate()
    return out


@contextlib.contextmanager
def scratch() -> Iterator[Scratch]:
    """Tracked files, and those that are new and not ignored, in a folder that goes at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    with TemporaryDirectory(prefix="mutate-", dir="/var/tmp") as folder:
        root, tmp = Path(folder, "tree"), Path(folder, "tmp")
        tmp.mkdir()
        for name in sorted({os.fsdecode(raw) for raw in listed.stdout.split(b"\0") if raw}):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        # Told by the source's hash, not its time: a mutant is never taken for what was compiled.
        compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "connector", "runner_adapter"]
        subprocess.run([sys.executable, *compiled], cwd=root, check=True)
        place = Scratch(root, tmp)
        try:
            yield place
        finally:
            if not place.alone:
                # The tree's own, not the copy's: that may still be patched after a Ctrl-C.
                sweep = [sys.executable, "-m", "connector.cli", "sweep"]
                subprocess.run(sweep, cwd=ROOT, stdout=sys.stderr, check=False)
