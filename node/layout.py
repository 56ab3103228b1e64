"""Where things lie on a host. Every other module, template and test reads the paths from here."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/opt/kimi-nodes"
RELEASES = f"{ROOT}/releases"
CURRENT = f"{ROOT}/current"
TOOLS = f"{ROOT}/tools"
TOOLS_ENVIRONMENT = f"{TOOLS}/environment"
CONFIGURATION = "/etc/kimi-nodes"
KEYS = f"{CONFIGURATION}/keys"
MANIFESTS = f"{CONFIGURATION}/manifests"
STATE = "/var/lib/kimi-nodes"
RECEIPTS = f"{STATE}/receipts"
CACHE = "/var/cache/kimi-nodes"
UNITS = "/etc/systemd/system"

SERVICE_USER = "sglang"
WEIGHTS_USER = "kimi-weights"

KEPT_RELEASES = 3  # the current one and two older


@dataclass(frozen=True)
class ReleasePaths:
    """Where one release lies. digest: 16 hex digits, see node.releases.digest."""

    digest: str

    @property
    def environment(self) -> str:
        """The release's virtual environment: built in place, because virtual environments cannot be moved."""
        return f"{RELEASES}/{self.digest}"

    @property
    def bin(self) -> str:
        return f"{self.environment}/bin"

    @property
    def python(self) -> str:
        return f"{self.bin}/python"

    @property
    def cache(self) -> str:
        """Everything compiled for this release and no other (FlashInfer, Triton, TVM-FFI, torch inductor)."""
        return f"{CACHE}/{self.digest}"

    @property
    def receipt(self) -> str:
        return f"{RECEIPTS}/release-{self.digest}.json"

    @property
    def patches_receipt(self) -> str:
        return f"{RECEIPTS}/patches-{self.digest}.json"

    @property
    def warmup_receipt(self) -> str:
        return f"{self.cache}/warmed.json"


@dataclass(frozen=True)
class WeightsPaths:
    """Where one repository's weights lie below the owner's weights directory.

    A snapshot is `<directory>/<owner>/<name>/<revision>/`; it is either absent or whole, because it appears by one rename
    out of `<directory>/.staging/`, which is on the same file system.
    """

    directory: str
    repository: str
    revision: str

    @property
    def snapshot(self) -> str:
        return f"{self.directory}/{self.repository}/{self.revision}"

    @property
    def staging(self) -> str:
        return f"{self.directory}/.staging/{self.repository.replace('/', '--')}-{self.revision}"

    @property
    def slug(self) -> str:
        """The repository as part of a file or unit name."""
        return self.repository.replace("/", "--").lower()

    @property
    def manifest(self) -> str:
        return f"{MANIFESTS}/{self.slug}.json"

    @property
    def configuration(self) -> str:
        return f"{CONFIGURATION}/weights-{self.slug}.json"

    @property
    def status(self) -> str:
        return f"{STATE}/weights-{self.slug}.status.json"

    @property
    def receipt(self) -> str:
        return f"{STATE}/weights-{self.slug}.receipt.json"

    @property
    def unit(self) -> str:
        return f"kimi-weights-{self.slug}.service"
