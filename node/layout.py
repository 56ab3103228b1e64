"""Where things lie on a host. Every other module, template and test reads the paths from here."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/opt/kimi-nodes"
RELEASES = f"{ROOT}/releases"
CURRENT = f"{ROOT}/current"
TOOLS = f"{ROOT}/tools"
TOOLS_ENVIRONMENT = f"{TOOLS}/environment"
WEIGHTS_AGENT = f"{TOOLS}/weights_agent.py"
WEIGHTS_AGENT_PARTS = f"{TOOLS}/weights"
CONFIGURATION = "/etc/kimi-nodes"
KEYS = f"{CONFIGURATION}/keys"
MANIFESTS = f"{CONFIGURATION}/manifests"
STATE = "/var/lib/kimi-nodes"
WEIGHTS_STATE = f"{STATE}/weights"  # the weights user's own
RECEIPTS = f"{STATE}/receipts"
BUILDS = f"{STATE}/builds"
CACHE = "/var/cache/kimi-nodes"
PACKAGE_CACHE = f"{CACHE}/packages"  # uv's, while a release is built, where the machine's own uv.toml names no other
UNITS = "/etc/systemd/system"
# The owner's: proxies and authorities of the machine (https_proxy, SSL_CERT_FILE). Whatever of ours goes outside
# reads it: the weights agent, the builder of releases, pip for the tools. PAM reads it for who logs in.
MACHINE_ENVIRONMENT = "/etc/environment"
SHARING = f"{CONFIGURATION}/sharing.json"
SHARING_UNIT = "kimi-share.service"
SHARING_FIREWALL = f"{CONFIGURATION}/sharing.nft"
SHARING_TABLE = "inet kimi_sharing"  # ours alone, as FIREWALL_TABLE
SHARING_RUNTIME = "/run/kimi-share"
SHARING_TABLES = f"{WEIGHTS_STATE}/pieces"
HUB_TOKEN = f"{KEYS}/hub-token"
API_KEY = f"{KEYS}/api-key"  # one line, for clients and programs on the node
API_KEY_CONFIGURATION = f"{KEYS}/keys.yaml"  # the same key as the server reads it
FIREWALL = f"{CONFIGURATION}/firewall.nft"
FIREWALL_UNIT = "kimi-firewall.service"
FIREWALL_TABLE = "inet kimi_nodes"  # ours alone: the owner's rules are not touched
FIREWALL_LOADED = "/run/kimi-firewall/loaded"  # what was loaded, as nft listed it then
EDGE_CLIENT_KEYS = f"{KEYS}/edge-client-keys"  # a line `name key` for each client
EDGE_USER = "kimi-edge"
EDGE_UNIT = "kimi-edge.service"
EDGE = f"{CONFIGURATION}/edge"
EDGE_CADDYFILE = f"{EDGE}/Caddyfile"
EDGE_CLIENTS = f"{EDGE}/clients"  # the same keys as Caddy reads them
EDGE_UPSTREAM = f"{EDGE}/upstream"  # the API key as Caddy adds it
EDGE_CERTIFICATE = f"{EDGE}/certificate.pem"
EDGE_CERTIFICATE_KEY = f"{EDGE}/certificate-key.pem"
EDGE_STATE = f"{STATE}/edge"  # Caddy's internal authority, where it is used
EDGE_ROOT_CERTIFICATE = f"{EDGE_STATE}/caddy/pki/authorities/local/root.crt"
EDGE_RUNTIME = "/run/kimi-edge"  # in memory: Caddy saves what it runs, keys included
EDGE_ADMIN = f"{EDGE_RUNTIME}/admin.sock"
ENGINE_LOGGING = f"{CONFIGURATION}/engine-logging.json"
CUBINS_AGENT = f"{TOOLS}/cubins.py"
CUBINS_CONFIGURATION = f"{CONFIGURATION}/cubins.json"
CUBINS_UNIT = "kimi-cubins.service"
CUBINS_RUNTIME = "/run/kimi-cubins"

SERVICE_USER = "sglang"
WEIGHTS_USER = "kimi-weights"

KEPT_RELEASES = 3  # the current one and two older
RELEASE_BYTES = 12 * 10**9  # free before a release is built; the default takes 8.8 GB (measured)
RELEASE_BUILD_UNIT = f"{UNITS}/kimi-release@.service"


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
    def build_request(self) -> str:
        """All that the builder is told."""
        return f"{BUILDS}/{self.digest}.json"

    @property
    def build_status(self) -> str:
        return f"{BUILDS}/{self.digest}.status.json"

    @property
    def build_unit(self) -> str:
        return f"kimi-release@{self.digest}.service"

    @property
    def patches_receipt(self) -> str:
        return f"{RECEIPTS}/patches-{self.digest}.json"

    @property
    def cubins(self) -> str:
        """Kernels that NVIDIA ships compiled, for a release whose lock brings none."""
        return f"{self.cache}/cubins"

    @property
    def cubins_receipt(self) -> str:
        return f"{self.cubins}/fetched.json"

    @property
    def warmup_receipt(self) -> str:
        return f"{self.cache}/warmed.json"


@dataclass(frozen=True)
class WeightsPaths:
    """Where one repository's weights lie below the owner's weights directory.

    A snapshot is `<directory>/<owner>/<name>/<revision>/`; it is either absent or whole, because it appears by one
    rename out of `<directory>/.staging/`, which is on the same file system.
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
        return f"{WEIGHTS_STATE}/{self.slug}.status.json"

    @property
    def receipt(self) -> str:
        """Inside the snapshot, so that both appear by the same rename and each revision keeps its own."""
        return f"{self.snapshot}/.kimi-nodes-receipt.json"

    @property
    def unit(self) -> str:
        return f"kimi-weights-{self.slug}.service"


@dataclass(frozen=True)
class ServicePaths:
    """What belongs to the service of one profile. `warmup_unit` compiles before it starts; `status` is what both say of
    their progress, JSON, there only while they run."""

    profile: str

    @property
    def unit(self) -> str:
        return f"sglang-{self.profile}.service"

    @property
    def unit_file(self) -> str:
        return f"{UNITS}/{self.unit}"

    @property
    def warmup_unit(self) -> str:
        return f"kimi-warmup-{self.profile}.service"

    @property
    def warmup_unit_file(self) -> str:
        return f"{UNITS}/{self.warmup_unit}"

    @property
    def environment(self) -> str:
        return f"{CONFIGURATION}/sglang-{self.profile}.env"

    @property
    def readiness(self) -> str:
        """What the readiness probe asks."""
        return f"{CONFIGURATION}/sglang-{self.profile}.readiness.json"

    @property
    def gpu_memory(self) -> str:
        """How much of which GPU must be free before a start."""
        return f"{CONFIGURATION}/sglang-{self.profile}.gpu-memory.json"

    @property
    def warmup(self) -> str:
        """What the warm-up compiles."""
        return f"{CONFIGURATION}/sglang-{self.profile}.warmup.json"

    @property
    def files(self) -> tuple[str, ...]:
        return (
            self.unit_file,
            self.warmup_unit_file,
            self.environment,
            self.readiness,
            self.gpu_memory,
            self.warmup,
        )

    @property
    def status(self) -> str:
        return f"/run/{self.unit.removesuffix('.service')}/status.json"

    @property
    def modules(self) -> str:
        """Where each process of the engine says which patched modules it has loaded, in <pid>.json."""
        return f"/run/{self.unit.removesuffix('.service')}/modules"

    @property
    def warmup_status(self) -> str:
        return f"/run/{self.warmup_unit.removesuffix('.service')}/status.json"
